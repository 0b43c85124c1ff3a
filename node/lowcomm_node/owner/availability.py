"""Whether the node may train now. Looks at clock and machine, and keeps pauses on disk."""

import asyncio
import json
import os
import subprocess
import time as clock
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from math import isfinite
from pathlib import Path
from time import monotonic, time

import psutil

from lowcomm_node.errors import ConfigError
from lowcomm_node.owner.rules import FOREVER, Hold, MachineUse, OwnerRules, Rule, Schedule, holds
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.storage.files import write_atomic
from lowcomm_node.system.tasks import Enduring, Warn
from lowcomm_node.system.units import seconds

BUSY_CORES = 1.0
"""If other programs take more cores than this, the machine is in use."""
BUSY_SECONDS = 60.0
LOGIND_EVERY = 15.0
LOGIND_DEADLINE = 5.0
_LOGIND = (
    *("busctl", "--system", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1"),
    *("org.freedesktop.login1.Manager", "IdleHint", "IdleSinceHint"),
)


@dataclass(frozen=True)
class Work:
    """Processor time up to a moment."""

    at: float
    """Monotonic seconds."""
    others: float
    """Seconds of all cores in which they were not idle and ran neither niced programs nor us."""


class Load:
    """Cores that other programs took over the last minute. Pure."""

    def __init__(self) -> None:
        self._seen: deque[Work] = deque()

    def saw(self, work: Work) -> float:
        """Add a measurement; returns the cores taken, 0 until a minute has been seen."""
        self._seen.append(work)
        while len(self._seen) > 2 and work.at - self._seen[1].at >= BUSY_SECONDS:
            self._seen.popleft()
        first = self._seen[0]
        elapsed = work.at - first.at
        return max(0.0, work.others - first.others) / elapsed if elapsed >= BUSY_SECONDS else 0.0


class OwnWork:
    """Processor time of our own processes, ended ones included. Pure."""

    def __init__(self) -> None:
        self._last: dict[int, float] = {}
        self._sum = 0.0

    def total(self, work: Mapping[int, float]) -> float:
        """Add what each process has used so far; returns the total of all."""
        self._sum += sum(max(0.0, used - self._last.get(pid, 0.0)) for pid, used in work.items())
        self._last = dict(work)
        return self._sum


class IdleDetector:
    """Looks at the machine, only for what the owner's rules need."""

    def __init__(self, use: bool, battery: bool) -> None:
        self._use = use
        self._battery = battery
        self._load = Load()
        self._own = OwnWork()
        self._busy_at: float | None = None
        self._cores = 0.0
        self._logind: tuple[float, float | None] = (-LOGIND_EVERY, None)

    def look(self) -> MachineUse:
        """The use of the machine now."""
        idle, by = self._idle() if self._use else (None, "")
        return MachineUse(
            idle=idle, used_by=by, on_battery=_on_battery() if self._battery else None
        )

    def _idle(self) -> tuple[float | None, str]:
        now = monotonic()
        work = Work(now, busy_seconds() - self._own.total(_family_work()))
        if (cores := self._load.saw(work)) > BUSY_CORES:
            self._busy_at = now
            self._cores = cores
        found: list[tuple[float, str]] = []
        if self._busy_at is not None:
            found.append((now - self._busy_at, f"other programs take {self._cores:.1f} cores"))
        if (typed := last_typed(_terminals())) is not None:
            idle = max(0.0, time() - typed)
            found.append((idle, f"a key was pressed in a terminal {seconds(idle)} ago"))
        if (idle := self._by_logind(now)) is not None:
            found.append((idle, f"logind saw it used {seconds(idle)} ago"))
        return min(found) if found else (None, "")

    def _by_logind(self, now: float) -> float | None:
        asked, since = self._logind
        if now - asked >= LOGIND_EVERY:
            since = ask_logind()
            self._logind = (now, since)
        return None if since is None else max(0.0, time() - since)


def last_typed(terminals: Iterable[Path]) -> float | None:
    """Unix time of the last key pressed in any of these terminals; None without terminals."""
    times: list[float] = []
    for terminal in terminals:
        with suppress(OSError):
            times.append(terminal.stat().st_atime)
    return max(times, default=None)


def _terminals() -> list[Path]:
    return [*Path("/dev").glob("tty[0-9]*"), *Path("/dev/pts").glob("[0-9]*")]


def ask_logind() -> float | None:
    """Unix time since which logind says it is idle, now if it is in use; None without logind."""
    try:
        done = subprocess.run(
            _LOGIND,
            capture_output=True,
            timeout=LOGIND_DEADLINE,
            check=True,
            encoding="utf-8",
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return read_logind(done.stdout, time())


def read_logind(answer: str, now: float) -> float | None:
    """Read the answer of ``busctl``: ``b true`` and ``t MICROSECONDS``, one a line."""
    words = answer.split()
    if len(words) != 4 or words[0] != "b" or words[2] != "t" or not words[3].isdecimal():
        return None
    return int(words[3]) / 1e6 if words[1] == "true" else now


def busy_seconds() -> float:
    """Processor time of all cores, without niced programs, which an owner does not notice."""
    total = psutil.cpu_times()
    return total.user + total.system + getattr(total, "irq", 0.0) + getattr(total, "softirq", 0.0)


def _family_work() -> dict[int, float]:
    """Processor time of this process and its children, by process id."""
    own = psutil.Process(os.getpid())
    work: dict[int, float] = {}
    for process in [own, *own.children(recursive=True)]:
        with suppress(psutil.Error):
            times = process.cpu_times()
            work[process.pid] = times.system + (0.0 if process.nice() > 0 else times.user)
    return work


def _on_battery() -> bool | None:
    try:
        battery = psutil.sensors_battery()
    except (AttributeError, OSError, RuntimeError):
        return None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


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
        rules: OwnerRules,
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
        rules = OwnerRules(
            schedule=settings.schedule,
            only_idle=settings.only_idle,
            idle_after=settings.idle_after,
            on_battery=settings.on_battery,
        )
        return cls(
            rules, settings.paths.pause, IdleDetector(rules.only_idle, not rules.on_battery).look
        )

    def pause(self, seconds: float | None) -> None:
        """Hold training now, for ``seconds`` or until ``resume``, over restarts too.

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
