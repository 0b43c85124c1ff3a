"""The gRPC server that listens for peers: over TLS, and on a unix socket for tunnels."""

import asyncio
import errno
import os
import secrets
import socket
from pathlib import Path
from typing import Any

from grpc import aio

from lowcomm_node.errors import ConfigError, PortInUse
from lowcomm_node.net.bandwidth import FREE_FLOW
from lowcomm_node.net.dialer import KEEP
from lowcomm_node.net.limits import MAX_CALLS
from lowcomm_node.net.service import ExchangeService
from lowcomm_node.net.tls import Certificate

HANDSHAKE_SECONDS = 15.0
"""For TLS and the HTTP/2 preface. gRPC's default of two minutes would let unauthenticated callers
hold many connections."""
IDLE_SECONDS = 900.0
"""A connection without calls is closed after this time."""
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
SHUTDOWN_GRACE = 3.0
PING_PATIENCE_MS = int(1000 * KEEP) + 10_000
"""For the answer to a gRPC ping. An interrupted tunnel must not count as dead while it may be
resumed."""
RETIRE_GRACE = 300.0
"""Seconds for the calls on connections that were made with other options."""
Options = tuple[tuple[str, Any], ...]


class ExchangeServer:
    """The listening side of a node."""

    def __init__(
        self, certificate: Certificate, service: ExchangeService, flow: Options = FREE_FLOW
    ) -> None:
        """``flow``: gRPC options for incoming bytes (``bandwidth.flow_options``)."""
        self._certificate = certificate
        self._service = service
        self._flow = flow
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
        """Also listen on a unix socket for tunnels. Call it before ``start``. ``folder``: private
        to us.

        The socket is unlinked at once: no other process finds it, and a killed one leaves nothing
        behind.
        """
        self._local = _listen_locally(self._server, folder)
        self._folder = folder

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises PortInUse, ConfigError."""
        # gRPC shares the port (SO_REUSEPORT) so that ``renew`` leaves no gap. Check that no other
        # program listens there.
        port = find_free(host, port)
        self._address = f"{host}:{port}"
        await self._start(self._server)
        return port

    async def renew(self, flow: Options) -> None:
        """Accept new connections with other options. Calls under way may end on the existing ones.

        Raises PortInUse; nothing has changed then.
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
                    # Dialers that know the path find the new socket behind it.
                    os.dup2(local, self._local, inheritable=False)
            finally:
                if local is not None:
                    os.close(local)
            before = self._server
            self._server = server
            self._flow = flow
            task = self._retiring[before] = asyncio.create_task(before.stop(RETIRE_GRACE))
            task.add_done_callback(lambda _: self._retiring.pop(before, None))

    async def close(self) -> None:
        """Answer no more calls; those under way get SHUTDOWN_GRACE seconds."""
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
                ("grpc.http2.min_ping_interval_without_data_ms", PING_EVERY_MS),
                ("grpc.http2.max_ping_strikes", MAX_PING_STRIKES),
                ("grpc.max_concurrent_streams", MAX_STREAMS),
                ("grpc.max_metadata_size", MAX_METADATA),
                ("grpc.absolute_max_metadata_size", MAX_METADATA),
                # None: what is inflated has no size beforehand
                ("grpc.compression_enabled_algorithms_bitset", 1),
                ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_SECONDS)),
                ("grpc.max_connection_idle_ms", int(1000 * IDLE_SECONDS)),
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", PING_PATIENCE_MS),
                ("grpc.http2.ping_timeout_ms", PING_PATIENCE_MS),
                *flow,
            ),
        )
        server.add_generic_rpc_handlers((self._service.handlers,))
        return server


def _listen_locally(server: aio.Server, folder: Path) -> int:
    """Have a server listen on an unlinked unix socket; returns a descriptor of it."""
    path = folder / f"{secrets.token_hex(8)}.grpc"
    server.add_insecure_port(f"unix:{path}")
    try:
        return os.open(path, os.O_PATH)
    finally:
        path.unlink()


def find_free(host: str, port: int) -> int:
    """A port that nobody listens on: ``port``, or any if that is 0. Raises PortInUse, ConfigError
    for an address that is not of this machine."""
    name = host.strip("[]")
    try:
        family, _, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
            return probe.getsockname()[1]
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _in_use(host, port) from None
        raise ConfigError(
            f"{host}:{port} can't be listened on ({error.strerror}): choose an address of this "
            "machine with --host, such as 0.0.0.0 for all, and another --port, or 0 for any."
        ) from None


def _in_use(host: str, port: int) -> PortInUse:
    return PortInUse(
        f"Port {port} of {host} is in use: choose another with --port, or 0 for any free one."
    )
