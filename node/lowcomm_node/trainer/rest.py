"""Rest of the trainer, as its owner wants it: a share of the time, and while the card is hot."""

from collections.abc import Callable
from time import monotonic, sleep

from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.system.accelerator import Card, open_card

LEAST_REST = 0.005
"""Seconds; shorter rests add up first, as no timer keeps them."""
MOST_CREDIT = 1.0
"""Seconds that a rest which took too long shortens later ones."""
COOLED = 5
"""Degrees below the limit to which a card cools before training goes on."""
LOOK_SECONDS = 1.0
"""Between two looks at the temperature."""


class Duty:
    """Rests so that computing takes a share of the time."""

    def __init__(
        self,
        wait: Callable[[], None] = lambda: None,
        waited: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = monotonic,
        sleep: Callable[[float], None] = sleep,
    ) -> None:
        """``wait``: waits for a device that computes beside this thread; ``waited``: seconds in all
        for which other programs kept this process from running, which count as none."""
        self.share = 1.0
        """Part of the time, above 0; 1 never rests."""
        self.wait, self.waited, self.clock, self.sleep = wait, waited, clock, sleep
        self._began = self._due = self._kept = self.rested = 0.0

    def begin(self) -> None:
        """Take in that computing begins."""
        self._began = self._now() if self.share < 1 else 0.0

    def rest(self) -> None:
        """Rest for what was computed since ``begin`` or the last rest."""
        if self.share >= 1:
            return
        self.wait()
        now = self._now()
        self._due += (now - self._began) * (1 / self.share - 1)
        if self._due >= LEAST_REST:
            self.sleep(self._due)
        self._began = self._now()
        rested = self._began - now
        self._due = max(-MOST_CREDIT, self._due - rested)
        self.rested += rested

    def _now(self) -> float:
        self._kept = max(self._kept, self.waited())
        return self.clock() - self._kept


class CardLimits:
    """Temperature and power that an owner allows the card that trains."""

    def __init__(self, settings: NodeSettings | None = None, uuid: str = "") -> None:
        """``uuid``: of that card; empty for another device. Raises ConfigError."""
        self.share, self.unlimited = 1.0, ""
        """Part of the time to compute where power could not be limited, and why it could not."""
        self.why_hot = ""
        """Why the card must cool; empty if it need not."""
        self._card: Card | None = None
        self._most, watts = (settings.max_gpu_temp, settings.gpu_power) if settings else (None,) * 2
        self._looked = -LOOK_SECONDS
        for flag, value in (("--max-gpu-temp", self._most), ("--gpu-power", watts)):
            if value is not None:
                self._card = open_card(flag, uuid, "cuda" if uuid else "other")
        if self._card is not None and self._most is not None:
            self._card.temperature()  # it can be read, or the node ends here
        if self._card is not None and watts is not None:
            self.share, fault = self._card.limit_power(watts)
            self.unlimited = fault and (
                f"--gpu-power {watts} needs root ({fault}): `sudo nvidia-smi -i {uuid} -pl {watts}`"
                f" before the start limits it; now steps compute {self.share:.0%} of the time "
                "instead"
            )

    def is_hot(self, now: float) -> bool:
        """Whether training must rest until the card has cooled; ``now``: monotonic seconds."""
        if self._card and self._most and now - self._looked >= LOOK_SECONDS:
            self._looked, degrees, cool = now, self._card.temperature(), self._most - COOLED
            if degrees >= self._most and not self.why_hot:
                self.why_hot = f"the GPU has {degrees} °C: rests until it has cooled to {cool} °C"
            elif degrees <= cool:
                self.why_hot = ""
        return bool(self.why_hot)

    def free(self) -> None:
        """Give the card its power back."""
        if self._card is not None:
            self._card.free_power()
