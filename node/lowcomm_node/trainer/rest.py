"""Rest of the trainer, as its owner wants it: a share of the time, and while the card is hot."""

from collections.abc import Callable
from time import monotonic, sleep

from lowcomm_node.errors import ConfigError
from lowcomm_node.owner.settings import NodeSettings, flag_of
from lowcomm_node.system.accelerator import Card, open_card
from lowcomm_node.system.units import write_share

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
        clock: Callable[[], float] = monotonic,
        sleep: Callable[[float], None] = sleep,
    ) -> None:
        """``wait``: waits for a device that computes beside this thread."""
        self.share = 1.0
        """Of the time, above 0; 1 never rests."""
        self.wait, self.clock, self.sleep = wait, clock, sleep
        self._began = self._due = self._rested = 0.0

    def begin(self) -> None:
        """Take in that computing begins."""
        self._began = self.clock()

    def rest(self) -> None:
        """Rest for what was computed since ``begin`` or the last rest."""
        if self.share >= 1:
            return
        self.wait()
        now = self.clock()
        self._due += (now - self._began) * (1 / self.share - 1)
        if self._due >= LEAST_REST:
            self.sleep(self._due)
        self._began = self.clock()
        rested = self._began - now
        self._due = max(-MOST_CREDIT, self._due - rested)
        self._rested += rested

    def take_rested(self) -> float:
        """Seconds of rest since the last call."""
        rested, self._rested = self._rested, 0.0
        return rested


class CardLimits:
    """Temperature and power that an owner allows the card that trains."""

    def __init__(self, settings: NodeSettings, uuid: str) -> None:
        """``uuid``: of that card; empty for another device. Raises ConfigError."""
        self.share = 1.0
        """Of the time, in which a card takes the power on average that could not be limited."""
        self.unlimited = ""
        """Why it could not; empty if it is limited as wanted."""
        self.why_hot = ""
        """Why the card must cool; empty if it need not."""
        self._card: Card | None = None
        self._most, self._looked = settings.max_gpu_temp, -LOOK_SECONDS
        for name in ("max_gpu_temp", "gpu_power"):
            if getattr(settings, name) is not None:
                self._card = open_card(flag_of(name), uuid, "cuda" if uuid else "cpu")
        if self._card is not None and settings.gpu_power is not None:
            self._limit_power(self._card, settings.gpu_power, uuid)

    def _limit_power(self, card: Card, watts: int, uuid: str) -> None:
        flag = f"--gpu-power {watts}"
        try:
            fault = card.limit_power(watts)
            self.share = min(1.0, watts / card.power_limit())
        except ValueError as error:
            raise ConfigError(f"{flag}: {error}.") from None
        if fault:
            self.unlimited = (
                f"{flag} needs root ({fault}): `sudo nvidia-smi -i {uuid} -pl {watts}` sets it "
                f"before the node starts; now steps compute {write_share(self.share)} of the time "
                "instead"
            )

    def is_hot(self, now: float) -> bool:
        """Whether training must rest until the card has cooled; ``now``: monotonic seconds."""
        if self._card is None or self._most is None or now - self._looked < LOOK_SECONDS:
            return bool(self.why_hot)
        self._looked, degrees = now, self._card.temperature()
        cool = self._most - COOLED
        if degrees >= self._most and not self.why_hot:
            self.why_hot = f"the GPU has {degrees} °C: rests until it has cooled to {cool} °C"
        elif degrees <= cool:
            self.why_hot = ""
        return bool(self.why_hot)

    def free(self) -> None:
        """Give the card its power back."""
        if self._card is not None:
            self._card.free_power()
