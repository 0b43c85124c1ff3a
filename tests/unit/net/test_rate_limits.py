"""What must hold for callers that call too often, too many at once, or begin calls that they do not
go on with."""

import grpc
import pytest
from grpc import aio

from helpers.waiting import until_async
from helpers.wire import (
    CALLEE,
    PATH,
    Callee,
    calling,
    calling_raw,
    listening,
    soon,
)
from lowcomm_node.net import limits as rate_limits
from lowcomm_node.net import server
from lowcomm_node.net.limits import RateLimits
from lowcomm_node.system.quota import Allowed
from lowcomm_protocol.messages import exchange_pb2 as pb

FEW = Allowed(each=3, all=rate_limits.UNBOUND, seconds=60.0)


def test_a_peer_has_so_many_calls_a_minute_and_they_come_back_evenly(monkeypatch):
    monkeypatch.setattr(rate_limits, "CALLS", FEW)
    one = RateLimits()
    assert [one.refuses("a", 0.0) for _ in range(3)] == [None] * 3
    assert one.refuses("a", 0.0) == "at most 3 calls a minute: call again later"
    assert one.refuses("b", 0.0) is None, "others have theirs"
    assert one.refuses("a", 20.0) is None and one.refuses("a", 20.0) is not None


def test_an_address_without_good_credentials_is_not_looked_at_for_a_while_and_others_are(
    monkeypatch,
):
    monkeypatch.setattr(rate_limits, "BAD_CALLS", FEW)
    one = RateLimits()
    for _ in range(3):
        assert one.refuses_place("192.0.2.1", 0.0) is None
        one.bad("192.0.2.1", 0.0)
    assert one.refuses_place("192.0.2.1", 0.0) is not None
    assert one.refuses_place("192.0.2.2", 0.0) is None
    assert one.refuses_place("192.0.2.1", 20.0) is None


async def status(callee: Callee, channels, metadata=None) -> tuple[grpc.StatusCode, str]:
    """How a call ends."""
    stub = await channels.stub(callee.info())
    given = channels.metadata(CALLEE.peer_id) if metadata is None else metadata
    try:
        await stub.Describe(pb.Introduction(), metadata=given, timeout=20)
    except aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


async def test_after_some_calls_without_a_credential_an_address_is_not_heard_for_a_while(
    monkeypatch,
):
    monkeypatch.setattr(rate_limits, "BAD_CALLS", FEW)
    async with listening() as callee, calling() as channels:
        codes = [(await status(callee, channels, ()))[0] for _ in range(5)]
        assert (
            codes
            == [grpc.StatusCode.UNAUTHENTICATED] * 3 + [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2
        )
        assert (await status(callee, channels))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


def half_open(channel: aio.Channel, method: str, metadata=None):
    """A call of which only the beginning comes."""
    return channel.stream_stream(PATH + method)(metadata=metadata)


@pytest.mark.parametrize("method", ["Describe", "Fetch", "Swap", "Ping"])
async def test_a_caller_that_begins_calls_and_sends_no_request_holds_no_place(
    method: str, monkeypatch
):
    monkeypatch.setattr(server, "MAX_CALLS", 4)
    async with listening() as callee, calling() as channels, calling_raw(callee.info()) as channel:
        begun = [half_open(channel, method) for _ in range(4)]
        assert [await soon(one.code()) for one in begun] == [grpc.StatusCode.UNAUTHENTICATED] * 4
        assert (await status(callee, channels))[0] is grpc.StatusCode.OK


async def test_who_sends_no_request_is_waited_for_no_longer_than_a_moment(monkeypatch):
    monkeypatch.setattr(server, "REQUEST_DEADLINE", 0.2)
    async with listening() as callee, calling() as channels, calling_raw(callee.info()) as channel:
        one = half_open(channel, "Describe", channels.metadata(CALLEE.peer_id))
        assert await soon(one.code()) is grpc.StatusCode.DEADLINE_EXCEEDED
        await until_async(lambda: not callee.service.open_calls, 10, "its place is free")


@pytest.mark.parametrize("request_", [None, b"\xff\xff"])
async def test_a_request_that_is_none_is_refused(request_: bytes | None):
    async with listening() as callee, calling() as channels, calling_raw(callee.info()) as channel:
        one = half_open(channel, "Describe", channels.metadata(CALLEE.peer_id))
        if request_ is not None:
            await one.write(request_)
        await one.done_writing()
        assert await soon(one.code()) is grpc.StatusCode.INVALID_ARGUMENT
        assert callee.introduced == []
