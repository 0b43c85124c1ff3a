"""What must hold for one stream between two peers: real gRPC over TLS, in one event loop."""

import asyncio
import tracemalloc
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from helpers import group_frames
from helpers.clock import Clock
from helpers.virtual import OFFER
from helpers.waiting import until_async
from helpers.wire import cabled, call, calling, linked, listening, misbehaving, soon
from lowcomm_node.errors import LinkLost, TooSlow
from lowcomm_node.net import stream as stream_module
from lowcomm_node.node.ipc import Arena, create_file
from lowcomm_node.node.messages import Retransmit
from lowcomm_node.sync import frames
from lowcomm_node.sync import link as link_module
from lowcomm_node.sync.link import CHUNK_BYTES, ContentLink, GroupLink, Incoming, PairLink
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.matching import Offer, Refusal
from lowcomm_protocol.messages import exchange_pb2 as pb

WHOLE = bytes(range(256)) * (3 * CHUNK_BYTES // 256) + b"end"


class Reader:
    """One end that reads to the other's confirmation, and what came."""

    def __init__(
        self, link: PairLink, size: int, least: int | None = None, ask: Retransmit | None = None
    ) -> None:
        self.link, self.into, self.least, self.ask = (
            link,
            bytearray(size),
            size if least is None else least,
            ask,
        )
        self.contents: list[bytes] = []
        self.resends: list[bytes] = []
        self.confirmed: list[bytes] = []

    async def read(self) -> "Reader":
        async with asyncio.timeout(30):
            await self.link.read(self._place, self._on_content, self._on_frame)
        return self

    async def _place(self, content: pb.Content) -> tuple[memoryview, int]:
        if self.link.awaits_more:
            return memoryview(self.into)[: self.ask.most], self.ask.least
        return memoryview(self.into), self.least

    async def _on_content(self, content: Incoming) -> None:
        self.contents.append(bytes(self.into[: content.size]))
        self.link.awaits_more = self.ask is not None and len(self.contents) == 1
        if self.link.awaits_more:
            await self.link.send(pb.Frame(resend=pb.Resend(blocks=self.ask.blocks)))

    def _on_frame(self, frame: pb.Frame) -> None:
        if frame.WhichOneof("kind") == "resend":
            self.resends.append(frame.resend.blocks)
        else:
            self.confirmed.append(frame.confirm.members)


async def send(link: PairLink, data: bytes) -> None:
    await link.send_content(memoryview(data), blake3(data).digest())
    await link.send(pb.Frame(confirm=pb.Confirm(members=b"members")))


async def under_way(*links: ContentLink) -> None:
    """Until each link has sent a part of its content."""
    await until_async(
        lambda: all(link.bytes_sent for link in links),
        30,
        "a content is under way",
    )


@pytest.mark.parametrize(
    "data", [b"x", WHOLE[: CHUNK_BYTES - 1], WHOLE[:CHUNK_BYTES], WHOLE[: CHUNK_BYTES + 1], WHOLE]
)
async def test_both_contents_arrive_whole_at_once_and_bytes_are_counted(data):
    async with linked() as (one, two):
        readers = [Reader(link, len(data)) for link in (one, two)]
        await asyncio.gather(
            *(reader.read() for reader in readers), send(one, data), send(two, data)
        )
        for reader in readers:
            assert reader.contents == [data]
            assert reader.confirmed == [b"members"]
            assert (reader.link.bytes_sent, reader.link.bytes_received) == (len(data), len(data))


async def test_a_confirmation_that_is_due_while_the_content_is_on_its_way_comes_after_it():
    data = WHOLE * 40  # more than the stream buffers: the sender has to wait in the middle
    async with linked() as (one, two):
        sending = asyncio.create_task(one.send_content(memoryview(data), blake3(data).digest()))
        confirming = asyncio.create_task(one.send(pb.Frame(confirm=pb.Confirm(members=b"late"))))
        await under_way(one)
        assert not sending.done() and not confirming.done()
        reader = await Reader(two, len(data)).read()
        assert reader.contents == [data] and reader.confirmed == [b"late"]
        await asyncio.gather(sending, confirming)


async def test_blocks_that_are_asked_for_come_again_over_the_first():
    again = Retransmit(blocks=b"\x80", least=5, most=5)
    async with linked() as (one, two):
        reading = asyncio.create_task(Reader(two, 100, ask=again).read())
        answering = Reader(one, 100)
        asked = asyncio.create_task(answering.read())
        first, second = b"f" * 100, b"again"
        for frame in (content(100, first), chunk(first)):
            await two.stream.send(frame)
        await one.send_content(memoryview(first), blake3(first).digest())
        await until_async(lambda: answering.resends, 30, "the reader asks for blocks again")
        await send(one, second)
        reader = await reading
        assert answering.resends == [b"\x80"]
        assert reader.contents == [first, second]
        assert two.bytes_received == 105
        receiving = two.stages.seconds["receive"]
        assert two.line(0.0) == pytest.approx(receiving), "both have taken time on the line"
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def test_a_confirmation_that_overtakes_what_comes_again_does_not_end_the_reading():
    async with linked() as (one, two):
        reading = asyncio.create_task(
            Reader(two, 4, ask=Retransmit(blocks=b"\x80", least=2, most=2)).read()
        )
        for frame in (content(), chunk(b"good"), CONFIRM, content(2, b"ok"), chunk(b"ok")):
            await one.stream.send(frame)
        reader = await reading
        assert reader.contents == [b"good", b"ok"] and reader.confirmed == [b"members"]


def content(size: int = 4, data: bytes = b"good") -> pb.Frame:
    return pb.Frame(content=pb.Content(size=size, digest=blake3(data).digest()))


def chunk(data: bytes, offset: int = 0) -> pb.Frame:
    return pb.Frame(chunk=pb.Chunk(offset=offset, data=data))


CONFIRM = pb.Frame(confirm=pb.Confirm(members=b"members"))
VIOLATIONS = {
    "confirms nothing": ([CONFIRM], "'confirm' after 'hello'"),
    "confirms a part": ([content(), chunk(b"go"), CONFIRM], "'confirm' after 'contribution'"),
    "chunk first": ([chunk(b"good")], "before its contribution was announced"),
    "too large": ([content(5)], "announced 5 bytes where 4 to 4 are due"),
    "too small": ([content(3)], "announced 3 bytes"),
    "absurd": ([content(2**63)], "announced 9223372036854775808 bytes"),
    "no digest": ([pb.Frame(content=pb.Content(size=4, digest=b"short"))], "announced 4 bytes"),
    "twice": ([content(), content()], "'contribution' after 'contribution'"),
    "out of order": ([content(), chunk(b"od", 2)], "out of place"),
    "overlap": ([content(), chunk(b"go"), chunk(b"od", 1)], "out of place"),
    "past the end": ([content(), chunk(b"goods")], "out of place"),
    "after the end": ([content(), chunk(b"good"), chunk(b"x", 4)], "out of place"),
    "resends first": ([pb.Frame(resend=pb.Resend(blocks=b"\1"))], "'resend' after 'hello'"),
    "empty chunk": ([content(), chunk(b"")], "out of place"),
    "other bytes": ([content(), chunk(b"evil")], "does not match its checksum"),
    "hello again": ([pb.Frame(hello=pb.Offer())], "'hello' after 'hello'"),
    "nothing": ([pb.Frame()], "'nothing' after 'hello'"),
    "asks twice": (
        [content(), chunk(b"good"), *[pb.Frame(resend=pb.Resend(blocks=b"\1"))] * 2],
        "'resend' after 'resend'",
    ),
    "no size": ([content(0)], "announced 0 bytes"),
    "long digest": ([pb.Frame(content=pb.Content(size=4, digest=bytes(33)))], "announced 4 bytes"),
    "same chunk twice": ([content(), chunk(b"go"), chunk(b"go")], "out of place"),
    "absurd offset": ([content(), chunk(b"good", 2**64 - 1)], "out of place"),
    "offset that wraps": ([content(), chunk(b"go"), chunk(b"od", 2**64 - 2)], "out of place"),
    "confirms what was cut": ([content(), CONFIRM], "'confirm' after 'contribution'"),
    "refuses late": ([content(), frames.refuse(Refusal.BUSY)], "'refuse' after 'contribution'"),
    "a share": (
        [pb.Frame(content=pb.Content(size=4, digest=bytes(32), part=pb.SHARE))],
        "sent 'share' after 'hello'",
    ),
    "a mean": (
        [pb.Frame(content=pb.Content(size=4, digest=bytes(32), part=pb.MEAN))],
        "sent 'mean' after 'hello'",
    ),
    "no part": (
        [pb.Frame(content=pb.Content(size=4, digest=bytes(32), part=7))],
        "sent 'content' after 'hello'",
    ),
    "rolls": ([pb.Frame(roll=pb.Roll(peers=["a"]))], "'roll' after 'hello'"),
    "commits": ([pb.Frame(commit=pb.Commit())], "'commit' after 'hello'"),
    "accepts twice": ([pb.Frame(accept=pb.Offer())], "'accept' after 'hello'"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
async def test_what_is_not_allowed_ends_the_reading_with_its_reason(name):
    frames, reason = VIOLATIONS[name]
    async with linked() as (one, two):
        for frame in frames:
            await one.stream.send(frame)
        reader = Reader(two, 4)
        with pytest.raises(ProtocolViolation, match=reason):
            await reader.read()
        assert reader.into in (b"good", b"go\0\0", bytes(4), b"evil"), (
            "nothing lies where it must not"
        )
        assert not reader.confirmed
        assert (len(reader.contents) == 1) == (name in ("asks twice", "after the end"))


@pytest.mark.parametrize("end", [0, 1])
async def test_an_end_that_drops_the_stream_is_noticed_by_the_other(end):
    async with linked() as links:
        links[end].stream.cancel()
        with pytest.raises(LinkLost):
            await Reader(links[1 - end], 4).read()
        with pytest.raises(LinkLost):
            while True:
                await soon(links[1 - end].send_content(memoryview(WHOLE), bytes(32)))


async def test_both_ends_notice_that_the_wire_is_cut_while_contents_travel():
    data = WHOLE * 40
    async with listening() as callee, cabled(callee.port) as cable, calling() as channels:
        caller = await call(channels, callee.info(addresses=(f"127.0.0.1:{cable.port}",)))
        await caller.send(pb.Frame())
        _, stream = await soon(callee.streams.get())
        one, two = PairLink("callee", caller), PairLink("caller", stream)
        await soon(stream.receive())
        sending = [
            asyncio.create_task(link.send_content(memoryview(data), bytes(32)))
            for link in (one, two)
        ]
        await under_way(one, two)
        cable.cut()
        assert isinstance(await soon(callee.ended.get()), asyncio.CancelledError), (
            "the handler is told"
        )
        for task in sending:
            with pytest.raises(LinkLost):
                await soon(task)
        for link in (one, two):
            with pytest.raises(LinkLost):
                await Reader(link, len(data)).read()


async def test_bytes_of_a_callee_that_are_no_frame_are_a_violation():
    async with misbehaving() as rogue, calling() as channels:
        rogue.frames = [b"\xff\xff\xff"]
        link = PairLink("rogue", await call(channels, rogue.info()))
        with pytest.raises(ProtocolViolation, match="no frame"):
            await Reader(link, 4).read()
        link.stream.cancel()


@pytest.mark.parametrize("end", [0, 1])
async def test_closing_lets_the_other_end_read_to_the_end(end, monkeypatch):
    monkeypatch.setattr(stream_module, "CLOSE_DEADLINE", 1000.0)
    async with linked() as links:
        ours, theirs = links[end].stream, links[1 - end].stream
        await links[end].send(pb.Frame(confirm=pb.Confirm(members=b"last")))
        closing = asyncio.create_task(ours.close())
        assert (await soon(theirs.receive())).confirm.members == b"last"
        if end == 0:
            assert await soon(theirs.receive()) is None
            theirs.cancel()  # the handler returns, which ends the other direction
            await soon(closing)
        else:
            answering = asyncio.create_task(theirs.close())
            await soon(closing)
            ours.cancel()
            await soon(answering)


@pytest.mark.parametrize("end", [0, 1])
async def test_giving_up_tells_why(end):
    async with linked() as links:
        await links[end].send_abandon("the trainer failed\x1b[2J\n" + "x" * 1000)
        frame = await soon(links[1 - end].stream.receive())
        assert len(frame.abandon.reason) == 200
        frame.abandon.reason *= 5
        await links[end].stream.send(frame)
        with pytest.raises(LinkLost, match="gave up: the trainer failed") as caught:
            await Reader(links[1 - end], 4).read()
        assert len(str(caught.value)) == len("gave up: ") + 200 and str(caught.value).isprintable()


async def test_a_content_is_held_once_at_each_end():
    """In the slots, where it lies anyway: what passes through on the way is a few chunks, and both
    go at once."""
    size = 32 * 1024 * 1024
    memory = Arena(create_file(), slots=4, slot_bytes=size)
    slots = [memory.view(slot, size) for slot in range(4)]
    slots[0][:] = b"a" * size
    slots[1][:] = b"b" * size
    digests = [blake3(slot).digest() for slot in slots[:2]]
    try:
        async with linked() as links:
            readers = [Reader(link, 0) for link in links]
            for reader, slot in zip(readers, slots[2:], strict=True):
                reader.into, reader.least, reader._on_content = (
                    slot,
                    size,
                    lambda content: asyncio.sleep(0),
                )
            tracemalloc.start()
            try:
                await asyncio.gather(
                    *(
                        link.send_content(slots[end], digests[end])
                        for end, link in enumerate(links)
                    ),
                    *(link.send(pb.Frame(confirm=pb.Confirm(members=b""))) for link in links),
                    *(reader.read() for reader in readers),
                )
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
        assert [blake3(slot).digest() for slot in reversed(slots[2:])] == digests
        assert CHUNK_BYTES < peak < 12 * CHUNK_BYTES < size / 2, (
            "chunks pass through; nothing joins them"
        )
    finally:
        memory.close()


# Groups


class Member:
    """One end of a group's stream that reads to the other's commit, and what came, in its order."""

    def __init__(self, link: GroupLink, share: int, mean: int) -> None:
        self.link, self.into = link, {pb.SHARE: bytearray(share), pb.MEAN: bytearray(mean)}
        self.came: list[str] = []

    async def read(self) -> "Member":
        async with asyncio.timeout(30):
            await self.link.read(self._place, self._on_content, self._on_told)
        return self

    async def _place(self, content: pb.Content) -> tuple[memoryview, int]:
        self.came.append("where")
        return memoryview(self.into[content.part]), len(self.into[content.part])

    async def _on_content(self, content: Incoming) -> None:
        await asyncio.sleep(0)
        assert blake3(self.into[content.part]).digest() == content.digest
        self.came.append({pb.SHARE: "share", pb.MEAN: "mean"}[content.part])

    def _on_told(self, frame: pb.Frame) -> None:
        self.came.append(frame.WhichOneof("kind") or "")


async def take_part(link: GroupLink, share: bytes, mean: bytes | None) -> None:
    for frame in (
        group_frames.roll(["a", "b"]),
        group_frames.members(["a", "b"]),
        group_frames.members(["a"]),
    ):
        await link.send(frame)
    await link.send_content(memoryview(share), blake3(share).digest(), pb.SHARE)
    if mean is not None:
        await link.send_content(memoryview(mean), blake3(mean).digest(), pb.MEAN)
    await link.send(group_frames.held([b"", bytes(32)]))
    await link.send(group_frames.commit([False, True], [True, True]))


@pytest.mark.parametrize("with_mean", [True, False])
async def test_both_members_hear_all_of_each_other_in_its_order(with_mean: bool):
    share, mean = WHOLE, WHOLE[: CHUNK_BYTES + 1] if with_mean else None
    async with linked(GroupLink) as links:
        members = [Member(link, len(share), len(mean or b"")) for link in links]
        await asyncio.gather(
            *(member.read() for member in members),
            *(take_part(link, share, mean) for link in links),
        )
        for member in members:
            told = [
                "roll",
                "members",
                "members",
                "where",
                "share",
                *(["where", "mean"] if with_mean else []),
                "held",
                "commit",
            ]
            assert member.came == told
            assert member.into[pb.SHARE] == share
            assert (
                member.link.bytes_sent
                == member.link.bytes_received
                == len(share) + len(mean or b"")
            )


@pytest.mark.parametrize("off", [-1, 1])
async def test_a_share_of_another_size_than_is_due_is_refused_unread(off: int):
    async with linked(GroupLink) as (one, two):
        sending = asyncio.create_task(take_part(one, WHOLE, None))
        member = Member(two, len(WHOLE) + off, 0)
        with pytest.raises(
            ProtocolViolation, match=f"announced {len(WHOLE)} bytes where {len(WHOLE) + off} to"
        ):
            await member.read()
        assert not any(member.into[pb.SHARE])
        two.stream.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_nothing_else_is_taken_in_while_a_share_is_on_its_way():
    async with linked(GroupLink) as (one, two):
        for frame in (group_frames.roll(["a"]), group_frames.members(["a"])):
            await one.send(frame)
        await one.send(pb.Frame(content=pb.Content(size=4, digest=bytes(32), part=pb.SHARE)))
        await one.send(group_frames.held([b""]))
        with pytest.raises(
            ProtocolViolation, match="sent 'held' after 'share', where it is not due"
        ):
            await Member(two, 4, 4).read()


# Offers

NUMBERS = ("round", "swarm_step", "steps", "tokens", "version")


@given(
    st.builds(
        Offer,
        protocol=st.integers(0, 2**32 - 1),
        run_id=st.binary(min_size=32, max_size=32).map(bytes.hex),
        plan=st.binary(min_size=32, max_size=32).map(bytes.hex),
        codec=st.text(max_size=32),
        fragment=st.integers(0, 2**32 - 1),
        slow_digest=st.just(b"") | st.binary(min_size=32, max_size=32),
        previous=st.lists(st.binary(min_size=8, max_size=8), max_size=4).map(tuple),
        **{name: st.integers(0, 2**53 - 1) for name in NUMBERS},
    )
)
def test_an_offer_arrives_as_it_was_made(offer):
    message = pb.Offer.FromString(frames.to_message(offer).SerializeToString())
    assert frames.from_message(message) == offer


HOSTILE = {
    "empty": dict.fromkeys(("run_id", "plan"), b""),
    "short run": {"run_id": bytes(31)},
    "long run": {"run_id": bytes(1_000_000)},
    "short plan": {"plan": bytes(31)},
    "long plan": {"plan": bytes(33)},
    "long codec": {"codec": "f" * 33},
    "endless codec": {"codec": "f" * 1_000_000},
    "short digest": {"slow_digest": bytes(31)},
    "long digest": {"slow_digest": bytes(33)},
    **{f"{name} {value}": {name: value} for name in NUMBERS for value in (2**53, 2**64 - 1)},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_offer_with_a_field_out_of_bounds_is_refused(name):
    message = frames.to_message(OFFER)
    frames.from_message(message)
    for field, value in HOSTILE[name].items():
        setattr(message, field, value)
    with pytest.raises(ProtocolViolation, match="out of bounds") as caught:
        frames.from_message(message)
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize("previous", [[bytes(8)] * 5, [bytes(7)], [b""], [bytes(1_000_000)]])
def test_an_offer_with_marks_that_can_not_be_is_refused(previous):
    message = frames.to_message(OFFER)
    message.previous.extend(previous)
    with pytest.raises(ProtocolViolation, match="out of bounds"):
        frames.from_message(message)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_negative_number_on_the_wire_is_a_huge_one_and_is_refused(name):
    minus_one = b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"
    tag = bytes([pb.Offer.DESCRIPTOR.fields_by_name[name].number << 3])
    with pytest.raises(ProtocolViolation):
        frames.from_message(
            pb.Offer.FromString(frames.to_message(OFFER).SerializeToString() + tag + minus_one)
        )


def paced(monkeypatch: pytest.MonkeyPatch, left: float) -> tuple[ContentLink, Clock, list[float]]:
    """A link to which 10,000 bytes are announced, and that has ``left`` seconds for them where ten
    are usual; and what it has told to need."""
    clock, told = Clock(), list[float]()
    monkeypatch.setattr(link_module, "monotonic", clock)
    nothing: Any = None
    link = ContentLink("a", nothing, nothing, lambda: left - clock.now, 10.0, told.append)
    announced = pb.Content(size=10_000, digest=bytes(32))
    link._expect(Incoming(announced, memoryview(bytearray(10_000)), 10_000))
    return link, clock, told


def comes(link: ContentLink, share: float) -> None:
    """Bytes come until this share of them is there."""
    assert link._incoming is not None
    offset = link._incoming.come
    link._take(pb.Chunk(offset=offset, data=bytes(int(10_000 * share) - offset)))


@pytest.mark.parametrize(("share", "seconds"), [(0.12, 2.5), (0.3, 6.0), (0.9, 10.0)])
def test_what_came_at_once_and_stalls_has_no_longer_than_usual_whatever_was_asked_for(
    monkeypatch, share, seconds
):
    link, clock, told = paced(monkeypatch, left=300.0)
    clock.now = 0.1
    comes(link, share)
    assert link._patience == pytest.approx(seconds - 0.1)
    clock.now = seconds + 0.1
    assert link._patience < 0 and told == []


def test_what_comes_evenly_has_as_long_as_it_needs_and_tells_where_that_is_not_there(monkeypatch):
    link, clock, told = paced(monkeypatch, left=30.0)
    for percent in range(1, 50):
        clock.now = 0.5 * percent
        comes(link, percent / 100)
        assert link._patience > 0.5, "two times as long as it has taken for as much"
    assert min(told) > 30.0 - clock.now and max(told) < 75.0


async def test_a_contribution_of_which_a_part_comes_and_no_more_is_given_up(
    monkeypatch,
):
    monkeypatch.setattr(link_module, "PATIENCE", 0.01)
    async with linked() as (one, two):
        two._time_left, two._usual = (lambda: 300.0), 1.0
        reading = asyncio.create_task(Reader(two, 100).read())
        await one.stream.send(content(100))
        await one.stream.send(chunk(b"x" * 12))
        with pytest.raises(TooSlow):
            await reading
