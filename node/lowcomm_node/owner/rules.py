"""Whether this node may train now, and if not, why: from what its owner said and what the machine does. Pure.

The owner's ``pause`` comes first, then the rules of the settings. ``resume`` overrules what holds at that moment: each rule
counts again once it has been kept in between.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from lowcomm_node.owner.schedule import Timetable
from lowcomm_node.system.units import write_duration

FOREVER = float("inf")


class Rule(StrEnum):
    """What can keep a node from training."""

    OWNER = "owner"
    SCHEDULE = "schedule"
    IN_USE = "in-use"
    BATTERY = "battery"


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the owner's settings say."""

    schedule: Timetable | None = None
    only_idle: bool = False
    idle_after: float = 600.0
    """Seconds that nobody must have used the machine."""
    on_battery: bool = True


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is seen of the machine."""

    idle: float | None = None
    """Seconds since somebody used it; None: it can't be told."""
    used_by: str = ""
    """What was seen of that use."""
    on_battery: bool | None = None
    """None: it has no battery, or can't tell."""


@dataclass(frozen=True)
class Hold:
    """Why the node may not train."""

    rule: Rule
    text: str
    """As ``status`` shows it."""
    until: float | None = None
    """Unix time at which it ends; None: that is not known."""


def holds(wishes: Wishes, paused_until: float | None, machine: Machine, now: datetime) -> list[Hold]:
    """All that keeps it from training at a local time; the first is what is shown. ``paused_until``: by its owner."""
    found: list[Hold] = []
    if paused_until is not None and paused_until > now.timestamp():
        found.append(_paused(paused_until, now))
    if wishes.schedule is not None and not wishes.schedule.allows(now):
        change = wishes.schedule.changes(now)
        until = change.timestamp() if change is not None else None
        found.append(Hold(Rule.SCHEDULE, f"outside its schedule {wishes.schedule}{_until(until, now)}", until))
    if wishes.only_idle and machine.idle is not None and machine.idle < wishes.idle_after:
        left = write_duration(wishes.idle_after - machine.idle)
        found.append(
            Hold(Rule.IN_USE, f"the machine is in use ({machine.used_by}): waits until it is left alone for {left}")
        )
    if not wishes.on_battery and machine.on_battery:
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
    return f" until {then:%a %H:%M}" if until - now.timestamp() < 6 * 86400 else f" until {then:%Y-%m-%d %H:%M}"
