"""What must hold for state that travels to a joiner: whole, of one version, whatever donors, lines
or the joiner itself do."""

import asyncio
import re
from contextlib import AsyncExitStack, closing
from hashlib import sha256
from pathlib import Path
from random import Random

import numpy as np
import pytest

from helpers.donors import (
    INTERVAL,
    LARGE,
    SMALL,
    STEP,
    Donor,
    Joiner,
    drawn,
    giving,
    identity,
    manifest,
    sync_of,
)
from helpers.waiting import until_async
from helpers.wire import (
    Cable,
    cabled,
    calling,
    drip,
    listening,
    misbehaving,
    never_serve,
    soon,
)
from lowcomm_node.errors import LinkLost
from lowcomm_node.fetch import engine, state
from lowcomm_node.fetch import giving as giving_module
from lowcomm_node.fetch.engine import Download
from lowcomm_node.fetch.giving import TurnQueue
from lowcomm_node.fetch.state import StateDownload
from lowcomm_node.net.stream import CalleeStream
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import PeerInfo
from lowcomm_protocol.state import read_manifest

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "RETRY_PAUSE", 0.05)
    monkeypatch.setattr(engine, "LATER", 1.0)
    monkeypatch.setattr(state, "VERSION_PATIENCE", 0.3)


async def reached(condition, why: str) -> None:
    await until_async(condition, 30, why)


# The whole of it


async def test_a_state_comes_from_several_donors_at_once(tmp_path):
    async with (
        giving(tmp_path, 11, LARGE) as one, giving(tmp_path, 12, LARGE) as two,
        giving(tmp_path, 13, LARGE) as three,
        calling() as channels,
    ):  # fmt: skip
        givers = [one, two, three]
        joiner = Joiner(
            channels, tmp_path / "incoming", lambda: [giver.info() for giver in givers], LARGE
        )
        most = []
        joiner.heard = lambda size: most.append(joiner.serving)
        await soon(joiner.run())
        assert min(joiner.given_by(givers)) > len(LARGE.pieces) // 10
        assert max(most) == 3
        assert joiner.download.peers == sorted(giver.peer_id for giver in givers)
        assert joiner.bytes_received < 1.05 * LARGE.size, "manifests, and a few pieces to compare"
        base = read_manifest((tmp_path / "incoming" / "manifest").read_bytes(), LARGE)
        assert base.swarm_step == STEP


async def test_cut_at_ten_random_places_with_donors_replaced_and_the_joiner_killed_it_completes(
    tmp_path,
):
    """Must be seen: every byte hashed, and at most 1.1 of the state fetched."""
    random = Random(6)
    places = sorted(random.randrange(LARGE.size // 50, int(0.97 * LARGE.size)) for _ in range(10))
    kills, joiner_dies = {places[3], places[7]}, places[5]
    async with AsyncExitStack() as stack:
        channels = await stack.enter_async_context(calling())
        givers: list[Donor] = []
        cables: list[Cable] = []
        reachable: list[Donor] = []

        async def come(number: int) -> None:
            giver = await stack.enter_async_context(
                giving(tmp_path, number, LARGE, step=STEP + number % 7)
            )
            cables.append(await stack.enter_async_context(cabled(giver.callee.port)))
            giver.port = cables[-1].port
            givers.append(giver)
            reachable.append(giver)

        for number in (11, 12, 13):
            await come(number)
        total = cut = 0
        died = asyncio.Event()

        def heard(size: int) -> None:
            nonlocal total, cut
            total += size
            if cut < len(places) and total >= places[cut]:
                place, cut = places[cut], cut + 1
                if place == joiner_dies:
                    died.set()
                victim = random.choice(reachable)
                cables[givers.index(victim)].cut()
                if place in kills:
                    reachable.remove(victim)
                    replaced.append(asyncio.create_task(replace(victim)))

        async def replace(victim: Donor) -> None:
            await cables[givers.index(victim)].close()
            await come(14 + len(replaced))

        replaced: list[asyncio.Task[None]] = []
        folder = tmp_path / "incoming"
        joiner = Joiner(channels, folder, lambda: [giver.info() for giver in reachable], LARGE)
        joiner.heard = heard
        first = asyncio.create_task(joiner.run())
        await soon(died.wait())
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        half = len(joiner.download._held)
        # What a crash leaves: half a manifest, and a piece that never reached the disk.
        lost = next(iter(joiner.download._held))
        with (folder / "state").open("r+b") as file:
            file.seek(LARGE.offsets[lost])
            file.write(bytes(1000))
        (folder / ".manifest").write_bytes(b"half")

        again = Joiner(channels, folder, lambda: [giver.info() for giver in reachable], LARGE)
        assert len(again.download._held) == half - 1, (
            "each piece is hashed again, and only what is damaged is missing"
        )
        again.heard = heard
        await soon(again.run())
        await soon(asyncio.gather(*replaced))
        assert cut == 10
        assert len(replaced) == 2
        assert sum(again.given_by(givers)) == len(LARGE.pieces)
        assert total == joiner.bytes_received + again.bytes_received
        assert total <= 1.1 * LARGE.size, total / LARGE.size


async def test_a_broken_stream_goes_on_at_the_byte_that_it_had_reached(tmp_path, monkeypatch):
    monkeypatch.setattr(giving_module, "CHUNK_BYTES", 10_000)
    async with (
        giving(tmp_path, 11) as giver,
        cabled(giver.callee.port) as cable,
        calling() as channels,
    ):
        giver.port = cable.port
        joiner = Joiner(channels, tmp_path / "incoming", lambda: [giver.info()])
        cuts = []

        def heard(size: int) -> None:
            if joiner.bytes_received > 150_000 and not cuts:
                cuts.append(cable.cut())

        joiner.heard = heard
        await soon(joiner.run())
        assert cuts and joiner.given_by([giver])
        sent = next(giver.folder.iterdir())
        assert joiner.bytes_received == SMALL.size + (sent / "manifest").stat().st_size, (
            "nothing came twice"
        )
        assert giver.made == 1


# Donors that come and go


async def test_a_donor_that_can_not_be_called_or_falls_silent_is_left_for_another(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(engine, "SILENCE", 0.5)
    async with (
        giving(tmp_path, 11) as dead, giving(tmp_path, 12) as silent, giving(tmp_path, 13) as good,
        calling() as channels
    ):  # fmt: skip
        dead.port = 1

        async def say_nothing(peer, stream) -> None:
            await stream.dropped.wait()

        silent.callee.fetching = say_nothing
        joiner = Joiner(
            channels, tmp_path / "incoming", lambda: [one.info() for one in (dead, silent, good)]
        )
        await soon(joiner.run())
        assert joiner.given_by([good]) == [len(SMALL.pieces)]


# Versions


@pytest.mark.parametrize(
    ("method", "step", "slow", "shared"),
    [
        ("lowcomm", STEP + 2 * INTERVAL, (2, 2), True),
        ("lowcomm", STEP + 2 * INTERVAL + 1, (1, 1), False),
        ("streaming-diloco", STEP + 3, (1, 1), True),
        ("streaming-diloco", STEP + 3, (2, 2), False),
    ],
)
async def test_pieces_of_one_version_only_go_together(tmp_path, method, step, slow, shared):
    async with (
        giving(tmp_path, 11) as one, giving(tmp_path, 12, step=step, slow=slow) as other,
        calling() as channels
    ):  # fmt: skip
        one.up.allow(4e5)  # it is asked first, and not alone for long
        joiner = Joiner(
            channels, tmp_path / "incoming", lambda: [one.info(), other.info()], method=method
        )
        await soon(joiner.run())
        given = joiner.given_by([one, other])
        assert (min(given) > 0) == shared, given


async def test_when_the_version_can_not_be_had_any_more_the_others_is_taken_and_nothing_is_mixed(
    tmp_path,
):
    async with (
        giving(tmp_path, 11) as first, cabled(first.callee.port) as cable,
        giving(tmp_path, 12, step=STEP + 500) as later,
        calling() as channels,
    ):  # fmt: skip
        first.port = cable.port
        donors = [first]
        joiner = Joiner(channels, tmp_path / "incoming", lambda: [one.info() for one in donors])

        def heard(size: int) -> None:
            if joiner.bytes_received > SMALL.size // 2 and first in donors:
                donors[:] = [later]
                closing.append(asyncio.create_task(cable.close()))

        closing: list[asyncio.Task[None]] = []
        joiner.heard = heard
        await soon(joiner.run())
        assert joiner.given_by([first, later]) == [0, len(SMALL.pieces)]
        assert joiner.download.base.swarm_step == STEP + 500


# Donors that lie


def reply(**kind: object) -> bytes:
    return pb.FetchReply(**kind).SerializeToString()


def opened(form=SMALL, pieces: list[bytes] | None = None, **changes: object) -> list[bytes]:
    """How a donor begins that says something else about its snapshot."""
    digests = [sha256(data).digest() for data in pieces or [bytes(one.size) for one in form.pieces]]
    told = manifest(form, digests)
    for name, value in changes.items():
        told.ClearField(name)
        if isinstance(value, list):
            getattr(told, name).extend(value)
        else:
            setattr(told, name, value)
    data = told.SerializeToString()
    begins = pb.Opened(name=sha256(data).digest(), size=len(data))
    return [reply(opened=begins), reply(chunk=pb.Chunk(data=data))]


def with_size(size: int) -> list[bytes]:
    return [reply(opened=pb.Opened(name=bytes(32), size=size))]


def with_other_digest() -> list[bytes]:
    data = pb.FetchReply.FromString(opened()[1]).chunk.data
    return [reply(opened=pb.Opened(name=bytes(32), size=len(data))), opened()[1]]


OPENINGS = {
    "nothing of ours": ([b"\xff\xff"], "no frame"),
    "a piece at once": ([reply(chunk=pb.Chunk(data=b"x"))], "before it was our turn"),
    "a position that grows": ([reply(position=2), reply(position=3)], "a position that grew"),
    "an absurd position": ([reply(position=2**31)], "a position that grew"),
    "an empty reply": ([b""], "before it was our turn"),
    "a manifest of nothing": (with_size(0), "a manifest of 0 bytes"),
    "a huge manifest": (with_size(2**60), "a manifest of"),
    "a manifest a little too large": (with_size(SMALL.largest_manifest + 1), "a manifest of"),
    "another digest": (with_other_digest(), "a manifest that does not match its digest"),
    "another run": (opened(run_id=bytes(32)), "another run"),
    "another plan": (opened(plan=bytes(32)), "another run or plan"),
    "after the run": (opened(swarm_step=10_001), "swarm step 10001 in a run of 10000"),
    "absurd moments": (opened(moments=2**24), "no training reaches"),
    "absurd versions": (opened(versions=[2**60, 1]), "no training reaches"),
    "too few versions": (opened(versions=[1]), "other fragments or pieces"),
    "too few digests": (opened(digests=[bytes(32)]), "other fragments or pieces"),
    "short digests": (opened(digests=[bytes(31)] * len(SMALL.pieces)), "digests that are none"),
    "short slow digests": (opened(slow_digests=[bytes(32), b""]), "digests that are none"),
    "far ahead of its record": (opened(swarm_step=9_999), "nobody else is near"),
}  # fmt: skip
ZEROS = bytes(SMALL.pieces[0].size)


def filled(value: float, at: int = 0) -> bytes:
    vector = np.zeros(len(ZEROS) // 4, dtype="<f4")
    vector[at] = value
    return vector.tobytes()


def chunks(*parts: bytes, offset: int = 0) -> list[bytes]:
    found = []
    for data in parts:
        found.append(reply(chunk=pb.Chunk(offset=offset, data=data)))
        offset += len(data)
    return found


NEGATIVE = filled(-1.0, 4 * (SMALL.pieces[0].stop - SMALL.pieces[0].start))
ANSWERS = {
    "other bytes": (ZEROS, chunks(b"x" * len(ZEROS)), "does not match its digest"),
    "too many": (ZEROS, chunks(ZEROS, b"x"), "out of place|more than was asked"),
    "too many at once": (ZEROS, chunks(ZEROS + b"x"), "more than was asked"),
    "a gap": (ZEROS, chunks(ZEROS[:100]) + chunks(ZEROS[200:], offset=200), "out of place"),
    "a chunk twice": (ZEROS, chunks(ZEROS[:100]) * 2, "out of place"),
    "an empty chunk": (ZEROS, chunks(b""), "out of place"),
    "an absurd offset": (ZEROS, chunks(ZEROS, offset=2**63), "out of place"),
    "something else": (ZEROS, [reply(position=3)], "out of place"),
    "NaN": (filled(float("nan")), chunks(filled(float("nan"))), "NaN or infinity"),
    "infinity": (filled(float("-inf"), 77), chunks(filled(float("-inf"), 77)), "NaN or infinity"),
    "impossible moments": (NEGATIVE, chunks(NEGATIVE), "impossible moments"),
}


async def below_9000(donor: PeerInfo, step: int) -> bool:
    return step < 9_000


@pytest.mark.parametrize("name", [*OPENINGS, *ANSWERS])
async def test_a_donor_that_does_what_no_donor_does_is_left_out_and_another_one_gives_all(
    tmp_path, name
):
    async with misbehaving() as rogue, giving(tmp_path, 12) as good, calling() as channels:
        if name in OPENINGS:
            rogue.opening, reason = OPENINGS[name]
        else:
            first, rogue.answers, reason = ANSWERS[name]
            rogue.opening = opened(pieces=[first, *[bytes(one.size) for one in SMALL.pieces[1:]]])
        good.may_make.clear()
        joiner = Joiner(
            channels,
            tmp_path / "home" / "incoming",
            lambda: [rogue.info(), good.info()],
            plausible=below_9000,
        )
        fetching = asyncio.create_task(joiner.run())
        await reached(lambda: joiner.warnings, "it is left out")
        good.may_make.set()
        await soon(fetching)
        assert joiner.given_by([good]) == [len(SMALL.pieces)]
        assert re.search(reason, joiner.warnings[0]), joiner.warnings
        written = {path.name for path in (tmp_path / "home").rglob("*") if path.is_file()}
        assert {"manifest", "state", f"{good.peer_id}.{STEP}"} <= written
        assert all(
            name.startswith(rogue.info().peer_id)
            for name in written - {"manifest", "state", f"{good.peer_id}.{STEP}"}
        )


@pytest.mark.parametrize("liar", [0, 2])
async def test_weights_that_have_nothing_in_common_with_those_of_two_others_are_not_taken(
    tmp_path, liar
):
    async with AsyncExitStack() as stack:
        channels = await stack.enter_async_context(calling())
        givers = [
            await stack.enter_async_context(
                giving(tmp_path, 11 + number, LARGE, common=int(number == liar))
            )
            for number in range(3)
        ]
        joiner = Joiner(
            channels, tmp_path / "incoming", lambda: [giver.info() for giver in givers], LARGE
        )
        await soon(joiner.run())
        given = joiner.given_by(givers)
        assert given[liar] == 0, given
        assert sum(given) == len(LARGE.pieces)
        assert any("nothing in common" in text for text in joiner.warnings)
        assert joiner.bytes_received < 1.8 * LARGE.size


def offers_of(download: StateDownload, states: list[list[bytes]], order: list[int]) -> list:
    """Donors of these states offer them, in this order, and each gives two pieces."""
    manifests = [
        manifest(SMALL, [sha256(data).digest() for data in pieces], STEP + number)
        for number, pieces in enumerate(states)
    ]
    offers = {number: download.offer(f"peer-{number}", manifests[number]) for number in order}
    return [offers[number] for number in range(len(states))]


async def give(download: StateDownload, offer, pieces: list[bytes], index: int | None) -> None:
    assert index is not None
    await download.put(offer, index, bytearray(pieces[index]))


def audit_of(download: StateDownload, offer, other) -> int:
    """A piece that another has given, and that this donor is asked for, too."""
    offer.auditing = next(index for index, held in download._held.items() if held is other)
    return offer.auditing


@pytest.mark.parametrize("base", [0, 1, 2])
async def test_two_who_are_alike_outvote_the_base(tmp_path, base):
    """The liar, number 0, comes first, second or last."""
    states = [drawn(SMALL, number, common=int(number == 0)) for number in range(3)]
    with closing(StateDownload(tmp_path / "incoming", SMALL, sync_of(), Random(1))) as download:
        download.load()
        order = [(base + number) % 3 for number in range(3)]
        offers = offers_of(download, states, order)
        for number in [*order, *order]:
            wanted = Download.take(download, offers[number])
            await give(download, offers[number], states[number], wanted)
        for number in (1, 2):
            audit = audit_of(download, offers[number], offers[0])
            await give(download, offers[number], states[number], audit)
        assert [offer.is_out for offer in offers] == [True, False, False]
        assert download.peers == ["peer-1", "peer-2"]
        assert download.base in [offer.manifest for offer in offers[1:]]


async def test_who_has_violated_the_protocol_loses_its_dispute_though_it_is_the_base(tmp_path):
    states = [drawn(SMALL, number, common=number) for number in (0, 1)]
    with closing(StateDownload(tmp_path / "incoming", SMALL, sync_of(), Random(3))) as download:
        download.load()
        liar, honest = offers_of(download, states, [0, 1])
        await give(download, liar, states[0], download.take(liar))
        await give(download, honest, states[1], audit_of(download, honest, liar))
        assert not (liar.is_out or honest.is_out), "nobody can tell yet"
        download.struck["peer-0"] = True
        download.conclude()
        assert liar.is_out and not honest.is_out
        assert download.peers == [] and download.base == honest.manifest


# Queues


async def test_a_joiner_waits_for_a_snapshot_that_takes_long_to_make(tmp_path, monkeypatch):
    monkeypatch.setattr(giving_module, "STILL_HERE", 0.1)
    monkeypatch.setattr(engine, "SILENCE", 0.5)
    signs, reply = [], engine._next

    async def count_signs(*arguments: object) -> pb.FetchReply:
        signs.append(await reply(*arguments))
        return signs[-1]

    monkeypatch.setattr(engine, "_next", count_signs)
    async with giving(tmp_path, 11) as giver, calling() as channels:
        giver.may_make.clear()
        joiner = Joiner(channels, tmp_path / "incoming", lambda: [giver.info()])
        task = asyncio.create_task(joiner.run())
        await reached(lambda: len(signs) > 8, "signs of life for longer than a silence may last")
        assert giver.made == 1 and giver.server.turns.serving == 1
        giver.may_make.set()
        await soon(task)
        assert joiner.given_by([giver]) == [len(SMALL.pieces)] and giver.made == 1


async def dribble(peer: str, stream: CalleeStream) -> None:
    """Serve at 3 kB/s, which is more than a piece needs at least."""
    for one in opened():
        await stream.send(pb.FetchReply.FromString(one))
    for at in range(0, SMALL.pieces[0].size, 150):
        await stream.send(pb.FetchReply(chunk=pb.Chunk(offset=at, data=bytes(150))))
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("way", [never_serve, drip, dribble])
async def test_donors_that_serve_next_to_nothing_give_way_to_those_not_asked_yet(
    tmp_path, monkeypatch, way
):
    """Must be seen. Six of them kept every newcomer waiting for an hour; three that were always
    about to begin counted as serving, and the queues of others were left."""
    monkeypatch.setattr(engine, "GIVING_WAY", 0.5)
    monkeypatch.setattr(engine, "PREPARING", 1)
    monkeypatch.setattr(engine, "SLOW", 0.5)
    async with AsyncExitStack() as stack:
        channels = await stack.enter_async_context(calling())
        good = await stack.enter_async_context(giving(tmp_path, 12))
        donors, asked = list[PeerInfo](), set[int]()
        for number in range(2 * engine.MOST_SESSIONS):
            callee = await stack.enter_async_context(listening(identity(20 + number)))

            async def serve(peer: str, stream: CalleeStream, number: int = number) -> None:
                asked.add(number)
                await way(peer, stream)

            callee.fetching = serve
            donors.append(callee.info())
        joiner = Joiner(channels, tmp_path / "incoming", lambda: donors)
        task = asyncio.create_task(joiner.run())
        enough = engine.MOST_SESSIONS if way is dribble else len(donors)
        await reached(lambda: len(asked) >= enough, "all of them keep it waiting")
        donors.append(good.info())
        await soon(task)
        assert joiner.download.peers == [good.peer_id]


async def test_a_turn_is_not_held_for_ever(tmp_path, monkeypatch):
    """Who asks for nothing is dropped; and while others wait, a turn ends after a while."""
    monkeypatch.setattr(giving_module, "SILENCE", 0.2)
    monkeypatch.setattr(giving_module, "SLOWEST", 1e9)
    monkeypatch.setattr(giving_module, "LOOK_SECONDS", 0.05)
    async with giving(tmp_path, 11) as giver, calling() as channels, calling(identity(50)) as other:
        giver.server.turns = TurnQueue(1, 10)
        idle = (await channels.stub(giver.info())).Fetch(metadata=channels.metadata(giver.peer_id))
        await idle.write(pb.FetchRequest(enter=pb.Enter(state=b"")))
        assert (await soon(idle.read())).WhichOneof("kind") == "opened"
        assert isinstance(await soon(giver.callee.ended.get()), LinkLost)
        assert giver.server.turns.serving == 0

        monkeypatch.setattr(giving_module, "SILENCE", 30.0)
        monkeypatch.setattr(giving_module, "TURN_SECONDS", 0.2)
        giver.up.allow(1e6)
        both = [
            Joiner(caller, tmp_path / name, lambda: [giver.info()])
            for caller, name in ((channels, "a"), (other, "b"))
        ]
        await soon(asyncio.gather(*(joiner.run() for joiner in both)))
        ends = []
        while not giver.callee.ended.empty():
            ends.append(giver.callee.ended.get_nowait())
        assert sum("turn is over" in str(error) for error in ends) >= 2, "they take turns"
        for joiner in both:
            assert joiner.given_by([giver]) == [len(SMALL.pieces)]
            assert joiner.bytes_received < 1.3 * SMALL.size


async def test_requests_that_no_joiner_makes_are_violations(tmp_path):
    wanted = [
        [pb.FetchRequest(wanted=pb.Wanted(piece=0))],
        [
            pb.FetchRequest(enter=pb.Enter(state=b"")),
            pb.FetchRequest(wanted=pb.Wanted(piece=len(SMALL.pieces))),
        ],
        [
            pb.FetchRequest(enter=pb.Enter(state=b"")),
            pb.FetchRequest(wanted=pb.Wanted(piece=0, offset=SMALL.pieces[0].size)),
        ],
        [pb.FetchRequest(enter=pb.Enter(state=b"")), pb.FetchRequest(enter=pb.Enter(state=b""))],
        [pb.FetchRequest()],
        [pb.FetchRequest(enter=pb.Enter(state=bytes(1024)))],
    ]
    async with giving(tmp_path, 11) as giver, calling() as channels:
        for requests in wanted:
            call = (await channels.stub(giver.info())).Fetch(
                metadata=channels.metadata(giver.peer_id)
            )
            for request in requests:
                await call.write(request)
            assert isinstance(await soon(giver.callee.ended.get()), ProtocolViolation)
            call.cancel()
        assert giver.server.turns.serving == 0


async def test_who_fills_our_memory_while_it_waits_loses_its_place(tmp_path):

    async with giving(tmp_path, 11) as giver, calling() as channels:
        giver.server.turns = TurnQueue(0, 10)
        call = (await channels.stub(giver.info())).Fetch(metadata=channels.metadata(giver.peer_id))
        await call.write(pb.FetchRequest(enter=pb.Enter(state=b"")))
        assert (await soon(call.read())).position == 1
        for _ in range(giving_module.MAX_REQUESTS + 1):
            await call.write(pb.FetchRequest(wanted=pb.Wanted(piece=0)))
        assert isinstance(await soon(giver.callee.ended.get()), ProtocolViolation)
        assert "more than 128 requests" in await soon(call.details())
        assert giver.server.turns.waiting == 0


# Disks


@pytest.mark.parametrize("change", ["another form", "no manifest", "rubbish", "nothing"])
async def test_what_is_left_of_another_state_is_not_taken_for_this_one(tmp_path, change):
    folder: Path = tmp_path / "incoming"
    async with giving(tmp_path, 11) as giver, calling() as channels:
        await soon(Joiner(channels, folder, lambda: [giver.info()]).run())
        if change == "no manifest":
            (folder / "manifest").unlink()
        elif change == "rubbish":
            (folder / f"{giver.peer_id}.{STEP}").write_bytes(b"\xff\xfe rubbish")
        form = LARGE if change == "another form" else SMALL
        again = Joiner(channels, folder, list, form)
        assert again.download.is_complete() == (change == "nothing")
        assert (again.download.size == 0) == (change != "nothing")
