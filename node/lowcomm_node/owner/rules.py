"""Why this node may not train now, by the owner's rules and the use of the machine. Pure.

The owner's ``pause`` comes first, then the rules of the settings. ``resume`` overrules the rules
that hold at that moment; each counts again once it has let go.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING

from lowcomm_node.system.units import NONE, write_duration

if TYPE_CHECKING:
    from lowcomm_node.owner.settings import NodeSettings

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_DAY, _WEEK = 24 * 60, 7 * 24 * 60
"""Minutes."""
_WINDOW = re.compile(r"(?:([A-Z][a-z]{2})(?:-([A-Z][a-z]{2}))? +)?(\d{2}):(\d{2})-(\d{2}):(\d{2})")
_EXAMPLE = 'such as 22:00-07:00, or "Mon-Fri 18:00-08:00, Sat 00:00-24:00"'
FOREVER = float("inf")
GPU_LEFT_ALONE = 120.0
"""Seconds for which no other process must have computed on the GPU."""


@dataclass(frozen=True)
class Schedule:
    """Minutes of the week in which the node may train, by local time."""

    text: str
    """As its owner wrote it."""
    minutes: frozenset[int] = field(repr=False)
    """Since Monday 00:00."""

    def __str__(self) -> str:
        return self.text

    def allows(self, now: datetime) -> bool:
        """Whether training is allowed at this local time."""
        return _minute_of_week(now) in self.minutes

    def changes(self, now: datetime) -> datetime | None:
        """When that changes next; None if it never does."""
        begin, allowed = _minute_of_week(now), self.allows(now)
        later = range(1, _WEEK)
        left = next((m for m in later if ((begin + m) % _WEEK in self.minutes) != allowed), None)
        minute = now.replace(second=0, microsecond=0)
        return None if left is None else minute + timedelta(minutes=left)


def _minute_of_week(now: datetime) -> int:
    return now.weekday() * _DAY + now.hour * 60 + now.minute


def read_schedule(text: str) -> Schedule | None:
    """Read a schedule; None for ``none``. Raises ValueError that says what to write."""
    if text.strip() == NONE:
        return None
    parts = [part.strip() for part in text.split(",")]
    return Schedule(", ".join(parts), frozenset(m for part in parts for m in _minutes_of(part)))


def _minutes_of(part: str) -> Iterator[int]:
    """Yield the minutes of the week in a window, which may reach into the next day."""
    match = _WINDOW.fullmatch(part)
    if match is None:
        raise ValueError(f"{part!r} is no window of time: write {_EXAMPLE}")
    first, last = match[1] or _DAYS[0], match[2] or match[1] or _DAYS[-1]
    for day in (first, last):
        if day not in _DAYS:
            raise ValueError(f"{part!r}: {day} is no day: write {', '.join(_DAYS)}")
    for hour, minute in ((match[3], match[4]), (match[5], match[6])):
        if int(minute) > 59 or int(hour) * 60 + int(minute) > _DAY:
            raise ValueError(f"{part!r}: {hour}:{minute} is no time of day: write 00:00 to 24:00")
    start, end = int(match[3]) * 60 + int(match[4]), int(match[5]) * 60 + int(match[6])
    if start == end:
        raise ValueError(f"{part!r} begins when it ends: for the whole day write 00:00-24:00")
    if start == _DAY:
        raise ValueError(f"{part!r} begins at 24:00: write 00:00, of the day after")
    begin = _DAYS.index(first)
    for day in range(begin, begin + (_DAYS.index(last) - begin) % 7 + 1):
        for minute in range(start, end if end > start else end + _DAY):
            yield (day * _DAY + minute) % _WEEK


class Rule(StrEnum):
    """Rules that can keep a node from training."""

    OWNER = "owner"
    SCHEDULE = "schedule"
    IN_USE = "in-use"
    BATTERY = "battery"
    PROGRAM = "program"
    GPU = "gpu-in-use"


@dataclass(frozen=True, kw_only=True)
class MachineUse:
    """Use of the machine."""

    idle: float | None = None
    """Seconds since its last use; None if that is unknown."""
    used_by: str = ""
    """The evidence of that use."""
    program: str = ""
    """A running program that the owner has named."""
    gpu_idle: float = FOREVER
    """Seconds since another process computed on the GPU, as far as is known."""
    gpu_used_by: str = ""
    """Name and id of that process."""
    on_battery: bool | None = None
    """None if it has no battery, or that is unknown."""


@dataclass(frozen=True)
class Hold:
    """Reason why the node may not train."""

    rule: Rule
    """What the owner set: `owner` (the command), `schedule`, `program`, `gpu-in-use`, `in-use` or
    `battery`."""
    reason: str
    """The same in words."""
    until: float | None = None
    """When it ends (Unix seconds); null if that is not known."""


def holds(
    settings: "NodeSettings", paused_until: float | None, machine: MachineUse, now: datetime
) -> Iterator[Hold]:
    """Yield all that holds training at a local time, the most important first.

    ``paused_until``: end of the owner's pause (Unix time), None without one.
    """
    if paused_until == FOREVER:
        yield Hold(Rule.OWNER, "paused by you, until `lowcomm-node resume`")
    elif paused_until is not None and paused_until > now.timestamp():
        yield Hold(Rule.OWNER, f"paused by you{_until(paused_until, now)}", paused_until)
    schedule = settings.schedule
    if schedule is not None and not schedule.allows(now):
        change = schedule.changes(now)
        until = None if change is None else change.timestamp()
        text = f"outside its schedule {schedule}{_until(until, now)}"
        yield Hold(Rule.SCHEDULE, text, until)
    if machine.program:
        yield Hold(Rule.PROGRAM, f"{machine.program} runs, which --not-while names")
    if settings.yield_to_gpu and machine.gpu_idle < GPU_LEFT_ALONE:
        left = write_duration(GPU_LEFT_ALONE - machine.gpu_idle)
        text = f"{machine.gpu_used_by} computes on the GPU: waits until it has ended for {left}"
        yield Hold(Rule.GPU, text)
    if settings.only_idle and machine.idle is not None and machine.idle < settings.idle_after:
        left = write_duration(settings.idle_after - machine.idle)
        text = f"the machine is in use ({machine.used_by}): waits until it is left alone for {left}"
        yield Hold(Rule.IN_USE, text)
    if not settings.on_battery and machine.on_battery:
        yield Hold(Rule.BATTERY, "the machine runs on its battery")


def _until(until: float | None, now: datetime) -> str:
    if until is None:
        return ""
    then = datetime.fromtimestamp(until, now.tzinfo)
    if then.date() == now.date():
        return f" until {then:%H:%M}"
    is_soon = until - now.timestamp() < 6 * 86400
    return f" until {then:%a %H:%M}" if is_soon else f" until {then:%Y-%m-%d %H:%M}"
