"""Answers calls: the gRPC server, and the Exchange service that authenticates every call.

    over TLS       a credential in each call proves the caller's identity
    through a pipe it must be the peer that libp2p has authenticated, whom its unix socket names
    then           limits by address and peer, and the handler of the node

To gRPC each method takes a stream: on the wire that is the same, and gRPC hands the call over when
it begins. With unary methods it would hold the requests of unauthenticated callers.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NoReturn, Protocol
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from lowcomm_node.errors import CheckpointError, LinkLost, PortInUse, RetryLater
from lowcomm_node.net.bandwidth import FREE_FLOW
from lowcomm_node.net.limits import MAX_CALLS, PeerLimit, RateLimits
from lowcomm_node.net.local import new_name, target_of
from lowcomm_node.net.p2pd import free_port
from lowcomm_node.net.ping import Echo
from lowcomm_node.net.pipe import IncomingStream, Pipes
from lowcomm_node.net.stream import TAKE_DEADLINE, CalleeStream, read_frame, write_frame
from lowcomm_node.net.targets import number_of
from lowcomm_node.net.tls import Certificate, Gatekeeper
from lowcomm_node.net.traffic import Meter, Traffic
from lowcomm_protocol import errors
from lowcomm_protocol.messages import exchange_pb2 as pb

SERVICE = "lowcomm.v1.Exchange"
REQUEST_DEADLINE = 10.0
"""Seconds for the request of a call that has only one."""
HANDSHAKE_SECONDS = 15.0
"""For TLS and the HTTP/2 preface; gRPC's default is two minutes."""
IDLE_SECONDS = 900.0
"""A connection without calls is closed after this time."""
AGE_SECONDS, AGE_GRACE_SECONDS = 3600.0, 1800.0
"""A connection takes new calls for this long; calls under way may take the grace beyond it. gRPC
can't end a call whose caller has stopped reading, so this ends its connection."""
MAX_MESSAGE = 2 * 1024 * 1024
"""Bytes of one incoming message. A chunk has at most 1 MiB."""
MAX_METADATA = 8 * 1024
"""Bytes of a call's metadata. A credential has at most 1 KiB."""
MAX_STREAMS = 32
"""Concurrent calls over one connection. A peer may have 8."""
PING_EVERY_MS = 5_000
MAX_PING_STRIKES = 32
"""Pings sooner than allowed, between two messages of ours, before the connection is ended. Our own
clients ping every 20 s."""
PING_PATIENCE_MS = 40_000
"""For the answer to a gRPC ping, which may wait behind a content on a slow line."""
SHUTDOWN_GRACE = 3.0
RETIRE_GRACE = 300.0
"""Seconds for the calls on connections that were made with other options."""
_STATUS = {
    errors.ProtocolViolation: grpc.StatusCode.INVALID_ARGUMENT,
    RetryLater: grpc.StatusCode.RESOURCE_EXHAUSTED,
    CheckpointError: grpc.StatusCode.FAILED_PRECONDITION,
}
"""What ends a call, and with which status."""
_INTERNET = ("ipv4", "ipv6")
"""The prefixes of gRPC's names for callers over TCP."""
Options = tuple[tuple[str, Any], ...]


class Handlers(Protocol):
    """What the daemon does with authenticated calls."""

    async def swap(self, peer: str, stream: CalleeStream) -> None:
        """Answer one Swap; returns when the stream is done."""
        ...

    async def fetch(self, peer: str, stream: CalleeStream) -> None:
        """Give pieces of files or of our state; returns when the peer has what it wanted."""
        ...

    def describe(self, peer: str, introduction: pb.Introduction) -> pb.Introduction:
        """Take in a peer's record and return ours. Raises RetryLater."""
        ...


@dataclass(frozen=True)
class _Origin:
    """Where a call comes from."""

    place: str
    """The key of quotas: an IP address, or the relay if it comes through one. Empty if a process of
    this machine calls through none of our pipes."""
    incoming: IncomingStream | None = None
    """The pipe, if it comes through one of ours."""

    @property
    def accused(self) -> str:
        """Who pays for a call without a valid credential: behind a relay, the peer alone."""
        return self.place if self.incoming is None else self.incoming.peer_id


class _Places:
    """Places in limits that a call holds until its caller has taken its end, possibly long after
    the handler has returned."""

    def __init__(self, context: Any) -> None:
        self._stack = ExitStack()
        self._is_over = False
        context.add_done_callback(self._release)  # at once: one added to an ended call never runs

    def take(self, place: AbstractContextManager[None]) -> None:
        if not self._is_over:
            self._stack.enter_context(place)

    def _release(self, context: Any) -> None:
        self._is_over = True
        self._stack.close()


@dataclass(eq=False)
class ExchangeService:
    """The Exchange service of one node."""

    gatekeeper: Gatekeeper
    handlers: Handlers
    pipes: Pipes | None = None
    """Through which others may call beside TLS."""
    traffic: Traffic = field(default_factory=Traffic)
    echo: Echo = field(default_factory=Echo)
    peer_limit: PeerLimit = field(default_factory=PeerLimit)
    refusals: errors.Refusals = field(default_factory=errors.Refusals)
    rate_limits: RateLimits = field(default_factory=RateLimits)
    on_caller: Callable[[str], None] = lambda peer: None
    """Called with each authenticated caller: a sign of life."""

    @property
    def open_calls(self) -> int:
        """Calls of peers that are served now."""
        return self.rate_limits.open_calls

    @property
    def rpc_handlers(self) -> grpc.GenericRpcHandler:
        """For a gRPC server."""
        streams, node = grpc.stream_stream_rpc_method_handler, self.handlers
        wanted, reply = pb.FetchRequest.FromString, pb.FetchReply.SerializeToString
        methods = {
            "Swap": streams(self._long(lambda *call: node.swap(*call)), read_frame, write_frame),
            "Fetch": streams(self._long(lambda *call: node.fetch(*call)), wanted, reply),
            "Ping": streams(
                self._long(self.echo.answer, Meter), pb.Ping.FromString, pb.Pong.SerializeToString
            ),
            "Describe": grpc.stream_unary_rpc_method_handler(
                self._describe, pb.Introduction.FromString, pb.Introduction.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _long(
        self,
        answer: Callable[[str, CalleeStream], Awaitable[None]],
        meter: Callable[[], Meter] | None = None,
    ) -> Callable[[Any, Any], Awaitable[None]]:
        """A method whose calls carry contents: there must be room for one more peer."""

        async def handle(requests: Any, context: Any) -> None:
            places, origin = _Places(context), self._origin(context)
            peer = await self._authenticate(context, origin)
            if not await self.peer_limit.has_room_for(peer, origin.place):
                words = "talks with as many peers as its owner allows: call another one, or later"
                await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, words)
            places.take(self.rate_limits.open(peer, origin.place))
            counts = meter() if meter is not None else self.traffic.of(peer)
            stream = CalleeStream(context, counts, origin.place)
            with self.peer_limit.with_(peer, origin.place):
                try:
                    await answer(peer, stream)
                except LinkLost:
                    await _abort(context, grpc.StatusCode.CANCELLED, "the stream broke off")
                except tuple(_STATUS) as error:
                    code = next(code for kind, code in _STATUS.items() if isinstance(error, kind))
                    await _abort(context, code, str(error))

        return handle

    async def _describe(self, requests: Any, context: Any) -> pb.Introduction:
        """Hello and goodbye: both sides hand over their newest signed record."""
        places, origin = _Places(context), self._origin(context)
        peer = await self._authenticate(context, origin)
        places.take(self.rate_limits.open(peer, origin.place))
        request = None
        try:
            async with asyncio.timeout(REQUEST_DEADLINE):
                request = await context.read()
        except TimeoutError:
            words = "the request did not come in time"
            await _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, words)
        except DecodeError:
            pass
        if not isinstance(request, pb.Introduction):
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "expected one Introduction")
        try:
            return self.handlers.describe(peer, request)
        except RetryLater as error:
            await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

    async def _authenticate(self, context: Any, origin: _Origin) -> str:
        """The admitted peer that calls, within its limits; otherwise the call is aborted."""
        now, peer = monotonic(), ""
        words = self.rate_limits.refuses_place(origin.accused, now)
        if words is None:
            try:
                peer = self._caller(context, origin)
            except errors.LowcommError as error:
                self.rate_limits.bad(origin.accused, now)
                await _abort(context, grpc.StatusCode.UNAUTHENTICATED, str(error))
            words = self.rate_limits.refuses(peer, now, origin.place)
        if words is not None:
            self.refusals.count(errors.What.CALL, errors.Reason.TOO_MANY)
            await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, words)
        self.on_caller(peer)
        return peer

    def _origin(self, context: Any) -> _Origin:
        """The kernel names the source of a connection, so no caller can claim another one."""
        kind, _, name = context.peer().partition(":")
        if kind in _INTERNET:
            host = unquote(name).rpartition(":")[0].strip("[]").partition("%")[0]
            return _Origin(str(number_of(host)))
        incoming = self.pipes.incoming.get(unquote(name)) if self.pipes is not None else None
        return _Origin(incoming.place if incoming is not None else "", incoming)

    def _caller(self, context: Any, origin: _Origin) -> str:
        metadata = dict(context.invocation_metadata() or ())
        if not origin.place:
            raise errors.RecordError(
                "A call from this machine that comes through no pipe is refused."
            )
        if origin.incoming is None:
            return self.gatekeeper.caller(metadata)
        peer = self.gatekeeper.caller(metadata, tunneled=origin.incoming.peer_id)
        origin.incoming.accept()
        return peer


async def _abort(context: Any, code: grpc.StatusCode, words: str) -> NoReturn:
    """End a call with a status. Raises AbortError, or CancelledError if the call has ended or its
    caller takes nothing."""
    # Such as a compressed message, which gRPC answers
    with suppress(aio.InternalError, aio.UsageError, TimeoutError):
        async with asyncio.timeout(TAKE_DEADLINE):
            await context.abort(code, words)
    raise asyncio.CancelledError


class ExchangeServer:
    """The listening side of a node: over TLS, and on a unix socket for pipes."""

    def __init__(
        self, certificate: Certificate, service: ExchangeService, flow: Options = FREE_FLOW
    ) -> None:
        """``flow``: gRPC options for incoming bytes (``bandwidth.flow_options``)."""
        self._certificate = certificate
        self._service = service
        self._flow = flow
        self._address = ""
        self.local = ""
        """The name of the unix socket."""
        self._server: aio.Server | None = None
        self._renewing = asyncio.Lock()
        self._retiring: dict[aio.Server, asyncio.Task[None]] = {}

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises PortInUse, ConfigError."""
        # gRPC shares the port (SO_REUSEPORT) so that ``renew`` leaves no gap. Check that no other
        # program listens there.
        port = free_port(host, port)
        self._address = f"{host}:{port}"
        await self._start()
        return port

    async def renew(self, flow: Options) -> None:
        """Accept new connections with other options. Calls under way may end on the existing ones.
        Raises PortInUse; nothing has changed then."""
        async with self._renewing:
            if flow == self._flow or self._server is None:
                return
            before, self._flow = (self._server, self._flow), flow
            try:
                await self._start()
            except BaseException:
                self._server, self._flow = before
                raise
            retired = before[0]
            task = self._retiring[retired] = asyncio.create_task(retired.stop(RETIRE_GRACE))
            task.add_done_callback(lambda _: self._retiring.pop(retired, None))

    async def close(self) -> None:
        """Answer no more calls; those under way get SHUTDOWN_GRACE seconds."""
        servers = [*self._retiring, *([self._server] if self._server is not None else [])]
        try:
            async with asyncio.timeout(2 * SHUTDOWN_GRACE):
                await asyncio.gather(*(server.stop(SHUTDOWN_GRACE) for server in servers))
        except TimeoutError:
            return

    async def _start(self) -> None:
        server = aio.server(
            maximum_concurrent_rpcs=MAX_CALLS,
            options=(
                ("grpc.max_receive_message_length", MAX_MESSAGE),
                ("grpc.so_reuseport", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", PING_EVERY_MS),
                ("grpc.http2.max_ping_strikes", MAX_PING_STRIKES),
                ("grpc.max_concurrent_streams", MAX_STREAMS),
                ("grpc.max_metadata_size", MAX_METADATA),
                ("grpc.absolute_max_metadata_size", MAX_METADATA),
                # None: what is inflated has no size beforehand
                ("grpc.compression_enabled_algorithms_bitset", 1),
                ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_SECONDS)),
                ("grpc.max_connection_idle_ms", int(1000 * IDLE_SECONDS)),
                ("grpc.max_connection_age_ms", int(1000 * AGE_SECONDS)),
                ("grpc.max_connection_age_grace_ms", int(1000 * AGE_GRACE_SECONDS)),
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", PING_PATIENCE_MS),
                ("grpc.http2.ping_timeout_ms", PING_PATIENCE_MS),
                *self._flow,
            ),
        )
        server.add_generic_rpc_handlers((self._service.rpc_handlers,))
        local = new_name("grpc")
        try:
            bound = server.add_secure_port(self._address, self._certificate.server_credentials())
        except RuntimeError:
            bound = 0
        if not bound:
            at = self._address
            raise PortInUse(f"{at} is in use: choose another --port, or 0 for any free one.")
        server.add_insecure_port(target_of(local))
        await server.start()
        self._server, self.local = server, local
