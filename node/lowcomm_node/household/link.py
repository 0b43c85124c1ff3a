"""The link between two paired machines: TLS 1.3, a reply in JSON, then plain bytes.

Both ends show certificates, and each takes only those that it has pinned. A line that is cut is
noticed within SILENCE seconds, however long the other end reads nothing.
"""

import asyncio
import hmac
import socket
import ssl
import struct
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from lowcomm_node.errors import ConfigError, LinkLost, RetryLater
from lowcomm_node.household.machines import (
    Household,
    Machine,
    Strict,
    certificate_der,
    read_address,
)
from lowcomm_node.household.pairing import Consent, Hello, propose, read, read_code
from lowcomm_node.net.pump import RECORD, pump
from lowcomm_node.system.tasks import first_of, in_time
from lowcomm_node.system.units import place
from lowcomm_protocol.errors import in_words

DEADLINE = 10.0
"""Seconds for a machine to prove itself, and to answer."""
IDLE, PROBES, BETWEEN = 5, 3, 2
"""TCP asks a silent machine for a sign of life: after 5 s, up to 3 times, every 2 s."""
SILENCE = IDLE + PROBES * BETWEEN
LINGER = 2.0
"""Seconds to read what the other end still sends: closing before would take back what we sent."""
_INFO = struct.Struct("8B24I")
_PROBES, _UNACKED, _LAST_ACK = 3, 8 + 4, 8 + 12
"""Places in Linux's tcp_info: unanswered probes of a closed window, packets without an
acknowledgement, and milliseconds since the last one."""
T = TypeVar("T")


class Reply(Strict):
    """A lender's answer to a paired head: all that follows is between its worker and the head."""

    refusal: Annotated[str, Field(max_length=300)] = ""
    """Why there is no worker; empty if there is one."""


def make_context(household: Household, pinned: bytes, *, is_lender: bool) -> ssl.SSLContext:
    """TLS that trusts ``pinned`` certificates (DER) alone. A lender lets machines in that show no
    certificate, since these may pair."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_lender else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # a certificate is pinned as a whole
    made.verify_mode = ssl.CERT_OPTIONAL if is_lender else ssl.CERT_REQUIRED
    made.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    made.load_cert_chain(household.key_file)
    if pinned:
        made.load_verify_locations(cadata=pinned)
    return made


class SecureStream:
    """TLS over a TCP socket. All methods raise LinkLost."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, is_lender: bool) -> None:
        """Take over a socket."""
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            # macOS calls the first one TCP_KEEPALIVE, which elsewhere is something else.
            idle = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"
            pauses = {idle: IDLE, "TCP_KEEPINTVL": BETWEEN, "TCP_KEEPCNT": PROBES}
            for name, value in pauses.items():
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            self._sock = context.wrap_socket(
                sock, server_side=is_lender, do_handshake_on_connect=False
            )
        except OSError as error:
            sock.close()
            raise LinkLost("has gone") from error
        self._loop = asyncio.get_running_loop()

    @property
    def certificate(self) -> bytes | None:
        """The certificate of the other end in DER, whose key it holds; None if it showed none."""
        return self._sock.getpeercert(binary_form=True)

    async def handshake(self) -> None:
        """Let both ends prove who they are."""
        await self._retry(self._sock.do_handshake)

    async def receive(self) -> bytes:
        """The next message: what comes in one record of TLS."""
        data = await self._retry(lambda: self._sock.recv(RECORD))
        if not data:
            raise LinkLost("has closed the connection")
        return data

    async def send(self, message: Strict) -> None:
        """Send a message; it fits a record."""
        data = message.model_dump_json().encode() + b"\n"
        await self._retry(lambda: self._sock.send(data))

    async def carry(self, local: socket.socket) -> bool:
        """Move bytes to and from ``local`` until one end closes, or the line is dead; whether
        ``local`` has closed."""
        local.setblocking(False)
        is_local = False

        async def move() -> None:
            nonlocal is_local
            is_local = await pump(local, self._sock) is local

        await first_of(move(), self._watch())
        return is_local

    def close(self) -> None:
        """End it at once."""
        self._sock.close()

    async def finish(self) -> None:
        """End it once the other end has all that was sent."""
        with socket.socket(fileno=self._sock.detach()) as raw:
            raw.setblocking(False)
            try:
                raw.shutdown(socket.SHUT_WR)
                async with asyncio.timeout(LINGER):
                    while await self._loop.sock_recv(raw, RECORD):
                        pass
            except (OSError, TimeoutError):
                return

    async def _watch(self) -> None:
        """Return when the other machine acknowledges nothing any more.

        Keepalive sees to it while nothing is under way. TCP_USER_TIMEOUT would also end a link
        whose other end is alive, and reads nothing for a while. Only Linux tells what was
        acknowledged.
        """
        while True:
            await asyncio.sleep(BETWEEN)
            if sys.platform != "linux":
                continue
            info = _INFO.unpack(
                self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
            )
            is_owed = info[_UNACKED] > 0 or info[_PROBES] > 1
            if is_owed and info[_LAST_ACK] > 1000 * SILENCE:
                return

    async def _retry(self, action: Callable[[], T]) -> T:
        while True:
            ready = asyncio.Event()
            try:
                return action()
            except ssl.SSLWantReadError:
                add, remove = self._loop.add_reader, self._loop.remove_reader
            except ssl.SSLWantWriteError:
                add, remove = self._loop.add_writer, self._loop.remove_writer
            except ssl.SSLEOFError:
                raise LinkLost("has closed the connection") from None
            except ssl.SSLError as error:
                raise LinkLost(
                    "is not the machine that was paired, or has forgotten this one: pair them again"
                ) from error
            except OSError as error:
                raise LinkLost(f"is lost: {error.strerror or error}") from error
            add(self._sock, ready.set)
            try:
                await ready.wait()
            finally:
                remove(self._sock)


@asynccontextmanager
async def borrowed(address: str, home: Path) -> AsyncIterator[SecureStream]:
    """Context with a stream to a worker of a lender. Raises ConfigError if it is not paired,
    RetryLater if it starts none, LinkLost."""
    household = Household(home)
    lender = household.lender(address)
    tls = make_context(household, certificate_der(lender.key), is_lender=False)
    async with _dialed(lender.address, tls, f"{lender.name} at {address}") as stream:
        async with in_time(DEADLINE):
            reply = read(Reply, await stream.receive())
        if reply.refusal:
            raise RetryLater(in_words(reply.refusal))
        yield stream


async def pair(address: str, home: Path, code: str) -> Machine:
    """Pair with a lender that shows a code. Raises ConfigError, LinkLost."""
    household, code = Household(home), read_code(code)
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.minimum_version = ssl.TLSVersion.TLSv1_3
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    async with _dialed(address, anybody, address) as stream, in_time(DEADLINE):
        try:
            hello = read(Hello, await stream.receive())
        except LinkLost:
            raise ConfigError(
                f"{address} shows no code: run `lowcomm-node lend --pair` there, and type its code."
            ) from None
        if stream.certificate != certificate_der(hello.key):
            raise LinkLost("shows the certificate of another machine")
        proposal, expected = propose(household, code, hello)
        await stream.send(proposal)
        with suppress(LinkLost):
            consent = read(Consent, await stream.receive())
            if hmac.compare_digest(consent.proof, expected):
                at = place(*read_address(address))
                return household.add(Machine(name=hello.name, key=hello.key, address=at))
    raise ConfigError(
        f"{address} has another code: type the one that it shows now. If it is the same, a "
        "machine between both has answered."
    )


@asynccontextmanager
async def _dialed(address: str, tls: ssl.SSLContext, name: str) -> AsyncIterator[SecureStream]:
    """Context with a stream to a lender. Errors name the lender."""
    try:
        try:
            at = read_address(address)
            sock = await asyncio.to_thread(socket.create_connection, at, timeout=DEADLINE)
        except OSError as error:
            raise LinkLost(f"can't be reached ({error.strerror or error})") from None
        with closing(SecureStream(sock, tls, is_lender=False)) as stream:
            async with in_time(DEADLINE):
                await stream.handshake()
            yield stream
    except LinkLost as error:
        raise LinkLost(f"{name} {error}.") from None
