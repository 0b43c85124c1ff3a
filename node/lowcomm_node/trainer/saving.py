"""When a checkpoint is begun, and when training waits for one: a node that is killed loses the steps of one interval at most.

A checkpoint counts once it is on the disk, so the next one is begun as long before the interval is over as a write takes, as far
as the last one tells; where it takes longer all the same, training stands still until it is done. Pure: steps and time come in.

    steps   |------ every ------|
            ^ newest on disk    ^ no further while one is being written
                      ^ begun: ahead of the end by twice what the last write took, half an interval at most

Where a save failed, the next one waits: five seconds, then twice as long each time; and training waits for none of them.
"""

from collections import deque

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 600.0
PATIENCE = 30.0
"""Seconds that training stands still for one write. It goes on after that: a disk that hangs ends no training."""
HANGS = f"the disk has not taken one within {PATIENCE:.0f} s."


class Saving:
    """What is known of the saves of one trainer."""

    def __init__(self, every: int, steps: int = 0) -> None:
        """``every``: inner steps that may be lost; ``steps``: those in the newest checkpoint."""
        self._every, self._written = every, steps
        self._ahead = most_ahead(every)
        self._writing = deque[int]()
        """Steps in those that are being written, in the order in which they are."""
        self._held_since: float | None = None
        self._pause, self._not_before = 0.0, 0.0
        self.trouble: str | None = None
        """Why the last save failed, or training waits for it no longer; None if all is well."""

    def is_due(self, steps: int, now: float) -> bool:
        """Whether to save after so many steps."""
        if self._writing:
            return False
        if self.trouble is not None:
            return now >= self._not_before
        return steps - self._written >= max(1, self._every - self._ahead)

    @property
    def is_holding(self) -> bool:
        """Whether training waited when that was last asked."""
        return self._held_since is not None

    def holds(self, steps: int, now: float) -> bool:
        """Whether training waits, after so many steps: one more, and a kill would lose more than an interval."""
        if not self._writing or self.trouble is not None or steps - self._written < self._every:
            self._held_since = None
            return False
        if self._held_since is None:
            self._held_since = now
        if now - self._held_since >= PATIENCE:
            self.trouble, self._held_since = HANGS, None
        return self.is_holding

    def began(self, steps: int) -> None:
        """A checkpoint of so many steps is being written."""
        self._writing.append(steps)

    def failed(self, reason: str, now: float) -> bool:
        """The one begun first could not be written; whether that is news."""
        self._writing.popleft()
        is_news, self.trouble = self.trouble in (None, HANGS), reason
        self._pause = min(LONGEST_PAUSE, 2 * self._pause or FIRST_PAUSE)
        self._not_before = now + self._pause
        return is_news

    def succeeded(self, steps: int) -> bool:
        """The one begun first is written, and so many steps are done by now; whether that is news, because the last one failed."""
        self._written = self._writing.popleft()
        meanwhile = self._every if self.is_holding else steps - self._written
        self._ahead = min(most_ahead(self._every), 2 * meanwhile + 1)
        is_news, self.trouble = self.trouble is not None, None
        self._pause = 0.0
        return is_news


def most_ahead(every: int) -> int:
    """Steps before the end of an interval at which a checkpoint is begun at the earliest."""
    return (every + 1) // 2
