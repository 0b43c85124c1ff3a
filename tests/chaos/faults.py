"""Fault plans: what goes wrong, where, and at which passage of a peer in virtual time
(``virtual_chaos.py``). Seeded or scripted.

Nothing in the product knows of them, so they cost it nothing.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random


class Boundary(StrEnum):
    """Where something can go wrong."""

    FRAME = "frame"
    """A frame of a ``Swap``, as it is sent."""
    PIPE = "pipe"
    """A request to the trainer."""


class Kind(StrEnum):
    """What goes wrong."""

    DELAY = "delay"
    DROP = "drop"
    TRUNCATE = "truncate"
    CORRUPT = "corrupt"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    STALL = "stall"
    """Nothing passes any more, and nobody is told."""
    STOP = "stop"
    """The whole process stands still for a while (SIGSTOP, a closed lid)."""
    KILL = "kill"
    EXIT = "exit"
    OUT_OF_MEMORY = "out-of-memory"
    CLOCK_STEP = "clock-step"


TO_A_PROCESS = (Kind.STOP, Kind.KILL, Kind.EXIT, Kind.CLOCK_STEP)
POSSIBLE = {
    Boundary.FRAME: (
        Kind.DELAY, Kind.DROP, Kind.TRUNCATE, Kind.CORRUPT, Kind.DUPLICATE, Kind.REORDER,
        Kind.STALL, *TO_A_PROCESS,
    ),
    Boundary.PIPE: (Kind.DELAY, Kind.STALL, Kind.OUT_OF_MEMORY, *TO_A_PROCESS),
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    boundary: Boundary
    kind: Kind
    what: str = ""
    """Which passages count: the kind of a frame, the name of a request, ...; empty: all."""
    number: int = 0
    """At which of them, counted from 0."""
    seconds: float = 0.0
    """How long, or how far the clock is set forward."""


@dataclass(frozen=True)
class Plan:
    """What goes wrong at one peer."""

    faults: tuple[Fault, ...]

    @classmethod
    def seeded(
        cls, seed: int, passages: Sequence[tuple[Boundary, str]], count: int, seconds: float
    ) -> "Plan":
        """So many faults at random passages; the same seed gives the same plan."""
        random = Random(f"plan:{seed}")
        faults: list[Fault] = []
        for _ in range(count):
            boundary, what = random.choice(passages)
            kind = random.choice(POSSIBLE[boundary])
            faults.append(
                Fault(boundary, kind, what, random.randrange(3), random.uniform(0.0, seconds))
            )
        return cls(tuple(faults))


class Injector:
    """Counts passages, and tells when one goes wrong."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._passed = Counter[Fault]()
        self.fired: list[Fault] = []

    def due(self, boundary: Boundary, what: str) -> Fault | None:
        """What goes wrong at this passage, if anything."""
        found = None
        for fault in self._plan.faults:
            if fault.boundary is boundary and fault.what in ("", what):
                if self._passed[fault] == fault.number and found is None:
                    found = fault
                self._passed[fault] += 1
        if found is not None:
            self.fired.append(found)
        return found
