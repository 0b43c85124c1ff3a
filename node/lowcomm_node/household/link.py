"""The link between two paired machines: TLS 1.3, a question in a line of JSON, then plain bytes.

Both ends show certificates, and each takes only those that it has pinned. A line that is cut is
noticed within SILENCE seconds, however long the other end reads nothing.
"""

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from lowcomm_node.errors import ConfigError, LinkLost, RetryLater
from lowcomm_node.household.machines import (
    Household,
    Machine,
    Message,
    Name,
    certificate_der,
    read_address,
)
from lowcomm_node.household.pairing import MAX_MESSAGE, Consent, Hello, Request, read, read_code
from lowcomm_node.net.pump import RECORD, pump
from lowcomm_node.net.tls import certificate_of
from lowcomm_node.system.tasks import first_of, in_time, start
from lowcomm_node.system.units import place
from lowcomm_protocol.errors import in_words

MAX_LINE = 64 * 1024
"""Bytes of a question or an answer."""
DEADLINE = 10.0
"""Seconds for a machine to prove itself, and to ask."""
ANSWER_DEADLINE = 60.0
"""Seconds for an answer: a lender may have to end another worker, or ask a driver of a GPU."""
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
M = TypeVar("M", bound=Message)


class Ask(Message):
    """The question with which a head begins."""

    ask: Literal["describe", "start"]
    settings: dict[str, Any] = Field(default_factory=dict)


class Gpu(Message):
    """A graphics card of a lender."""

    name: str
    memory_bytes: int
    free_bytes: int


class Description(Message):
    """What a lender has, and what it does."""

    name: Name
    release: str
    cores: float
    free_bytes: int
    """Memory that a worker may take."""
    gpus: tuple[Gpu, ...]
    computes_for: str
    """The head that it computes for; empty if it is free."""
    last_end: str
    """How the last worker of the head that asks has ended."""


class Started(Message):
    """The worker runs: all that follows is between it and the head."""

    started: Literal[True] = True


class Refusal(Message):
    """Why a lender does not do what it was asked."""

    refusal: Annotated[str, Field(max_length=300)]


def make_context(household: Household, *, is_lender: bool, pinned: bytes) -> ssl.SSLContext:
    """TLS that trusts ``pinned`` certificates (PEM) alone. A lender lets machines in that show no
    certificate, since these may pair."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_lender else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # a certificate is pinned as a whole
    made.verify_mode = ssl.CERT_OPTIONAL if is_lender else ssl.CERT_REQUIRED
    made.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    made.load_cert_chain(household.key_file)
    if pinned:
        made.load_verify_locations(cadata=pinned.decode())
    return made


class SecureStream:
    """TLS over a TCP socket. All methods raise LinkLost."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, is_lender: bool) -> None:
        """Take over a socket."""
        try:
            sock.setblocking(False)
            for level, name, value in (
                (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
                (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE),
                (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, BETWEEN),
                (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES),
                (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            ):
                sock.setsockopt(level, name, value)
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

    async def read_line(self, limit: int) -> bytes:
        """The next line of at most ``limit`` bytes. Nothing may follow it before an answer."""
        data = b""
        while b"\n" not in data and len(data) <= limit:
            more = await self._retry(lambda: self._sock.recv(RECORD))
            if not more:
                raise LinkLost("has closed the connection")
            data += more
        line, _, rest = data.partition(b"\n")
        if rest or len(line) > limit:
            raise LinkLost("sent more than a line")
        return line

    async def send(self, message: Message) -> None:
        """Send a message as a line."""
        left = memoryview(message.model_dump_json().encode() + b"\n")
        while left:
            left = left[await self._retry(lambda left=left: self._sock.send(left)) :]

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
        whose other end is alive, and reads nothing for a while.
        """
        while True:
            await asyncio.sleep(BETWEEN)
            info = _INFO.unpack(
                self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
            )
            is_owed = info[_UNACKED] > 0 or info[_PROBES] > 1
            if is_owed and info[_LAST_ACK] > 1000 * SILENCE:
                return

    async def _retry(self, action: Callable[[], T]) -> T:
        while True:
            try:
                return action()
            except ssl.SSLWantReadError:
                await self._ready(self._loop.add_reader, self._loop.remove_reader)
            except ssl.SSLWantWriteError:
                await self._ready(self._loop.add_writer, self._loop.remove_writer)
            except ssl.SSLEOFError:
                raise LinkLost("has closed the connection") from None
            except ssl.SSLError as error:
                raise LinkLost(
                    "is not the machine that was paired, or has forgotten this one: pair them again"
                ) from error
            except OSError as error:
                raise LinkLost(f"is lost: {error.strerror or error}") from error

    async def _ready(self, add: Callable[..., object], remove: Callable[..., object]) -> None:
        ready = asyncio.Event()
        add(self._sock, ready.set)
        try:
            await ready.wait()
        finally:
            remove(self._sock)


class Link:
    """A worker on a lender, at the other end of a plain socket."""

    def __init__(self, home: Path, lender: Machine, stream: SecureStream) -> None:
        self.lender = lender
        self._home = home
        ours, self.socket = socket.socketpair()
        """The head's end of the link. It reads EOF or raises ECONNRESET once the link has ended. A
        caller that passes it to a process closes it here."""
        self._carrying = start(self._carry(stream, ours))

    async def ended(self) -> str:
        """Wait until it has ended; why, in a sentence, as far as the lender says."""
        is_local = await asyncio.shield(self._carrying)
        if is_local:
            return f"The link to {self.lender.name} was closed here."
        try:
            description = await describe(self.lender.address, self._home)
        except (LinkLost, ConfigError) as error:
            return f"The link to {self.lender.name} has ended: {error}"
        reason = description.last_end or "its lender does not say why."
        return f"The link to {self.lender.name} has ended: {reason}"

    async def close(self) -> None:
        """End it, and with it the worker."""
        self._carrying.cancel()
        await asyncio.gather(self._carrying, return_exceptions=True)
        self.socket.close()

    async def _carry(self, stream: SecureStream, ours: socket.socket) -> bool:
        try:
            with ours:
                return await stream.carry(ours)
        finally:
            stream.close()


async def lent(address: str, home: Path, settings: Mapping[str, Any]) -> Link:
    """Start a worker on a lender. Raises ConfigError if it is not paired or the settings are no
    JSON, RetryLater if it computes for another head, LinkLost."""
    try:
        ask = Ask(ask="start", settings=dict(settings))
        size = len(ask.model_dump_json())
    except ValueError as error:
        raise ConfigError(f"Settings that are no JSON can't be sent to {address}.") from error
    if size > MAX_LINE:
        raise ConfigError(f"Settings for {address} have {size:,} bytes; {MAX_LINE:,} are allowed.")
    lender, stream, _ = await _ask(address, home, ask, Started)
    return Link(home, lender, stream)


async def describe(address: str, home: Path) -> Description:
    """What a lender has. Raises ConfigError if it is not paired, LinkLost."""
    _, stream, description = await _ask(address, home, Ask(ask="describe"), Description)
    stream.close()
    return description


async def _ask(
    address: str, home: Path, ask: Ask, kind: type[M]
) -> tuple[Machine, SecureStream, M]:
    household = Household(home)
    lender = household.lender(address)
    pinned = certificate_of(bytes.fromhex(lender.key))
    tls = make_context(household, is_lender=False, pinned=pinned)
    async with _dialed(lender.address, tls, f"{lender.name} at {address}") as stream:
        async with in_time(ANSWER_DEADLINE):
            await stream.send(ask)
            line = await stream.read_line(MAX_LINE)
        if line.startswith(b'{"refusal"'):
            raise RetryLater(in_words(read(Refusal, line).refusal))
        return lender, stream, read(kind, line)


async def pair(address: str, home: Path, code: str) -> Machine:
    """Pair with a lender that shows a code. Raises ConfigError, LinkLost."""
    household = Household(home)
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.minimum_version = ssl.TLSVersion.TLSv1_3
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    read_code(code)
    async with _dialed(address, anybody, address) as stream, in_time(DEADLINE):
        try:
            hello = read(Hello, await stream.read_line(MAX_MESSAGE))
        except LinkLost:
            raise ConfigError(
                f"{address} shows no code: run `lowcomm-node lend --pair` there, and type its code."
            ) from None
        if stream.certificate != certificate_der(hello.key):
            raise LinkLost("shows the certificate of another machine")
        request = Request(household, code, hello)
        await stream.send(request.proposal)
        try:
            is_same = request.accepts(read(Consent, await stream.read_line(MAX_MESSAGE)))
        except LinkLost:
            is_same = False
        stream.close()
    if not is_same:
        raise ConfigError(
            f"{address} has another code: type the one that it shows now. If it is the same, a "
            "machine between both has answered."
        )
    lender = Machine(name=hello.name, key=hello.key, address=place(*read_address(address)))
    return household.add(lender)


@asynccontextmanager
async def _dialed(address: str, tls: ssl.SSLContext, name: str) -> AsyncIterator[SecureStream]:
    """Context with a stream to a lender, which stays open at its end. An error closes it, and
    names the lender."""
    try:
        try:
            sock = await asyncio.to_thread(
                socket.create_connection, read_address(address), timeout=DEADLINE
            )
        except OSError as error:
            raise LinkLost(f"can't be reached ({error.strerror or error})") from None
        stream = SecureStream(sock, tls, is_lender=False)
        try:
            async with in_time(DEADLINE):
                await stream.handshake()
            yield stream
        except BaseException:
            stream.close()
            raise
    except LinkLost as error:
        raise LinkLost(f"{name} {error}.") from None
