"""When a checkpoint is due: at every so many steps, or as soon after as the one before is written.

So a node that is killed loses the steps between two checkpoints and those that a write takes, on a slow disk, too. Pure: steps and
time come in. Where a save failed, the next one waits: five seconds, then twice as long each time.
"""

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 600.0


class Saving:
    """What is known of the saves of one trainer."""

    def __init__(self, every: int, steps: int = 0) -> None:
        """``every``: inner steps between two checkpoints; ``steps``: those in the newest one."""
        self._every, self._newest = every, steps
        self._writing = 0
        self._pause, self._not_before = 0.0, 0.0
        self.trouble: str | None = None
        """Why the last save failed; None if it went well."""

    def is_due(self, steps: int, now: float) -> bool:
        """Whether to save after so many steps."""
        if self._writing:
            return False
        if self.trouble is not None:
            return now >= self._not_before
        return steps // self._every > self._newest // self._every

    def began(self, steps: int) -> None:
        """A checkpoint of so many steps is being written."""
        self._newest = steps
        self._writing += 1

    def failed(self, reason: str, now: float) -> bool:
        """It could not be written; whether that is news."""
        self._writing -= 1
        is_news, self.trouble = self.trouble is None, reason
        self._pause = min(LONGEST_PAUSE, 2 * self._pause or FIRST_PAUSE)
        self._not_before = now + self._pause
        return is_news

    def succeeded(self) -> bool:
        """It is written; whether that is news, because the last one failed."""
        self._writing -= 1
        is_news, self.trouble = self.trouble is not None, None
        self._pause = 0.0
        return is_news
