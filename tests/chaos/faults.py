"""Fault plans: what goes wrong, where, and at which passage. Seeded, scripted, plain JSON.

    Plan ──► virtual_chaos.py   peers in virtual time: streams, trainers, clocks
         └─► faulty.py          processes: DHT, calls, frames, snapshots, trainer, disk, clock

Nothing in the product knows of them, so they cost it nothing.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from random import Random


class Boundary(StrEnum):
    """Where something can go wrong."""

    DHT = "dht"
    """A record that is published or looked up."""
    DIAL = "dial"
    """A call of another peer."""
    FRAME = "frame"
    """A frame of a ``Swap``, as it is sent."""
    FETCH = "fetch"
    """A chunk of a snapshot, as it is sent."""
    PIPE = "pipe"
    """A request to the trainer."""
    DISK = "disk"
    """A write that is forced to the disk."""


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
    NO_SPACE = "no-space"
    CLOCK_STEP = "clock-step"


ON_THE_WAY = (
    Kind.DELAY,
    Kind.DROP,
    Kind.TRUNCATE,
    Kind.CORRUPT,
    Kind.DUPLICATE,
    Kind.REORDER,
    Kind.STALL,
)
"""What can happen to a message."""
TO_A_PROCESS = (Kind.STOP, Kind.KILL, Kind.EXIT, Kind.CLOCK_STEP)
POSSIBLE = {
    Boundary.DHT: (Kind.DELAY, Kind.DROP, Kind.TRUNCATE, Kind.CORRUPT, Kind.STALL, *TO_A_PROCESS),
    Boundary.DIAL: (Kind.DELAY, Kind.DROP, Kind.STALL, *TO_A_PROCESS),
    Boundary.FRAME: (*ON_THE_WAY, *TO_A_PROCESS),
    Boundary.FETCH: (*ON_THE_WAY, *TO_A_PROCESS),
    Boundary.PIPE: (Kind.DELAY, Kind.STALL, Kind.OUT_OF_MEMORY, *TO_A_PROCESS),
    Boundary.DISK: (Kind.DELAY, Kind.NO_SPACE, *TO_A_PROCESS),
}


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

    def to_json(self) -> str:
        """For the command line of a process."""
        return json.dumps([asdict(fault) for fault in self.faults])

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The counterpart of ``to_json``."""
        return cls(
            tuple(
                Fault(Boundary(one["boundary"]), Kind(one["kind"]), *list(one.values())[2:])
                for one in json.loads(text)
            )
        )

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
