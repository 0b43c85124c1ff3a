"""What ``status`` and ``peers`` show, as plain JSON; the API, the panel and the command line read the same."""

import os
from math import isfinite
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from lowcomm_node.sync.history import Outcome
from lowcomm_node.system.release import release
from lowcomm_node.system.systemd import Condition
from lowcomm_protocol.spec.run import RunSpec, SignedRun

if TYPE_CHECKING:
    from lowcomm_node.daemon.daemon import Daemon

_PROGRESS = (
    "steps",
    "swarm_step",
    "tokens",
    "tokens_per_second",
    "loss",
    "skipped_steps",
    "learning_rate",
    "val_loss_first",
    "val_loss_last",
)


def report(node: "Daemon") -> dict[str, Any]:
    """The status of a node."""
    membership, exchanger = node.membership, node.exchanger
    history = exchanger.history if exchanger else None
    ready = node.training.ready if node.training else None
    running = [round_.describe(monotonic()) for round_ in exchanger.running.values()] if exchanger else []
    sent = sum(round_["bytes_sent"] for round_ in running)
    received = sum(round_["bytes_received"] for round_ in running)
    return {
        "peer_id": node.peer_id,
        "release": release(),
        "pid": os.getpid(),
        "run": _run(node),
        "phase": node.bulletin.phase,
        "joined": membership is not None,
        "waiting": node.bulletin.waiting or _why_alone(node),
        "unchanged": monotonic() - node.bulletin.changed,
        "leaving": node.leaving,
        "swarm": node.rejoin.describe() if node.rejoin else None,
        "pause": _pause(node),
        "uptime": monotonic() - node.began,
        "trainer": {
            "state": node.bulletin.phase,
            "pid": node.supervisor.pid,
            "failures": node.supervisor.restarts,
            "last_failure": _last_failure(node),
            "overdue": node.supervisor.overdue(monotonic()),
            "device": ready.device if ready else None,
            "parameters": ready.parameters if ready else None,
            "total_steps": _settings_now(node, node.run_).run.steps if node.run_ else None,
            "tokenizing": node.bulletin.tokenizing,
            **{key: _finite(node.bulletin.progress.get(key)) for key in _PROGRESS},
        },
        "exchanges_running": running,
        "exchanges": {
            "completed": history.outcomes[Outcome.APPLIED] if history else 0,
            "refused": history.refusals if history else 0,
            "failed": history.outcomes[Outcome.FAILED] if history else 0,
            "no_partner": history.outcomes[Outcome.NO_PARTNER] if history else 0,
            "in_doubt": history.in_doubt if history else 0,
            "realigned": history.realigned if history else 0,
            "realigned_share": _share(history.realigned, history.outcomes[Outcome.APPLIED]) if history else None,
            "worst_block": max(history.worst_block.values(), default=None) if history else None,
        },
        "bytes_sent": (history.bytes_sent if history else 0) + sent,
        "bytes_received": (history.bytes_received if history else 0) + received,
        "limits": node.limits(),
        "peers": membership.count() if membership else 0,
        "silent_peers": membership.count_silent() if membership else 0,
        "dht_peers": membership.dht_peers if membership else 0,
        "checkpoint": node.bulletin.checkpoint,
        "addresses": list(membership.addresses) if membership else [],
        "entry_points": list(membership.entry_points) if membership else [],
        "tunnels": node.channels.tunnels() if node.channels else {},
        "refusals": node.refusals.counts(),
        "warnings": node.bulletin.warnings,
    }


def summary(status: dict[str, Any]) -> str:
    """A status in a line: what the node does, and why it waits if it does."""
    phase, waiting, trainer = status["phase"], status["waiting"], status["trainer"]
    if waiting or trainer["swarm_step"] is None:
        return f"{phase} · {waiting}" if waiting else phase
    return f"{phase} · step {trainer['swarm_step']} of {trainer['total_steps']}, {status['peers']} other peers alive"


def condition(node: "Daemon") -> Condition:
    """What the service manager is told. Ready is who takes part, also alone: it has found the run, and may exchange."""
    status = report(node)
    overdue = status["trainer"]["overdue"]
    leaving = status["leaving"]
    if leaving is not None and leaving < 0:
        overdue = overdue or f"the node should have left {-leaving:.0f} s ago"
    return Condition(ready=status["joined"], line=summary(status), leaving=leaving is not None, overdue=overdue)


def report_peers(node: "Daemon") -> list[dict[str, Any]]:
    """The peers of a node."""
    if node.membership is None or node.exchanger is None:
        return []
    now, history = time(), node.exchanger.history
    return [
        {
            "peer_id": info.peer_id,
            "phase": info.phase.value,
            "swarm_step": info.swarm_step,
            "steps": info.steps,
            "tokens_per_second": info.tokens_per_second,
            "address": info.addresses[0] if info.addresses else None,
            "release": node.membership.release_of(info.peer_id),
            "age": now - info.issued,
            "completed": history.of(info.peer_id).completed,
            "refused": history.of(info.peer_id).refused,
            "failed": history.of(info.peer_id).failed,
            "last_reason": history.of(info.peer_id).last_reason,
            **node.exchanger.standing(info.peer_id),
            **node.exchanger.channels.describe(info.peer_id),
        }
        for info in node.membership.roster.alive(now)
    ]


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 3) if whole else None


def _finite(value: Any) -> Any:
    """Null for what JSON has no word for: the loss of a model that has diverged is NaN."""
    return None if isinstance(value, float) and not isfinite(value) else value


def _run(node: "Daemon") -> dict[str, Any] | None:
    run = node.run_
    if run is None:
        return None
    now = _settings_now(node, run).run
    return {
        "name": run.spec.run.name,
        "description": now.description,
        "run_id": run.run_id,
        "fingerprint": run.fingerprint,
        "method": run.spec.sync.method,
        "creator": run.creator,
        "steps": now.steps,
        "amendments": _amendments(node),
    }


def _settings_now(node: "Daemon", run: SignedRun) -> RunSpec:
    """What holds of the run at the swarm step of this node."""
    return node.training.course.at(node.bulletin.position()[0]) if node.training else run.spec


def _amendments(node: "Daemon") -> list[dict[str, Any]]:
    """What the creator has changed of the run, in force or to come."""
    if node.training is None:
        return []
    step = node.bulletin.position()[0]
    return [{**one.to_json(), "text": str(one), "in_force": one.at <= step} for one in node.training.course.chain.links]


def _pause(node: "Daemon") -> dict[str, Any] | None:
    """What keeps it from training, by its owner's will; null if nothing does."""
    hold = node.availability.hold
    return None if hold is None else {"rule": hold.rule.value, "reason": hold.text, "until": hold.until}


def _last_failure(node: "Daemon") -> dict[str, Any] | None:
    failure = node.supervisor.last_failure
    return None if failure is None else {"kind": failure.kind.value, "reason": failure.reason, "step": failure.step}


def _why_alone(node: "Daemon") -> str | None:
    """Training never waits; but if the last exchange was not applied, the owner wants to know why."""
    if node.bulletin.phase == "paused" and node.availability.hold is not None:
        return node.availability.hold.text
    if node.bulletin.phase == "joining" and node.rejoin is not None:
        return node.rejoin.reason
    if node.bulletin.phase != "training" or node.exchanger is None or node.run_ is None:
        return None
    if node.run_.spec.sync.group == 1:
        return None
    if node.membership is not None and node.membership.count() == 0:
        why = node.rejoin.reason if node.rejoin is not None else None
        silent = f": {count} have a record and do not answer" if (count := node.membership.count_silent()) else ""
        return f"training alone: {why or f'no other peer is alive{silent}'}"
    if (hindrance := node.exchanger.hindrance) is not None:
        return f"training on without exchanges of our own: {hindrance}"
    if (resting := node.exchanger.resting) is not None:
        return f"training on; {resting}"
    if (trouble := node.exchanger.own_line.trouble) is not None:
        return f"training on; {trouble}"
    reason = node.exchanger.history.last_reason
    return f"training on; the last exchange was not applied: {reason}" if reason else None
