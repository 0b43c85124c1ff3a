"""Whether the node may train now. Looks at clock and machine, and keeps pauses on disk."""

import asyncio
import json
import time as clock
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from math import isfinite
from pathlib import Path
from time import time

from lowcomm_node.errors import ConfigError
from lowcomm_node.owner.idle import IdleDetector
from lowcomm_node.owner.rules import FOREVER, Hold, MachineUse, Rule, Rules, holds
from lowcomm_node.owner.schedule import Schedule
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.storage.files import write_atomic
from lowcomm_node.system.tasks import Enduring, Warn

LOOK_EVERY = 5.0
NOT_LOOKED = "nobody looks at the use and the battery of this machine"
_ENDLESS = {"until": None}


def _elapsed() -> float:
    """Seconds that go on while the machine sleeps, and that no change of its clock moves."""
    return clock.clock_gettime(getattr(clock, "CLOCK_BOOTTIME", clock.CLOCK_MONOTONIC))


class Availability:
    """Whether this node may train now: ``hold`` says so.

    ``run`` keeps ``hold`` up to date; ``pause`` and ``resume`` update it at once.
    """

    def __init__(
        self,
        rules: Rules,
        file: Path,
        look: Callable[[], MachineUse],
        clock: Callable[[], float] = time,
        elapsed: Callable[[], float] = _elapsed,
    ) -> None:
        """``file`` keeps the owner's pause over restarts. Raises ConfigError if it is damaged."""
        self._rules = rules
        self._file = file
        self._look = look
        self._clock = clock
        self._elapsed = elapsed
        left = _read(file, clock())
        self._pause_ends = None if left is None else elapsed() + left
        self._overruled: set[Rule] = set()
        self.hold: Hold | None = None
        """Why it may not train; None if it may."""
        self._held = asyncio.Event()
        self._free = asyncio.Event()
        self._machine = MachineUse()
        with Enduring(NOT_LOOKED):
            self._machine = look()
        self.update()

    @classmethod
    def of(cls, settings: NodeSettings) -> "Availability":
        """By the owner's settings, for this machine."""
        rules = Rules(
            schedule=settings.schedule,
            only_idle=settings.only_idle,
            idle_after=settings.idle_after,
            on_battery=settings.on_battery,
        )
        return cls(
            rules, settings.paths.pause, IdleDetector(rules.only_idle, not rules.on_battery).look
        )

    def pause(self, seconds: float | None) -> None:
        """Hold training now, for so many seconds or until ``resume``, over restarts too.

        Raises DiskFull, OSError.
        """
        left = FOREVER if seconds is None else seconds
        content = {"until": self._clock() + left, "seconds": left} if isfinite(left) else _ENDLESS
        write_atomic(self._file, json.dumps(content).encode())
        self._pause_ends = self._elapsed() + left
        self._overruled.clear()
        self.update()

    def resume(self) -> None:
        """End the owner's pause, and overrule each rule that holds now until it has let go once."""
        self._file.unlink(missing_ok=True)
        self._pause_ends = None
        self._overruled = {hold.rule for hold in self._holds()}
        self.update()

    @property
    def schedule(self) -> Schedule | None:
        """The hours in which it may train; None for always."""
        return self._rules.schedule

    def follow(self, schedule: Schedule | None) -> None:
        """Train in other hours, from now on."""
        self._rules = replace(self._rules, schedule=schedule)
        self._overruled.discard(Rule.SCHEDULE)
        self.update()

    def update(self) -> None:
        """Decide again, from the last look at the machine."""
        found = self._holds()
        self._overruled &= {hold.rule for hold in found}
        self.hold = next((hold for hold in found if hold.rule not in self._overruled), None)
        for event, is_set in ((self._held, self.hold is not None), (self._free, self.hold is None)):
            (event.set if is_set else event.clear)()

    async def run(self, warn: Warn = lambda text: None) -> None:
        """Look at clock and machine every few seconds until cancelled."""
        enduring = Enduring(NOT_LOOKED, warn)
        while True:
            await asyncio.sleep(LOOK_EVERY)
            with enduring:
                self._machine = await asyncio.to_thread(self._look)
            with enduring:  # pause and schedule need no look at the machine
                self.update()

    async def wait_held(self) -> None:
        """Return once it may not train."""
        await self._held.wait()

    async def wait_free(self) -> None:
        """Return once it may."""
        await self._free.wait()

    def _holds(self) -> list[Hold]:
        now, ends = self._clock(), self._pause_ends
        until = None if ends is None else now + (ends - self._elapsed())
        local = datetime.fromtimestamp(now).astimezone()
        return holds(self._rules, until, self._machine, local)


def _read(file: Path, now: float) -> float | None:
    """The seconds that are left of the pause in a file; None without one."""
    try:
        content = json.loads(file.read_bytes())
        if (until := content["until"]) is None:
            return FOREVER
        # The clock may have been ahead when the pause began.
        return min(float(until) - now, float(content.get("seconds", FOREVER)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{file} can't be read: remove it to let the node train, or say `lowcomm-node pause` "
            "again once it runs."
        ) from None
