"""Whether the node may train now. Looks at clock and machine, and keeps pauses on disk."""

import asyncio
import json
import subprocess
import time as clock
from collections import deque
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from math import inf, isfinite
from pathlib import Path
from time import monotonic, time

import psutil

from lowcomm_node.errors import ConfigError
from lowcomm_node.owner.rules import FOREVER, Hold, MachineUse, Rule, Schedule, holds
from lowcomm_node.owner.settings import NodeSettings, flag_of
from lowcomm_node.storage.files import write_atomic
from lowcomm_node.system.accelerator import Card, Polled, names_of, open_card
from lowcomm_node.system.tasks import Enduring, Warn
from lowcomm_node.system.units import seconds

BUSY_CORES = 1.0
"""If other programs take more cores than this, the machine is in use."""
BUSY_GPU = 0.1
"""The same, of the GPU's time."""
BUSY_SECONDS = 60.0
LOOK_EVERY = 5.0
NEEDS_CARD = ("max_gpu_temp", "gpu_power", "yield_to_gpu")
"""Settings that need a card of NVIDIA."""
NOT_LOOKED = "nobody looks at the use and the battery of this machine"
_LOGIND = (
    *("busctl", "--system", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1"),
    *("org.freedesktop.login1.Manager", "IdleHint", "IdleSinceHint"),
)


class IdleDetector:
    """Looks at the machine, only for what the owner's rules need."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self.follow_gpus([])
        self._seen: deque[tuple[float, float]] = deque()
        """Moments, and processor seconds of other programs up to each (monotonic seconds)."""
        self._own: dict[int, float] = {}
        self._own_total = 0.0
        """Processor seconds of our processes, with those that have ended."""
        self._busy: tuple[float, float] | None = None
        """When other programs took too many cores last, and how many."""
        self._gpu_busy = self._gpu_computed = -inf, ""
        """When others used the GPU much, or computed there, and how."""

    def follow_gpus(self, uuids: Sequence[str]) -> None:
        """Look at the GPUs that train; without UUIDs at those which ``--device`` names."""
        cards, ours = list[tuple[str, str]](), self._settings
        if ours.only_idle or ours.yield_to_gpu:
            named = [("", name) for name in names_of(ours.device) if name != "cpu"]
            cards = [(uuid, "cuda") for uuid in uuids if uuid] or named
        self.gpus = tuple(Polled(partial(_users_of, *card)) for card in cards)

    def look(self) -> MachineUse:
        """The use of the machine now."""
        signs: list[tuple[float, str]] = []
        settings, now = self._settings, monotonic()
        own = _own_pids() if self.gpus or settings.not_while else set[int]()
        self._look_at_gpu(now, own)
        if settings.only_idle:
            signs.append((now - self._gpu_busy[0], self._gpu_busy[1]))
            if (cores := self._cores_of_others(now)) > BUSY_CORES:
                self._busy = now, cores
            if self._busy is not None:
                text = f"other programs take {self._busy[1]:.1f} cores"
                signs.append((now - self._busy[0], text))
            if (idle := _since_typed()) is not None:
                signs.append((idle, f"a key was pressed in a terminal {seconds(idle)} ago"))
            if (idle := _since_logind()) is not None:
                signs.append((idle, f"logind saw it used {seconds(idle)} ago"))
        idle, sign = min(signs, default=(None, ""))
        return MachineUse(
            idle=idle,
            used_by=sign,
            program=running(settings.not_while, own),
            gpu_idle=now - self._gpu_computed[0],
            gpu_used_by=self._gpu_computed[1],
            on_battery=None if settings.on_battery else _on_battery(),
        )

    def _look_at_gpu(self, now: float, own: set[int]) -> None:
        for gpu in self.gpus:
            total = 0.0
            for pid, (computes, share) in (gpu.look(now) or {}).items():
                # In a container the driver's ids are those of the host: others are not judged.
                if pid not in own and psutil.pid_exists(pid):
                    total += share or 0.0
                    if computes and share != 0:
                        self._gpu_computed = now, _name_of(pid)
            if total > BUSY_GPU:
                self._gpu_busy = now, f"other programs take {total:.0%} of the GPU"

    def _cores_of_others(self, now: float) -> float:
        """Cores that other programs took over the last minute; 0 until a minute has been seen.

        Niced programs do not count: an owner does not notice them.
        """
        own: dict[int, float] = {}
        daemon = psutil.Process()
        for process in (daemon, *daemon.children(recursive=True)):
            with suppress(psutil.Error):
                times = process.cpu_times()
                own[process.pid] = times.system + (0.0 if process.nice() > 0 else times.user)
        self._own_total += sum(max(0.0, own[pid] - self._own.get(pid, 0.0)) for pid in own)
        self._own = own
        all_ = psutil.cpu_times()
        interrupts = getattr(all_, "irq", 0.0) + getattr(all_, "softirq", 0.0)
        self._seen.append((now, all_.user + all_.system + interrupts - self._own_total))
        while len(self._seen) > 2 and now - self._seen[1][0] >= BUSY_SECONDS:
            self._seen.popleft()
        (began, before), (_, after) = self._seen[0], self._seen[-1]
        return max(0.0, after - before) / (now - began) if now - began >= BUSY_SECONDS else 0.0


def check_card(settings: NodeSettings) -> None:
    """Raises ConfigError if a setting needs a card of NVIDIA, and there is none."""
    for name in NEEDS_CARD:
        for device in names_of(settings.device) if getattr(settings, name) else ():
            open_card(flag_of(name), device=device)


def _users_of(uuid: str, device: str) -> Callable[[], dict[int, tuple[bool, float | None]]]:
    return Card(uuid, device).users


def _own_pids() -> set[int]:
    daemon = psutil.Process()
    return {daemon.pid, *(child.pid for child in daemon.children(recursive=True))}


def _name_of(pid: int) -> str:
    with suppress(psutil.Error):
        return f"{psutil.Process(pid).name()} (process {pid})"
    return f"process {pid}"


def running(programs: Sequence[str], own: Container[int]) -> str:
    """The first of these programs that runs, as its owner calls it, but for processes of our own;
    empty if none does."""
    known = {name.casefold().removesuffix(".exe"): name for name in programs}
    for process in psutil.process_iter() if known else ():
        with suppress(psutil.Error):
            name = known.get(process.name().casefold().removesuffix(".exe"))
            if name and process.pid not in own and process.status() != psutil.STATUS_ZOMBIE:
                return name
    return ""


def _since_typed() -> float | None:
    """Seconds since a key was pressed in a terminal; None without terminals."""
    times: list[float] = []
    for terminal in (*Path("/dev").glob("tty[0-9]*"), *Path("/dev/pts").glob("[0-9]*")):
        with suppress(OSError):
            times.append(terminal.stat().st_atime)
    return max(0.0, time() - max(times)) if times else None


def _since_logind() -> float | None:
    """Seconds since which logind has the machine idle; None without logind."""
    try:
        answer = subprocess.run(
            _LOGIND, capture_output=True, timeout=5.0, check=True, encoding="utf-8"
        )
    except (OSError, subprocess.SubprocessError):
        return None
    since = read_logind(answer.stdout, time())
    return None if since is None else max(0.0, time() - since)


def read_logind(answer: str, now: float) -> float | None:
    """Unix time from an answer of ``busctl``: ``b true`` and ``t MICROSECONDS``, one a line."""
    words = answer.split()
    if len(words) != 4 or words[0] != "b" or words[2] != "t" or not words[3].isdecimal():
        return None
    return int(words[3]) / 1e6 if words[1] == "true" else now


def _on_battery() -> bool | None:
    with suppress(AttributeError, OSError, RuntimeError):
        battery = psutil.sensors_battery()
        if battery is not None and battery.power_plugged is not None:
            return not battery.power_plugged
    return None


_elapsed = partial(clock.clock_gettime, getattr(clock, "CLOCK_BOOTTIME", clock.CLOCK_MONOTONIC))
"""Seconds that go on while the machine sleeps, and that no change of its clock moves."""


class Availability:
    """Whether this node may train now: ``hold`` says so.

    ``run`` keeps ``hold`` up to date; ``pause`` and ``resume`` update it at once.
    """

    def __init__(
        self,
        settings: NodeSettings,
        look: Callable[[], MachineUse] | None = None,
        clock: Callable[[], float] = time,
        elapsed: Callable[[], float] = _elapsed,
    ) -> None:
        """Raises ConfigError if the file is damaged that keeps a pause over restarts."""
        self._settings = settings
        self._file = settings.paths.pause
        detector = IdleDetector(settings)
        self.follow_gpus = detector.follow_gpus
        self._look = look or detector.look
        self._clock = clock
        self._elapsed = elapsed
        left = _read(self._file, clock())
        self._pause_ends = None if left is None else elapsed() + left
        self._overruled: set[Rule] = set()
        self.hold: Hold | None = None
        """Why it may not train; None if it may."""
        self.held, self.free = asyncio.Event(), asyncio.Event()
        """Set while it may not train, and while it may."""
        self._machine = MachineUse()
        with Enduring(NOT_LOOKED):
            self._machine = self._look()
        self.update()

    def pause(self, seconds: float | None) -> None:
        """Hold training now, for ``seconds`` or until ``resume``, over restarts too.

        Raises DiskFull, OSError.
        """
        left = FOREVER if seconds is None else seconds
        is_finite = isfinite(left)
        content = {"until": self._clock() + left, "seconds": left} if is_finite else {"until": None}
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
        return self._settings.schedule

    def follow(self, schedule: Schedule | None) -> None:
        """Train in other hours, from now on."""
        self._settings = self._settings.model_copy(update={"schedule": schedule})
        self._overruled.discard(Rule.SCHEDULE)
        self.update()

    def update(self) -> None:
        """Decide again, from the last look at the machine."""
        all_ = self._holds()
        self._overruled &= {hold.rule for hold in all_}
        self.hold = next((hold for hold in all_ if hold.rule not in self._overruled), None)
        now, other = (self.free, self.held) if self.hold is None else (self.held, self.free)
        now.set()
        other.clear()

    async def run(self, warn: Warn = lambda text: None) -> None:
        """Look at clock and machine every few seconds until cancelled."""
        enduring = Enduring(NOT_LOOKED, warn)
        while True:
            await asyncio.sleep(LOOK_EVERY)
            with enduring:
                self._machine = await asyncio.to_thread(self._look)
            with enduring:  # pause and schedule need no look at the machine
                self.update()

    def _holds(self) -> list[Hold]:
        now, ends = self._clock(), self._pause_ends
        until = None if ends is None else now + (ends - self._elapsed())
        local = datetime.fromtimestamp(now).astimezone()
        return list(holds(self._settings, until, self._machine, local))


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
