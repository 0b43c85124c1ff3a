"""When a checkpoint begins, and when training waits for one: a kill costs one interval at most.

A checkpoint counts once it is on the disk. The next one therefore begins before the interval ends,
as early as the last write suggests. If the write takes longer all the same, training waits for it.
Pure: steps and time come in.

    steps   |------ every ------|
            ^ newest on disk    ^ no further while one is being written
                      ^ begun: twice the last write ahead of the end, half an interval at most

After a failed save the next one waits: five seconds, then twice as long each time. Training waits
for none of them.
"""

from collections import deque

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 600.0
PATIENCE = 30.0
"""Seconds that training waits for one write; then it goes on: a disk that hangs ends no
training."""
HANGS = f"the disk has not taken one within {PATIENCE:.0f} s."


class Saving:
    """What is known of the saves of one trainer."""

    def __init__(self, every: int, steps: int = 0) -> None:
        """``every``: inner steps that may be lost; ``steps``: those in the newest checkpoint."""
        self._every = every
        self._written = steps
        self._ahead = most_ahead(every)
        self._writing = deque[int]()
        """Steps in those that are being written, in the order in which they are."""
        self._held_since: float | None = None
        self._pause = 0.0
        self._not_before = 0.0
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
        """Whether training waits: with one more step a kill would lose more than an interval."""
        if not self._writing or self.trouble is not None or steps - self._written < self._every:
            self._held_since = None
            return False
        if self._held_since is None:
            self._held_since = now
        if now - self._held_since >= PATIENCE:
            self.trouble = HANGS
            self._held_since = None
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
        """The one begun first is written; whether that is news, because the last one failed.

        ``steps`` are done by now.
        """
        self._written = self._writing.popleft()
        meanwhile = self._every if self.is_holding else steps - self._written
        self._ahead = min(most_ahead(self._every), 2 * meanwhile + 1)
        is_news, self.trouble = self.trouble is not None, None
        self._pause = 0.0
        return is_news


def most_ahead(every: int) -> int:
    """Steps before the end of an interval at which a checkpoint is begun at the earliest."""
    return (every + 1) // 2
