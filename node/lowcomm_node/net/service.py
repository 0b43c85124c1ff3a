"""The Exchange service: authenticates every call, then hands it on.

over TLS          a credential in each call proves the caller's identity
through a tunnel  libp2p has proven it; our end of the tunnel names the caller by its unix socket
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError, Message

from lowcomm_node.errors import CheckpointError, LinkLost, RetryLater
from lowcomm_node.net.call import Call
from lowcomm_node.net.connections import INTERNET, Endings, Place, place_of
from lowcomm_node.net.limits import PeerLimit, RateLimits
from lowcomm_node.net.overhead import Explaining
from lowcomm_node.net.ping import Echo
from lowcomm_node.net.stream import CalleeStream, read_frame, write_frame
from lowcomm_node.net.tls import Gatekeeper
from lowcomm_node.net.traffic import Meter, Traffic
from lowcomm_node.net.tunnels import Tunnels
from lowcomm_node.net.unauthenticated import Unauthenticated
from lowcomm_protocol.errors import (
    LowcommError,
    ProtocolViolation,
    Reason,
    RecordError,
    Refusals,
    What,
)
from lowcomm_protocol.messages import exchange_pb2 as pb

SERVICE = "lowcomm.v1.Exchange"
REQUEST_DEADLINE = 10.0
"""Seconds for the request of a call that has only one."""
M = TypeVar("M", bound=Message)


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


class ExchangeService:
    """The Exchange service of one node.

    To gRPC each method takes a stream, even if the caller sends one request. On the wire that is
    the same, and gRPC hands the call over when it begins. With unary methods gRPC itself would hold
    the requests of unauthenticated callers as they trickle in, and nobody could end them.
    """

    def __init__(
        self,
        gatekeeper: Gatekeeper,
        handlers: Handlers,
        tunnels: Tunnels | None = None,
        traffic: Traffic | None = None,
        echo: Echo | None = None,
        peer_limit: PeerLimit | None = None,
        refusals: Refusals | None = None,
        rate_limits: RateLimits | None = None,
    ) -> None:
        """``tunnels``: through which others may call; None: no tunnels."""
        self._gatekeeper = gatekeeper
        self._handlers = handlers
        self._tunnels = tunnels
        self._traffic = traffic or Traffic()
        self._echo = echo or Echo()
        # An empty one is false
        self._peer_limit = PeerLimit() if peer_limit is None else peer_limit
        self._refusals = refusals or Refusals()
        self._rate_limits = rate_limits or RateLimits()
        self._endings = Endings()
        self.unauthenticated = Unauthenticated(self._refusals)
        """Bounds the TCP connections whose callers have not authenticated."""
        self.on_caller: Callable[[str], None] = lambda peer: None
        """Called with each authenticated caller: a sign of life."""

    @property
    def open_calls(self) -> int:
        """Calls of peers that are served now."""
        return self._rate_limits.open_calls

    @property
    def handlers(self) -> grpc.GenericRpcHandler:
        """For a gRPC server."""
        methods = {
            "Swap": grpc.stream_stream_rpc_method_handler(
                self.Swap, read_frame, write_frame
            ),
            "Fetch": grpc.stream_stream_rpc_method_handler(
                self.Fetch, pb.FetchRequest.FromString, pb.FetchReply.SerializeToString
            ),
            "Describe": grpc.stream_unary_rpc_method_handler(
                self.Describe, pb.Introduction.FromString, pb.Introduction.SerializeToString
            ),
            "Ping": grpc.stream_stream_rpc_method_handler(
                self.Ping, pb.Ping.FromString, pb.Pong.SerializeToString
            ),
        }  # fmt: skip
        return _Methods(
            {f"/{SERVICE}/{name}": method for name, method in methods.items()},
            grpc.stream_stream_rpc_method_handler(self._unknown),
        )

    async def _unknown(self, request_iterator: Any, context: Any) -> None:
        """A call of an unknown method. gRPC alone would answer any number of them and count
        none."""
        with Call(context, self._tunnels, self._endings) as call:
            place = self._place(context)
            if (words := self._rate_limits.refuses_place(place, monotonic())) is not None:
                await self._turn_away(call, place, words)
            self._rate_limits.bad(place, monotonic())
            self._refusals.count(What.CALL, Reason.MALFORMED)
            await call.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such method")

    async def Swap(self, request_iterator: Any, context: Any) -> None:  # noqa: N802 - the name in the .proto
        """One exchange of one fragment with the caller."""
        with Call(context, self._tunnels, self._endings) as call:
            peer = await self._welcome(call)
            stream = self._stream(context, self._traffic.of(peer))
            await self._guard(call, peer, lambda: self._handlers.swap(peer, stream))

    async def Fetch(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        """Pieces of a file of the run, or of our state."""
        with Call(context, self._tunnels, self._endings) as call:
            peer = await self._welcome(call)
            stream = self._stream(context, self._traffic.of(peer), call.taking)
            await self._guard(call, peer, lambda: self._handlers.fetch(peer, stream))

    async def Describe(self, request_iterator: Any, context: Any) -> pb.Introduction:  # noqa: N802
        """Hello and goodbye: both sides hand over their newest signed record."""
        with Call(context, self._tunnels, self._endings) as call:
            peer = await self._authenticate(call)
            call.hold(self._rate_limits.open(peer, self._address(context)))
            introduction = await self._request(call, pb.Introduction)
            try:
                return self._handlers.describe(peer, introduction)
            except RetryLater as error:
                await call.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
                raise

    async def Ping(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        """Measure latency and rate of the link."""
        with Call(context, self._tunnels, self._endings) as call:
            peer = await self._welcome(call)
            stream = self._stream(context, Meter())
            await self._guard(call, peer, lambda: self._echo.answer(peer, stream))

    def _stream(
        self,
        context: Any,
        meter: Meter,
        taking: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> CalleeStream:
        """Our end of a call. It counts the messages, and attributes the connection's bytes to
        them."""
        connection = self._connection(context)
        counts = (
            Explaining(meter, self.unauthenticated.overhead, connection)
            if connection is not None
            else meter
        )
        return CalleeStream(context, counts, taking, self._address(context))

    async def _authenticate(self, call: Call) -> str:
        place, connection = self._place(call.context), self._connection(call.context)
        # Peers that share an address with a flooder are still heard over authenticated
        # connections.
        is_known = connection is not None and self.unauthenticated.knows(connection)
        if (
            not is_known
            and (words := self._rate_limits.refuses_place(place, monotonic())) is not None
        ):
            await self._turn_away(call, place, words)
        try:
            peer = self._caller(call.context)
        except LowcommError as error:
            self._rate_limits.bad(place, monotonic())
            if connection is not None:
                self.unauthenticated.forget(connection)
            await call.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
            raise
        if connection is not None:
            self.unauthenticated.vouch(connection)
        if (
            words := self._rate_limits.refuses(peer, monotonic(), self._address(call.context))
        ) is not None:
            await self._turn_away(call, place, words, peer)
        self.on_caller(peer)
        return peer

    async def _turn_away(self, call: Call, place: str, words: str, peer: str = "") -> None:
        """``peer``: the caller, if known."""
        self._refusals.count(What.CALL, Reason.TOO_MANY)
        if self._rate_limits.is_flood(place, monotonic(), peer):
            if (connection := self._connection(call.context)) is not None:
                self.unauthenticated.block(connection[0])
            call.break_off("goes on calling beyond its limits")
        await call.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, words)

    async def _request(self, call: Call, kind: type[M]) -> M:
        """Read the single request of a call."""
        request = None
        try:
            async with asyncio.timeout(REQUEST_DEADLINE):
                request = await call.context.read()
        except TimeoutError:
            await call.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request did not come in time")
        except DecodeError:
            pass
        if not isinstance(request, kind):
            await call.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"expected one {kind.DESCRIPTOR.name}"
            )
            raise ProtocolViolation("sent another request than the call has")
        return request

    async def _welcome(self, call: Call) -> str:
        """Authenticate the caller of a long call: there must be room for one more peer."""
        peer = await self._authenticate(call)
        if not await self._peer_limit.has_room_for(peer, self._address(call.context)):
            words = "talks with as many peers as its owner allows: call another one, or later"
            await call.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, words)
        return peer

    def _connection(self, context: Any) -> Place | None:
        """The TCP connection that a call came over; None if it came through a tunnel."""
        return place_of(context.peer()) if context.peer().startswith(INTERNET) else None

    def _place(self, context: Any) -> str:
        """Where a call comes from: an IP address, or the peer id that libp2p vouches for."""
        connection = self._connection(context)
        if connection is not None:
            return connection[0]
        name = context.peer().partition(":")[2]
        return (
            self._tunnels.callee.peer_of(unquote(name)) if self._tunnels is not None else None
        ) or ""

    def _address(self, context: Any) -> str:
        """The key of quotas by address: the caller's address, or the relay if it comes through
        one."""
        connection = self._connection(context)
        if connection is not None:
            return connection[0]
        return (
            self._tunnels.callee.place_of(unquote(context.peer().partition(":")[2]))
            if self._tunnels is not None
            else ""
        )

    def _caller(self, context: Any) -> str:
        metadata = dict(context.invocation_metadata() or ())
        kind, _, name = context.peer().partition(":")
        if kind in INTERNET:  # the kernel names the source, so no caller can claim another one
            return self._gatekeeper.caller(metadata, self._address(context))
        name = unquote(name)
        peer = (
            self._tunnels.callee.peer_of(name)
            if self._tunnels is not None and kind == "unix-abstract"
            else None
        )
        if self._tunnels is None or peer is None:
            raise RecordError(
                "A call from this machine that comes through none of our tunnels is refused."
            )
        caller = self._gatekeeper.tunneled(peer, metadata, self._address(context))
        self._tunnels.callee.accept(name)
        return caller

    async def _guard(self, call: Call, peer: str, work: Callable[[], Awaitable[None]]) -> None:
        place = self._address(call.context)
        call.hold(self._rate_limits.open(peer, place))
        with self._peer_limit.with_(peer, place):
            try:
                await work()
            except ProtocolViolation as error:
                await call.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            except LinkLost:
                await call.abort(grpc.StatusCode.CANCELLED, "the stream broke off")
            except RetryLater as error:
                await call.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
            except CheckpointError as error:
                await call.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))


class _Methods(grpc.GenericRpcHandler):
    """Our methods, and one handler for all others."""

    def __init__(self, methods: dict[str, Any], other: Any) -> None:
        self._methods = methods
        self._other = other

    def service(self, handler_call_details: Any) -> Any:
        """The handler of a call."""
        return self._methods.get(handler_call_details.method, self._other)
