"""Connections on which nobody has shown who it is: gRPC takes as many as come, so those that are too many are ended here.

    peers' connections    a call with a good credential has come over them; they are left alone
    strangers'            so many of one address, and of all together; beyond that the oldest are ended
    a flooding address    no new ones for a minute, and all of its strangers' are ended

A caller authenticates with its first call, a moment after it has connected, so the oldest are those that mean no good.
"""

import asyncio
import socket
from collections import Counter, OrderedDict
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from time import monotonic

from lowcomm_node.exchange.blocklist import BLOCKED, Blocklist
from lowcomm_node.exchange.connections import Place, connections, plain
from lowcomm_node.exchange.turnstile import UNBOUND
from lowcomm_node.logs import log
from lowcomm_node.probing.ration import Allowed, Ration, network_of
from lowcomm_protocol.refusals import Reason, Refusals, What

EVERY = 1.0
"""Seconds between two looks."""
MOST_OF_ONE, MOST = 32, 256
"""Connections of strangers from one address of IPv4 or /64 of IPv6, and of all."""
ENDED = Allowed(each=100, all=UNBOUND, seconds=60.0)
"""Connections that may be too many, of one address, until it is a flood: then it is blocked."""
MAX_KNOWN = 4096


class Strangers:
    """Tells which connections are too many."""

    def __init__(
        self,
        refusals: Refusals | None = None,
        most_of_one: int = MOST_OF_ONE,
        most: int = MOST,
        ended: Allowed = ENDED,
        blocked: float = BLOCKED,
    ) -> None:
        """``blocked``: seconds for which an address that floods us can't connect."""
        self._refusals = refusals or Refusals()
        self._most_of_one, self._most = most_of_one, most
        self._blocklist, self._ration = Blocklist(blocked), Ration(ended)
        self._known: OrderedDict[Place, None] = OrderedDict()
        self._since: dict[Place, float] = {}
        self._ending: set[Place] = set()
        """Ended, but gRPC has not closed them yet."""
        self.ended = 0

    def vouch(self, place: Place) -> None:
        """A call from there had a good credential."""
        self._known[place] = None
        self._known.move_to_end(place)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def knows(self, place: Place) -> bool:
        """Whether somebody vouched for a connection, and it has not been forgotten."""
        return place in self._known

    def forget(self, place: Place) -> None:
        """A call from there had a bad credential: it is a stranger's again."""
        self._known.pop(place, None)

    def block(self, host: str) -> None:
        """An address floods us: take no new connections from there for a while, and end those of strangers."""
        self._blocklist.block(host, monotonic())

    def surplus(self, there: Iterable[Place], now: float) -> list[Place]:
        """Those of the connections that there are now which should end."""
        present = set(there)
        self._since = {place: self._since.get(place, now) for place in present if place not in self._known}
        blocked = self._blocklist.networks(now)
        left, each = len(self._since), Counter(network_of(host) for host, _ in self._since)
        over: list[Place] = []
        for place in sorted(self._since, key=lambda place: self._since[place]):
            network = network_of(place[0])
            if network in blocked or each[network] > self._most_of_one or left > self._most:
                over.append(place)
                each[network] -= 1
                left -= 1
        return over

    def look(self, port: int) -> None:
        """End those of a server's connections that are too many, and keep out whom we have blocked."""
        with ExitStack() as opened:
            ours = [opened.enter_context(one) for one in connections(port)]
            there = {place: one for one in ours if (place := _other_end(one)) is not None}
            now = monotonic()
            self._ending &= set(there)
            for place in self.surplus(set(there) - self._ending, now):
                self._end(place, there[place], now)
            self._blocklist.enforce((one for one in ours if _listens(one)), now)

    def _end(self, place: Place, connection: socket.socket, now: float) -> None:
        self.ended += 1
        self._refusals.count(What.CONNECTION, Reason.TOO_MANY)
        self._ending.add(place)
        if not self._ration.take(network_of(place[0]), 1, now):
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
                log.warning("strangers.not_looked", reason=str(error))
            if self.ended > told:
                log.info("strangers.ended", connections=self.ended - told)
                told = self.ended
            await asyncio.sleep(EVERY)


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _other_end(connection: socket.socket) -> Place | None:
    """Who is at the other end of a connection; None if nobody is."""
    try:
        host, number = connection.getpeername()[:2]
        return plain(host), number
    except (OSError, ValueError):
        return None
