"""Why this node may not train now, by the owner's rules and the use of the machine. Pure.

The owner's ``pause`` comes first, then the rules of the settings. ``resume`` overrules the rules
that hold at that moment; each counts again once it has let go.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from lowcomm_node.system.units import write_duration

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_WEEK = 7 * 24 * 60
_FORM = re.compile(r"(?:([A-Z][a-z]{2})(?:-([A-Z][a-z]{2}))? +)?(\d{2}):(\d{2})-(\d{2}):(\d{2})")
_EXAMPLE = 'such as 22:00-07:00, or "Mon-Fri 18:00-08:00, Sat 00:00-24:00"'
NONE = "none"


@dataclass(frozen=True)
class Schedule:
    """Windows of the week, in minutes since Monday 00:00, local time.

    A window may reach into the next day or week.
    """

    text: str
    """As its owner wrote it."""
    windows: tuple[tuple[int, int], ...]
    """``[start, end)``, where ``end`` may lie beyond the end of the week."""

    def __str__(self) -> str:
        return self.text

    def allows(self, now: datetime) -> bool:
        """Whether training is allowed at this local time."""
        minute = now.weekday() * 24 * 60 + now.hour * 60 + now.minute
        return any(
            start <= minute + week < end for start, end in self.windows for week in (0, _WEEK)
        )

    def changes(self, now: datetime) -> datetime | None:
        """When that changes next; None if it never does."""
        allowed = self.allows(now)
        return next((edge for edge in self._edges(now) if self.allows(edge) != allowed), None)

    def _edges(self, now: datetime) -> Iterator[datetime]:
        """All starts and ends of windows within a week from now, in order."""
        monday = now.replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(
            days=now.weekday()
        )
        minutes = {
            minute % _WEEK + week
            for window in self.windows
            for minute in window
            for week in (0, _WEEK)
        }
        edges = sorted(monday + timedelta(minutes=minute) for minute in minutes)
        return (edge for edge in edges if edge > now)


def read_schedule(text: str) -> Schedule | None:
    """Read a schedule; None for ``none``. Raises ValueError that says what to write."""
    if text.strip() == NONE:
        return None
    windows = [window for part in text.split(",") for window in _read_part(part.strip())]
    return Schedule(", ".join(part.strip() for part in text.split(",")), tuple(sorted(windows)))


def _read_part(part: str) -> list[tuple[int, int]]:
    match = _FORM.fullmatch(part)
    if match is None:
        raise ValueError(f"{part!r} is no window of time: write {_EXAMPLE}")
    start, end = _minute(part, match[3], match[4]), _minute(part, match[5], match[6])
    if start == end:
        raise ValueError(f"{part!r} begins when it ends: for the whole day write 00:00-24:00")
    if start == 24 * 60:
        raise ValueError(f"{part!r} begins at 24:00: write 00:00, of the day after")
    length = end - start if end > start else end - start + 24 * 60
    starts = [day * 24 * 60 + start for day in _days(part, match[1], match[2])]
    return [(begin, begin + length) for begin in starts]


def _minute(part: str, hour: str, minute: str) -> int:
    if int(minute) > 59 or int(hour) * 60 + int(minute) > 24 * 60:
        raise ValueError(f"{part!r}: {hour}:{minute} is no time of day: write 00:00 to 24:00")
    return int(hour) * 60 + int(minute)


def _days(part: str, first: str | None, last: str | None) -> list[int]:
    if first is None:
        return list(range(7))
    for day in (first, last or first):
        if day not in _DAYS:
            raise ValueError(f"{part!r}: {day} is no day: write {', '.join(_DAYS)}")
    begin, end = _DAYS.index(first), _DAYS.index(last or first)
    return [day % 7 for day in range(begin, end + 1 if end >= begin else end + 8)]


FOREVER = float("inf")


class Rule(StrEnum):
    """Rules that can keep a node from training."""

    OWNER = "owner"
    SCHEDULE = "schedule"
    IN_USE = "in-use"
    BATTERY = "battery"


@dataclass(frozen=True, kw_only=True)
class OwnerRules:
    """The rules that the owner's settings make."""

    schedule: Schedule | None = None
    only_idle: bool = False
    idle_after: float = 600.0
    """Seconds for which nobody may have used the machine."""
    on_battery: bool = True


@dataclass(frozen=True, kw_only=True)
class MachineUse:
    """How the machine is used."""

    idle: float | None = None
    """Seconds since its last use; None if that is unknown."""
    used_by: str = ""
    """The evidence of that use."""
    on_battery: bool | None = None
    """None if it has no battery, or that is unknown."""


@dataclass(frozen=True)
class Hold:
    """Why the node may not train."""

    rule: Rule
    text: str
    """As ``status`` shows it."""
    until: float | None = None
    """Unix time at which it ends; None if that is unknown."""


def holds(
    rules: OwnerRules, paused_until: float | None, machine: MachineUse, now: datetime
) -> list[Hold]:
    """Everything that holds training at a local time, the most important first.

    ``paused_until``: when the owner's pause ends, None without one.
    """
    found: list[Hold] = []
    if paused_until is not None and paused_until > now.timestamp():
        found.append(_paused(paused_until, now))
    if rules.schedule is not None and not rules.schedule.allows(now):
        change = rules.schedule.changes(now)
        until = change.timestamp() if change is not None else None
        found.append(
            Hold(Rule.SCHEDULE, f"outside its schedule {rules.schedule}{_until(until, now)}", until)
        )
    if rules.only_idle and machine.idle is not None and machine.idle < rules.idle_after:
        left = write_duration(rules.idle_after - machine.idle)
        found.append(
            Hold(
                Rule.IN_USE,
                f"the machine is in use ({machine.used_by}): waits until it is left alone for "
                f"{left}",
            )
        )
    if not rules.on_battery and machine.on_battery:
        found.append(Hold(Rule.BATTERY, "the machine runs on its battery"))
    return found


def _paused(until: float, now: datetime) -> Hold:
    if until == FOREVER:
        return Hold(Rule.OWNER, "paused by its owner, until `lowcomm-node resume`")
    return Hold(Rule.OWNER, f"paused by its owner{_until(until, now)}", until)


def _until(until: float | None, now: datetime) -> str:
    if until is None:
        return ""
    then = datetime.fromtimestamp(until, now.tzinfo)
    if (then.date() - now.date()).days == 0:
        return f" until {then:%H:%M}"
    return (
        f" until {then:%a %H:%M}"
        if until - now.timestamp() < 6 * 86400
        else f" until {then:%Y-%m-%d %H:%M}"
    )
