"""Is a node well? From its status alone, as the control API gives it. Pure.

Unwell is a node that does not get anywhere though nobody wants it so: its daemon does not end a
trainer that hangs, it stays in one phase for longer than anything there takes, or no peer of the
swarm has answered for long. Training alone is
not: a node trains on through an outage, but its owner should know of one that lasts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lowcomm_node.status.lines import summary
from lowcomm_node.status.model import Status
from lowcomm_node.system.systemd import Condition
from lowcomm_node.system.units import clean, seconds

SWARM_PATIENCE = 300.0
"""Seconds without an answer of the swarm: by then p2pd was started again twice."""
PHASE_PATIENCE: Mapping[str, float] = {
    "starting": 120.0,
    "joining": 3600.0,  # text is read and the model made, too
    # nobody waits longer than 300 s for the first peers; a state that comes in changes what it
    # shows
    "syncing": 600.0,
    "restarting": 3600.0,
    "finishing": 120.0,
    "left": 60.0,
}
"""Seconds in which a phase, or what it waits for, must change; others may last for ever."""


@dataclass(frozen=True)
class Health:
    """Whether a node is well, and why."""

    healthy: bool
    reason: str
    """One line."""


def judge_health(status: Status) -> Health:
    """Judge a status; a pause by its owner is health, and what ended as it should is too."""
    phase = status.phase
    if phase == "paused":
        return Health(True, clean(status.waiting or "paused"))
    return _unwell(status, phase) or Health(True, _doing(status, phase))


def condition(status: Status) -> Condition:
    """What the service manager is told. A node is ready once it has found its run, also alone."""
    overdue, leaving = status.trainer.overdue, status.leaving
    if leaving is not None and leaving < 0:
        overdue = overdue or f"the node should have left {-leaving:.0f} s ago"
    return Condition(
        ready=status.joined, line=summary(status), leaving=leaving is not None, overdue=overdue
    )


def _unwell(status: Status, phase: str) -> Health | None:
    if status.trainer.overdue:
        return Health(
            False,
            f"{clean(status.trainer.overdue)}: end the node and start it again, it resumes from "
            "its checkpoint",
        )
    patience = PHASE_PATIENCE.get(phase)
    if status.leaving is not None:
        patience = None if status.leaving >= 0 else 0.0
    if patience is not None and status.unchanged > patience:
        why = f" ({clean(status.waiting)})" if status.waiting else ""
        return Health(
            False, f"{phase}{why} for {seconds(status.unchanged)}: see its logs, or start it again"
        )
    swarm = status.swarm
    if swarm is None or swarm.state == "connected" or phase in ("finishing", "left"):
        return None
    if swarm.seconds <= SWARM_PATIENCE:
        return None
    why = swarm.reason or f"it is {swarm.state}"
    return Health(False, f"not in the swarm for {seconds(swarm.seconds)}: {clean(why)}")


def _doing(status: Status, phase: str) -> str:
    step, peers = status.trainer.swarm_step, status.peers
    if phase == "training":
        return (
            f"training at swarm step {step or 0}, {peers} other {'peer' if peers == 1 else 'peers'}"
        )
    return f"{phase}: {clean(status.waiting)}" if status.waiting else phase
