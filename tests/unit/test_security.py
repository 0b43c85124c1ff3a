"""What must hold for who may call whom: real gRPC over TLS on loopback."""

import datetime
from contextlib import suppress
from dataclasses import replace
from time import time

import grpc
import pytest
from wire import CALLEE, CALLER, RUN, calling, linked, listening

from lowcomm_node.errors import LinkLost
from lowcomm_node.exchange import service
from lowcomm_node.exchange.security import CREDENTIAL_KEY, Gatekeeper, make_certificate, pinned
from lowcomm_node.exchange.stream import CallerStream
from lowcomm_protocol.errors import LowcommError, RecordError
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.records import CREDENTIAL_LIFE, write_credential

STRANGER = Identity(b"\3" * 32)
NONCE = b"n" * 16


async def status_of(callee, channels, metadata) -> grpc.StatusCode:
    """How a call with this metadata ends."""
    stub = await channels.stub(callee.info())
    try:
        answer = await stub.Describe(pb.Introduction(), metadata=metadata, timeout=10)
    except grpc.aio.AioRpcError as error:
        return error.code()
    assert answer.release
    return grpc.StatusCode.OK


async def test_the_callee_knows_who_calls():
    async with listening() as callee, calling() as channels:
        stub = await channels.stub(callee.info())
        answer = await stub.Describe(pb.Introduction(), metadata=channels.metadata(CALLEE.peer_id), timeout=10)
        assert answer.release == CALLER.peer_id


def credential(signer=CALLER, callee=CALLEE.peer_id, run=RUN, issued=0.0, nonce=NONCE) -> bytes:
    return write_credential(signer, callee, run, time() + issued, nonce)


BAD = {
    "none": (),
    "empty": ((CREDENTIAL_KEY, b""),),
    "rubbish": ((CREDENTIAL_KEY, b"\xff" * 100),),
    "long": ((CREDENTIAL_KEY, credential() + bytes(6000)),),
    "for another callee": ((CREDENTIAL_KEY, credential(callee=STRANGER.peer_id)),),
    "for another run": ((CREDENTIAL_KEY, credential(run="cd" * 32)),),
    "expired": ((CREDENTIAL_KEY, credential(issued=-10 * CREDENTIAL_LIFE)),),
    "from the future": ((CREDENTIAL_KEY, credential(issued=10 * CREDENTIAL_LIFE)),),
    "forged": ((CREDENTIAL_KEY, credential()[:-1] + b"\0"),),
    "our own": ((CREDENTIAL_KEY, credential(signer=CALLEE, callee=STRANGER.peer_id)),),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_call_without_a_good_credential_is_refused(name):
    async with listening() as callee, calling() as channels:
        assert await status_of(callee, channels, BAD[name]) is grpc.StatusCode.UNAUTHENTICATED
        assert callee.streams.empty()


async def test_a_credential_is_good_once():
    async with listening() as callee, calling() as channels:
        used = channels.metadata(CALLEE.peer_id)
        assert await status_of(callee, channels, used) is grpc.StatusCode.OK
        assert await status_of(callee, channels, used) is grpc.StatusCode.UNAUTHENTICATED
        assert await status_of(callee, channels, channels.metadata(CALLEE.peer_id)) is grpc.StatusCode.OK


def test_used_nonces_are_remembered_as_long_as_they_could_be_used_and_no_longer():
    now = [1000.0]
    keeper = Gatekeeper(CALLEE, RUN, lambda: now[0])
    first = {CREDENTIAL_KEY: write_credential(CALLER, CALLEE.peer_id, RUN, now[0], NONCE)}
    assert keeper.caller(first) == CALLER.peer_id
    for seconds in range(0, int(4 * CREDENTIAL_LIFE), 5):
        now[0] = 1000.0 + seconds
        with pytest.raises(LowcommError):
            keeper.caller(first)
    keeper.caller({CREDENTIAL_KEY: write_credential(CALLER, CALLEE.peer_id, RUN, now[0], b"m" * 16)})
    assert len(keeper._seen) == 1


async def test_another_certificate_than_that_in_the_record_is_not_talked_to():
    async with listening() as callee, calling() as channels:
        other = make_certificate(datetime.datetime.now(datetime.UTC))
        stub = await channels.stub(callee.info(certificate=other.der))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Describe(pb.Introduction(), metadata=channels.metadata(CALLEE.peer_id), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_certificate_that_is_none_is_one_clear_error():
    with pytest.raises(RecordError, match="certificate can't be read"):
        pinned(b"rubbish")


async def test_a_peer_that_tells_no_address_is_not_called():
    async with listening() as callee, calling() as channels:
        with pytest.raises(LinkLost, match="no address"):
            await channels.stub(replace(callee.info(), addresses=()))


async def test_one_peer_has_so_many_calls_at_once_and_others_are_still_served(monkeypatch):
    monkeypatch.setattr(service, "MAX_CALLS_PER_PEER", 3)
    async with listening() as callee, calling() as channels, calling(STRANGER) as others:
        stub = await channels.stub(callee.info())
        open_ = []
        for _ in range(3):
            stream = CallerStream(stub.Swap(metadata=channels.metadata(CALLEE.peer_id), timeout=30))
            await stream.send(pb.Frame())
            open_.append(stream)
            await callee.streams.get()
        over = CallerStream(stub.Swap(metadata=channels.metadata(CALLEE.peer_id), timeout=30))
        with pytest.raises(LinkLost, match="is busy"):
            await over.receive()
        assert await status_of(callee, others, others.metadata(CALLEE.peer_id)) is grpc.StatusCode.OK
        for stream in open_:
            stream.cancel()
            await callee.ended.get()
        assert await status_of(callee, channels, channels.metadata(CALLEE.peer_id)) is grpc.StatusCode.OK


async def test_a_message_that_is_too_large_is_refused_before_it_is_read():
    async with linked() as (one, two):
        await one.stream.send(pb.Frame(chunk=pb.Chunk(data=bytes(service.MAX_MESSAGE + 1))))
        with suppress(LinkLost):
            assert await two.stream.receive() is None
        with pytest.raises(LinkLost):
            await one.stream.receive()


async def test_channels_are_bounded(monkeypatch):
    from lowcomm_node.exchange import channels as module

    monkeypatch.setattr(module, "MAX_CHANNELS", 2)
    async with listening() as callee, calling() as channels:
        for port in (1, 2, 3, callee.port):
            await channels.stub(callee.info(addresses=(f"127.0.0.1:{port}",)))
        assert len(channels._open) == 2
        assert await status_of(callee, channels, channels.metadata(CALLEE.peer_id)) is grpc.StatusCode.OK
