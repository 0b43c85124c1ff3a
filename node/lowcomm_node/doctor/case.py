"""Everything that is known of a machine and its node, before it is judged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowcomm_node.dht.interface import Discovery
from lowcomm_node.doctor.machine import Machine
from lowcomm_node.doctor.sights import Names, Silence, Subject, Survey
from lowcomm_node.owner.settings import NodeSettings


@dataclass(frozen=True, kw_only=True)
class RunningNode:
    """What the doctor is shown of a node that runs."""

    settings: NodeSettings
    status: Mapping[str, Any]
    members: Sequence[Mapping[str, Any]]
    """Peers of the run, as ``peers`` tells them."""
    trouble: str
    """What it waits for, or its phase."""
    discovery: Discovery | None
    """None while it is not in the DHT."""
    entry_points: Sequence[str]
    """Where the peers of its run enter the DHT."""
    addresses: Sequence[str]
    """Where others are told to call it."""
    port: int | None
    """Of its Exchange service, once that listens."""
    certificate: bytes
    """DER; empty before."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Everything that is known of this machine and its node."""

    home: Path
    machine: Machine
    peers: tuple[str, ...] = ()
    """Where the swarm was looked for."""
    subject: Subject | None = None
    survey: Survey | None = None
    names: Names | None = None
    silence: tuple[Silence, ...] = ()
    """What answers where no peer does."""
    dht_peers: int | None = None
    """Peers of the DHT that are known; None if it was not entered."""
    runs: int | None = None
    """Runs that are published; None if that was not looked up."""
    trouble: str = ""
    """Why the swarm does not answer."""
    status: Mapping[str, Any] | None = None
    """Of the node that runs, as ``status`` tells it."""
    members: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    """Peers of the run, as ``peers`` tells them."""
    absent: str = ""
    """Why no node of this home answers, and what to do about it."""
    hangs: bool = False
    """Whether one runs all the same."""
    broken: str = ""
    """Why no node could start on this machine, such as a port that is taken."""
