"""Findings: what ``lowcomm-node doctor`` tells, for people and for programs."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from lowcomm_node.errors import NoPeers, Unhealthy

UNREACHED = "dht"
"""The finding whose fault means that nobody answers at all."""


class State(StrEnum):
    """How good a finding is."""

    OK = "ok"
    WARNING = "warning"
    """It works, but worse than it could."""
    FAULT = "fault"
    """It does not work."""
    UNKNOWN = "unknown"
    """It could not be looked at; the remedy says how it can."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: State
    value: str
    """What was found, in words."""
    remedy: str = ""
    """What to do, with this machine's own values; empty where there is nothing to do."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The same for a program."""

    def to_json(self) -> dict[str, Any]:
        """As ``--json`` and the control API tell it."""
        return asdict(self)


def read_finding(told: Mapping[str, Any]) -> Finding:
    """A finding that the control API has told."""
    known = {
        name: told[name] for name in Finding.__dataclass_fields__ if name in told
    }  # its release may be newer than ours
    return Finding(**{**known, "state": State(told["state"])})


def exit_code(findings: Iterable[Finding]) -> int:
    """What the command ends with: 0 ok, 4 unhealthy, 6 nobody answers."""
    faults = {finding.name for finding in findings if finding.state is State.FAULT}
    if UNREACHED in faults:
        return NoPeers.exit_code
    return Unhealthy.exit_code if faults else 0
