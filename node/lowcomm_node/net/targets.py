"""Which addresses from untrusted records we dial, and how often, so that nobody can aim a swarm at
a third party.

    host named by our owner, or our own    dialed as often as needed
    name, multicast, unspecified           never
    loopback                               only if we are reached over loopback ourselves
    private, link-local, shared (CGNAT)    only if we have an address in the same network
    public                                 a few connections, until a peer has proved to be there;
                                           then within a rate

A host is an IP address: its ports count together.
"""

import ipaddress
import socket
from collections.abc import Callable, Iterable, Sequence
from time import monotonic

from cachetools import TTLCache

from lowcomm_node.net.addresses import CIRCUIT
from lowcomm_node.system.quota import Allowed, Quota

MAX_ADDRESSES = 3
"""Of one record, dialed directly in one attempt."""
DIALS = 3
"""Connections to an unproven host within PAUSE: direct, and the tunnel over TCP and QUIC."""
PAUSE = 600.0
"""Seconds in which these come back, evenly."""
PROOF, MAX_HOSTS = 86_400.0, 4096
"""Seconds for which a proof counts, and hosts that are remembered."""
OF_PROVED = Allowed(each=32, all=1 << 40, seconds=32.0)
"""Connections to one proven host."""
LOOK_EVERY = 10.0
"""Seconds between two reads of our own interfaces."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_CARRIER = ipaddress.ip_network("100.64.0.0/10")
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
"""Addresses of IPv4 as IPv6 has them behind NAT64."""
_SITES_OWN = ipaddress.ip_network("64:ff9b:1::/48")
"""Those behind a NAT64 of one site, which may lead to its private addresses."""
_SAME_SITE = {4: 16, 6: 48}
"""Prefix bits shared by private addresses of one site, since sites route between subnets."""
_PLACE = {4: 24, 6: 48}


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


def outward_address(towards: str) -> str:
    """Which of our addresses packets to an IP address leave from; empty if there is no way there.
    Sends nothing."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))
            return probe.getsockname()[0]
    except OSError:
        return ""


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
        loopback. ``own``: the addresses of our interfaces; ``dials``: see ``DIALS``."""
        self.local = local
        self._own = own
        self._clock = clock
        self._named = {host for text in named if (host := host_in(text)) is not None}
        self._proved: TTLCache[str, bool] = TTLCache(MAX_HOSTS, PROOF, clock)
        self._of_proved = Quota(OF_PROVED)
        self._of_unproved = Quota(Allowed(each=dials, all=1 << 40, seconds=PAUSE))
        self._interfaces: Sequence[Address] = ()
        self._looked = float("-inf")

    def reason(self, address: str) -> str | None:
        """Why an address (host:port, or a multiaddress) is never dialed; None if it may be."""
        host = host_in(address)
        if host is None or host in self._named:
            return None if host is not None else "it names no host"
        number = number_of(host)
        if number is None:
            return "it is a name, which could be made to mean any host"
        if number.is_multicast or number.is_unspecified or str(number) == "255.255.255.255":
            return "nobody can be there"
        if number.is_loopback:
            why = "it is a loopback address, and we are not reached over loopback"
            return None if self.local else why
        if number.is_global or self._is_near(number):
            return None
        return "it is a private address of a network that we are not in"

    def admit(self, addresses: Sequence[str], most: int = MAX_ADDRESSES) -> list[str]:
        """The addresses that may be dialed now, in their order. Counts them as dialed."""
        admitted: list[str] = []
        for address in addresses:
            if len(admitted) >= most:
                break
            if self.reason(address) is None and self._take(host_in(address) or ""):
                admitted.append(address)
        return admitted

    def reached(self, address: str) -> None:
        """A peer has proved to be at an address, by a handshake that only it can complete."""
        if (host := host_in(address)) is not None:
            self._proved[host] = True

    def refusal(self, addresses: Sequence[str]) -> str:
        """Why none of these addresses is dialed, in words."""
        for address in addresses:
            if (reason := self.reason(address)) is not None:
                return f"{address[:80]} is not dialed: {reason}"
        host = next((host for address in addresses if (host := host_in(address)) is not None), "")
        if host in self._proved:
            return f"{host} was dialed too often: it is tried again in a moment"
        return f"nobody has proved to be at {host} yet: it is tried again within minutes"

    def _take(self, host: str) -> bool:
        """Whether one more connection to a host is allowed; counts it."""
        number = number_of(host)
        is_ours = number is not None and (number.is_loopback or number in self._own_numbers())
        if host in self._named or is_ours:
            return True
        quota = self._of_proved if host in self._proved else self._of_unproved
        return quota.take(host, 1, self._clock())

    def _own_numbers(self) -> Sequence[Address]:
        if self._clock() - self._looked >= LOOK_EVERY:
            self._looked = self._clock()
            self._interfaces = [number for text in self._own() if (number := number_of(text))]
        return self._interfaces

    def _is_near(self, number: Address) -> bool:
        """Whether a private address belongs to the same site as one of ours."""
        for own in self._own_numbers():
            if own.version != number.version or own.is_global or own.is_loopback:
                continue
            # A provider's network, or a private overlay on the internet, has no smaller sites.
            site = _SAME_SITE[number.version] if number not in _CARRIER else _CARRIER.prefixlen
            if number in ipaddress.ip_network((own, site), strict=False):
                return True
        return False


def host_in(address: str) -> str | None:
    """The host in ``host:port`` or in a multiaddress, possibly a relay's; None if there is none."""
    if address.startswith("/"):
        _, kind, host, *_ = [*address.split("/"), "", ""]
        return _plain(host) if kind in ("ip4", "ip6", "dns", "dns4", "dns6") and host else None
    host = address.rpartition(":")[0].strip("[]")
    return _plain(host) if host else None


def places_of(addresses: Sequence[str], entry_points: Sequence[str]) -> tuple[str, ...]:
    """The places in a record: networks of its public addresses (/24 or /48), or else its relays'
    ids."""
    direct = [text for text in entry_points if CIRCUIT not in text]
    hosts = [
        number_of(host) for text in (*addresses, *direct) if (host := host_in(text)) is not None
    ]
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


def is_public(host: str) -> bool:
    """Whether an IP address is of the public internet; of one of IPv6 that leads to IPv4, both
    are."""
    number = number_of(host)
    if number is None or not number.is_global or number.is_multicast or number in _SITES_OWN:
        return False
    if number.version == 4:
        return True
    inner = [number.sixtofour, *(number.teredo or ())]
    if number in _TRANSLATED:
        inner.append(ipaddress.IPv4Address(int(number) & 0xFFFFFFFF))
    return all(one is None or one.is_global for one in inner)


def _plain(host: str) -> str:
    number = number_of(host)
    return str(number) if number is not None else host.lower().rstrip(".")


def number_of(host: str) -> Address | None:
    """The IP address in a text, of IPv4 also where IPv6 contains it; None for a name."""
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        return None
    return (number.ipv4_mapped or number) if number.version == 6 else number
