"""Packed text comes piece by piece from whoever has it, and stays within its room."""

import asyncio
import ctypes
import tracemalloc
from contextlib import AsyncExitStack
from hashlib import sha256
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from helpers.donors import identity
from helpers.packed_text import (
    ALL,
    DATA,
    DIGESTS,
    PART,
    PIECE,
    TRAINING,
    givers,
    giving_of,
    holding,
    never,
    opened,
    store_of,
)
from helpers.waiting import until_async
from helpers.wire import Handler, calling, listening, soon
from lowcomm_node.errors import DataError, DiskFull, RetryLater
from lowcomm_node.fetch import engine, packs
from lowcomm_node.fetch.packs import DataRoom, PackStore
from lowcomm_node.net.stream import CalleeStream
from lowcomm_node.storage.files import GIB
from lowcomm_node.storage.pack_file import has_bit
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.spec.sections import PackedText


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "RETRY_PAUSE", 0.05)
    monkeypatch.setattr(engine, "LATER", 0.3)
    monkeypatch.setattr(engine, "SLOW", 0.1)
    monkeypatch.setattr(engine, "TICK", 0.02)


async def test_pieces_come_from_peers_of_which_none_has_all_and_stay_after_a_restart(
    tmp_path: Path,
) -> None:
    halves = [holding(tmp_path / name, one) for name, one in (("a", ALL[:12]), ("b", ALL[8:]))]
    async with givers(*halves) as callees, calling(identity(9)) as channels:
        store = store_of(tmp_path / "c", channels, [callee.info() for callee in callees])
        await soon(store.have(ALL))
        assert store.path.read_bytes() == DATA and store.bytes_fetched == len(DATA)
        assert all(half.bytes_given >= 8 * PIECE for half in halves)
        await store.close()
    again = opened(tmp_path / "c")
    assert all(map(again.has, ALL)) and again.digests == DIGESTS


async def test_a_flipped_bit_costs_a_peer_its_piece_and_no_more(tmp_path: Path) -> None:
    bad = bytearray(DATA)
    bad[5 * PIECE + 100] ^= 1
    peers, shown = [holding(tmp_path / "a", ALL, bytes(bad)), holding(tmp_path / "b", [5])], [""]
    async with givers(*peers) as callees, calling(identity(9)) as channels:
        known = [callees[0].info()]
        store = store_of(tmp_path / "c", channels, known)
        work = asyncio.create_task(store.have(ALL, shown.append))
        await until_async(lambda: sum(map(store.file.has, ALL)) == 19, 30, "others")
        await until_async(lambda: "nobody" in shown[-1], 30, "the reason is shown")
        assert shown[-1].startswith("piece 5 of text: nobody that answers has it")
        known.append(callees[1].info())
        await soon(work)
        assert store.path.read_bytes() == DATA
        await store.close()


async def test_a_peer_with_wrong_pieces_is_left_out_and_others_are_asked(tmp_path: Path) -> None:
    bad = bytes(8 * PIECE) + DATA[8 * PIECE :]
    liar, honest = holding(tmp_path / "a", ALL, bad), holding(tmp_path / "b", ALL)
    warnings = list[str]()
    async with givers(liar, honest) as callees, calling(identity(9)) as channels:
        infos = [callee.info() for callee in callees]
        store = store_of(tmp_path / "c", channels, infos[:1], warnings=warnings)
        work = asyncio.create_task(store.have([3, 4, 5]))
        await until_async(lambda: bool(warnings), 30, "the liar is found")
        assert "sent 3 wrong pieces of text" in warnings[0] and not store.file.has(5)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await store.close()
        store = store_of(tmp_path / "c", channels, infos)
        await soon(store.have([5]))
        assert store.file.read(5) == DATA[5 * PIECE : 6 * PIECE]
        await store.close()


async def test_waiting_says_for_which_piece_who_has_it_and_what_would_help(tmp_path: Path) -> None:
    shown = list[str]()
    store = PackStore(opened(tmp_path / "a", digests=DIGESTS), never)
    work = asyncio.create_task(store.have([3, 7], shown.append))
    await until_async(lambda: bool(shown), 30, "it says so")
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    assert shown[0].startswith("piece 3 and 1 more of text: nobody that answers has it: a node")
    assert store.conclude(), "what nobody waits for is not fetched"
    await store.close()


async def test_unused_pieces_make_room_the_only_copy_last_and_nothing_that_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = DataRoom(4 * PIECE / GIB)
    async with givers(holding(tmp_path / "a", ALL)) as callees, calling(identity(9)) as channels:
        store = store_of(tmp_path / "b", channels, [callees[0].info()], room=room)
        for piece in (0, 1, 2, TRAINING):
            await soon(store.have([piece]))
        blocks = store.path.stat().st_blocks
        store.assigned = lambda: {0}
        [holder] = store.holders
        with monkeypatch.context() as patch:
            patch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace())  # as on macOS
            with pytest.raises(DiskFull, match="gives no space of a piece back"):
                await store.drop([])
        store.holders[holder] = bytes([0b1101_1111, 0xFF, 0xF0])  # not piece 2
        await soon(store.have([3]))
        assert [piece for piece in ALL if store.file.has(piece)] == [0, 2, 3, TRAINING]
        assert store.path.stat().st_blocks <= blocks, "the space of piece 1 was given back"
        store.holders[holder] = bytes([0b1101_1111, 0xFF, 0xF0])
        store.assigned = lambda: {0, 2, 3}
        with pytest.raises(DiskFull, match="raise it"):
            await store.have([4])
        assert store.file.has(3) and not store.missing
        await store.close()
    kept = opened(tmp_path / "b")
    assert [piece for piece in ALL if kept.has(piece)] == [0, 2, 3, TRAINING]


@pytest.mark.parametrize("harm", ["truncated", "replaced", "unsealed"])
async def test_what_was_verified_counts_only_of_the_file_that_was_verified(
    harm: str, tmp_path: Path
) -> None:
    await holding(tmp_path / "a", ALL).close()
    data, here = tmp_path / "a" / "data", tmp_path / "a" / "here"
    if harm == "truncated":
        with data.open("r+b") as file:
            file.truncate(5 * PIECE)
    elif harm == "replaced":
        data.rename(tmp_path / "before")
        data.write_bytes(bytes(PIECE) + DATA[PIECE:])
    else:
        here.write_bytes(here.read_bytes()[:-1] + b"\xff")
    file = opened(tmp_path / "a")
    assert [piece for piece in ALL if file.has(piece)] == (
        list(ALL[:5]) if harm == "truncated" else []
    )
    file.check([0, 4])
    assert file.has(4) and file.has(0) is (harm != "replaced"), "what is right needs no giver"


async def test_a_pack_of_the_owner_is_read_in_place_and_never_written(tmp_path: Path) -> None:
    own = tmp_path / "own.pack"
    own.write_bytes(DATA[:PIECE] + bytes(PIECE) + DATA[2 * PIECE :])
    own.chmod(0o400)
    store = PackStore(opened(tmp_path / "a", own, DIGESTS), never)
    await store.have([0, 2])
    with pytest.raises(DataError, match=r"Piece 1 of .* is damaged"):
        await store.have([1])
    assert [has_bit(store.here(), piece) for piece in ALL[:3]] == [True, False, True]
    async with givers(store) as callees, calling(identity(9)) as channels:
        taker = store_of(tmp_path / "b", channels, [callees[0].info()])
        await soon(taker.have([0, 5]))
        assert taker.file.has(5) and store.file.has(5), "verified when it was first given"
        await taker.close()
    again = opened(tmp_path / "a", own, DIGESTS)
    assert [piece for piece in ALL if again.has(piece)] == [0, 2, 5]
    own.chmod(0o600)
    own.write_bytes(DATA)
    assert not any(map(opened(tmp_path / "a", own, DIGESTS).has, ALL)), "somebody has written to it"


async def test_several_small_pieces_are_on_their_way_at_once(tmp_path: Path) -> None:
    ahead = PackStore.SLICE_BYTES // PIECE

    async def patient(peer: str, stream: CalleeStream) -> None:
        name, here = (await stream.receive()).enter.pack, bytes([0xFF, 0xFF, 0xF0])
        opened = pb.Opened(name=name, size=len(DATA), here=here)
        await stream.send(pb.FetchReply(opened=opened))
        asked = [await stream.receive() for _ in range(ahead)]
        while asked:
            start = asked.pop(0).wanted.piece * PIECE
            chunk = pb.Chunk(data=DATA[start : start + PIECE])
            await stream.send(pb.FetchReply(chunk=chunk))
            if not asked and (request := await stream.receive()):
                asked.append(request)

    async with listening(identity(1)) as callee, calling(identity(9)) as channels:
        callee.fetching = patient
        store = store_of(tmp_path / "b", channels, [callee.info()], digests=DIGESTS)
        await soon(store.have(ALL))
        assert store.path.read_bytes() == DATA
        await store.close()


def giving_some(piece: bytes, count: int, pause: float = 0.0) -> Handler:
    """A handler that gives ``count`` bytes of any piece and then breaks off, or one byte after
    every ``pause`` seconds."""

    async def fetch(peer: str, stream: CalleeStream) -> None:
        assert (await stream.receive()).enter.pack.hex() == PART.pieces
        here = bytes([0xFF, 0xFF, 0xF0])
        opened = pb.Opened(name=bytes.fromhex(PART.pieces), size=len(DATA), here=here)
        await stream.send(pb.FetchReply(opened=opened))
        if not (await stream.receive()).wanted.offset:
            sizes = [1] * count if pause else [count]
            for place, size in enumerate(sizes):
                chunk = pb.Chunk(offset=place, data=piece[place : place + size])
                await stream.send(pb.FetchReply(chunk=chunk))
                await asyncio.sleep(pause)
        raise RetryLater("breaks off")

    return fetch


async def test_a_sole_peer_that_drips_is_left_for_a_while_and_the_reason_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "GIVING_WAY", 0.2)
    shown = list[str]()
    async with listening(identity(1)) as callee, calling(identity(9)) as channels:
        callee.fetching = giving_some(DATA, 10_000, 0.01)
        store = store_of(tmp_path / "b", channels, [callee.info()], digests=DIGESTS)
        work = asyncio.create_task(store.have([0], shown.append))
        await until_async(lambda: any("next to nothing" in text for text in shown), 30, "left")
        assert "piece 0 of text: 1 peer has it" in shown[-1] and not work.done()
        callee.fetching = giving_of(holding(tmp_path / "a", ALL))
        await soon(work)
        await store.close()


@pytest.mark.parametrize("is_right", [True, False])
async def test_a_piece_that_was_begun_goes_on_elsewhere_unless_its_beginning_is_wrong(
    is_right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packs, "KEEP_BYTES", 4096)
    monkeypatch.setattr(engine, "ATTEMPTS", 1)
    sent, warnings = 9000, list[str]()
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(listening(identity(n))) for n in (1, 2)]
        channels = await stack.enter_async_context(calling(identity(9)))
        first.fetching = giving_some(DATA if is_right else bytes(sent), sent)
        peers = [first.info()]
        store = store_of(tmp_path / "b", channels, peers, warnings=warnings, digests=DIGESTS)
        work = asyncio.create_task(store.have([0]))
        await until_async(lambda: not first.ended.empty(), 30, "it broke off")
        honest = holding(tmp_path / "a", ALL)
        second.fetching = giving_of(honest)
        peers[:] = [second.info()]
        await soon(work)
        assert store.file.read(0) == DATA[:PIECE] and not warnings, "the second is honest"
        given = PIECE - 8192 if is_right else 2 * PIECE - 8192
        assert honest.bytes_given == given
        await store.close()


def test_a_text_of_a_trillion_tokens_opens_in_the_memory_of_its_list(tmp_path: Path) -> None:
    tokens, piece = 10**12, 1 << 24
    count = -(-tokens * 2 // piece) + 1
    digests = Random(1).randbytes(count * 32)
    part = PackedText(
        name="web", pieces=sha256(digests).hexdigest(), tokens=tokens, held_out_tokens=1
    )
    tracemalloc.start()
    try:
        file = opened(tmp_path, None, digests, part)
        store = PackStore(file, never)
        assert store.here() == bytes(-(-count // 8)) and not store.is_whole()
        assert tracemalloc.get_traced_memory()[1] < 3 * len(digests)
    finally:
        tracemalloc.stop()
    assert file.path.stat().st_size == part.size and file.path.stat().st_blocks == 0
    assert opened(tmp_path, part=part).digests == digests
