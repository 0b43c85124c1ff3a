"""What must hold for callers that call too often, too many at once, or begin calls that they do not
go on with."""

import asyncio

import grpc
import pytest
from grpc import aio

from helpers.waiting import until_async
from helpers.wire import (
    CALLEE,
    CALLER,
    PATH,
    Callee,
    calling,
    calling_raw,
    listening,
    soon,
)
from lowcomm_node.net import limits as rate_limits
from lowcomm_node.net import server, service
from lowcomm_node.net.limits import RateLimits
from lowcomm_node.system.quota import Allowed
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb

FEW = Allowed(each=3, all=rate_limits.UNBOUND, seconds=60.0)
STRANGER = Identity(b"\5" * 32)


def test_a_peer_has_so_many_calls_a_minute_and_they_come_back_evenly():
    one = RateLimits(calls=FEW)
    assert [one.refuses("a", 0.0) for _ in range(3)] == [None] * 3
    assert one.refuses("a", 0.0) == "at most 3 calls a minute: call again later"
    assert one.refuses("b", 0.0) is None, "others have theirs"
    assert one.refuses("a", 20.0) is None and one.refuses("a", 20.0) is not None


def test_an_address_without_good_credentials_is_not_looked_at_for_a_while_and_others_are():
    one = RateLimits(bad_calls=FEW)
    for _ in range(3):
        assert one.refuses_place("192.0.2.1", 0.0) is None
        one.bad("192.0.2.1", 0.0)
    assert one.refuses_place("192.0.2.1", 0.0) is not None
    assert one.refuses_place("192.0.2.2", 0.0) is None
    assert one.refuses_place("192.0.2.1", 20.0) is None


def test_a_household_of_ipv6_is_one_caller():
    one = RateLimits(bad_calls=FEW)
    for number in range(3):
        one.bad(f"2001:db8::{number}", 0.0)
    assert one.refuses_place("2001:db8::ffff", 0.0) is not None
    assert one.refuses_place("2001:db8:0:1::1", 0.0) is None


def test_refusals_are_counted_until_the_connection_should_end():
    one = RateLimits(refused=FEW)
    assert [one.is_flood("192.0.2.1", 0.0) for _ in range(5)] == [False] * 3 + [True] * 2


def test_a_peer_answers_for_its_own_refusals_until_its_address_has_had_ten_times_as_many():
    one = RateLimits(refused=FEW)
    assert [one.is_flood("192.0.2.1", 0.0, "a") for _ in range(4)] == [False] * 3 + [True]
    assert not one.is_flood("192.0.2.1", 0.0, "neighbour")
    ends = [one.is_flood("192.0.2.1", 0.0, f"peer {number}") for number in range(26)]
    assert ends == [False] * 25 + [True]
    assert not one.is_flood("192.0.2.2", 0.0, "elsewhere")


def test_memory_does_not_grow_with_callers():
    one = RateLimits()
    for number in range(20_000):
        one.bad(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 0.0)
        one.refuses(f"peer{number}", 0.0)
        one.is_flood(f"peer{number}", 0.0)
    assert max(len(ration._callers) for ration in (one._calls, one._bad, one._refused)) <= 4096
    assert one.open_calls == 0 and not one._open


async def status(callee: Callee, channels, metadata=None) -> tuple[grpc.StatusCode, str]:
    """How a call ends."""
    stub = await channels.stub(callee.info())
    given = channels.metadata(CALLEE.peer_id) if metadata is None else metadata
    try:
        await stub.Describe(pb.Introduction(), metadata=given, timeout=20)
    except aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


async def test_a_flood_of_calls_is_turned_away_by_caller_and_its_connection_ends():
    async with listening() as callee, calling() as channels, calling(STRANGER) as others:
        callee.service._rate_limits = RateLimits(calls=FEW, refused=FEW)
        stub, metadata = await channels.stub(callee.info()), channels.metadata(CALLEE.peer_id)
        held = stub.Swap(metadata=metadata)
        await soon(callee.streams.get())
        for _ in range(2):
            assert (await status(callee, channels))[0] is grpc.StatusCode.OK
        for _ in range(3):
            code, words = await status(callee, channels)
            assert (code, words) == (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "at most 3 calls a minute: call again later",
            )
        assert not held.done(), "it may be overly eager"
        assert (await status(callee, channels))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await soon(held.code()) is grpc.StatusCode.UNAVAILABLE, (
            "its connection was ended, with all that it held"
        )
        assert (await status(callee, others))[0] is grpc.StatusCode.OK
        assert callee.service._refusals.counts() == {"call.too-many": 4}
        assert callee.introduced == [CALLER.peer_id] * 2 + [STRANGER.peer_id]


async def test_after_some_calls_without_a_credential_an_address_is_not_heard_for_a_while():
    async with listening() as callee, calling() as channels:
        callee.service._rate_limits = RateLimits(bad_calls=FEW)
        codes = [(await status(callee, channels, ()))[0] for _ in range(5)]
        assert (
            codes
            == [grpc.StatusCode.UNAUTHENTICATED] * 3 + [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2
        )
        assert (await status(callee, channels))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_peer_at_the_address_of_a_flood_is_heard_over_the_connection_that_it_has():
    async with listening() as callee, calling() as channels, calling_raw(callee.info()) as flooding:
        callee.service._rate_limits = RateLimits(bad_calls=FEW)
        assert (await status(callee, channels))[0] is grpc.StatusCode.OK
        codes = [await soon(half_open(flooding, "Describe").code()) for _ in range(5)]
        assert codes[3:] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2
        assert (await status(callee, channels))[0] is grpc.StatusCode.OK
        assert (await status(callee, channels, ()))[0] is grpc.StatusCode.UNAUTHENTICATED, (
            "it does as the flood does"
        )
        assert (await status(callee, channels))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED, (
            "and is a stranger now"
        )


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
    monkeypatch.setattr(service, "REQUEST_DEADLINE", 0.2)
    async with listening() as callee, calling() as channels, calling_raw(callee.info()) as channel:
        one = half_open(channel, "Describe", channels.metadata(CALLEE.peer_id))
        assert await soon(one.code()) is grpc.StatusCode.DEADLINE_EXCEEDED
        await until_async(
            lambda: asyncio.sleep(0, not callee.service.open_calls), 10, "its place is free"
        )


@pytest.mark.parametrize("request_", [None, b"\xff\xff"])
async def test_a_request_that_is_none_is_refused(request_: bytes | None):
    async with listening() as callee, calling() as channels, calling_raw(callee.info()) as channel:
        one = half_open(channel, "Describe", channels.metadata(CALLEE.peer_id))
        if request_ is not None:
            await one.write(request_)
        await one.done_writing()
        assert await soon(one.code()) is grpc.StatusCode.INVALID_ARGUMENT
        assert callee.introduced == []
