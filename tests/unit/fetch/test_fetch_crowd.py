"""What must hold for a newcomer where free identities crowd the donors: it gets its whole state."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from time import time

import grpc
import pytest

from helpers.donors import SMALL, Donor, Joiner, giving, identity
from helpers.wire import RUN, cabled, calling, calling_raw, soon
from lowcomm_node.fetch import engine
from lowcomm_node.fetch import giving as giving_module
from lowcomm_node.fetch.giving import TURN_SECONDS
from lowcomm_node.net.tls import Gatekeeper
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.messages.exchange_pb2_grpc import ExchangeStub

pytestmark = pytest.mark.slow

NEWCOMER, SHARED = "127.9.0.1", "127.9.1.1"
AT_EACH = 18


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates are the real ones, over shorter times."""
    monkeypatch.setattr(engine, "RETRY_PAUSE", 0.05)
    monkeypatch.setattr(engine, "LATER", 0.5)
    monkeypatch.setattr(giving_module, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(giving_module, "TURN_SECONDS", TURN_SECONDS / 60)


async def _idle(giver: Donor, stub: ExchangeStub, who: Identity, entered: asyncio.Event) -> None:
    """Stand in line, be served, and ask for nothing; begin anew when that ends."""
    keeper = Gatekeeper(who, RUN, time)
    while True:
        call = stub.Fetch(metadata=keeper.credential_for(giver.peer_id))
        await call.write(pb.FetchRequest(enter=pb.Enter(state=b"")))
        with suppress(grpc.RpcError):  # refused
            if await call.read() is not grpc.aio.EOF:
                entered.set()
        await call.code()
        await asyncio.sleep(0.1)


@asynccontextmanager
async def crowded(givers: Sequence[Donor]) -> AsyncIterator[None]:
    """All places of all donors are taken by identities of one address, which come again whenever
    they are dropped."""
    tasks: list[asyncio.Task[None]] = []
    all_entered: list[asyncio.Event] = []
    async with AsyncExitStack() as stack:
        for number, giver in enumerate(givers):
            stub = ExchangeStub(await stack.enter_async_context(calling_raw(giver.callee.info())))
            keys = [Identity(bytes([100 + number, one]) * 16) for one in range(AT_EACH)]
            for one in keys:
                all_entered.append(asyncio.Event())
                tasks.append(asyncio.create_task(_idle(giver, stub, one, all_entered[-1])))
        try:
            # Not "all at once": on a busy machine some are always on their way back.
            await soon(asyncio.gather(*(entered.wait() for entered in all_entered)))
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_newcomer_gets_its_state_from_three_donors_with_fifty_four_idle_joiners(tmp_path):
    async with AsyncExitStack() as stack:
        givers = [
            await stack.enter_async_context(giving(tmp_path, number)) for number in (11, 12, 13)
        ]
        await stack.enter_async_context(crowded(givers))
        for giver in givers:
            giver.port = (await stack.enter_async_context(cabled(giver.port, NEWCOMER))).port
        channels = await stack.enter_async_context(calling(identity(50)))
        joiner = Joiner(channels, tmp_path / "incoming", lambda: [giver.info() for giver in givers])
        await soon(joiner.run())
        assert sum(joiner.given_by(givers)) == len(SMALL.pieces)
