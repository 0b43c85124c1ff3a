"""What is examined, and what others told of it. No I/O."""

from dataclasses import dataclass
from hashlib import sha256

from lowcomm_node.doctor.nat import Sight, is_public
from lowcomm_node.libp2p.multiaddress import EntryPoint, host_of, port_of, relay_of
from lowcomm_node.probing.measuring import Speed
from lowcomm_protocol.peers.probes import Kind, Seen, Target

LIBP2P = b"/multistream/"
"""What libp2p says first, to whoever calls."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Who is examined: our ports."""

    peer_id: str
    """Of our libp2p."""
    hosts: tuple[str, ...]
    """IP addresses of this machine."""
    listens: tuple[str, ...]
    """Multiaddresses of our libp2p."""
    direct: int | None = None
    """Port at which others are told to call the Exchange service; None if there is none."""
    certificate: bytes = b""
    """What answers there, DER."""
    told: tuple[str, ...] = ()
    """``host:port`` that others are told."""
    loopback: bool = False
    """Whether the node listens on loopback alone."""

    def port(self, kind: Kind, version: int = 4) -> int | None:
        """Which of our ports is meant, by version of IP; None if there is none."""
        if kind is Kind.DIRECT:
            return self.direct  # gRPC listens on both
        family, transport = f"/ip{version}/", "/tcp/" if kind is Kind.TCP else "/udp/"
        listens = (dial for dial in self.listens if dial.startswith(family) and transport in dial)
        return next((port_of(dial) for dial in listens if host_of(dial) in self.hosts), None)

    @property
    def dht_port(self) -> int | None:
        """Of our libp2p over TCP: of IPv4, or of IPv6 where there is nothing else; None if there is none."""
        return self.port(Kind.TCP) or self.port(Kind.TCP, 6)

    @property
    def relays(self) -> tuple[str, ...]:
        """Peer ids of the relays at which we have a place."""
        return tuple(relay for dial in self.listens if (relay := relay_of(dial)) is not None)

    def targets(self, version: int = 4) -> tuple[Target, ...]:
        """All of them, to be called."""
        return tuple(
            Target(kind, port, sha256(self.certificate).digest() if kind is Kind.DIRECT else b"")
            for kind in Kind
            if (port := self.port(kind, version)) is not None
        )


@dataclass(frozen=True)
class Helper:
    """Somebody who told how he sees us."""

    entry: EntryPoint
    host: str
    """His IP address."""
    seen: Seen
    offset: float
    """Seconds that his clock is ahead of ours."""
    reached: tuple[tuple[Kind, bool], ...] = ()
    """Which of our ports he could call."""
    refused: str = ""
    """Why he did not try."""

    @property
    def is_outside(self) -> bool:
        """Whether he sees us from outside of our own network."""
        return bool(self.sees) and is_public(self.sees)

    @property
    def sees(self) -> str:
        """The IP address that he sees; empty if he sees none."""
        return host_of(self.seen.address) or ""


@dataclass(frozen=True)
class Scouting:
    """What a scout found out over UDP, or over IPv6."""

    gets_out: bool
    sights: tuple[Sight, ...] = ()
    gets_in: bool | None = None
    """Whether a call comes in; None if nobody tried."""
    by_stranger: bool = False
    """Whether somebody tried whom the scout had not called before."""
    reached: tuple[tuple[Kind, bool], ...] = ()
    """Of IPv6: which of our own ports could be called."""
    helper: str = ""
    """Whom the scout called, as a multiaddress."""


@dataclass(frozen=True)
class Names:
    """Whether names can be resolved."""

    used: bool
    """Whether this node uses them; else one was tried that always exists."""
    tried: tuple[tuple[str, str], ...]
    """Each name, and why it can't be resolved; empty if it can."""
    servers: tuple[str, ...]
    """Name servers that this machine asks."""


@dataclass(frozen=True)
class Silence:
    """What answers over plain TCP at the host of somebody who does not answer as a peer."""

    host: str
    port: int
    is_its_own: bool
    """Whether it is the port of the peer, not that of the web."""
    reply: bytes
    """To a browser's question; the beginning."""


@dataclass(frozen=True)
class Packets:
    """Whether more than a packet full gets through over TCP, where a few bytes do."""

    entry: EntryPoint
    out: bool
    into: bool


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What others told."""

    helpers: tuple[Helper, ...] = ()
    silent: tuple[tuple[str, str], ...] = ()
    """Addresses that did not help, and why."""
    udp: Scouting | None = None
    ipv6: Scouting | None = None
    speed: Speed | None = None
    no_speed: str = ""
    """Why the rate was not measured."""
    packets: tuple[Packets, ...] = ()
    """Of each helper that is called over TCP."""
    outward: str | None = None
    """Our own address that packets leave from."""

    @property
    def reached(self) -> dict[Kind, bool]:
        """Which of our ports somebody could call, of those that somebody tried."""
        told = [entry for helper in self.helpers for entry in helper.reached]
        return {kind: any(ok for its_kind, ok in told if its_kind is kind) for kind, _ in told}

    @property
    def sights(self) -> tuple[Sight, ...]:
        """How all of them see us."""
        ours = (Sight(helper.host, "tcp", *place) for helper in self.helpers if (place := _tcp_place(helper)))
        return (*ours, *(self.udp.sights if self.udp is not None else ()))


def place_of(address: str) -> tuple[str, int] | None:
    """Host and port in a multiaddress that a stranger wrote; None if it has none that there can be."""
    host, port = host_of(address), port_of(address)
    return (host, port) if host is not None and port is not None and 0 < port < 65536 else None


def _tcp_place(helper: Helper) -> tuple[str, int] | None:
    return place_of(helper.seen.address) if "/tcp/" in helper.seen.address else None
