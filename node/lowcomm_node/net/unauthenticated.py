"""Bounds connections, above all those whose caller has not authenticated: gRPC accepts any number.

    authenticated     a valid credential has come over it. Bounded by address and in all; the least
                      recently used is ended beyond that, and one with too many bytes beside
                      messages (overhead.py)
    unauthenticated   bounded by address and in all; the oldest is ended beyond that. Each has a few
                      seconds, and some bytes, for a call with a valid credential
    flooding address  no new connections for a minute, and all unauthenticated ones are ended

A caller authenticates with its first call, a moment after it has connected, so old unauthenticated
connections are of no use. gRPC reports no frames other than calls (PING, WINDOW_UPDATE,
CONTINUATION); the kernel reports the bytes of each connection.
"""

import asyncio
import socket
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from time import monotonic

from lowcomm_node.net.blocklist import BLOCKED, Blocklist
from lowcomm_node.net.connections import Place, connections, plain
from lowcomm_node.net.limits import UNBOUND
from lowcomm_node.net.overhead import OF_CALL, Overhead
from lowcomm_node.system.logs import log
from lowcomm_node.system.quota import Allowed, Quota, network_of
from lowcomm_protocol.errors import Reason, Refusals, What

EVERY = 1.0
"""Seconds between two looks."""
MOST_OF_ONE, MOST = 32, 256
"""Unauthenticated connections of one address (IPv4, or /64 of IPv6), and of all."""
UNPROVEN_SECONDS = 10.0
"""For TLS and the first call with a valid credential. Over a round trip of 1 s that takes 5."""
UNPROVEN_BYTES = 64 * 1024
"""Before that call. TLS, a credential of 1 KiB and a record of 8 KiB take a quarter of it."""
PROVEN_OF_ONE, PROVEN = 128, 1024
"""Authenticated connections of one address, and of all. A peer has one or two."""
NOISY = 25
"""Weight of a connection that brought too many bytes, in surplus connections."""
ENDED = Allowed(each=100, all=UNBOUND, seconds=60.0)
"""Surplus connections of one address before it counts as a flood and is blocked."""
MAX_KNOWN = 4096
_TCP_INFO, _BYTES_RECEIVED = (
    192,
    128,
)  # linux/tcp.h: the size of struct tcp_info that we need, tcpi_bytes_received in it


class Unauthenticated:
    """Finds and ends surplus connections."""

    def __init__(
        self,
        refusals: Refusals | None = None,
        most_of_one: int = MOST_OF_ONE,
        most: int = MOST,
        ended: Allowed = ENDED,
        blocked: float = BLOCKED,
        unproven: float = UNPROVEN_SECONDS,
        proven_of_one: int = PROVEN_OF_ONE,
    ) -> None:
        """``blocked``: seconds for which a flooding address can't connect; ``unproven``: for the
        first valid call."""
        self._unproven = unproven
        self._proven_of_one = proven_of_one
        self._refusals = refusals or Refusals()
        self.overhead = Overhead()
        """Bytes beside messages on authenticated connections."""
        self._most_of_one = most_of_one
        self._most = most
        self._blocklist = Blocklist(blocked)
        self._quota = Quota(ended)
        self._known: OrderedDict[Place, None] = OrderedDict()
        """Authenticated connections, in the order of their last valid call."""
        self._vouched: set[Place] = set()
        """Connections that ever had a valid call. If a later one was invalid, what they carry may
        still be an exchange."""
        self._since: dict[Place, float] = {}
        self._noisy: set[Place] = set()
        """Connections with too many bytes at the last look."""
        self._ending: set[Place] = set()
        """Ended, but not closed by gRPC yet."""
        self.ended = 0

    def vouch(self, place: Place) -> None:
        """A call over this connection had a valid credential."""
        self._known[place] = None
        self._known.move_to_end(place)
        self._vouched.add(place)
        self.overhead.explain(place, OF_CALL)
        if len(self._known) > MAX_KNOWN:
            self._vouched.discard(self._known.popitem(last=False)[0])

    def knows(self, place: Place) -> bool:
        """Whether a connection is authenticated and remembered."""
        return place in self._known

    def forget(self, place: Place) -> None:
        """A call had an invalid credential: the connection counts as unauthenticated again."""
        self._known.pop(place, None)

    def block(self, host: str) -> None:
        """Block a flooding address: no new connections for a while, and its unauthenticated ones
        end."""
        self._blocklist.block(host, monotonic())

    def surplus(self, there: Iterable[Place], now: float) -> list[Place]:
        """The connections among those present that should end."""
        present = set(there)
        for place in [place for place in self._known if place not in present]:
            del self._known[place]
        self._vouched &= present
        self._since = {
            place: self._since.get(place, now) for place in present if place not in self._known
        }
        return self._surplus_unauthenticated(now) + self._surplus_peers()

    def _surplus_unauthenticated(self, now: float) -> list[Place]:
        blocked = self._blocklist.networks(now)
        left, each = len(self._since), Counter(network_of(host) for host, _ in self._since)
        over: list[Place] = []
        for place in sorted(self._since, key=lambda place: self._since[place]):
            network = network_of(place[0])
            too_many = each[network] > self._most_of_one or left > self._most
            is_late = place not in self._vouched and now - self._since[place] >= self._unproven
            if network in blocked or too_many or is_late:
                over.append(place)
                each[network] -= 1
                left -= 1
        return over

    def _surplus_peers(self) -> list[Place]:
        left, each = len(self._known), Counter(network_of(host) for host, _ in self._known)
        over: list[Place] = []
        for place in self._known:
            network = network_of(place[0])
            if each[network] > self._proven_of_one or (
                left > PROVEN and each[network] == max(each.values())
            ):
                over.append(place)
                each[network] -= 1
                left -= 1
        return over

    def noisy(self, received: Callable[[Place], int]) -> list[Place]:
        """Unauthenticated connections with too many bytes at this look and the one before.

        Once is not enough: the first call may be waiting for our event loop, as this check was.
        """
        before = self._noisy
        self._noisy = {
            place
            for place in self._since
            if place not in self._vouched and received(place) > UNPROVEN_BYTES
        }
        return sorted(self._noisy & before)

    def look(self, port: int) -> None:
        """End the surplus connections of a server, and enforce the blocklist."""
        with ExitStack() as opened:
            ours = [opened.enter_context(one) for one in connections(port)]
            there = {place: one for one in ours if (place := _other_end(one)) is not None}
            now = monotonic()
            self._ending &= set(there)
            for place in self.surplus(set(there) - self._ending, now):
                self._end(place, there[place], now)
            for place in self.noisy(lambda place: _received(there[place])):
                if place not in self._ending:
                    self._end(place, there[place], now, NOISY)
            peers = {place: _received(there[place]) for place in self._vouched - self._ending}
            for place in self.overhead.excess(peers, now):
                log.info(
                    "unauthenticated.noisy_peer",
                    host=place[0],
                    reason="its frames belong to no message",
                )
                self._end(place, there[place], now, NOISY)
            self._blocklist.enforce((one for one in ours if _listens(one)), now)

    def _end(self, place: Place, connection: socket.socket, now: float, weight: int = 1) -> None:
        self.ended += 1
        self._refusals.count(What.CONNECTION, Reason.TOO_MANY)
        self._ending.add(place)
        if not self._quota.take(network_of(place[0]), weight, now):
            self.block(place[0])
        with suppress(OSError):  # it has ended meanwhile
            connection.shutdown(socket.SHUT_RDWR)

    async def run(self, port: int) -> None:
        """Look every second."""
        told = 0
        while True:
            try:
                self.look(port)
            except OSError as error:  # such as too many open files: it passes
                log.warning("unauthenticated.not_looked", reason=str(error))
            if self.ended > told:
                log.info("unauthenticated.ended", connections=self.ended - told)
                told = self.ended
            await asyncio.sleep(EVERY)


def _received(connection: socket.socket) -> int:
    """Bytes received over a connection; 0 if the kernel does not report them (other than Linux)."""
    if sys.platform != "linux":
        return 0
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO)
    except OSError:
        return 0
    return (
        struct.unpack_from("=Q", told, _BYTES_RECEIVED)[0]
        if len(told) >= _BYTES_RECEIVED + 8
        else 0
    )


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _other_end(connection: socket.socket) -> Place | None:
    """Address and port of the other end; None if the socket is not connected."""
    try:
        host, number = connection.getpeername()[:2]
        return plain(host), number
    except (OSError, ValueError):
        return None
