"""Rest of the trainer, as its owner wants it: a share of the time, and while the card is hot."""

from collections.abc import Callable, Sequence
from time import monotonic, sleep

from lowcomm_node.errors import ConfigError
from lowcomm_node.node.messages import TrainingDevice
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
    """Temperature and power that an owner allows each card that trains."""

    def __init__(
        self, settings: NodeSettings | None = None, devices: Sequence[TrainingDevice] = ()
    ) -> None:
        """``devices``: all that train. Raises ConfigError."""
        self.share, self.unlimited = 1.0, ""
        """Part of the time to compute where power could not be limited, and why it could not."""
        self.why_hot = ""
        """Why a card must cool; empty if none need."""
        self._cards: dict[str, Card] = {}
        """By the names of their devices."""
        self._most, watts = (settings.max_gpu_temp, settings.gpu_power) if settings else (None,) * 2
        self._looked = -LOOK_SECONDS
        for flag, value in (("--max-gpu-temp", self._most), ("--gpu-power", watts)):
            for one in devices if value is not None else ():
                card = open_card(flag, one.gpu, "cuda" if one.gpu else "other")
                self._cards[one.name] = card
        if self._most is not None:
            self._hottest()  # it can be read, or the node ends here
        if watts is not None:
            self._limit_power(watts, [one.gpu for one in devices])

    def is_hot(self, now: float) -> bool:
        """Whether training must rest until all cards have cooled; ``now``: monotonic seconds."""
        if self._cards and self._most and now - self._looked >= LOOK_SECONDS:
            self._looked, cool = now, self._most - COOLED
            degrees, name = self._hottest()
            if degrees >= self._most and not self.why_hot:
                which = "the GPU" if len(self._cards) == 1 else name
                self.why_hot = f"{which} has {degrees} °C: rests until it has cooled to {cool} °C"
            elif degrees <= cool:
                self.why_hot = ""
        return bool(self.why_hot)

    def free(self) -> None:
        """Give the cards their power back."""
        for card in self._cards.values():
            card.free_power()

    def _hottest(self) -> tuple[int, str]:
        return max((card.temperature(), name) for name, card in self._cards.items())

    def _limit_power(self, watts: int, uuids: Sequence[str]) -> None:
        refused: list[str] = []
        for uuid, card in zip(uuids, self._cards.values(), strict=True):
            try:
                share, fault = card.limit_power(watts)
            except ConfigError:
                self.free()
                raise
            if fault:
                refused.append(uuid)
                self.share = min(self.share, share)
                self.unlimited = (
                    f"--gpu-power {watts} needs root ({fault}): `sudo nvidia-smi -i "
                    f"{','.join(refused)} -pl {watts}` before the start limits it; now steps "
                    f"compute {self.share:.0%} of the time instead"
                )
