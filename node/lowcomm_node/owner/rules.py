"""Why this node may not train now, by the owner's rules and the use of the machine. Pure.

The owner's ``pause`` comes first, then the rules of the settings. ``resume`` overrules the rules
that hold at that moment; each counts again once it has let go.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from lowcomm_node.owner.schedule import Schedule
from lowcomm_node.system.units import write_duration

FOREVER = float("inf")


class Rule(StrEnum):
    """What can keep a node from training."""

    OWNER = "owner"
    SCHEDULE = "schedule"
    IN_USE = "in-use"
    BATTERY = "battery"


@dataclass(frozen=True, kw_only=True)
class Rules:
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
    """Seconds since somebody used it; None if that is unknown."""
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
    rules: Rules, paused_until: float | None, machine: MachineUse, now: datetime
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
