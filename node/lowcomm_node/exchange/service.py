"""The gRPC server: every call is authenticated first, then handed on.

over TLS          the caller proves who it is by a credential in each call
through a tunnel  libp2p has proven it already; our own end of the tunnel tells it by the name of its unix socket
"""

import asyncio
import os
import secrets
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote

import grpc
from grpc import aio

from lowcomm_node.errors import CheckpointError, LinkLost, PortInUse, RetryLater
from lowcomm_node.exchange.call import Call
from lowcomm_node.exchange.company import Company
from lowcomm_node.exchange.connections import INTERNET
from lowcomm_node.exchange.pinging import Echo
from lowcomm_node.exchange.security import Certificate, Gatekeeper
from lowcomm_node.exchange.stream import CalleeStream
from lowcomm_node.exchange.throttle import FREE_FLOW
from lowcomm_node.exchange.traffic import Traffic
from lowcomm_node.exchange.tunnel import Tunnels
from lowcomm_node.exchange.way import KEEP
from lowcomm_protocol.errors import LowcommError, ProtocolViolation, RecordError
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.messages.exchange_pb2_grpc import ExchangeServicer, add_ExchangeServicer_to_server

MAX_CALLS_PER_PEER = 16
MAX_CALLS = 256
MAX_MESSAGE = 2 * 1024 * 1024
"""Bytes of one incoming message: a chunk has at most 1 MiB."""
SHUTDOWN_GRACE = 3.0
PING_PATIENCE_MS = int(1000 * KEEP) + 10_000
"""For the answer to a ping of gRPC's: a tunnel that was cut off must not be taken for dead while it may be resumed."""
RETIRE_GRACE = 300.0
"""Seconds for the calls on connections that were made with other options."""
Options = tuple[tuple[str, Any], ...]


class Handlers(Protocol):
    """What the daemon does with authenticated calls."""

    async def swap(self, peer: str, stream: CalleeStream) -> None:
        """Answer one Swap; returns when the stream is done."""
        ...

    async def fetch(self, peer: str, stream: CalleeStream) -> None:
        """Serve a joiner; returns when it has what it wanted."""
        ...

    def describe(self, peer: str, introduction: pb.Introduction) -> pb.Introduction:
        """Take in a peer's record, and tell our own."""
        ...


class ExchangeService(ExchangeServicer):
    """The Exchange service of one node."""

    def __init__(
        self,
        gatekeeper: Gatekeeper,
        handlers: Handlers,
        tunnels: Tunnels | None = None,
        traffic: Traffic | None = None,
        echo: Echo | None = None,
        company: Company | None = None,
    ) -> None:
        """``tunnels``: through which others may call; None: none may."""
        self._gatekeeper, self._handlers, self._tunnels = gatekeeper, handlers, tunnels
        self._traffic, self._echo, self._company = traffic or Traffic(), echo or Echo(), company or Company()
        self._calls: Counter[str] = Counter()

    async def Swap(self, request_iterator: Any, context: Any) -> None:  # noqa: N802 - the name in the .proto
        """One exchange of one fragment with the caller."""
        with Call(context, self._tunnels) as call:
            peer = await self._welcome(call)
            stream = CalleeStream(context, self._traffic.of(peer))
            await self._guard(call, peer, lambda: self._handlers.swap(peer, stream))

    async def Fetch(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        """Pieces of a snapshot of ours, for a joiner."""
        with Call(context, self._tunnels) as call:
            peer = await self._welcome(call)
            stream = CalleeStream(context, self._traffic.of(peer), call.taking)
            await self._guard(call, peer, lambda: self._handlers.fetch(peer, stream))

    async def Describe(self, request: pb.Introduction, context: Any) -> pb.Introduction:  # noqa: N802
        """Hello and goodbye: both sides hand over their newest signed record."""
        with Call(context, self._tunnels) as call:
            peer = await self._authenticate(call)
            return self._handlers.describe(peer, request)

    async def Ping(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        """How long and how fast is the line?"""
        with Call(context, self._tunnels) as call:
            peer = await self._welcome(call)
            await self._guard(call, peer, lambda: self._echo.answer(peer, CalleeStream(context)))

    async def _authenticate(self, call: Call) -> str:
        try:
            peer = self._caller(call.context)
        except LowcommError as error:
            await call.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
            raise
        if self._calls[peer] >= MAX_CALLS_PER_PEER:
            words = f"at most {MAX_CALLS_PER_PEER} calls at once: call again when one has ended"
            await call.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, words)
        return peer

    async def _welcome(self, call: Call) -> str:
        """Who calls, where the call takes its time: there must be room for one more peer."""
        peer = await self._authenticate(call)
        if not await self._company.has_room_for(peer):
            words = "talks with as many peers as its owner allows: call another one, or later"
            await call.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, words)
        return peer

    def _caller(self, context: Any) -> str:
        metadata = dict(context.invocation_metadata() or ())
        kind, _, name = context.peer().partition(":")
        if kind in INTERNET:  # as the kernel tells: nobody can choose to come from elsewhere
            return self._gatekeeper.caller(metadata)
        name = unquote(name)
        peer = self._tunnels.peer_of(name) if self._tunnels is not None and kind == "unix-abstract" else None
        if self._tunnels is None or peer is None:
            raise RecordError("A call from this machine that comes through none of our tunnels is refused.")
        caller = self._gatekeeper.tunneled(peer, metadata)
        self._tunnels.accept(name)
        return caller

    @contextmanager
    def _count(self, peer: str):  # noqa: ANN202
        self._calls[peer] += 1
        try:
            with self._company.with_(peer):
                yield
        finally:
            self._calls[peer] -= 1
            if not self._calls[peer]:
                del self._calls[peer]

    async def _guard(self, call: Call, peer: str, work: Callable[[], Awaitable[None]]) -> None:
        with self._count(peer):
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


class ExchangeServer:
    """The listening side of a node."""

    def __init__(self, certificate: Certificate, service: ExchangeService, flow: Options = FREE_FLOW) -> None:
        """``flow``: options of gRPC for what comes in (``throttle.flow_options``)."""
        self._certificate, self._service, self._flow = certificate, service, flow
        self._server = self._make(flow)
        self._folder: Path | None = None
        self._local: int | None = None
        self._address = ""
        self._renewing = asyncio.Lock()
        self._retiring: dict[aio.Server, asyncio.Task[None]] = {}

    @property
    def local(self) -> str:
        """The path by which this process, and no other, can dial the server without TLS."""
        return f"/proc/self/fd/{self._local}"

    def listen_locally(self, folder: Path) -> None:
        """Listen on a unix socket for tunnels too; to be called before ``start``. ``folder``: nobody else's.

        The socket loses its name at once: no other process finds it, and a killed one leaves nothing behind.
        """
        self._local, self._folder = _listen_locally(self._server, folder), folder

    async def start(self, host: str, port: int) -> int:
        """Listen; the port. Raises PortInUse."""
        # gRPC shares a port so that ``renew`` leaves no gap; with another program we share none.
        port = _find_free(host, port)
        self._address = f"{host}:{port}"
        await self._start(self._server)
        return port

    async def renew(self, flow: Options) -> None:
        """Take new connections with other options; calls under way may end on those that there are.

        Raises PortInUse; then all stays as it was.
        """
        async with self._renewing:
            if flow == self._flow:
                return
            server, local = self._make(flow), None
            try:
                if self._folder is not None:
                    local = _listen_locally(server, self._folder)
                if self._address:
                    await self._start(server)
                if local is not None and self._local is not None:
                    # Whoever knows the path finds the new socket behind it.
                    os.dup2(local, self._local, inheritable=False)
            finally:
                if local is not None:
                    os.close(local)
            before, self._server, self._flow = self._server, server, flow
            task = self._retiring[before] = asyncio.create_task(before.stop(RETIRE_GRACE))
            task.add_done_callback(lambda _: self._retiring.pop(before, None))

    async def close(self) -> None:
        """Answer no more calls; those under way get a moment."""
        try:
            async with asyncio.timeout(2 * SHUTDOWN_GRACE):
                servers = (self._server, *self._retiring)
                await asyncio.gather(*(server.stop(SHUTDOWN_GRACE) for server in servers))
        except TimeoutError:
            return
        finally:
            if self._local is not None:
                os.close(self._local)
                self._local = None

    async def _start(self, server: aio.Server) -> None:
        host, _, port = self._address.rpartition(":")
        try:
            bound = server.add_secure_port(self._address, self._certificate.server_credentials())
        except RuntimeError:
            bound = 0
        if not bound:
            raise _in_use(host, int(port))
        await server.start()

    def _make(self, flow: Options) -> aio.Server:
        server = aio.server(
            maximum_concurrent_rpcs=MAX_CALLS,
            options=(
                ("grpc.max_receive_message_length", MAX_MESSAGE),
                ("grpc.so_reuseport", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", PING_PATIENCE_MS),
                ("grpc.http2.ping_timeout_ms", PING_PATIENCE_MS),
                *flow,
            ),
        )
        add_ExchangeServicer_to_server(self._service, server)
        return server


def _listen_locally(server: aio.Server, folder: Path) -> int:
    """Have a server listen on a unix socket without a name; the descriptor that leads there."""
    path = folder / f"{secrets.token_hex(8)}.grpc"
    server.add_insecure_port(f"unix:{path}")
    try:
        return os.open(path, os.O_PATH)
    finally:
        path.unlink()


def _find_free(host: str, port: int) -> int:
    """A port that nobody listens on: ``port``, or any if that is 0. Raises PortInUse."""
    name = host.strip("[]")
    try:
        family, _, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
            return probe.getsockname()[1]
    except OSError:
        raise _in_use(host, port) from None


def _in_use(host: str, port: int) -> PortInUse:
    return PortInUse(f"Port {port} of {host} is in use: choose another with --port, or 0 for any free one.")
