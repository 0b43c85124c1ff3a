"""What must hold for who may call whom, and how much: real gRPC over TLS on loopback."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from time import time

import grpc
import pytest
from grpc import aio

from helpers.clock import Clock
from helpers.waiting import until_async
from helpers.wire import (
    CALLEE,
    CALLER,
    DEADLINE,
    PATH,
    RUN,
    SERVER_NAME,
    Callee,
    cabled,
    call,
    calling,
    calling_raw,
    listening,
    misbehaving,
    new_certificate,
    soon,
)
from lowcomm_node.errors import LinkLost, PortInUse
from lowcomm_node.net import limits as rate_limits
from lowcomm_node.net import server as server_module
from lowcomm_node.net.channels import Channels
from lowcomm_node.net.peer_channel import Dialer
from lowcomm_node.net.server import ExchangeServer, ExchangeService
from lowcomm_node.net.stream import CalleeStream
from lowcomm_node.net.tls import CREDENTIAL_KEY, Gatekeeper, certificate_of, pinned
from lowcomm_protocol.errors import (
    LowcommError,
    ProtocolViolation,
    RecordError,
    Refusals,
)
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.admission import Admission, Rules
from lowcomm_protocol.peers.invites import issue_invite
from lowcomm_protocol.peers.records import CREDENTIAL_LIFE, write_credential

STRANGER = Identity(b"\3" * 32)
NOW = 1_800_000_000.0
NONCE = b"n" * 16
Status = grpc.StatusCode


async def describe(
    channels: Channels, callee: Callee, metadata: object = None
) -> tuple[Status, str]:
    """How a call of Describe ends, with our own credential unless other metadata is given."""
    stub = await channels.stub(callee.info())
    metadata = channels.metadata(callee.identity.peer_id) if metadata is None else metadata
    try:
        answer = await stub.Describe(pb.Introduction(), metadata=metadata, timeout=10)
    except aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return Status.OK, answer.amendments.decode()


# Credentials


def test_a_credential_is_good_once_for_as_long_as_it_could_be_used():
    clock = Clock(NOW)
    keeper = Gatekeeper(CALLEE, RUN, clock)
    for ahead in (0, CREDENTIAL_LIFE):  # of a caller whose clock is ahead
        nonce = bytes([int(ahead)] * 16)
        first = {CREDENTIAL_KEY: credential(issued=clock.now + ahead, nonce=nonce)}
        assert keeper.caller(first) == CALLER.peer_id
        began = clock.now
        for seconds in range(0, int(4 * CREDENTIAL_LIFE), 5):
            clock.now = began + seconds
            with pytest.raises(LowcommError):
                keeper.caller(first)


async def test_the_callee_knows_who_calls():
    async with listening() as callee, calling() as channels, calling(STRANGER) as others:
        assert await describe(channels, callee) == (Status.OK, CALLER.peer_id)
        assert await describe(others, callee) == (Status.OK, STRANGER.peer_id)


def credential(signer=CALLER, callee=CALLEE.peer_id, run=RUN, issued=NOW, nonce=NONCE) -> bytes:
    return write_credential(signer, callee, run, issued, nonce)


def changed(
    change: Callable[[pb.SignedCredential, pb.Credential], None], purpose: str | None = None
) -> bytes:
    """A credential after ``change``, signed again by its caller if a purpose is given."""
    signed = pb.SignedCredential.FromString(credential())
    inner = pb.Credential.FromString(signed.payload)
    change(signed, inner)
    signed.payload = inner.SerializeToString()
    if purpose is not None:
        signed.signature = CALLER.sign(purpose, signed.payload)
    return signed.SerializeToString()


def flip(signed: pb.SignedCredential, inner: pb.Credential) -> None:
    signed.signature = bytes([signed.signature[0] ^ 1]) + signed.signature[1:]


def keep(signed: pb.SignedCredential, inner: pb.Credential) -> None:
    pass


def cut_signature(signed: pb.SignedCredential, inner: pb.Credential) -> None:
    signed.signature = signed.signature[:-1]


UNKNOWN_FIELD = b"\x7a\xe8\x07" + bytes(1000)
BAD = {
    "none": (None, "without a credential"),
    "empty": (b"", "wrong length"),
    "rubbish": (b"\xff" * 100, "not a signed message"),
    "too long, though sound": (credential() + UNKNOWN_FIELD, "at most 1024"),
    "for another callee": (credential(callee=STRANGER.peer_id), "another peer or run"),
    "for another run": (credential(run="cd" * 32), "another peer or run"),
    "expired": (credential(issued=NOW - CREDENTIAL_LIFE - 0.1), "set both clocks right"),
    "from the future": (credential(issued=NOW + CREDENTIAL_LIFE + 0.1), "set both clocks right"),
    "from the end of time": (
        changed(lambda _, c: setattr(c, "issued_ms", 2**64 - 1), "credential"),
        "set both clocks",
    ),
    "forged": (changed(flip), "is not one of"),
    "in another's name": (
        changed(lambda _, c: setattr(c, "caller", STRANGER.peer_id)),
        "is not one of",
    ),
    "in nobody's name": (
        changed(lambda _, c: setattr(c, "caller", "nobody"), "credential"),
        "nobody",
    ),
    "with a new nonce": (changed(lambda _, c: setattr(c, "nonce", b"m" * 16)), "is not one of"),
    "signed for another use": (changed(keep, "peer record"), "is not one of"),
    "without a nonce": (credential(nonce=b""), "wrong length"),
    "with half a signature": (changed(cut_signature), "wrong length"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_call_without_a_good_credential_is_refused_with_the_reason(name):
    data, word = BAD[name]
    metadata = () if data is None else ((CREDENTIAL_KEY, data),)
    async with listening(clock=Clock(NOW)) as callee, calling(clock=Clock(NOW)) as channels:
        code, details = await describe(channels, callee, metadata)
        assert code is Status.UNAUTHENTICATED
        assert word in details
        assert (await describe(channels, callee))[0] is Status.OK, "the next sound call is served"


async def test_metadata_that_no_credential_needs_is_refused_before_it_is_looked_at():
    async with listening() as callee, calling() as channels:
        code, _ = await describe(channels, callee, ((CREDENTIAL_KEY, bytes(64 * 1024)),))
        assert code is Status.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("method", ["Describe", "Swap", "Fetch", "Ping"])
async def test_a_compressed_message_is_not_inflated_and_costs_no_traceback(method: str, caplog):
    async with listening() as callee, calling() as channels:
        options = (
            ("grpc.ssl_target_name_override", SERVER_NAME),
            ("grpc.max_send_message_length", -1),
        )
        pin, gzip = pinned(callee.certificate.public_key), grpc.Compression.Gzip
        async with aio.secure_channel(f"127.0.0.1:{callee.port}", pin, options, gzip) as channel:
            one = channel.stream_stream(PATH + method)(
                metadata=channels.metadata(CALLEE.peer_id), timeout=20
            )
            with suppress(aio.AioRpcError, asyncio.InvalidStateError):
                await one.write(bytes(3 * 2**20))
            assert await soon(one.code()) in (Status.UNIMPLEMENTED, Status.INTERNAL)
        assert callee.streams.empty() and not callee.introduced
    # On a busy machine gRPC still hands events to the event loop of the test before, which is
    # closed.
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [error for error in errors if "PollerCompletionQueue" not in error] == []


async def test_a_credential_is_good_once_for_all_methods_together():
    async with listening() as callee, calling() as channels:
        used = channels.metadata(CALLEE.peer_id)
        assert (await describe(channels, callee, used))[0] is Status.OK
        code, details = await describe(channels, callee, used)
        assert code is Status.UNAUTHENTICATED and "used before" in details
        swap = (await channels.stub(callee.info())).Swap(metadata=used, timeout=10)
        with pytest.raises(aio.AioRpcError, match="used before"):
            await swap.read()
        assert (await describe(channels, callee))[0] is Status.OK


def test_a_call_is_taken_only_of_who_may_take_part_and_its_credential_says_so():
    token = issue_invite(CALLEE, RUN, b"i" * 32, NOW + 1000, uses=2)
    rules, refusals = Rules(RUN, CALLEE.peer_id, "invite"), Refusals()
    keeper = Gatekeeper(CALLEE, RUN, Clock(NOW), admission=Admission(rules), refusals=refusals)
    claim = token.claim(CALLER.peer_id, NOW).data
    invited = Gatekeeper(CALLER, RUN, Clock(NOW), claim=claim)
    for _ in range(2):
        assert keeper.caller(dict(invited.credential_for(CALLEE.peer_id))) == CALLER.peer_id
    for caller in (
        Gatekeeper(STRANGER, RUN, Clock(NOW)),
        Gatekeeper(STRANGER, RUN, Clock(NOW), claim=claim),
    ):
        with pytest.raises(LowcommError):
            keeper.caller(dict(caller.credential_for(CALLEE.peer_id)))
    assert refusals.counts() == {"call.bad-signature": 1, "call.not-invited": 1}


def test_a_caller_through_a_tunnel_shows_a_credential_of_the_peer_whose_tunnel_it_is():
    refusals = Refusals()
    keeper = Gatekeeper(CALLEE, RUN, Clock(NOW), refusals=refusals)
    shown = dict(Gatekeeper(CALLER, RUN, Clock(NOW)).credential_for(CALLEE.peer_id))
    with pytest.raises(RecordError, match="without a credential"):
        keeper.caller({}, CALLER.peer_id)
    assert keeper.caller(shown, CALLER.peer_id) == CALLER.peer_id
    shown = dict(Gatekeeper(CALLER, RUN, Clock(NOW)).credential_for(CALLEE.peer_id))
    with pytest.raises(RecordError, match="another peer than the one that calls"):
        keeper.caller(shown, STRANGER.peer_id)
    assert refusals.counts() == {"call.misplaced": 1, "call.missing": 1}


# Certificates


def test_both_ends_build_the_same_certificate_from_the_key_in_the_record():
    one, other = new_certificate(), new_certificate()
    assert len(one.public_key) == 32 and one.public_key != other.public_key
    assert certificate_of(one.public_key) == one.pem
    assert "PRIVATE KEY" not in repr(one)


@pytest.mark.parametrize("key", [bytes(31), bytes(33), b"\xff" * 32])
def test_a_key_that_is_none_is_one_clear_error(key):
    with pytest.raises(RecordError, match="not a point of P-256"):
        pinned(key)


async def test_a_server_with_another_key_than_that_in_the_record_is_not_talked_to():
    refusals = Refusals()
    async with listening() as callee:
        channels = Channels(Gatekeeper(CALLER, RUN, time), refusals=refusals)
        other = new_certificate()
        with pytest.raises(LinkLost, match="another certificate"):
            await channels.stub(callee.info(certificate=other.public_key))
        await channels.close()
    assert not callee.introduced
    assert refusals.counts() == {"connection.other-certificate": 1}


async def test_a_caller_that_does_not_encrypt_is_not_served():
    async with listening() as callee, aio.insecure_channel(f"127.0.0.1:{callee.port}") as channel:
        metadata = Gatekeeper(CALLER, RUN, Clock(NOW)).credential_for(CALLEE.peer_id)
        with pytest.raises(aio.AioRpcError) as caught:
            await channel.unary_unary(PATH + "Describe")(b"", metadata=metadata, timeout=10)
        assert caught.value.code() is Status.UNAVAILABLE
        assert not callee.introduced


async def test_a_peer_whose_record_names_no_certificate_is_not_called_directly():
    async with listening() as callee, calling() as channels:
        with pytest.raises(LinkLost, match="no TLS key"):
            await channels.stub(callee.info(certificate=b""))


# Channels


async def test_a_peer_that_tells_no_address_is_not_called():
    async with listening() as callee, calling() as channels:
        with pytest.raises(LinkLost, match="no address"):
            await channels.stub(callee.info(addresses=()))


async def test_addresses_are_tried_in_turn():
    async with listening() as callee, calling() as channels:
        here = f"127.0.0.1:{callee.port}"
        for addresses in (("127.0.0.1:1", here), (here, "127.0.0.1:1")):
            stub = await channels.stub(callee.info(addresses=addresses))
            metadata = channels.metadata(CALLEE.peer_id)
            assert (
                await stub.Describe(pb.Introduction(), metadata=metadata, timeout=10)
            ).amendments.decode() == CALLER.peer_id


async def test_an_address_can_not_name_a_path_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    called = asyncio.Event()
    server = await asyncio.start_unix_server(lambda reader, writer: called.set(), "4711")
    async with server, listening() as callee, calling() as channels:
        with pytest.raises(LinkLost):
            await channels.stub(callee.info(addresses=("unix:4711",)))
        assert not called.is_set()


# Limits


async def no_ping(dialer: Dialer, channel: aio.Channel, peer_id: str) -> None:
    """In place of the call that measures a round trip, which would count too."""


X = pb.FetchReply(chunk=pb.Chunk(data=b"x"))


async def hold(peer: str, stream: CalleeStream) -> None:
    """Serve one chunk, and no end."""
    await stream.send(X)
    await asyncio.Event().wait()


async def begin(method: str, channels: Channels, callee: Callee):
    """Begin a call that the callee holds."""
    if method == "Swap":
        stream = await call(channels, callee.info())
        await soon(callee.streams.get())
        return stream
    callee.fetching = hold
    stub = await channels.stub(callee.info())
    fetch = stub.Fetch(metadata=channels.metadata(CALLEE.peer_id), timeout=60)
    assert await soon(fetch.read()) == X
    return fetch


@pytest.mark.parametrize("methods", [("Swap", "Swap"), ("Fetch", "Fetch"), ("Swap", "Fetch")])
async def test_one_peer_has_so_many_calls_at_once_and_others_are_still_served(methods, monkeypatch):
    monkeypatch.setattr(rate_limits, "MAX_CALLS_PER_PEER", 2)
    monkeypatch.setattr(Dialer, "ping", no_ping)
    async with listening() as callee, calling() as channels, calling(STRANGER) as others:
        for _ in range(3):  # as often as they like, one after the other
            open_ = [await begin(method, channels, callee) for method in methods]
            for refused in (
                await call(channels, callee.info()),
                await call(channels, callee.info()),
            ):
                with pytest.raises(LinkLost, match="is busy"):
                    await soon(refused.receive())
            fetch = (await channels.stub(callee.info())).Fetch(
                metadata=channels.metadata(CALLEE.peer_id), timeout=10
            )
            with pytest.raises(aio.AioRpcError, match="at most 2 calls at once"):
                await soon(fetch.read())
            assert callee.streams.empty()
            assert (await describe(others, callee))[0] is Status.OK
            for stream in open_:
                stream.cancel()
                assert isinstance(
                    await soon(callee.ended.get()), asyncio.CancelledError | GeneratorExit
                )
        assert (await describe(channels, callee))[0] is Status.OK


async def test_a_message_that_is_too_large_ends_the_stream_before_it_is_read():
    async with listening() as callee, calling() as channels:
        stream = await call(channels, callee.info())
        _, other_end = await soon(callee.streams.get())
        size = server_module.MAX_MESSAGE - 100
        await stream.send(pb.Frame(chunk=pb.Chunk(data=bytes(size))))
        assert len((await soon(other_end.receive())).chunk.data) == size
        reading = asyncio.create_task(other_end.receive())
        await stream.send(pb.Frame(chunk=pb.Chunk(data=bytes(server_module.MAX_MESSAGE + 1))))
        with pytest.raises(LinkLost, match="too large"):
            await soon(stream.receive())
        with suppress(
            LinkLost
        ):  # whichever gRPC notices first: that there is no message, or that the stream has ended
            assert await soon(reading) is None
        assert (await describe(channels, callee))[0] is Status.OK


async def test_a_callee_can_not_send_a_message_that_is_too_large_either():
    async with misbehaving() as rogue, calling() as channels:
        rogue.frames = [
            pb.Frame(chunk=pb.Chunk(data=bytes(server_module.MAX_MESSAGE + 1))).SerializeToString()
        ]
        stream = await call(channels, rogue.info())
        with pytest.raises(LinkLost, match="too large"):
            await soon(stream.receive())


# How calls end


@pytest.mark.parametrize("way", ["cancels", "closes", "is cut off"])
@pytest.mark.parametrize("method", ["Swap", "Fetch"])
async def test_a_caller_that_vanishes_frees_everything(way, method, monkeypatch):
    monkeypatch.setattr(rate_limits, "MAX_CALLS_PER_PEER", 1)
    monkeypatch.setattr(Dialer, "ping", no_ping)
    async with (
        listening() as callee,
        cabled(callee.port) as cable,
        calling() as channels,
        calling() as later,
    ):
        direct, callee.port = callee.port, cable.port
        stream = await begin(method, channels, callee)
        if way == "cancels":
            stream.cancel()
        elif way == "closes":
            await channels.close()
        else:
            cable.cut()
        assert isinstance(await soon(callee.ended.get()), asyncio.CancelledError | GeneratorExit)
        callee.port = direct
        held = await begin(method, later, callee)
        held.cancel()
        await soon(callee.ended.get())
        await until_async(
            lambda: not callee.service.open_calls,
            DEADLINE,
            "nothing is kept of the callers",
        )


ENDS = {
    "violation": (ProtocolViolation("sent too much"), Status.INVALID_ARGUMENT, "sent too much"),
    "lost": (LinkLost("the caller has gone"), Status.CANCELLED, "broke off"),
}


@pytest.mark.parametrize("name", ENDS)
async def test_what_a_caller_did_wrong_ends_its_stream_with_the_reason(name):
    error, code, word = ENDS[name]

    async def swap(peer: str, stream: object) -> None:
        raise error

    async with listening() as callee, calling() as channels:
        callee.swapping = swap
        swap_call = (await channels.stub(callee.info())).Swap(
            metadata=channels.metadata(CALLEE.peer_id), timeout=10
        )
        with pytest.raises(aio.AioRpcError, match=word) as caught:
            await soon(swap_call.read())
        assert caught.value.code() is code


async def test_bytes_that_are_no_frame_are_a_violation_of_the_caller():
    async def read(peer: str, stream) -> None:
        await stream.receive()

    async with listening() as callee, calling_raw(callee.info()) as channel:
        callee.swapping = read
        metadata = Gatekeeper(CALLER, RUN, callee.gatekeeper._clock).credential_for(CALLEE.peer_id)
        swap = channel.stream_stream(PATH + "Swap")(metadata=metadata, timeout=10)
        await swap.write(b"\xff\xff\xff")
        with pytest.raises(aio.AioRpcError, match="no frame") as caught:
            await soon(swap.read())
        assert caught.value.code() is Status.INVALID_ARGUMENT
        assert isinstance(await soon(callee.ended.get()), ProtocolViolation)


async def test_a_port_that_is_taken_is_one_clear_error():
    async with listening() as callee:
        second = ExchangeServer(callee.certificate, ExchangeService(callee.gatekeeper, callee))
        try:
            with pytest.raises(PortInUse, match=f"Port {callee.port} .* --port"):
                await second.start("127.0.0.1", callee.port)
        finally:
            await second.close()


async def test_closing_ends_the_calls_that_do_not_end_themselves(monkeypatch):
    monkeypatch.setattr(server_module, "SHUTDOWN_GRACE", 0.1)
    async with listening() as callee, calling() as channels:
        stream = await begin("Swap", channels, callee)
        await soon(callee.server.close())
        assert isinstance(await soon(callee.ended.get()), asyncio.CancelledError)
        with pytest.raises(LinkLost):
            await soon(stream.receive())
        with pytest.raises(LinkLost, match="can't be reached"):
            await describe(channels, callee)
