"""Events and statuses in words: lines, progress, farewell, and whether a node is well."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowcomm_node.node.messages import Evaluated, MicroBatch, Tokenizing
from lowcomm_node.owner.sources import find_home
from lowcomm_node.status.events import Contributed, details
from lowcomm_node.status.model import Status, TextStatus, TrainerStatus
from lowcomm_node.system.accelerator import Accelerator
from lowcomm_node.system.command import program
from lowcomm_node.system.logs import Event
from lowcomm_node.system.systemd import Condition
from lowcomm_node.system.units import MISSING, clean, loss, quantity, seconds, short_peer, size

SLOW = 0.8
"""Speed beside the fastest device below which one holds the others up."""
_LINES: Mapping[str, str] = {
    "phase": "{phase}",
    "warning": "warning: {text}",
    "evaluated": "held-out loss {loss} of the fast weights at swarm step {swarm_step}",
    "skipped": "inner step {steps} skipped, as loss or gradients are not finite ({skipped_steps} "
    "so far)",
    "micro-batch": "{why}: {micro_batch} windows go through the model at once",
    "saved": "checkpoint at swarm step {swarm_step}",
    "saving-again": "checkpoints can be saved again",
    "exchange.failed": "exchange of fragment {fragment} with {partners} failed: {reason}",
    "state.adopted": "copied the state of {donors}, {bytes}",
    "piece-skipped": "piece {piece} of {text} is skipped in epoch {epoch}",
    "amended": "the run's creator has changed it: {text}",
    "paused": "paused: {reason}",
    "resumed": "resumed",
    "addresses.changed": "this machine's addresses are now {addresses}",
    "door.open": "{address} answers",
    "door.closed": "{address} does not answer: {reason}",
    "swarm.connected": "in the swarm",
    "swarm.lost": "not in the swarm: {reason}",
    "swarm.unlisted": "not in the swarm: {reason}",
}
"""Lines of events by name, from their fields."""
_IN_PROGRESS = ("exchange.applied", "exchange.no-partner", "limits", "finished")
"""Events that the line on progress shows, too."""


def _peers(peers: Sequence[str]) -> str:
    return " ".join(short_peer(peer) for peer in peers) or "nobody"


_SHOWN: Mapping[str, Callable[[Any], str]] = {
    "loss": loss, "bytes": size, "partners": _peers, "donors": _peers, "addresses": ", ".join,
}  # fmt: skip
"""Fields of events that a line shows in another form."""


def event_in_words(event: Event) -> str | None:
    """A line without control characters; None for what the line on progress shows, too."""
    if event.name in _IN_PROGRESS:
        return None
    values = details(event)
    if event.name not in _LINES:
        return clean(" ".join((event.name, *(f"{key}={value}" for key, value in values.items()))))
    shown = {key: _SHOWN.get(key, str)(value) for key, value in values.items()}
    line = _LINES[event.name].format(**shown)
    if isinstance(event, Evaluated) and event.epochs >= 1:
        line += f", after {event.epochs:.1f} epochs of the text"
    if isinstance(event, MicroBatch) and event.activation_checkpointing:
        line += ", activations computed again"
    return clean(line)


def peers_in_words(status: Status, which: str = "") -> str:
    """The number of other peers, or about how many where the node knows but a part of them."""
    if status.shards:
        shards = f"{status.shards} {'shard' if status.shards == 1 else 'shards'}"
        return f"about {status.swarm_peers:,} {which}peers (from {shards})"
    return f"{status.peers} {which}{'peer' if status.peers == 1 else 'peers'}"


def speed_in_words(trainer: TrainerStatus) -> str:
    """The speed of training, and which share of the time its owner allows."""
    limit = f" at {trainer.duty:.0%} duty" if trainer.duty and trainer.duty < 1 else ""
    return f"{quantity(trainer.tokens_per_second)} tokens/s{limit}"


def lenders_in_words(trainer: TrainerStatus) -> list[str]:
    """A sentence on each machine that computes for a node, or does not."""
    found: list[str] = []
    for one in trainer.lenders:
        if one.away:
            found.append(clean(f"{one.name} is away: {one.away}"))
        elif one.blocks:
            blocks = f"{one.name} holds blocks {one.blocks[0]} to {one.blocks[1] - 1}"
            times = f"computes {one.computing:.2f} s of a step, waited for {one.moving:.2f} s"
            found.append(clean(f"{blocks}, {times}"))
        elif one.windows:
            windows = f"{one.windows} window{'s' if one.windows > 1 else ''} of each step"
            found.append(clean(f"{one.name} computes {windows}, {size(one.moved)} moved"))
        else:
            found.append(clean(f"{one.name} is here: its line would cost more than it saves"))
    return found


def kinds_in_words(devices: str | None) -> str:
    """The device that trains, or the kind and number of several."""
    first, *others = clean(devices or MISSING).upper().split(",")
    return f"{first.partition(':')[0]} x {1 + len(others)}" if others else first


def slow_in_words(devices: Sequence[Accelerator]) -> Iterator[str]:
    """Yield a sentence on each device that holds the others up."""
    for one in devices:
        if one.speed is not None and one.speed < SLOW:
            yield (
                f"{one.device} computes {one.speed:.1f} times as fast as the fastest: the others "
                "wait for it"
            )


def progress_in_words(status: Status) -> str:
    """The progress of a node that trains."""
    trainer, exchanges = status.trainer, status.exchanges
    parts = (
        f"step {trainer.swarm_step or 0} of {trainer.total_steps}",
        f"loss {loss(trainer.loss)}",
        speed_in_words(trainer),
        f"{exchanges.completed} exchanges, {size(status.bytes_sent)} sent",
        peers_in_words(status, "other "),
    )
    return clean(", ".join(parts) + (f"; {status.waiting}" if status.waiting else ""))


def summary(status: Status) -> str:
    """The phase of a node, and why it waits or how far it is."""
    if status.waiting or status.trainer.swarm_step is None:
        return f"{status.phase} · {status.waiting}" if status.waiting else status.phase
    return f"{status.phase} · {progress_in_words(status)}"


def contribution(status: Status) -> Contributed:
    """The contribution of a node to its run, from its last status."""
    return Contributed(
        steps=status.trainer.steps or 0,
        tokens=status.trainer.tokens or 0,
        exchanges=status.exchanges.completed,
        bytes_sent=status.bytes_sent,
        checkpoint=status.checkpoint.path if status.checkpoint else None,
    )


def tell_farewell(given: Contributed, home: Path) -> str:
    """Lines on what a node has given, where the model lies, and commands that use it."""
    option = "" if find_home() == home else f" --home {shlex.quote(str(home))}"
    lines = [
        f"contributed: {given.steps:,} steps, {quantity(given.tokens)} tokens; since this start "
        f"{given.exchanges:,} exchanges applied, {size(given.bytes_sent)} sent"
    ]
    if given.checkpoint is not None:
        lines += [
            f"the model:   {given.checkpoint}",
            f'try it:      {program()} generate "def "{option}',
            f"export it:   {program()} checkpoint export FOLDER{option}",
        ]
    return "\n".join(lines)


def swarm_in_words(statuses: Sequence[Status | None]) -> str:
    """The progress of the nodes of a demo (None: not up yet), in a line."""
    doings = [summary(status) if status else "starting" for status in statuses]
    return clean("; ".join(f"node {number} {one}" for number, one in enumerate(doings, 1)))


def tokenizing_in_words(now: Tokenizing) -> str:
    """How far the text is tokenized, how fast, and how long it takes yet."""
    share = f"{100 * now.done // now.total} %" if now.total else MISSING
    left = f", about {seconds(now.remaining)} left" if now.remaining is not None else ""
    return (
        f"tokenizing the text: {share}, {size(now.done)} of {size(now.total)}, "
        f"{size(now.rate)}/s{left}"
    )


def text_in_words(part: TextStatus, is_read: bool = True) -> str:
    """How far a part of packed text is read, and what of it was sent. A node that does not train
    (not ``is_read``) knows nothing of the reading."""
    all_, own = (100 * count / part.pieces for count in (part.pieces_read, part.own_pieces))
    noun = "piece" if part.missing == 1 else "pieces"
    parts = [
        f"epoch {part.epoch + 1}, {all_:.0f} % read by all, {own:.0f} % by this node"
        if is_read
        else f"{part.held:,} pieces here",
        *((f"{size(part.bytes_fetched)} fetched",) if part.bytes_fetched else ()),
        *((f"{size(part.bytes_given)} given",) if part.bytes_given else ()),
        *((f"{part.missing} {noun} to come",) if part.missing else ()),
        *((part.waiting,) if part.waiting else ()),
    ]
    return clean(", ".join(parts))


SWARM_PATIENCE = 300.0
"""Seconds without an answer of the swarm: by then p2pd was started again twice."""
PHASE_PATIENCE: Mapping[str, float] = {
    "starting": 120.0,
    "joining": 3600.0,  # text is read and the model made, too
    "syncing": 600.0,  # the first peers are awaited for 300 s; a state that comes in changes it
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
    if status.phase == "paused":
        return Health(True, clean(status.waiting or "paused"))
    trouble = _trouble(status)
    return Health(trouble is None, clean(trouble or summary(status)))


def condition(status: Status) -> Condition:
    """The node's condition for the service manager; ready once it has found its run."""
    late, leaves = -(status.leaving or 0.0), status.leaving is not None
    overdue = f"the node should have left {late:.0f} s ago" if late > 0 else None
    return Condition(ready=status.joined, line=summary(status), leaving=leaves, overdue=overdue)


def _trouble(status: Status) -> str | None:
    """Why a node that may train is not well."""
    phase, swarm = status.phase, status.swarm
    patience = PHASE_PATIENCE.get(phase)
    if status.leaving is not None:
        patience = None if status.leaving >= 0 else 0.0
    if patience is not None and status.unchanged > patience:
        why = f" ({status.waiting})" if status.waiting else ""
        return f"{phase}{why} for {seconds(status.unchanged)}: see its logs, or start it again"
    if swarm is None or swarm.state == "connected" or phase in ("finishing", "left"):
        return None
    if swarm.seconds <= SWARM_PATIENCE:
        return None
    why = swarm.reason or f"it is {swarm.state}"
    return f"not in the swarm for {seconds(swarm.seconds)}: {why}"
