"""What was seen of a machine, its network and its node, before any check. No I/O."""

import ipaddress
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from lowcomm_node.errors import ConfigError
from lowcomm_node.net.addresses import (
    EntryPoint,
    host_of,
    parse_entry_point,
    port_of,
    relay_of,
)
from lowcomm_node.net.measuring import Speed
from lowcomm_node.status.model import PeerStatus, Status
from lowcomm_protocol.peers.probes import Kind, Seen, Target


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Who is examined: our own ports."""

    peer_id: str
    """Of our libp2p."""
    hosts: tuple[str, ...]
    """IP addresses of this machine."""
    listens: tuple[str, ...]
    """Multiaddresses of our libp2p."""
    direct: int | None = None
    """The port at which others call the Exchange service; None if there is none."""
    certificate: bytes = b""
    """The certificate that the Exchange service shows, DER."""
    told: tuple[str, ...] = ()
    """Where others are told to call it, ``host:port``."""
    loopback: bool = False
    """Whether the node listens on loopback alone."""

    def port(self, kind: Kind, version: int = 4) -> int | None:
        """Our port of a kind, by version of IP; None if there is none."""
        if kind is Kind.DIRECT:
            return self.direct  # gRPC listens on both
        family, transport = f"/ip{version}/", "/tcp/" if kind is Kind.TCP else "/udp/"
        dials = (dial for dial in self.listens if dial.startswith(family) and transport in dial)
        return next((port_of(dial) for dial in dials if host_of(dial) in self.hosts), None)

    @property
    def dht_port(self) -> int | None:
        """The port of our libp2p over TCP: of IPv4, or of IPv6 where there is nothing else."""
        return self.port(Kind.TCP) or self.port(Kind.TCP, 6)

    @property
    def relays(self) -> tuple[str, ...]:
        """Peer ids of the relays at which we have a place."""
        return tuple(relay for dial in self.listens if (relay := relay_of(dial)) is not None)

    def targets(self, version: int = 4) -> tuple[Target, ...]:
        """All our ports, to be called."""
        return tuple(
            Target(kind, port, sha256(self.certificate).digest() if kind is Kind.DIRECT else b"")
            for kind in Kind
            if (port := self.port(kind, version)) is not None
        )


@dataclass(frozen=True)
class ObservedAddress:
    """The address from which one helper sees one port of ours come."""

    helper: str
    """IP address of the helper."""
    socket: str
    """Which port of ours; any name."""
    host: str
    port: int


@dataclass(frozen=True)
class Helper:
    """A peer that told how it sees us."""

    entry: EntryPoint
    host: str
    """Its IP address."""
    seen: Seen
    offset: float
    """Seconds that its clock is ahead of ours."""
    reached: Mapping[Kind, bool] = field(default_factory=dict)
    """Which of our ports it could call."""
    refused: str = ""
    """Why it did not try."""

    @property
    def sees(self) -> str:
        """The IP address from which it sees us; empty if there is none, as through a relay."""
        return host_of(self.seen.address) or ""

    @property
    def is_outside(self) -> bool:
        """Whether it sees us from outside of our own network."""
        return bool(self.sees) and is_public(self.sees)

    @property
    def dials(self) -> tuple[str, ...]:
        """Where it says that it is dialed, without a relay.

        A stranger wrote this, so only addresses that lead to itself count.
        """
        entries = [self.entry]
        for text in self.seen.entry_points:
            with suppress(ConfigError):
                entries.append(parse_entry_point(text))
        own = (one for one in entries if one.peer_id == self.entry.peer_id)
        return tuple(one.dial for one in own if one.relay is None)


@dataclass(frozen=True)
class UdpProbe:
    """Whether UDP gets out and in."""

    helper: str
    """Multiaddress of the helper that was called."""
    gets_out: bool
    observed: tuple[ObservedAddress, ...] = ()
    gets_in: bool | None = None
    """Whether a call comes in; None if nobody tried."""
    by_stranger: bool = False
    """Whether that call came from somebody who had not been called before."""
    refused: str = ""
    """Why nobody tried to call."""


@dataclass(frozen=True)
class LargePackets:
    """Whether more than a packet full gets through over TCP, where a few bytes do."""

    out: bool
    into: bool


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What others told of us."""

    subject: Subject
    helpers: tuple[Helper, ...] = ()
    silent: Mapping[str, str] = field(default_factory=dict)
    """Addresses that did not help, and why."""
    udp: UdpProbe | None = None
    packets: tuple[LargePackets, ...] = ()
    """Of each helper that is called over TCP."""
    speed: Speed | None = None
    no_speed: str = ""
    """Why the rate was not measured."""
    outward: str = ""
    """Our own address that packets leave from."""

    @property
    def reached(self) -> dict[Kind, bool]:
        """Which of our ports somebody could call, of those that somebody tried."""
        told = [entry for helper in self.helpers for entry in helper.reached.items()]
        return {kind: any(ok for its_kind, ok in told if its_kind is kind) for kind, _ in told}

    @property
    def observed(self) -> tuple[ObservedAddress, ...]:
        """Our addresses as all of them see them."""
        over_tcp = [helper for helper in self.helpers if "/tcp/" in helper.seen.address]
        places = ((helper.host, place_of(helper.seen.address)) for helper in over_tcp)
        own = (ObservedAddress(host, "tcp", *place) for host, place in places if place is not None)
        return (*own, *(self.udp.observed if self.udp is not None else ()))


@dataclass(frozen=True, kw_only=True)
class Observations:
    """What checks go by. What a check can look at without asking others, it looks at itself."""

    home: Path
    peers: tuple[str, ...] = ()
    """Where this home is told to look for the swarm."""
    asked: tuple[str, ...] = ()
    """Where it was looked for now."""
    survey: Survey | None = None
    dht_peers: int | None = None
    """Peers of the DHT that are known; None if it was not entered."""
    runs: int | None = None
    """Runs that are published; None if that was not looked up."""
    trouble: str = ""
    """Why the swarm does not answer."""
    status: Status | None = None
    """Of the node that runs, as ``status`` shows it."""
    members: Sequence[PeerStatus] = ()
    """Peers of the run, as ``peers`` shows them."""
    absent: str = ""
    """Why no node of this home answers, and what to do about it."""
    hangs: bool = False
    """Whether a node runs although it does not answer."""
    broken: str = ""
    """Why no node could start on this machine, such as a port in use."""


def is_public(host: str) -> bool:
    """Whether an IP address belongs to the internet."""
    return ipaddress.ip_address(host).is_global


def place_of(address: str) -> tuple[str, int] | None:
    """Host and port in a multiaddress that a stranger wrote; None if there can be none such."""
    host, port = host_of(address), port_of(address)
    return (host, port) if host and port is not None and 0 < port < 65536 else None
