"""When a checkpoint is due: every so many steps, but not while the disk is full, nor while the last one is being written.

Pure: steps and time come in. Where a save failed, the next one waits: five seconds, then twice as long each time.
"""

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 600.0


class Saving:
    """What is known of the saves of one trainer."""

    def __init__(self, every: int) -> None:
        """``every``: inner steps between two checkpoints."""
        self._every = every
        self._writing = 0
        self._pause, self._not_before = 0.0, 0.0
        self.trouble: str | None = None
        """Why the last save failed; None if it went well."""

    def is_due(self, steps: int, now: float) -> bool:
        """Whether to save after so many steps."""
        return steps % self._every == 0 and not self._writing and (self.trouble is None or now >= self._not_before)

    def began(self) -> None:
        """A checkpoint is being written."""
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
