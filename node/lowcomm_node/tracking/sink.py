"""What a sink is, and what it is told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from lowcomm_node.errors import ConfigError
from lowcomm_node.sync.records import ExchangeEnded
from lowcomm_node.system.command import install

Setting = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """The run and the node that are followed."""

    run: str
    """Name of the run."""
    run_id: str
    fingerprint: str
    peer_id: str
    node: str
    """What the node is called."""
    settings: Mapping[str, Setting]
    """Of the specification as it was signed, by names such as ``sync.method``."""
    step_tokens: int | None = None
    """Tokens of an inner step, where the specification is known."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Figures of one moment."""

    time: float
    """Unix seconds."""
    number: int
    """Its place among all points of this node, from 0."""
    step: int
    """Swarm step."""
    tokens: int | None
    """That the node had trained on."""
    values: Mapping[str, float]
    """By the names of ``names.py``."""


@dataclass(frozen=True)
class Batch:
    """What comes next of a journal, in the order of time."""

    points: Sequence[Point] = ()
    exchanges: Sequence[ExchangeEnded] = ()

    def __bool__(self) -> bool:
        return bool(self.points or self.exchanges)


Kept = Mapping[str, Any]
"""What a sink wants to know at its next start; JSON."""


class Sink(Protocol):
    """Where a journal is followed to.

    Its class is made with the target that the owner names, or None, and raises ConfigError for one
    that can't be."""

    target: str
    """Where it writes, in words that hold no secret."""
    takes: str
    """What it takes of a batch: ``points`` or ``exchanges``."""

    def open(self, tracked: Tracked, kept: Kept) -> None:
        """Begin, or go on where ``kept`` was. Raises ConfigError, RetryLater."""
        ...

    def write(self, batch: Batch) -> Kept:
        """Deliver all of it; what to keep. Raises RetryLater if nothing may have arrived."""
        ...

    def close(self) -> None:
        """Nothing more comes; what was written is delivered."""
        ...


@dataclass
class Library:
    """A library that an extra brings."""

    extra: str
    name: str
    modules: dict[str, Any] = field(default_factory=dict[str, Any])

    def module(self, name: str) -> Any:
        """Import a part of it. Raises ConfigError, which names the extra."""
        try:
            return import_module(name)
        except ImportError as error:
            if (error.name or "").partition(".")[0].startswith("lowcomm"):
                raise
            raise ConfigError(
                f"The library {self.name} is needed here ({error}): {install(f'[{self.extra}]')}."
            ) from None
