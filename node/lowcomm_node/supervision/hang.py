"""Hang detection from the usual step time.

Pure: the time comes in. Only time in which the daemon itself was awake counts, so that a suspended
machine or a stopped process group makes nobody late; and of that only what other programs left to
the trainer, which steps back for them.
"""

from collections import deque

LEAST = 60.0
"""Seconds of silence that are never too long."""
FACTOR = 20
"""Times the longest usual silence; evaluation and saving are part of that."""
FIRST_STEP = 3600.0
"""Seconds: it may have to compile the model."""
_USUAL = 256
"""Silences that are remembered."""
_LONGEST_TICK = 5.0
"""Seconds between two ticks that count; whatever is longer, the daemon slept through."""


class Pace:
    """The pace of one life of a trainer. Needs a tick each second or so."""

    def __init__(self, now: float, least: float = LEAST) -> None:
        self._least = least
        self._awake = 0.0
        self._ticked = now
        self._waited = 0.0
        self._since: float | None = None
        """When it was heard last, or allowed to step; None while nothing is due from it."""
        self._learns = False
        """Whether the silence that goes on is one between two steps."""
        self._silences: deque[float] = deque(maxlen=_USUAL)

    def hold(self) -> None:
        """Nothing is due from it: it may not step, or is busy with what takes its time."""
        self._since = None
        self._learns = False

    def tick(self, now: float, waited: float = 0.0) -> None:
        """Let time pass while it may step.

        ``waited``: seconds in all for which other programs kept it from running.
        """
        passed = self._clock(now) - self._awake
        self._awake += passed - min(passed, max(0.0, waited - self._waited))
        self._waited = max(waited, self._waited)
        self._ticked = now
        if self._since is None:
            self._since = self._awake

    def stepped(self, now: float) -> None:
        """It has taken a step."""
        awake = self._clock(now)
        if self._since is not None and self._learns:
            self._silences.append(awake - self._since)
        self._since = awake
        self._learns = True

    @property
    def deadline(self) -> float:
        """Seconds of silence after which it hangs."""
        return max(self._least, FACTOR * max(self._silences)) if self._silences else FIRST_STEP

    def silence(self, now: float) -> float:
        """Seconds since it was heard, while something is due from it."""
        return 0.0 if self._since is None else self._clock(now) - self._since

    def _clock(self, now: float) -> float:
        """Seconds that we were awake and it could run."""
        return self._awake + min(now - self._ticked, _LONGEST_TICK)
