"""Events and statuses in words: lines, progress, farewell, and whether a node is well."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowcomm_node.fetch.records import StateAdopted
from lowcomm_node.node.messages import Evaluated, Finished, MicroBatch, Saved, Skipped, Tokenizing
from lowcomm_node.owner.sources import find_home
from lowcomm_node.status.events import (
    LimitsChanged,
    Paused,
    PhaseEntered,
    Resumed,
    RunAmended,
    SavingAgain,
    Warned,
    details,
)
from lowcomm_node.status.model import Contribution, Status
from lowcomm_node.swarm.watchdog import (
    AddressesChanged,
    EntryPointAnswers,
    EntryPointSilent,
    SwarmConnected,
    SwarmLost,
    SwarmUnlisted,
)
from lowcomm_node.sync.history import ExchangeEnded
from lowcomm_node.system.command import program
from lowcomm_node.system.logs import Event
from lowcomm_node.system.systemd import Condition
from lowcomm_node.system.units import MISSING, clean, loss, quantity, seconds, short_peer, size
from lowcomm_protocol.exchange.events import Outcome


def event_in_words(event: Event) -> str | None:
    """A line without control characters; None for what the line on progress tells, too."""
    told = _words(event)
    return None if told is None else clean(told)


def progress_in_words(status: Status) -> str:
    """Where a node is that trains, from its status."""
    trainer, exchanges = status.trainer, status.exchanges
    parts = (
        f"step {trainer.swarm_step or 0} of {trainer.total_steps}",
        f"loss {loss(trainer.loss)}",
        f"{quantity(trainer.tokens_per_second)} tokens/s",
        f"{exchanges.completed} exchanges, {size(status.bytes_sent)} sent",
        f"{status.peers} other {'peer' if status.peers == 1 else 'peers'}",
    )
    return clean(", ".join(parts) + (f"; {status.waiting}" if status.waiting else ""))


def summary(status: Status) -> str:
    """What a node does, and why it waits if it does."""
    trainer = status.trainer
    if status.waiting or trainer.swarm_step is None:
        return f"{status.phase} · {status.waiting}" if status.waiting else status.phase
    return (
        f"{status.phase} · step {trainer.swarm_step} of {trainer.total_steps}, {status.peers} "
        "other peers alive"
    )


def contribution(status: Status) -> Contribution:
    """What a node has given to its run, and where its model lies, from its last status."""
    return Contribution(
        steps=status.trainer.steps or 0,
        tokens=status.trainer.tokens or 0,
        exchanges=status.exchanges.completed,
        bytes_sent=status.bytes_sent,
        checkpoint=status.checkpoint.path if status.checkpoint else None,
    )


def tell_farewell(given: Contribution, home: Path) -> str:
    """What a node has given, where the model lies, and how to use it, in lines.

    Commands are those that the owner of this home types."""
    command = program()
    option = "" if find_home() == home else f" --home {shlex.quote(str(home))}"
    lines = [
        f"contributed: {given.steps:,} steps, {quantity(given.tokens)} tokens; since this start "
        f"{given.exchanges:,} exchanges applied, {size(given.bytes_sent)} sent"
    ]
    if given.checkpoint is not None:
        lines += [
            f"the model:   {given.checkpoint}",
            f'try it:      {command} generate "def "{option}',
            f"export it:   {command} checkpoint export FOLDER{option}",
        ]
    return "\n".join(lines)


def swarm_in_words(statuses: Sequence[Status | None]) -> str:
    """Where the nodes of a demo are (None: not up yet), in a line."""
    training = [status for status in statuses if status and status.trainer.swarm_step is not None]
    at_work = [
        status for status in training if status.phase in ("training", "finishing", "finished")
    ]
    if len(at_work) < len(statuses):
        doings: dict[str, list[str]] = {}
        for number, status in enumerate(statuses, start=1):
            waiting = f" ({status.waiting})" if status and status.waiting else ""
            doing = f"{status.phase}{waiting}" if status else "starting"
            doings.setdefault(doing, []).append(str(number))
        return clean(
            "; ".join(
                f"node{'s' * (len(names) > 1)} {', '.join(names)} "
                f"{'are' if len(names) > 1 else 'is'} {doing}"
                for doing, names in doings.items()
            )
        )
    trainers = [status.trainer for status in at_work]
    held_out = mean_loss(one.val_loss_last for one in trainers)
    parts = (
        f"step {min(one.swarm_step or 0 for one in trainers)}/{trainers[0].total_steps}",
        f"loss {mean_loss(one.loss for one in trainers)} (held out {held_out})",
        f"{sum(status.exchanges.completed for status in at_work)} exchanges",
        size(sum(status.bytes_sent for status in at_work)),
    )
    return ", ".join(parts)


def mean_loss(losses: Iterable[float | None]) -> str:
    """The mean of the losses that are known."""
    known = [one for one in losses if one is not None]
    return loss(sum(known) / len(known) if known else None)


def tokenizing_in_words(now: Tokenizing) -> str:
    """How far the text is tokenized, how fast, and how long it takes yet."""
    share = f"{100 * now.done // now.total} %" if now.total else MISSING
    left = f", about {seconds(now.remaining)} left" if now.remaining is not None else ""
    return (
        f"tokenizing the text: {share}, {size(now.done)} of {size(now.total)}, "
        f"{size(now.rate)}/s{left}"
    )


def _words(event: Event) -> str | None:
    match event:
        case PhaseEntered(phase=phase):
            return phase
        case Warned(text=text):
            return f"warning: {text}"
        case Evaluated():
            again = f", after {event.epochs:.1f} epochs of the text" if event.epochs >= 1 else ""
            return (
                f"held-out loss {loss(event.loss)} of the fast weights at swarm step "
                f"{event.swarm_step}{again}"
            )
        case Skipped():
            why = f"as loss or gradients are not finite ({event.skipped_steps} so far)"
            return f"inner step {event.steps} skipped, {why}"
        case MicroBatch():
            again = ", activations computed again" if event.activation_checkpointing else ""
            return f"{event.why}: {event.micro_batch} windows go through the model at once{again}"
        case Saved():
            return f"checkpoint at swarm step {event.swarm_step}"
        case SavingAgain():
            return "checkpoints can be saved again"
        case ExchangeEnded(outcome=Outcome.FAILED):
            partners = " ".join(short_peer(peer) for peer in event.partners) or "nobody"
            return f"exchange of fragment {event.fragment} with {partners} failed: {event.reason}"
        case ExchangeEnded() | LimitsChanged() | Finished():
            return None
        case StateAdopted():
            donors = " ".join(short_peer(peer) for peer in event.donors)
            return f"copied the state of {donors}, {size(event.bytes)}"
        case RunAmended(text=text):
            return f"the run's creator has changed it: {text}"
        case Paused(reason=reason):
            return f"paused: {reason}"
        case Resumed():
            return "goes on"
        case AddressesChanged(addresses=addresses):
            return f"this machine's addresses are now {', '.join(addresses)}"
        case EntryPointAnswers(address=address):
            return f"{address} answers"
        case EntryPointSilent():
            return f"{event.address} does not answer: {event.reason}"
        case SwarmConnected():
            return "in the swarm"
        case SwarmLost(reason=reason) | SwarmUnlisted(reason=reason):
            return f"not in the swarm: {reason}"
        case _:
            return " ".join(
                (event.name, *(f"{key}={value}" for key, value in details(event).items()))
            )


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
    return _unwell(status, phase) or Health(True, clean(summary(status)))


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
