"""Attempts to punch holes, with a p2pd that only pretends: who takes part, and what a stranger
can't make us do."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from lowcomm_node.net.addresses import CIRCUIT, EntryPoint, encode
from lowcomm_node.net.control import Connection, OpenStream, framed
from lowcomm_node.net.punching import (
    MAX_ADDRESSES,
    MAX_HEARD,
    PROTOCOL,
    TAKE_EVERY,
    Puncher,
)
from lowcomm_node.net.relays import IDENTIFY, observed
from lowcomm_protocol.identity import peer_id_of

ADA, BOB, RELAY = sorted(peer_id_of(bytes([number]) * 32) for number in (1, 2, 3))
RELAYED = f"/ip4/44.1.1.1/tcp/4001/p2p/{RELAY}{CIRCUIT}"
AT_ADA, AT_BOB = "/ip4/44.1.1.2/udp/4001/quic-v1", "/ip4/44.1.1.3/udp/4001/quic-v1"
WAYS = [EntryPoint(BOB, RELAYED)]


class Daemon:
    """One p2pd, as its control socket shows it."""

    def __init__(self, punchable: bool = True) -> None:
        self.address = RELAYED
        """Of the connection to the other peer; empty: there is none."""
        self.punchable = punchable
        self.dialed: list[list[str]] = []
        self.far: dict[str, socket.socket] = {}
        """The other ends of the streams that were opened, by protocol."""
        self._opened = asyncio.Event()

    async def connections(self) -> list[Connection]:
        return [Connection(BOB, self.address)] if self.address else []

    async def connect(self, peer_id: str, entries: list[EntryPoint], seconds: float) -> None:
        self.dialed.append([entry.dial for entry in entries])
        self.address = AT_BOB if self.punchable else RELAYED

    async def disconnect(self, peer_id: str) -> None:
        self.address = ""

    async def open_stream(self, peer_id: str, protocol: str, seconds: float) -> OpenStream:
        near, self.far[protocol] = pair()
        self._opened.set()
        return OpenStream(peer_id, self.address, near)

    async def asked(self, protocol: str) -> socket.socket:
        """The other end of the next stream of a protocol."""
        await self._opened.wait()
        self._opened.clear()
        return self.far.pop(protocol)


def pair() -> tuple[socket.socket, socket.socket]:
    both = socket.socketpair()
    for one in both:
        one.setblocking(False)
    return both


def puncher(own: str = ADA, seen_at: tuple[str, ...] = (AT_ADA,)) -> Puncher:
    return Puncher(own, lambda: seen_at)


def message(*dials: str) -> bytes:
    return framed("\n".join(dials).encode())


async def answering(daemon: Daemon, answer: bytes, times: int = 1) -> None:
    """Play the other end: take what is asked, and answer."""
    loop = asyncio.get_running_loop()
    for _ in range(times):
        far = await daemon.asked(PROTOCOL)
        assert await loop.sock_recv(far, 1000) == message(AT_ADA)
        await loop.sock_sendall(far, answer)
        far.close()


async def ask(daemon: Daemon, one: Puncher, answer: bytes, times: int = 1) -> None:
    async with asyncio.timeout(20):
        await asyncio.gather(one.improve(daemon, BOB, WAYS), answering(daemon, answer, times))


async def test_both_tell_their_addresses_and_the_relayed_connection_is_given_up() -> None:
    daemon = Daemon()
    await ask(daemon, puncher(), message(AT_BOB))
    assert daemon.dialed == [[AT_BOB, RELAYED]], (
        "the relay is there in case that no hole is punched"
    )
    assert daemon.address == AT_BOB


async def test_nothing_is_given_up_where_the_other_end_does_not_take_part() -> None:
    daemon = Daemon()
    await ask(daemon, puncher(), framed(b"no"))
    assert daemon.address == RELAYED
    assert not daemon.dialed


@pytest.mark.parametrize(
    "answer",
    [
        message("/ip4/192.168.1.2/udp/4001/quic-v1"),
        message("/ip4/127.0.0.1/tcp/22"),
        message("/dns4/example.org/tcp/4001"),
        message(RELAYED),
        message("nonsense"),
        message(*[AT_BOB] * (MAX_ADDRESSES + 1)),
        b"",
    ],
)
async def test_addresses_that_are_none_are_not_dialed(answer: bytes) -> None:
    daemon = Daemon()
    await ask(daemon, puncher(), answer)
    assert not daemon.dialed
    assert daemon.address == RELAYED


# The end that is asked


async def taking(
    daemon: Daemon, one: Puncher, address: str = RELAYED, asked: bytes = message(AT_BOB)
) -> bytes:
    """What is answered to a request of bob, who then gives the connection up."""
    near, far = pair()
    loop = asyncio.get_running_loop()
    daemon.address = RELAYED
    before = set(one._tasks)
    with far:
        one.take(daemon, OpenStream(BOB, address, near))
        await loop.sock_sendall(far, asked)
        async with asyncio.timeout(20):
            answer = await loop.sock_recv(far, 1000)
            far.close()
            await asyncio.gather(*(one._tasks - before))
    return answer


async def test_who_is_asked_gives_the_relayed_connection_up_and_dials() -> None:
    daemon = Daemon()
    assert await taking(daemon, puncher()) == message(AT_ADA)
    assert daemon.dialed == [[AT_BOB]]


async def test_only_through_a_relay_can_we_be_asked() -> None:
    daemon = Daemon()
    assert await taking(daemon, puncher(), address=AT_BOB) == framed(b"no")
    assert not daemon.dialed


async def test_nobody_can_make_us_dial_all_day(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon, one, now = Daemon(), puncher(), 1000.0
    monkeypatch.setattr("lowcomm_node.net.punching.monotonic", lambda: now)
    assert await taking(daemon, one) == message(AT_ADA)
    assert await taking(daemon, one) == framed(b"no")
    now += TAKE_EVERY
    assert await taking(daemon, one) == message(AT_ADA)
    assert len(daemon.dialed) == 2


@pytest.fixture
async def idle() -> AsyncIterator[Callable[[Puncher, int, int], list[socket.socket]]]:
    """Has strangers open streams, some of each, and say nothing; the other ends."""
    opened: list[socket.socket] = []
    asked: list[Puncher] = []

    def open_streams(
        one: Puncher, strangers: int, of_each: int = 1, addresses: Sequence[str] = (RELAYED,)
    ) -> list[socket.socket]:
        for number in range(strangers * of_each):
            near, far = pair()
            opened.append(far)
            stranger = peer_id_of(bytes([10 + number // of_each]) * 32)
            one.take(Daemon(), OpenStream(stranger, addresses[number % len(addresses)], near))
        asked.append(one)
        return opened

    yield open_streams
    for one in asked:
        await one.close()
    for far in opened:
        far.close()


def is_closed(far: socket.socket) -> bool:
    try:
        return far.recv(1) == b""
    except BlockingIOError:
        return False


RELAYS = [
    RELAYED.replace("44.1.1.1", f"44.1.{number}.1").replace(RELAY, peer_id_of(bytes([number]) * 32))
    for number in range(4, 14)
]
OF_ONE_RELAY = 22
"""Two thirds of all."""


@pytest.mark.parametrize(
    ("strangers", "of_each", "addresses", "taken"),
    [
        (100, 1, [RELAYED], OF_ONE_RELAY),
        (100, 1, [AT_BOB], MAX_HEARD // 2),
        (100, 1, RELAYS, MAX_HEARD),
        (1, 50, [RELAYED], 1),
    ],
)
async def test_streams_on_which_nothing_is_asked_are_few(
    idle, strangers: int, of_each: int, addresses: list[str], taken: int
) -> None:
    ends = idle(puncher(), strangers, of_each, addresses)
    assert len([far for far in ends if not is_closed(far)]) == taken


# Where others see us


def identify(dial: str) -> bytes:
    body = bytes([4 << 3 | 2, len(encode(dial))]) + encode(dial)
    return bytes([len(body)]) + body


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        (identify(AT_ADA), AT_ADA),
        (identify("/ip4/192.168.1.2/tcp/4001"), None),
        (bytes([4, 1, 2, 3, 4]), None),
        (bytes([0]), None),
    ],
)
async def test_others_tell_where_they_see_us(told: bytes, wanted: str | None) -> None:
    daemon = Daemon()
    daemon.address = AT_BOB

    async def tell() -> None:
        with await daemon.asked(IDENTIFY) as far:
            await asyncio.get_running_loop().sock_sendall(far, told)

    seen, _ = await asyncio.gather(observed(daemon, BOB), tell())
    assert seen == wanted


async def test_who_is_connected_through_a_relay_can_not_tell_where_we_are() -> None:
    assert await observed(Daemon(), BOB) is None
