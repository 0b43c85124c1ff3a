"""The owner's word, kept over restarts, and a look at clock and machine every few seconds."""

import asyncio
import json
from collections.abc import Callable
from datetime import datetime
from math import isfinite
from pathlib import Path
from time import time

from lowcomm_node.errors import ConfigError
from lowcomm_node.owner.idle import Looks
from lowcomm_node.owner.rules import FOREVER, Hold, Machine, Rule, Wishes, holds
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.storage.files import write_atomic

LOOK_EVERY = 5.0


class Availability:
    """Whether this node may train now. ``run`` keeps ``hold`` up to date; ``pause`` and ``resume`` hold at once."""

    def __init__(
        self,
        wishes: Wishes,
        file: Path,
        look: Callable[[], Machine],
        clock: Callable[[], float] = time,
    ) -> None:
        """``file``: where the owner's pause is kept. Raises ConfigError if it is damaged."""
        self._wishes, self._file, self._look, self._clock = wishes, file, look, clock
        self._paused_until = _read(file)
        self._overruled: set[Rule] = set()
        self.hold: Hold | None = None
        """Why it may not train; None if it may."""
        self._held, self._free = asyncio.Event(), asyncio.Event()
        self._machine = look()
        self.update()

    @classmethod
    def of(cls, settings: NodeSettings) -> "Availability":
        """For the machine that this is."""
        wishes = Wishes(
            schedule=settings.schedule,
            only_idle=settings.only_idle,
            idle_after=settings.idle_after,
            on_battery=settings.on_battery,
        )
        return cls(wishes, settings.paths.pause, Looks(wishes.only_idle, not wishes.on_battery).look)

    def pause(self, seconds: float | None) -> None:
        """Stop training now, for so many seconds or until ``resume``; also over a restart. Raises DiskFull, OSError."""
        until = FOREVER if seconds is None else self._clock() + seconds
        content = {"until": until if isfinite(until) else None}
        write_atomic(self._file, json.dumps(content).encode())
        self._paused_until = until
        self._overruled.clear()
        self.update()

    def resume(self) -> None:
        """Train now: the owner's pause ends, and what else holds now is overruled until it has once ceased to."""
        self._file.unlink(missing_ok=True)
        self._paused_until = None
        self._overruled = {hold.rule for hold in self._holds()}
        self.update()

    def update(self) -> None:
        """Decide anew, by what was seen of the machine last."""
        found = self._holds()
        self._overruled &= {hold.rule for hold in found}
        self.hold = next((hold for hold in found if hold.rule not in self._overruled), None)
        for event, is_set in ((self._held, self.hold is not None), (self._free, self.hold is None)):
            (event.set if is_set else event.clear)()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            self._machine = await asyncio.to_thread(self._look)
            self.update()

    async def wait_held(self) -> None:
        """Until it may not train."""
        await self._held.wait()

    async def wait_free(self) -> None:
        """Until it may."""
        await self._free.wait()

    def _holds(self) -> list[Hold]:
        now = datetime.fromtimestamp(self._clock()).astimezone()
        return holds(self._wishes, self._paused_until, self._machine, now)


def _read(file: Path) -> float | None:
    try:
        until = json.loads(file.read_bytes())["until"]
        return FOREVER if until is None else float(until)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{file} can't be read: remove it to let the node train, or say `lowcomm-node pause` again once it runs."
        ) from None
