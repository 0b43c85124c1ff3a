"""Seconds that a test moves on, in the place of a clock."""


class Clock:
    """What ``time`` or ``monotonic`` would tell."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
