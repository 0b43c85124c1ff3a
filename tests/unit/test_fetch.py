"""What must hold for state that travels to a joiner: bit for bit or not at all, whatever a donor or the wire does."""

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

import grpc
import pytest
import torch
from grpc import aio
from wire import CALLEE, DEADLINE, Callee, cabled, calling, listening, misbehaving, soon

from lowcomm_node.checkpoint import CheckpointStore
from lowcomm_node.errors import CheckpointError, DiskFull, LinkLost
from lowcomm_node.exchange import fetch as fetch_module
from lowcomm_node.exchange.fetch import CHUNK_BYTES, FETCH_ATTEMPTS, MAX_MANIFEST, PARTS, Fetcher, SnapshotServer
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from waiting import until_async

PARAMETERS = 300_000
STEP = 40
OTHERS = [Identity(bytes([number]) * 32) for number in (7, 8, 9)]


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "RETRY_PAUSE", 0.0)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """The checkpoints of a donor, with one whose parts are of several chunks."""
    store = CheckpointStore(tmp_path / "donor", keep=2)
    save(store, STEP)
    return store


def save(store: CheckpointStore, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    vectors = [torch.randn(PARAMETERS, generator=generator) for _ in range(5)]
    parts = {
        "weights": {"theta": vectors[0]},
        "outer": {"phi": vectors[1], "delta": vectors[2]},
        "inner": {"m": vectors[3], "v": vectors[4]},
    }
    store.save(step, parts, {"swarm_step": step}, 1.0)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Joiner(Fetcher):
    """A fetcher, and what it told."""

    def __init__(self, channels, folder: Path) -> None:
        self.told: list[tuple[str, int, int]] = []
        self.folder = folder
        super().__init__(channels, folder, PARAMETERS, lambda *told: self.told.append(told))


@asynccontextmanager
async def donating(store: CheckpointStore, identity: Identity = CALLEE, max_age: float = 1000.0):
    """A donor of the newest checkpoint; how often it was made anew is counted."""
    async with listening(identity) as donor:
        donor.refreshed, donor.may_refresh = 0, asyncio.Event()
        donor.may_refresh.set()

        async def refresh() -> int:
            donor.refreshed += 1
            await donor.may_refresh.wait()
            return store.steps()[-1]

        donor.snapshots = SnapshotServer(store, refresh, max_age)
        donor.fetching = donor.snapshots.chunks
        yield donor


def asked(donor: Callee) -> list[str]:
    return [part for part, _ in donor.requests]


# The whole of it


async def test_a_snapshot_arrives_bit_for_bit(store, tmp_path):
    async with donating(store) as donor, calling() as channels:
        joiner = Joiner(channels, tmp_path / "new" / "incoming")
        info = await soon(joiner.fetch(donor.info()))
        assert info.step == STEP and info.meta == {"swarm_step": STEP}
        sent = files(store.folder / f"step-{STEP:010d}")
        assert files(joiner.folder) == sent
        assert asked(donor) == ["manifest", *[file.part for file in info.parts]]
        assert joiner.bytes_received == sum(len(data) for data in sent.values())
        for file in info.parts:
            told = [(have, size) for part, have, size in joiner.told if part == file.part]
            steps = [*range(CHUNK_BYTES, file.size, CHUNK_BYTES), file.size]
            assert told == [(have, file.size) for have in steps]
            assert len(steps) > 2


async def test_a_part_that_is_there_already_is_not_sent_again(store, tmp_path):
    async with donating(store) as donor, calling() as channels:
        joiner = Joiner(channels, tmp_path / "incoming")
        await soon(joiner.fetch(donor.info()))
        donor.requests.clear()
        (joiner.folder / "outer.safetensors").unlink()
        await soon(joiner.fetch(donor.info()))
        assert asked(donor) == ["manifest", "outer"]
        assert files(joiner.folder) == files(store.folder / f"step-{STEP:010d}")


@pytest.mark.parametrize("size", ["shorter", "same", "longer"])
async def test_what_is_left_of_another_snapshot_does_not_get_into_this_one(store, tmp_path, size):
    path = store.folder / f"step-{STEP:010d}" / "weights.safetensors"
    length = path.stat().st_size + {"shorter": -1000, "same": 0, "longer": 1000}[size]
    async with donating(store) as donor, calling() as channels:
        joiner = Joiner(channels, tmp_path / "incoming")
        joiner.folder.mkdir()
        (joiner.folder / "weights.safetensors").write_bytes(bytes(length))
        (joiner.folder / "manifest.json").write_bytes(b"old")
        await soon(joiner.fetch(donor.info()))
        assert files(joiner.folder) == files(path.parent)
        assert ("weights", 0) in donor.requests


# Streams that break


def breaking(donor: Callee, breaks: list[int], act) -> None:
    """Let the donor ``act`` and say nothing more after so many chunks of a part that is not the manifest, each once."""
    serve = donor.fetching

    async def chunks(peer: str, request: pb.FetchRequest) -> AsyncIterator[pb.FetchChunk]:
        sent = 0
        async for chunk in serve(peer, request):
            if request.part != "manifest" and breaks and sent == breaks[0]:
                del breaks[0]
                await act()
                await asyncio.Event().wait()
            yield chunk
            sent += 1

    donor.fetching = chunks


@pytest.mark.parametrize("breaks", [[1], [2], [1, 0, 0], [1, 0, 1]])
async def test_a_broken_stream_goes_on_at_the_last_good_byte(store, tmp_path, monkeypatch, breaks):
    monkeypatch.setattr(fetch_module, "RETRY_PAUSE", 0.7)  # gRPC dials again after half a second
    async with donating(store) as donor, cabled(donor.port) as cable, calling() as channels:
        joiner = Joiner(channels, tmp_path / "incoming")
        goods = [CHUNK_BYTES * sum(breaks[:number]) for number in range(len(breaks) + 1)]
        cuts = iter(goods[1:])

        async def cut() -> None:
            good = next(cuts)

            async def has_arrived() -> bool:
                return good in (0, *(have for part, have, _ in joiner.told if part == "weights"))

            await until_async(has_arrived, DEADLINE, f"{good} bytes arrive")  # what is on the wire is lost with it
            cable.cut()

        breaking(donor, list(breaks), cut)
        await soon(joiner.fetch(donor.info(addresses=(f"127.0.0.1:{cable.port}",))))
        whole = files(store.folder / f"step-{STEP:010d}")
        assert files(joiner.folder) == whole
        assert [offset for part, offset in donor.requests if part == "weights"] == goods
        assert joiner.bytes_received == sum(map(len, whole.values())), "nothing came twice"


async def test_a_donor_that_breaks_off_every_time_is_given_up_and_the_next_one_goes_on(store, tmp_path):
    async with donating(store) as first, donating(store, OTHERS[0]) as second, calling() as channels:
        joiner = Joiner(channels, tmp_path / "incoming")
        serve = first.fetching

        async def fail(peer: str, request: pb.FetchRequest) -> AsyncIterator[pb.FetchChunk]:
            if request.part == "outer":
                raise CheckpointError("the disk has died")
            async for chunk in serve(peer, request):
                yield chunk

        first.fetching = fail
        with pytest.raises(LinkLost, match="the disk has died"):
            await soon(joiner.fetch(first.info()))
        assert Counter(asked(first))["outer"] == FETCH_ATTEMPTS
        await soon(joiner.fetch(second.info()))
        assert files(joiner.folder) == files(store.folder / f"step-{STEP:010d}")
        had = asked(first)[1 : asked(first).index("outer")]
        assert asked(second) == ["manifest", *[part for part in ("weights", "outer", "inner") if part not in had]]


async def test_when_a_donor_dies_another_one_can_take_over(store, tmp_path):
    async with donating(store, OTHERS[0]) as second, calling() as channels:
        joiner = Joiner(channels, tmp_path / "incoming")
        async with donating(store) as first, cabled(first.port) as cable:
            breaking(first, [1], cable.close)
            with pytest.raises(LinkLost, match="can't be reached"):
                await soon(joiner.fetch(first.info(addresses=(f"127.0.0.1:{cable.port}",))))
        await soon(joiner.fetch(second.info()))
        assert files(joiner.folder) == files(store.folder / f"step-{STEP:010d}")


async def test_a_donor_that_falls_silent_is_given_up(store, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_module, "CHUNK_DEADLINE", 0.2)
    async with donating(store) as donor, calling() as channels:
        joiner = Joiner(channels, tmp_path / "incoming")
        breaking(donor, [1, 0, 0, 0], lambda: asyncio.sleep(0))
        with pytest.raises(LinkLost, match="stopped sending"):
            await soon(joiner.fetch(donor.info()))
        assert [offset for part, offset in donor.requests if part == "weights"] == [0, *[CHUNK_BYTES] * 3]
        for _ in range(4):
            await soon(donor.ended.get())
        await soon(joiner.fetch(donor.info()))


async def test_a_joiner_that_gives_up_frees_the_donor(store, tmp_path):
    async with donating(store) as donor, calling() as channels:
        halted = asyncio.Event()

        async def halt() -> None:
            halted.set()

        breaking(donor, [1], halt)
        fetching = asyncio.create_task(Joiner(channels, tmp_path / "incoming").fetch(donor.info()))
        await soon(halted.wait())
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await soon(fetching)
        await soon(donor.ended.get())  # of the manifest
        await soon(donor.ended.get())
        await until_async(lambda: asyncio.sleep(0, not donor.snapshots._joiners), DEADLINE, "its place is free")
        save(store, STEP + 1)
        save(store, STEP + 2)
        assert store.steps() == [STEP + 1, STEP + 2], "nothing holds the old one any more"


# Donors that lie


def sealed(content: object) -> bytes:
    """A manifest with the right digest of whatever it says."""
    encoded = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    whole = {"content": content, "sha256": sha256(encoded).hexdigest()}
    return json.dumps(whole, sort_keys=True, indent=1).encode() + b"\n"


def manifest(step: object = STEP, **changes: object) -> bytes:
    """A manifest of parts of 1000 zeros, with other values for some fields of its weights."""
    entries = [{"part": part, "size": 1000, "sha256": sha256(bytes(1000)).hexdigest()} for part in PARTS]
    entries[0] |= changes
    return sealed({"format": 1, "step": step, "created_at": 1.0, "files": entries, "meta": {}})


def of_parts(*parts: object) -> bytes:
    entries = [{"part": part, "size": 1000, "sha256": sha256(bytes(1000)).hexdigest()} for part in parts]
    return sealed({"format": 1, "step": STEP, "created_at": 1.0, "files": entries, "meta": {}})


def chunks(*pieces: bytes, offset: int = 0) -> list[bytes]:
    messages = []
    for piece in pieces:
        messages.append(pb.FetchChunk(offset=offset, data=piece).SerializeToString())
        offset += len(piece)
    return messages


LARGEST = 4 * PARAMETERS + 16 * 1024 * 1024
MANIFESTS = {
    "empty": b"",
    "no JSON": b"\xff\xfe",
    "no object": b"[]",
    "a number": b"7",
    "deep": b"[" * 100_000,
    "no content": b"{}",
    "other digest": manifest().replace(b'"size": 1000', b'"size": 1001', 1),
    "no files": sealed({"format": 1, "step": STEP}),
    "another format": sealed({"format": 2, "step": STEP}),
    "too large a part": manifest(size=LARGEST + 1),
    "absurd part": manifest(size=10**30),
    "part of nothing": manifest(size=0),
    "negative part": manifest(size=-1),
    "part of half a byte": manifest(size=0.5),
    "part of words": manifest(size="many"),
    "part of truth": manifest(size=True),
    "no digest of a part": manifest(sha256=None),
    "another field": manifest(path="/etc/passwd"),
    "a path for a part": manifest(part="../../identity"),
    "a rooted part": manifest(part="/etc/passwd"),
    "a list for a part": manifest(part=["weights"]),
    "unknown part": manifest(part="secrets"),
    "part twice": of_parts("weights", "weights", "outer", "inner"),
    "part missing": of_parts("weights", "outer"),
    "part too many": of_parts(*PARTS, "more"),
    **{
        f"step {step!r:.9}": manifest(step)
        for step in (-1, 2**63, 10**30, "forty", None, [], 1.5, float("inf"), float("nan"))
    },
}


@pytest.mark.parametrize("name", MANIFESTS)
async def test_a_manifest_that_is_not_one_of_our_model_is_refused_before_anything_is_asked_for(tmp_path, name):
    async with misbehaving() as rogue, calling() as channels:
        rogue.parts["manifest"] = chunks(MANIFESTS[name]) if MANIFESTS[name] else []
        joiner = Joiner(channels, tmp_path / "home" / "incoming")
        with pytest.raises(CheckpointError):
            await soon(joiner.fetch(rogue.info()))
        assert rogue.requests == [("manifest", 0)]
        assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == [
            "home", "home/incoming", "home/incoming/manifest.json",
        ]  # fmt: skip


async def test_the_same_manifest_without_a_lie_is_taken(tmp_path):
    async with misbehaving() as rogue, calling() as channels:
        rogue.parts |= {"manifest": chunks(manifest()), **{part: chunks(bytes(1000)) for part in PARTS}}
        joiner = Joiner(channels, tmp_path / "incoming")
        assert (await soon(joiner.fetch(rogue.info()))).step == STEP
        assert {name: len(data) for name, data in files(joiner.folder).items() if name != "manifest.json"} == {
            f"{part}.safetensors": 1000 for part in PARTS
        }


async def test_the_largest_part_that_is_allowed_is_asked_for(tmp_path):
    async with misbehaving() as rogue, calling() as channels:
        rogue.parts["manifest"] = chunks(manifest(size=LARGEST))
        with pytest.raises(LinkLost, match=f"sent 0 of {LARGEST} bytes of weights"):
            await soon(Joiner(channels, tmp_path / "incoming").fetch(rogue.info()))


async def test_a_manifest_without_end_is_not_kept(tmp_path):
    piece = bytes(CHUNK_BYTES // 8)
    async with misbehaving() as rogue, calling() as channels:
        rogue.parts["manifest"] = chunks(*[piece] * 100)
        joiner = Joiner(channels, tmp_path / "incoming")
        with pytest.raises(CheckpointError, match="out of place"):
            await soon(joiner.fetch(rogue.info()))
        assert (joiner.folder / "manifest.json").stat().st_size <= MAX_MANIFEST


STREAMS = {
    "more than announced": (chunks(bytes(600), bytes(401)), "out of place", 600),
    "much more at once": (chunks(bytes(1_000_000)), "out of place", 0),
    "an empty chunk": (chunks(bytes(600), b"", bytes(400)), "out of place", 600),
    "out of order": (chunks(bytes(600), offset=400), "out of place", 0),
    "a chunk twice": (chunks(bytes(600)) * 2, "out of place", 600),
    "a gap": (chunks(bytes(600)) + chunks(bytes(300), offset=700), "out of place", 600),
    "an absurd offset": (chunks(bytes(600)) + chunks(bytes(300), offset=2**64 - 1), "out of place", 600),
    "after the end": (chunks(bytes(1000), b"x"), "out of place", 1000),
    "no chunk": ([b"\xff\xff"], "no chunk", 0),
    "other bytes": (chunks(b"x" * 1000), "do not match their digest", None),
}


@pytest.mark.parametrize("name", STREAMS)
async def test_bytes_that_are_not_what_was_announced_are_refused(tmp_path, name):
    messages, reason, kept = STREAMS[name]
    async with misbehaving() as rogue, calling() as channels:
        rogue.parts |= {"manifest": chunks(manifest()), "weights": messages}
        joiner = Joiner(channels, tmp_path / "incoming")
        with pytest.raises(CheckpointError, match=reason):
            await soon(joiner.fetch(rogue.info()))
        assert asked_once(rogue.requests, "weights")
        path = joiner.folder / "weights.safetensors"
        assert (path.stat().st_size if path.exists() else None) == kept


def asked_once(requests: list[tuple[str, int]], part: str) -> bool:
    return [name for name, _ in requests].count(part) == 1


async def test_a_chunk_that_is_too_large_for_a_message_is_not_received(tmp_path):
    async with misbehaving() as rogue, calling() as channels:
        rogue.parts |= {"manifest": chunks(manifest(size=4_000_000)), "weights": chunks(bytes(4_000_000))}
        joiner = Joiner(channels, tmp_path / "incoming")
        with pytest.raises(LinkLost, match="too large"):
            await soon(joiner.fetch(rogue.info()))
        assert (joiner.folder / "weights.safetensors").stat().st_size == 0


async def test_a_donor_that_says_that_it_is_done_too_early_is_asked_for_the_rest_and_then_given_up(tmp_path):
    async with misbehaving() as rogue, calling() as channels:
        rogue.parts |= {"manifest": chunks(manifest()), "weights": []}
        with pytest.raises(LinkLost, match="sent 0 of 1000 bytes of weights"):
            await soon(Joiner(channels, tmp_path / "incoming").fetch(rogue.info()))
        assert Counter(part for part, _ in rogue.requests)["weights"] == FETCH_ATTEMPTS


async def test_a_snapshot_that_does_not_fit_on_the_disk_is_not_begun(store, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    async with donating(store) as donor, calling() as channels:
        with pytest.raises(DiskFull):
            await soon(Joiner(channels, tmp_path / "incoming").fetch(donor.info()))
        assert asked(donor) == ["manifest"]


async def test_a_donor_that_can_not_be_called_is_lost(tmp_path):
    async with listening() as donor, calling() as channels:
        for changes in ({"addresses": ()}, {"certificate": b"rubbish"}, {"addresses": ("127.0.0.1:1",)}):
            with pytest.raises(LinkLost):
                await soon(Joiner(channels, tmp_path / "incoming").fetch(donor.info(**changes)))
        assert not donor.requests


# What a donor gives


async def collect(channels, donor: Callee, **fields) -> tuple[bytes, grpc.StatusCode, str]:
    """All bytes of one Fetch, and how it ended."""
    stub = await channels.stub(donor.info())
    call = stub.Fetch(pb.FetchRequest(**fields), metadata=channels.metadata(donor.identity.peer_id), timeout=30)
    data, offset = b"", fields.get("offset", 0)
    try:
        while (chunk := await call.read()) is not aio.EOF:
            assert (chunk.offset, 0 < len(chunk.data) <= CHUNK_BYTES) == (offset + len(data), True)
            data += chunk.data
    except aio.AioRpcError as error:
        return data, error.code(), error.details() or ""
    return data, grpc.StatusCode.OK, ""


@pytest.mark.parametrize(
    "part", ["", "manifest.json", "../manifest", "../../identity.key", "weights.safetensors", "x" * 9999]
)
async def test_a_donor_gives_nothing_but_the_parts_of_a_snapshot(store, part):
    async with donating(store) as donor, calling() as channels:
        data, code, details = await collect(channels, donor, part=part, snapshot=STEP)
        assert (data, code) == (b"", grpc.StatusCode.FAILED_PRECONDITION)
        assert "no part" in details and len(details) < 200


@pytest.mark.parametrize("snapshot", [0, STEP - 1, 2**64 - 1])
async def test_a_snapshot_that_is_not_there_is_refused_without_telling_where_ours_are(store, snapshot):
    async with donating(store) as donor, calling() as channels:
        data, code, details = await collect(channels, donor, part="weights", snapshot=snapshot)
        assert (data, code) == (b"", grpc.StatusCode.FAILED_PRECONDITION)
        assert f"no snapshot {snapshot}" in details
        assert str(store.folder) not in details and "/" not in details


@pytest.mark.parametrize("offset", [0, 1, CHUNK_BYTES, -1, None, 2**64 - 1])
async def test_a_part_is_given_from_any_offset_on(store, offset):
    whole = (store.folder / f"step-{STEP:010d}" / "weights.safetensors").read_bytes()
    offset = {-1: len(whole) - 1, None: len(whole)}.get(offset, offset)
    async with donating(store) as donor, calling() as channels:
        data, code, _ = await collect(channels, donor, part="weights", snapshot=STEP, offset=offset)
        assert (data == whole[offset:], code) == (True, grpc.StatusCode.OK)


async def test_a_snapshot_is_made_anew_when_it_is_old_and_once_for_all_who_ask_meanwhile(store):
    wanted = files(store.folder / f"step-{STEP:010d}")["manifest.json"]
    async with (
        donating(store, max_age=1000.0) as donor,
        donating(store, OTHERS[0], max_age=-1.0) as eager,
        calling() as channels,
    ):
        donor.may_refresh.clear()
        asking = [asyncio.create_task(collect(channels, donor, part="manifest")) for _ in range(4)]
        await until_async(lambda: asyncio.sleep(0, len(donor.requests) == 4), DEADLINE, "all have asked")
        donor.may_refresh.set()
        assert [answer[0] for answer in await soon(asyncio.gather(*asking))] == [wanted] * 4
        for _ in range(3):
            assert (await collect(channels, donor, part="manifest"))[0] == wanted
            await collect(channels, donor, part="weights", snapshot=STEP)
            await collect(channels, eager, part="manifest")
        assert (donor.refreshed, eager.refreshed) == (1, 3)


async def test_a_snapshot_that_could_not_be_made_is_tried_again(store):
    async with listening() as donor, calling() as channels:
        attempts = []

        async def refresh() -> int:
            attempts.append(1)
            if len(attempts) == 1:
                raise CheckpointError("the trainer is busy")
            return STEP

        donor.fetching = SnapshotServer(store, refresh, 1000.0).chunks
        assert "the trainer is busy" in (await collect(channels, donor, part="manifest"))[2]
        assert (await collect(channels, donor, part="manifest"))[1] is grpc.StatusCode.OK


async def test_no_more_joiners_are_served_at_once_than_allowed(store, monkeypatch):
    monkeypatch.setattr(fetch_module, "MAX_JOINERS", 2)
    held: dict[str, asyncio.Event] = {}
    async with donating(store) as donor:
        serve = donor.fetching

        async def hold(peer: str, request: pb.FetchRequest) -> AsyncIterator[pb.FetchChunk]:
            async for chunk in serve(peer, request):
                yield chunk
                if request.offset:  # the test's mark for a call that is to stay
                    await held.setdefault(peer, asyncio.Event()).wait()

        donor.fetching = hold
        async with calling(OTHERS[0]) as one, calling(OTHERS[1]) as two, calling(OTHERS[2]) as three:
            stays = []
            for channels in (one, two):
                stub = await channels.stub(donor.info())
                request = pb.FetchRequest(part="weights", snapshot=STEP, offset=1)
                stays.append(stub.Fetch(request, metadata=channels.metadata(CALLEE.peer_id), timeout=30))
                await soon(stays[-1].read())
            # Another call of one that is being served already is served, and takes no place away when it ends.
            assert (await collect(one, donor, part="weights", snapshot=STEP))[1] is grpc.StatusCode.OK
            data, code, details = await collect(three, donor, part="weights", snapshot=STEP)
            assert (data, code) == (b"", grpc.StatusCode.RESOURCE_EXHAUSTED)
            assert "2 joiners are being served" in details
            held[OTHERS[1].peer_id].set()
            while await soon(stays[1].read()) is not aio.EOF:
                pass
            assert (await collect(three, donor, part="weights", snapshot=STEP))[1] is grpc.StatusCode.OK
            stays[0].cancel()


async def test_a_snapshot_stays_whole_while_it_is_served_though_newer_ones_push_it_out(store, tmp_path):
    whole = files(store.folder / f"step-{STEP:010d}")
    async with donating(store) as donor, calling() as channels:
        joiner = Joiner(channels, tmp_path / "incoming")
        serve, pushed = donor.fetching, []

        async def push(peer: str, request: pb.FetchRequest) -> AsyncIterator[pb.FetchChunk]:
            async for chunk in serve(peer, request):
                if request.part == "inner" and not pushed:
                    pushed.append(await asyncio.to_thread(lambda: [save(store, STEP + n) for n in (1, 2)]))
                yield chunk

        donor.fetching = push
        await soon(joiner.fetch(donor.info()))
        assert pushed
        assert files(joiner.folder) == whole
