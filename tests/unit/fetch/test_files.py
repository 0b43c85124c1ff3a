"""A file of the run comes from any peers that have it, and from nobody else.

Each piece is the right one, or its sender is not asked again.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from random import Random

import pytest

from helpers.donors import identity
from helpers.waiting import until_async
from helpers.wire import (
    Callee,
    calling,
    listening,
    misbehaving,
    soon,
)
from lowcomm_node.fetch import engine, files
from lowcomm_node.fetch.engine import Fetch, Source
from lowcomm_node.fetch.files import FileDownload, Provider, RunFile, VerifiedFiles, pin, start_of
from lowcomm_node.fetch.giving import PieceServer
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.storage.files import GIB, DiskQuota
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import PeerInfo
from lowcomm_protocol.spec import sections
from lowcomm_protocol.spec.run import SignedRun, parse_toml, sign_run
from lowcomm_protocol.spec.sections import AdapterSettings, StartSettings, digest_of_pieces

STEP = 100_000
SIZE = 10 * STEP - 7
DATA = Random(1).randbytes(SIZE)
LISTING = b"".join(sha256(DATA[at : at + STEP]).digest() for at in range(0, SIZE, STEP))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (files, sections):
        monkeypatch.setattr(module, "PIECE_BYTES", STEP)
    monkeypatch.setattr(files, "BLOCK", STEP // 4)
    monkeypatch.setattr(engine, "RETRY_PAUSE", 0.05)
    monkeypatch.setattr(engine, "LATER", 0.3)
    monkeypatch.setattr(engine, "SLOW", 0.1)
    monkeypatch.setattr(engine, "TICK", 0.02)


def run_of(path: Path) -> SignedRun:
    """A run that begins with a file."""
    spec = parse_toml('[run]\nname = "a"\n')
    spec = spec.model_copy(update={"start": StartSettings(files=(pin(path),))})
    return sign_run(spec, Identity(bytes(32)))


@pytest.fixture
def original(tmp_path: Path) -> Path:
    path = tmp_path / "original" / "model.safetensors"
    path.parent.mkdir()
    path.write_bytes(DATA)
    return path


@pytest.fixture
def file(original: Path) -> RunFile:
    [file] = start_of(run_of(original).spec)
    return file


class Taking(Fetch):
    """A file on its way."""

    download: FileDownload

    def __init__(self, file: RunFile, into: Path, *more, **others) -> None:
        channels, peers = more
        super().__init__(channels, FileDownload(file, into), peers, gives_up=False, **others)

    async def take(self, show: Callable[[str], None] = lambda text: None) -> None:
        """All of it."""
        try:
            await self.run(lambda text: show(self.download.describe(text, self.serving > 0)))
            self.download.finish()
        finally:
            self.download.close()


@asynccontextmanager
async def givers(file: RunFile, *paths: Path) -> AsyncIterator[list[Callee]]:
    """Peers that believe these files to be the one."""
    async with AsyncExitStack() as stack:
        callees: list[Callee] = []
        for number, path in enumerate(paths, 1):
            callee = await stack.enter_async_context(listening(identity(number)))
            held = VerifiedFiles()
            held.add(file, path, LISTING)
            callee.fetching = PieceServer(held).serve
            callees.append(callee)
        yield callees


async def test_it_comes_from_several_peers_at_once(
    file: RunFile, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "TICK", 0.0)  # or a fast machine is done before the second look
    shown: list[str] = []
    into = tmp_path / "home" / file.name
    async with givers(file, original, original) as callees, calling(identity(9)) as channels:
        one = Taking(file, into, channels, lambda: [callee.info() for callee in callees])
        await soon(one.take(shown.append))
    assert into.read_bytes() == DATA
    assert one.download.digests == LISTING
    assert [path.name for path in into.parent.iterdir()] == [file.name]
    assert all(name in (shown[0], *shown) for name in shown)
    assert any("of 1.0 MB from" in text for text in shown), shown


async def test_who_sends_a_wrong_piece_is_left_out(
    file: RunFile, original: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_bytes(DATA[: 3 * STEP] + bytes(STEP) + DATA[4 * STEP :])
    warnings: list[str] = []
    into = tmp_path / "home" / file.name
    async with givers(file, other, original) as callees, calling(identity(9)) as channels:
        liar, honest = callees
        known = [liar]
        one = Taking(file, into, channels, lambda: [c.info() for c in known], warn=warnings.append)
        work = asyncio.create_task(one.take())
        await until_async(lambda: bool(warnings), 30, "the liar found")
        assert not work.done(), "and nothing of it is taken for the whole"
        known.append(honest)
        await soon(work)
    assert into.read_bytes() == DATA
    assert len(warnings) == 1 and "sent a wrong piece" in warnings[0]


@pytest.mark.parametrize(
    ("opening", "told"),
    [
        ([pb.Opened(name=b"x" * 32, size=SIZE)], "another file"),
        ([pb.Opened(name=sha256(DATA).digest(), size=SIZE + 1)], "another file"),
        ([pb.Opened(name=sha256(DATA).digest(), size=1 << 62)], "another file"),
        ([pb.Opened(name=sha256(DATA).digest(), size=SIZE), bytes(320)], "digests"),
        ([pb.Opened(name=sha256(DATA).digest(), size=SIZE), bytes(321)], "more than"),
        ([bytes(10)], "before it was our turn"),
    ],
)
async def test_what_is_not_the_pinned_file_is_refused_before_anything_is_allocated(
    opening: list[pb.Opened | bytes], told: str, file: RunFile, tmp_path: Path
) -> None:
    warnings: list[str] = []
    into = tmp_path / "home" / file.name
    async with misbehaving() as rogue, calling(identity(9)) as channels:
        rogue.opening = [
            (
                pb.FetchReply(chunk=pb.Chunk(offset=0, data=one))
                if isinstance(one, bytes)
                else pb.FetchReply(opened=one)
            ).SerializeToString()
            for one in opening
        ]
        one = Taking(file, into, channels, lambda: [rogue.info()], warn=warnings.append)
        work = asyncio.create_task(one.take())
        await until_async(lambda: bool(warnings), 30, "it is refused")
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    assert told in warnings[0]
    assert not into.parent.exists()


LIES = {
    "its size is smaller": [pb.Opened(name=sha256(DATA[:STEP]).digest(), size=5), b"liars"],
    "its size is larger": [pb.Opened(name=sha256(DATA[:STEP]).digest(), size=STEP)],
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("is_told", [True, False])
async def test_what_one_giver_claims_of_a_size_binds_no_other(
    lie: str, is_told: bool, tmp_path: Path
) -> None:
    """Must be seen. The first claim held for all, who were barred for good for sending more."""
    data, small, warnings = DATA[: STEP - 10], tmp_path / "small", list[str]()
    small.write_bytes(data)
    digest = sha256(data).digest()
    file = RunFile("tokenizer.json", digest)
    if is_told:
        file = RunFile("tokenizer.json", digest, len(data), digest_of_pieces([digest]))
    opened, *sent = LIES[lie]
    into = tmp_path / "home" / file.name
    async with (
        misbehaving() as liar,
        listening(identity(3)) as honest,
        calling(identity(9)) as channels,
    ):
        opened.name = digest
        liar.opening = [pb.FetchReply(opened=opened).SerializeToString()]
        chunks = [pb.FetchReply(chunk=pb.Chunk(offset=0, data=one)) for one in sent]
        liar.answers = [chunk.SerializeToString() for chunk in chunks]
        held = VerifiedFiles()
        assert not await held.verify(file, small)
        honest.fetching = PieceServer(held).serve
        known = [liar.info()]
        one = Taking(file, into, channels, lambda: known, warn=warnings.append)
        work = asyncio.create_task(one.take())
        await until_async(lambda: bool(liar.requests or warnings), 30, "the liar was asked")
        known.append(honest.info())
        await soon(work)
    assert into.read_bytes() == data
    assert all(honest.identity.peer_id[-6:] not in one for one in warnings)


async def test_who_waits_is_told_why_and_goes_on_as_soon_as_a_peer_has_it(
    file: RunFile, original: Path, tmp_path: Path
) -> None:
    shown: list[str] = []
    into = tmp_path / "home" / file.name
    known: list[PeerInfo] = []
    async with listening(identity(1)) as callee, calling(identity(9)) as channels:
        held = VerifiedFiles()
        callee.fetching = PieceServer(held).serve
        work = asyncio.create_task(Taking(file, into, channels, lambda: known).take(shown.append))

        async def told(what: str) -> None:
            await until_async(lambda: any(what in text for text in shown), 30, what)

        await told("waiting for model.safetensors, which the run needs: no peer")
        known.append(callee.info())
        await told(f"{callee.identity.peer_id[-6:]}: does not have it yet")
        assert not await held.verify(file, original)
        await soon(work)
    assert into.read_bytes() == DATA


async def test_pieces_on_the_disk_are_kept_after_a_crash_and_hashed_again(
    file: RunFile, tmp_path: Path
) -> None:
    async def begun() -> tuple[FileDownload, Source]:
        download = FileDownload(file, tmp_path / "home" / "f")
        opened = pb.Opened(name=file.sha256, size=SIZE)
        peer = PeerInfo(**dict.fromkeys(PeerInfo.__dataclass_fields__, ""))
        return download, await download.open(peer, opened, LISTING)

    async def put(download: FileDownload, source: Source, index: int) -> None:
        await download.put(source, index, bytearray(DATA[index * STEP : (index + 1) * STEP]))

    one, source = await begun()
    for index in (2, 9):
        await put(one, source, index)
    assert one.size == 2 * STEP - 7
    one.close()
    again, source = await begun()
    assert set(again.missing) == set(range(10)) - {2, 9} and again.size == one.size
    again.close()
    await put(again, source, 3)  # a thread that comes late
    (tmp_path / "home" / ".f.pieces" / "here").unlink()
    with (tmp_path / "home" / ".f.pieces" / "data").open("r+b") as data:
        data.seek(2 * STEP + 5)
        data.write(b"other")
    last, _ = await begun()
    assert set(last.missing) == set(range(9))
    last.close()


async def test_nothing_is_given_but_what_has_been_verified_and_left_alone(
    file: RunFile, original: Path
) -> None:
    held = VerifiedFiles()
    assert held.find(file.sha256) is None
    assert not await held.verify(file, original)
    found = held.find(file.sha256)
    assert found is not None and found.digests == LISTING
    original.write_bytes(DATA)
    assert held.find(file.sha256) is None, "somebody has written to it"


# What a node needs before its trainer starts


def provider(
    home: Path, run: SignedRun, fetched: list[str], weights: Path | None = None
) -> Provider:
    settings = NodeSettings(home=home, weights=weights)

    async def fetch(download: FileDownload) -> None:
        fetched.append(download.name)
        opened = pb.Opened(name=download.file.sha256, size=SIZE)
        peer = PeerInfo(**dict.fromkeys(PeerInfo.__dataclass_fields__, ""))
        source = await download.open(peer, opened, LISTING)
        while (index := download.take(source)) is not None:
            await download.put(source, index, bytearray(DATA[index * STEP : (index + 1) * STEP]))

    return Provider(settings, run, VerifiedFiles(), fetch, lambda text: None)


async def test_weights_come_from_the_owner_else_from_the_home_else_from_peers(
    original: Path, tmp_path: Path
) -> None:
    run, fetched = run_of(original), list[str]()
    home = tmp_path / "home"
    _, owned, _ = await provider(home, run, fetched, original.parent).provide()
    assert owned == (str(original),)
    _, again, _ = await provider(home, run, fetched).provide()
    assert Path(again[0]).resolve() == original.resolve(), "by a link in the home"
    original.unlink()
    _, peers, _ = await provider(home, run, fetched).provide()
    assert Path(peers[0]).read_bytes() == DATA
    assert fetched == ["model.safetensors"]
    assert not original.exists(), "what a peer sends never lands in the owner's folder"
    await provider(home, run, fetched).provide()
    assert len(fetched) == 1


@pytest.mark.parametrize("adapter", [None, AdapterSettings(rank=4)])
async def test_beside_a_checkpoint_only_an_adapter_needs_its_weights(
    original: Path, tmp_path: Path, adapter: AdapterSettings | None
) -> None:
    run, home = run_of(original), tmp_path / "home"
    run = replace(run, spec=run.spec.model_copy(update={"adapter": adapter}))
    (NodeSettings(home=home).paths.checkpoints(run.fingerprint) / "step-1").mkdir(parents=True)
    one = provider(home, run, [], original.parent)
    _, weights, _ = await one.provide()
    assert weights == ((str(original),) if adapter else ())
    await one.close()


async def test_a_part_that_is_here_is_no_reason_to_refuse_the_rest(
    original: Path, tmp_path: Path
) -> None:
    run, home = run_of(original), tmp_path / "home"
    start = NodeSettings(home=home).paths.start(run.fingerprint)
    begun = start / ".model.safetensors.pieces"
    begun.mkdir(parents=True)
    (begun / "data").write_bytes(DATA[: 9 * STEP])
    one = provider(home, run, [])
    one._disk_quota = DiskQuota(home, 1.2 * SIZE / GIB)
    _, [path], _ = await one.provide()
    assert Path(path).read_bytes() == DATA
