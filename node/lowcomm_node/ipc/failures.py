"""Retry policy for a trainer that fails: another try after a pause, or the end.

Pure: failures and steps come in. A failure is forgiven once the trainer is one checkpoint interval
beyond the step where it failed. A trainer that makes no progress between failures is given up.
"""

from dataclasses import dataclass
from enum import StrEnum

MOST = 5
"""Failures in a row after which the node leaves."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before the trainer is started again; twice as long each time."""


class Kind(StrEnum):
    """What went wrong with a trainer."""

    DIED = "died"
    HUNG = "hung"
    MEMORY = "memory"
    DIVERGED = "diverged"
    UNFIT = "unfit"
    ERROR = "error"


_REMEDIES = {
    Kind.DIED: "see what it told last in the log above",
    Kind.HUNG: "see whether the GPU's driver still answers (nvidia-smi), or restart the machine",
    Kind.MEMORY: "free memory of that device, raise --max-memory or --max-vram where you set it, "
    "choose another --device, or take part from a larger machine",
    Kind.DIVERGED: "the run's learning rate is too high for it: tell its creator",
    Kind.UNFIT: "correct that",
    Kind.ERROR: "see the log above",
}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One end of a trainer that nobody asked for."""

    kind: Kind
    reason: str
    """A sentence."""
    step: int
    """Inner steps of this replica that were done by then."""


class Failures:
    """Those that are not forgiven yet."""

    def __init__(self, margin: int) -> None:
        """``margin``: steps between two checkpoints."""
        self._margin = margin
        self._unforgiven: list[Failure] = []
        self._has_stepped = False

    @property
    def count(self) -> int:
        """Failures in a row."""
        return len(self._unforgiven)

    def stepped(self, steps: int) -> None:
        """Take in how many inner steps are done."""
        self._has_stepped = True
        furthest = max((failure.step for failure in self._unforgiven), default=0)
        if steps >= furthest + self._margin:
            self._unforgiven.clear()

    def failed(self, failure: Failure) -> float | None:
        """Count a failure; the seconds until the next try, or None where no try could help."""
        self._unforgiven.append(failure)
        same = sum(one.kind is failure.kind for one in self._unforgiven)
        if self.count >= MOST or same >= self._most(failure.kind):
            return None
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (self.count - 1))

    def _most(self, kind: Kind) -> int:
        """Failures of one kind that are enough."""
        if kind is Kind.UNFIT:
            return 1
        # To diverge once can be bad luck with text or partners; twice, the second time from one
        # checkpoint back, is the run's fault.
        if kind is Kind.DIVERGED:
            return 2
        # A trainer that never stepped never fitted; otherwise another program may have taken
        # memory.
        if kind is Kind.MEMORY and not self._has_stepped:
            return 2
        return MOST

    def farewell(self) -> str:
        """Why the node leaves, and what its owner can do."""
        last = self._unforgiven[-1]
        times = f"{self.count} times in a row, the last time " if self.count > 1 else ""
        diverged = last.kind is Kind.DIVERGED
        newest = "one before those that it diverged from" if diverged else "newest"
        return (
            f"The trainer failed {times}at step {last.step}: {last.reason.rstrip('.')}; "
            f"{_REMEDIES[last.kind]}. The checkpoints are intact: `lowcomm-node join` goes on from "
            f"the {newest}."
        )
