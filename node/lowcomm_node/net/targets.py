"""Which addresses from untrusted records we dial, and how often, so that nobody can aim a swarm at
a third party.

    host named by our owner, or our own    dialed as often as needed
    name, multicast, unspecified           never
    loopback                               only if we are reached over loopback ourselves
    private, link-local, shared (CGNAT)    only if we have an address in the same network
    public                                 one attempt for a peer; the next after a doubling pause,
                                           until a peer has proved to be there; then within a rate

A host is an IP address: its ports count together. An attempt covers the direct connection and the
tunnel to one peer.
"""

import ipaddress
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic

from lowcomm_node.net.addresses import CIRCUIT

MAX_ADDRESSES = 3
"""Of one record, dialed directly in one attempt."""
DIALS = 3
"""Connections of one attempt to one unproven host: direct, and the tunnel over TCP and QUIC."""
ATTEMPT = 30.0
"""Seconds that an attempt lasts at most."""
FIRST_PAUSE, LONGEST_PAUSE = 60.0, 600.0
"""Seconds before an unproven host is tried again: the first and the longest pause."""
PROOF = 86_400.0
"""Seconds for which a proof counts."""
RATE, BURST = 1.0, 32
"""Connections a second to one proven host, and the burst."""
MAX_HOSTS = 4096
LOOK_EVERY = 10.0
"""Seconds between two reads of our own interfaces."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_CARRIER = ipaddress.ip_network("100.64.0.0/10")
_SAME_SITE = {4: 16, 6: 48}
"""Prefix bits shared by private addresses of one site, since sites route between subnets."""
_PLACE = {4: 24, 6: 64}


@dataclass
class _Host:
    proved: float = float("-inf")
    """When a peer last proved to be there."""
    attempts: int = 0
    due: float = float("-inf")
    """When the next attempt may begin."""
    peer: str = ""
    """The peer of the last attempt."""
    began: float = float("-inf")
    dials: int = 0
    tokens: float = float(BURST)
    counted: float = float("-inf")


def held_addresses() -> tuple[str, ...]:
    """All addresses of this machine's interfaces."""
    # Imported late: it raises on unknown systems, where the commands must still say what is wrong.
    import psutil

    # Of IPv6 the system adds the interface to some.
    return tuple(
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
    )


class Targets:
    """Which untrusted addresses may be dialed now."""

    def __init__(
        self,
        named: Iterable[str] = (),
        local: bool = False,
        own: Callable[[], Sequence[str]] = held_addresses,
        clock: Callable[[], float] = monotonic,
        dials: int = DIALS,
    ) -> None:
        """``named``: addresses given by our owner; ``local``: whether others reach us over
        loopback.

        ``own``: the addresses of our interfaces; ``dials``: see ``DIALS``.
        """
        self.local = local
        self._dials = dials
        self._own = own
        self._clock = clock
        self._named = {host for text in named if (host := host_in(text)) is not None}
        self._hosts: OrderedDict[str, _Host] = OrderedDict()
        self._interfaces: Sequence[Address] = ()
        self._looked = float("-inf")

    def reason(self, address: str) -> str | None:
        """Why an address (host:port, or a multiaddress) is never dialed; None if it may be."""
        host = host_in(address)
        if host is None or host in self._named:
            return None if host is not None else "it names no host"
        number = _number(host)
        if number is None:
            return "it is a name, which could be made to mean any host"
        if (
            number.is_multicast
            or number.is_unspecified
            or (number.version == 4 and int(number) == 2**32 - 1)
        ):
            return "nobody can be there"
        if number.is_loopback:
            return (
                None
                if self.local
                else "it is a loopback address, and we are not reached over loopback"
            )
        if number.is_global or self._is_near(number):
            return None
        return "it is a private address of a network that we are not in"

    def admit(self, peer: str, addresses: Sequence[str], most: int = MAX_ADDRESSES) -> list[str]:
        """The addresses that may be dialed for a peer now, in their order. Counts them as
        dialed."""
        admitted: list[str] = []
        for address in addresses:
            if len(admitted) >= most:
                break
            host = host_in(address)
            if host is not None and self.reason(address) is None and self._take(host, peer):
                admitted.append(address)
        return admitted

    def reached(self, address: str) -> None:
        """A peer has proved to be at an address, by a handshake that only it can complete."""
        if (host := host_in(address)) is not None:
            known = self._of(host)
            known.proved, known.attempts, known.due = self._clock(), 0, float("-inf")

    def refusal(self, addresses: Sequence[str]) -> str:
        """Why none of these addresses is dialed, in words."""
        for address in addresses:
            if (reason := self.reason(address)) is not None:
                return f"{address[:80]} is not dialed: {reason}"
        host = next((host for address in addresses if (host := host_in(address)) is not None), "")
        wait = max(0.0, self._of(host).due - self._clock())
        return f"nobody has proved to be at {host} yet: it is tried again in {wait:.0f} s"

    def _take(self, host: str, peer: str) -> bool:
        """Whether one more connection to a host is allowed; counts it."""
        if host in self._named or self._is_ours(host):
            return True
        known, now = self._of(host), self._clock()
        if now - known.proved < PROOF:
            known.tokens = min(float(BURST), known.tokens + (now - known.counted) * RATE)
            known.counted = now
            if known.tokens < 1.0:
                return False
            known.tokens -= 1.0
            return True
        if known.peer == peer and now - known.began < ATTEMPT and known.dials < self._dials:
            known.dials += 1
            return True
        if now < known.due:
            return False
        known.peer, known.began, known.dials = peer, now, 1
        known.due = now + min(FIRST_PAUSE * 2 ** min(known.attempts, 20), LONGEST_PAUSE)
        known.attempts += 1
        return True

    def _of(self, host: str) -> _Host:
        known = self._hosts.setdefault(host, _Host())
        self._hosts.move_to_end(host)
        if len(self._hosts) > MAX_HOSTS:
            self._hosts.popitem(last=False)
        return known

    def _own_numbers(self) -> Sequence[Address]:
        if self._clock() - self._looked >= LOOK_EVERY:
            numbers = (_number(text) for text in self._own())
            self._looked = self._clock()
            self._interfaces = [one for one in numbers if one is not None]
        return self._interfaces

    def _is_ours(self, host: str) -> bool:
        number = _number(host)
        return number is not None and (number.is_loopback or number in self._own_numbers())

    def _is_near(self, number: Address) -> bool:
        return any(_is_same_site(number, own) for own in self._own_numbers() if not own.is_loopback)


def host_in(address: str) -> str | None:
    """The host in ``host:port`` or in a multiaddress, possibly a relay's; None if there is none."""
    if address.startswith("/"):
        _, kind, host, *_ = [*address.split("/"), "", ""]
        return _plain(host) if kind in ("ip4", "ip6", "dns", "dns4", "dns6") and host else None
    host = address.rpartition(":")[0].strip("[]")
    return _plain(host) if host else None


def places_of(addresses: Sequence[str], entry_points: Sequence[str]) -> tuple[str, ...]:
    """The places in a record: networks of its public addresses (/24 or /64), or else its relays'
    ids."""
    direct = [text for text in entry_points if CIRCUIT not in text]
    hosts = [_number(host) for text in (*addresses, *direct) if (host := host_in(text)) is not None]
    places = [
        str(ipaddress.ip_network((number, _PLACE[number.version]), strict=False))
        for number in hosts
        if number is not None and (number.is_global or number.is_loopback)
    ]
    relays = [
        text.partition(CIRCUIT)[0].rpartition("/p2p/")[2]
        for text in entry_points
        if CIRCUIT in text
    ]
    if not places and not relays:
        places = [str(number) for number in hosts if number is not None]
    return tuple(dict.fromkeys(places or relays))[:MAX_ADDRESSES]


def _plain(host: str) -> str:
    number = _number(host)
    return str(number) if number is not None else host.lower().rstrip(".")


def _number(host: str) -> Address | None:
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        return None
    return (number.ipv4_mapped or number) if number.version == 6 else number


def _is_same_site(number: Address, own: Address) -> bool:
    """Whether a private address belongs to the same site as one of ours."""
    if number.version != own.version or own.is_global:
        return False
    # A provider's network, or a private overlay on the internet: neither has smaller sites.
    if number in _CARRIER:
        return own in _CARRIER
    return number in ipaddress.ip_network((own, _SAME_SITE[number.version]), strict=False)
