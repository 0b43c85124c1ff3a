"""What must hold for one stream between two peers: real gRPC over TLS, in one event loop."""

import asyncio
import tracemalloc
from hashlib import sha256

import pytest
from wire import linked

from lowcomm_node.errors import LinkLost
from lowcomm_node.exchange.link import CHUNK_BYTES, Link
from lowcomm_node.trainer.interface import Again
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.messages import exchange_pb2 as pb

WHOLE = bytes(range(256)) * (3 * CHUNK_BYTES // 256) + b"end"


class Reader:
    """One end that reads to the other's confirmation, and what came."""

    def __init__(self, link: Link, size: int, least: int | None = None, ask: Again | None = None) -> None:
        self.link, self.into, self.least, self.ask = link, bytearray(size), size if least is None else least, ask
        self.contents: list[bytes] = []
        self.resends: list[bytes] = []
        self.confirmed: list[bytes] = []

    async def read(self) -> "Reader":
        async with asyncio.timeout(30):
            await self.link.read(
                memoryview(self.into), self.least, self._on_content, self.resends.append, self.confirmed.append
            )
        return self

    async def _on_content(self, size: int, again: bool) -> Again | None:
        assert again == bool(self.contents)
        self.contents.append(bytes(self.into[:size]))
        return None if again else self.ask


async def send(link: Link, data: bytes) -> None:
    await link.send_content(memoryview(data), sha256(data).digest())
    await link.send_confirm(b"members")


@pytest.mark.parametrize("data", [b"x", WHOLE[:CHUNK_BYTES], WHOLE])
async def test_both_contents_arrive_whole_at_once_and_bytes_are_counted(data):
    async with linked() as (one, two):
        readers = [Reader(link, len(data)) for link in (one, two)]
        await asyncio.gather(*(reader.read() for reader in readers), send(one, data), send(two, data))
        for reader in readers:
            assert reader.contents == [data]
            assert reader.confirmed == [b"members"]
            assert (reader.link.bytes_sent, reader.link.bytes_received) == (len(data), len(data))


async def test_a_confirmation_that_is_due_while_the_content_is_on_its_way_comes_after_it():
    data = WHOLE * 40  # more than the stream buffers: the sender has to wait in the middle
    async with linked() as (one, two):
        sending = asyncio.create_task(one.send_content(memoryview(data), sha256(data).digest()))
        confirming = asyncio.create_task(one.send_confirm(b"late"))
        done, _ = await asyncio.wait({sending, confirming}, timeout=1)
        assert not done
        reader = await Reader(two, len(data)).read()
        assert reader.contents == [data] and reader.confirmed == [b"late"]
        await asyncio.gather(sending, confirming)


async def test_blocks_that_are_asked_for_come_again_over_the_first():
    again = Again(blocks=b"\x80", size=5)
    async with linked() as (one, two):
        reading = asyncio.create_task(Reader(two, 100, ask=again).read())
        answering = Reader(one, 100)
        asked = asyncio.create_task(answering.read())
        first, second = b"f" * 100, b"again"
        await one.send_content(memoryview(first), sha256(first).digest())
        while not answering.resends:  # noqa: ASYNC110 - filled by the reader
            await asyncio.sleep(0.01)
        await send(one, second)
        reader = await reading
        assert answering.resends == [b"\x80"]
        assert reader.contents == [first, second]
        assert two.bytes_received == 105
        asked.cancel()


async def test_a_confirmation_that_overtakes_what_comes_again_does_not_end_the_reading():
    async with linked() as (one, two):
        reading = asyncio.create_task(Reader(two, 4, ask=Again(blocks=b"\x80", size=2)).read())
        for frame in (content(), chunk(b"good"), CONFIRM, content(2, b"ok"), chunk(b"ok")):
            await one.stream.send(frame)
        reader = await reading
        assert reader.contents == [b"good", b"ok"] and reader.confirmed == [b"members"]


def content(size: int = 4, data: bytes = b"good") -> pb.Frame:
    return pb.Frame(content=pb.Content(size=size, digest=sha256(data).digest()))


def chunk(data: bytes, offset: int = 0) -> pb.Frame:
    return pb.Frame(chunk=pb.Chunk(offset=offset, data=data))


CONFIRM = pb.Frame(confirm=pb.Confirm(members=b"members"))
VIOLATIONS = {
    "confirms nothing": ([CONFIRM], "confirmed before its contribution"),
    "confirms a part": ([content(), chunk(b"go"), CONFIRM], "confirmed before its contribution"),
    "chunk first": ([chunk(b"good")], "before its contribution was announced"),
    "too large": ([content(5)], "announced 5 bytes where 4 to 4 are due"),
    "too small": ([content(3)], "announced 3 bytes"),
    "absurd": ([content(2**63)], "announced 9223372036854775808 bytes"),
    "no digest": ([pb.Frame(content=pb.Content(size=4, digest=b"short"))], "announced 4 bytes"),
    "twice": ([content(), content()], "began a second contribution"),
    "again unasked": ([content(), chunk(b"good"), content()], "began a second contribution"),
    "out of order": ([content(), chunk(b"od", 2)], "out of place"),
    "overlap": ([content(), chunk(b"go"), chunk(b"od", 1)], "out of place"),
    "past the end": ([content(), chunk(b"goods")], "out of place"),
    "after the end": ([content(), chunk(b"good"), chunk(b"x", 4)], "out of place"),
    "empty chunk": ([content(), chunk(b"")], "out of place"),
    "other bytes": ([content(), chunk(b"evil")], "does not match its checksum"),
    "hello again": ([pb.Frame(hello=pb.Offer())], "'hello' where a contribution"),
    "nothing": ([pb.Frame()], "None where a contribution"),
    "asks twice": ([pb.Frame(resend=pb.Resend(blocks=b"\1"))] * 2, "asked for our contribution a third time"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
async def test_what_is_not_allowed_ends_the_reading_with_its_reason(name):
    frames, reason = VIOLATIONS[name]
    async with linked() as (one, two):
        for frame in frames:
            await one.stream.send(frame)
        with pytest.raises(ProtocolViolation, match=reason):
            await Reader(two, 4).read()


async def test_what_comes_again_must_have_the_size_that_was_asked_for():
    async with linked() as (one, two):
        for frame in (content(), chunk(b"good"), content(3, b"bad")):
            await one.stream.send(frame)
        with pytest.raises(ProtocolViolation, match="announced 3 bytes where 2 to 2 are due"):
            await Reader(two, 4, ask=Again(blocks=b"\1", size=2)).read()


async def test_a_content_of_a_codec_whose_size_varies_may_be_shorter():
    async with linked() as (one, two):
        sending = asyncio.create_task(send(one, b"good"))
        assert (await Reader(two, 100, least=3).read()).contents == [b"good"]
        await sending


@pytest.mark.parametrize("end", [0, 1])
async def test_an_end_that_drops_the_stream_is_noticed_by_the_other(end):
    async with linked() as links:
        links[end].stream.cancel()
        with pytest.raises(LinkLost):
            await Reader(links[1 - end], 4).read()
        with pytest.raises(LinkLost):
            while True:
                await links[1 - end].send_content(memoryview(WHOLE), bytes(32))


@pytest.mark.parametrize("end", [0, 1])
async def test_giving_up_tells_why(end):
    async with linked() as links:
        await links[end].send_abandon("the trainer failed" + "x" * 1000)
        with pytest.raises(LinkLost, match="gave up: the trainer failed") as caught:
            await Reader(links[1 - end], 4).read()
        assert len(str(caught.value)) < 250


async def test_an_end_that_has_no_more_to_say_before_it_has_confirmed_has_broken_off():
    async with linked() as (one, two):
        closing = asyncio.create_task(one.stream.close())
        with pytest.raises(LinkLost, match="ended the stream"):
            await Reader(two, 4).read()
        two.stream.cancel()
        await closing


async def test_a_content_is_held_once_at_each_end():
    data = bytes(32 * 1024 * 1024)
    async with linked() as (one, two):
        reader = Reader(two, len(data))
        reader._on_content = lambda size, again: asyncio.sleep(0)
        tracemalloc.start()
        try:
            sending = asyncio.create_task(one.send_content(memoryview(data), sha256(data).digest()))
            confirming = asyncio.create_task(one.send_confirm(b""))
            await reader.read()
            await asyncio.gather(sending, confirming)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 32 * CHUNK_BYTES, "chunks pass through; nothing joins them outside the slots"
