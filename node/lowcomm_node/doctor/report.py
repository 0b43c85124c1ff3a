"""Findings: what ``lowcomm-node doctor`` reports, and its exit code."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Self

from lowcomm_node.errors import NoPeers, Unhealthy

UNREACHED = "dht"
"""The check whose fault means that nobody answers at all."""


class State(StrEnum):
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
    state: State
    value: str
    """What was found, for people."""
    remedy: str = ""
    """What to do, with this machine's own values; empty if there is nothing to do."""
    figures: Mapping[str, object] = field(default_factory=dict)
    """What was found, for programs."""

    def to_json(self) -> dict[str, Any]:
        """The form of ``--json`` and of the control API."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Self:
        """A finding of the control API; a newer release may add fields."""
        known = {entry.name: told[entry.name] for entry in fields(cls) if entry.name in told}
        return replace(cls(**known), state=State(told["state"]))


def exit_code(findings: Iterable[Finding]) -> int:
    """The exit code of the command: 0 ok, 4 unhealthy, 6 nobody answers."""
    faults = {finding.name for finding in findings if finding.state is State.FAULT}
    if UNREACHED in faults:
        return NoPeers.exit_code
    return Unhealthy.exit_code if faults else 0
