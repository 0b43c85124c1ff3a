"""How many seconds an exchange needs at this node, from what was measured of late. Pure: the time
comes in.

    limits   contents at the rates that the owner allows
    step     a capture waits for the end of an inner step
    work     what the trainer takes beyond that: coding, decoding, averaging
    line     what contents took at the rates that were measured, beyond ``limits``

Both ends tell their sum in their offers, and both add the larger to their deadlines.
"""

from collections import deque
from dataclasses import dataclass
from statistics import median

MOST = 16
"""Measurements that count."""
LIFE = 600.0
"""Seconds after which one is forgotten: a bad moment must not keep exchanges from ever being tried
again."""
STEPS = 8
"""The longest of so many last steps is what a capture may wait for."""


class Recent:
    """The last measurements of one quantity."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=MOST)

    def add(self, value: float, now: float) -> None:
        """Take in one more."""
        self._values.append((now, value))

    def usual(self, now: float) -> float | None:
        """Their median; None if there is none."""
        values = [value for since, value in self._values if now - since <= LIFE]
        return median(values) if values else None


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What one exchange needs; whole seconds are told."""

    limits: int = 0
    step: float = 0.0
    work: float = 0.0
    line: float = 0.0
    streams: int = 1
    """How many share the link."""

    @property
    def least(self) -> int:
        """What it takes in any case: an exchange that may not take so long is not begun."""
        return self.limits + int(self.step)

    def told(self, longest: float) -> int:
        """What an offer tells. What was only measured makes no exchange too long to be begun."""
        return max(
            self.least, min(int(longest), self.limits + int(self.step + self.work + self.line))
        )

    def hindrance(self, longest: float) -> str | None:
        """Why it can't be begun where one may take ``longest`` seconds, and what to do; None if it
        can."""
        if self.least <= longest:
            return None
        shared = f", which {self.streams} share," if self.streams > 1 else ""
        causes = [f"at the limits on traffic{shared}"] if self.limits else []
        causes += [f"with steps of {self.step:.0f} s"] if self.step >= 1 else []
        remedy = "--max-up and --max-down, or that" if self.limits else "that"
        return (
            f"{' and '.join(causes)} an exchange may take {self.least} s, and --exchange-deadline "
            f"allows {longest:.0f}: raise {remedy}"
        )
