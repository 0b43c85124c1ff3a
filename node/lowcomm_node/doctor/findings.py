"""Findings, and what they go by: what was seen of a machine, its network and its node. No I/O."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from lowcomm_node.errors import NoPeers, Unhealthy
from lowcomm_node.net.addresses import EntryPoint, host_of, port_of, relay_of
from lowcomm_node.net.targets import is_public
from lowcomm_node.status.model import PeerStatus, Status
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.probes import ProbeKind, Seen

UNREACHED = "dht"
"""The check whose fault means that no peer answers at all."""


class Severity(StrEnum):
    """How good a finding is."""

    OK = "ok"
    WARNING = "warning"
    """It works, but worse than it could."""
    FAULT = "fault"
    """It does not work."""
    UNKNOWN = "unknown"
    """It could not be looked at; the remedy says how it can."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    state: Severity
    value: str
    """What was found, for people."""
    remedy: str = ""
    """What to do, with this machine's own values; empty if there is nothing to do."""
    figures: Mapping[str, object] = field(default_factory=dict)
    """What was found, for programs."""


def exit_code(findings: Iterable[Finding]) -> int:
    """The exit code of the command: 0 ok, 4 unhealthy, 6 if no peer answers."""
    faults = {finding.name for finding in findings if finding.state is Severity.FAULT}
    if UNREACHED in faults:
        return NoPeers.exit_code
    return Unhealthy.exit_code if faults else 0


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Our own ports, which others are asked to call."""

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
    announced: tuple[str, ...] = ()
    """Where others shall call it, ``host:port``."""

    def port(self, kind: ProbeKind, version: int = 4) -> int | None:
        """Our port of a kind, by version of IP; None if there is none."""
        if kind is ProbeKind.DIRECT:
            return self.direct  # gRPC listens on both
        family, transport = f"/ip{version}/", "/tcp/" if kind is ProbeKind.TCP else "/udp/"
        dials = (dial for dial in self.listens if dial.startswith(family) and transport in dial)
        return next((port_of(dial) for dial in dials if host_of(dial) in self.hosts), None)

    @property
    def dht_port(self) -> int | None:
        """The port of our libp2p over TCP: of IPv4, or of IPv6 where there is nothing else."""
        return self.port(ProbeKind.TCP) or self.port(ProbeKind.TCP, 6)

    @property
    def relays(self) -> tuple[str, ...]:
        """Peer ids of the relays at which we have a place."""
        return tuple(relay for dial in self.listens if (relay := relay_of(dial)) is not None)

    def targets(self, version: int = 4) -> tuple[pb.Target, ...]:
        """All our ports, to be called."""
        shown = {ProbeKind.DIRECT: sha256(self.certificate).digest()}
        return tuple(
            pb.Target(kind=kind.value, port=port, certificate=shown.get(kind))
            for kind in ProbeKind
            if (port := self.port(kind, version)) is not None
        )


class ObservedAddress(NamedTuple):
    """The address from which a helper sees one port of ours come."""

    socket: str
    """Our port: `tcp` or `udp`."""
    host: str
    port: int


@dataclass(frozen=True)
class Helper:
    """A peer that has said how it sees us."""

    entry: EntryPoint
    host: str
    """Its IP address."""
    seen: Seen
    offset: float
    """Seconds that its clock is ahead of ours."""
    reached: Mapping[ProbeKind, bool] = field(default_factory=dict)
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
    def is_over_udp(self) -> bool:
        """Whether our connection to it is over UDP, which libp2p prefers."""
        return "/udp/" in self.seen.address

    @property
    def offers_udp(self) -> bool:
        """Whether it says that it can be dialed over UDP."""
        return any("/udp/" in text for text in (self.entry.dial, *self.seen.entry_points))


@dataclass(frozen=True, kw_only=True)
class Survey:
    """How others see us."""

    subject: Subject
    helpers: tuple[Helper, ...] = ()
    silent: Mapping[str, str] = field(default_factory=dict)
    """Addresses that did not help, and why."""
    outward: str = ""
    """Our own address that packets leave from."""

    @property
    def reached(self) -> dict[ProbeKind, bool]:
        """Which of our ports any helper could call, of those that were tried."""
        tried = [entry for helper in self.helpers for entry in helper.reached.items()]
        return {kind: any(ok for its_kind, ok in tried if its_kind is kind) for kind, _ in tried}

    @property
    def observed(self) -> tuple[ObservedAddress, ...]:
        """Our addresses as all of them see them."""
        return tuple(
            ObservedAddress("udp" if helper.is_over_udp else "tcp", *place)
            for helper in self.helpers
            if (place := place_of(helper.seen.address)) is not None
        )


@dataclass(frozen=True, kw_only=True)
class Observations:
    """What checks go by. What a check can look at without asking others, it looks at itself."""

    home: Path
    peers: tuple[str, ...] = ()
    """Entry points that this home is set to."""
    survey: Survey | None = None
    dht_peers: int | None = None
    """Peers of the DHT that are known; None if it was not entered."""
    runs: int | None = None
    """Runs that are published; None if that was not looked up."""
    trouble: str = ""
    """Why the swarm does not answer."""
    status: Status | None = None
    """Status of the running node, as ``status`` shows it."""
    members: Sequence[PeerStatus] = ()
    """Peers of the run, as ``peers`` shows them."""
    absent: str = ""
    """Why no node of this home answers, and what to do about it."""
    hangs: bool = False
    """Whether a node runs although it does not answer."""
    broken: str = ""
    """Why no node could start on this machine, such as a port in use."""


def place_of(address: str) -> tuple[str, int] | None:
    """Host and port in a stranger's multiaddress; None if they can't be an address."""
    host, port = host_of(address), port_of(address)
    return (host, port) if host and port is not None and 0 < port < 65536 else None
