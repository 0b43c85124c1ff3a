"""What must hold where requests are read ahead of their handler: few and small ones wait, anything
else ends it."""

import asyncio
from typing import Any

import pytest

from lowcomm_node.errors import LinkLost
from lowcomm_node.fetch.readahead import ReadAhead
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.messages import exchange_pb2 as pb

MOST, LARGEST = 3, 16
END = 10.0


class Caller:
    """Sends what the test says."""

    def __init__(self, *sent: Any) -> None:
        self._sent: asyncio.Queue[Any] = asyncio.Queue()
        for one in sent:
            self.send(one)

    def send(self, one: Any) -> None:
        """A request, None for the end, or an error that breaks the stream."""
        self._sent.put_nowait(one)

    async def receive(self) -> Any:
        """See ``Source``."""
        one = await self._sent.get()
        if isinstance(one, Exception):
            raise one
        return one


def wanted(piece: int) -> pb.FetchRequest:
    """A small request."""
    return pb.FetchRequest(wanted=pb.Wanted(piece=piece))


async def test_requests_come_in_their_order_and_then_the_end():
    async with (
        asyncio.timeout(END),
        ReadAhead(Caller(wanted(1), wanted(2), None), MOST, LARGEST) as requests,
    ):
        found = [await requests.receive() for _ in range(3)]
    assert found == [wanted(1), wanted(2), None]


BAD = {
    "more than 3 requests at once": (*map(wanted, range(MOST + 1)),),
    "a request of 102 bytes, where 16 are enough": (
        pb.FetchRequest(enter=pb.Enter(snapshot=bytes(98))),
    ),
    "not a message": (ProtocolViolation("not a message"),),
    "the caller has gone": (wanted(1), LinkLost("the caller has gone")),
}


@pytest.mark.parametrize("reason", BAD)
async def test_whatever_its_handler_waits_for_a_bad_stream_ends_it_with_the_reason(reason: str):
    caller = Caller()
    with pytest.raises((ProtocolViolation, LinkLost), match=reason):
        async with asyncio.timeout(END), ReadAhead(caller, MOST, LARGEST):
            for one in BAD[reason]:
                caller.send(one)
            await asyncio.Event().wait()
    await asyncio.sleep(0)  # nothing of the cancellation is left behind


@pytest.mark.parametrize("yields", range(4))
async def test_a_stream_that_breaks_while_its_handler_ends_breaks_nothing_else(yields: int):
    caller = Caller()
    try:
        async with asyncio.timeout(END), ReadAhead(caller, MOST, LARGEST):
            caller.send(LinkLost("the caller has gone"))
            for _ in range(yields):
                await asyncio.sleep(0)
    except LinkLost:
        pass
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()
    await asyncio.sleep(0)


async def test_who_is_cancelled_from_outside_stays_cancelled():
    async def handle() -> None:
        async with ReadAhead(Caller(), MOST, LARGEST) as requests:
            await requests.receive()

    task = asyncio.create_task(handle())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
