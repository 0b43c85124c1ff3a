"""Figures of a node: one table for Prometheus, the journal, the page and trackers.

Names follow Prometheus: base units, ``_total`` for what only grows. Labels have few values: no peer
and no fragment is a label. An unknown figure is None, and has no sample.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from lowcomm_node.catalogue import CATALOGUE
from lowcomm_node.status.model import Status, TextStatus

if TYPE_CHECKING:
    from starlette.responses import Response

SWARM_STEP = "lowcomm_swarm_step"
STEPS = "lowcomm_steps_total"
TOKENS = "lowcomm_tokens_total"
TRAINING_LOSS = "lowcomm_loss_nats/training"
HELD_OUT = "lowcomm_loss_nats/held_out"
CLAIMED_LOSS = "lowcomm_loss_nats/held_out_claimed"
COMPUTING = "lowcomm_computing_seconds_total"
WAITED = "lowcomm_waited_seconds_total"
WORST_BLOCK = "lowcomm_worst_block"


_OF_DEVICES = (
    ("load_ratio", "load", "Share of its time in which a device computed, or of its cores."),
    ("memory_bytes", "memory_taken", "Of a GPU, taken by any program."),
    ("memory_size_bytes", "memory_total", "Of a GPU."),
    ("temperature_celsius", "temperature", "Of a GPU."),
    ("speed_ratio", "speed", "Beside that of the fastest device that trains here."),
)


class Figure(NamedTuple):
    """A figure, or with a label one for each of its values."""

    name: str
    text: str
    value: float | Mapping[str, float | None] | None
    label: str = ""


def figures(status: Status) -> Iterator[Figure]:
    """Yield all figures of a status."""
    phases = {phase: float(phase == status.phase) for phase in CATALOGUE["phases"]}
    yield Figure("lowcomm_phase", "1 for the phase of the node.", phases, "phase")
    yield Figure("lowcomm_uptime_seconds", "Since the node started.", status.uptime)
    waits = float(status.waiting is not None)
    yield Figure("lowcomm_waiting", "Whether it waits, or trains alone.", waits)
    yield Figure("lowcomm_warnings", "Warnings that hold.", len(status.warnings))
    yield from _of_training(status)
    yield from _of_exchanges(status)
    yield from _of_text(status.text)
    peers = {"alive": status.peers, "silent": status.silent_peers}
    yield Figure("lowcomm_peers", "Other peers of the run.", peers, "state")
    about = status.swarm_peers
    yield Figure("lowcomm_swarm_peers", "Other peers of the run, about.", about)
    yield Figure("lowcomm_dht_peers", "Peers of the DHT that are known.", status.dht_peers)
    text, label = "Of exchanges and states.", "direction"
    contents = {"sent": status.bytes_sent, "received": status.bytes_received}
    yield Figure("lowcomm_content_bytes_total", text, contents, label)
    limits = status.limits
    rates = {"sent": limits.up, "received": limits.down}
    yield Figure("lowcomm_content_bytes_per_second", "Recent average.", rates, label)
    limit = {"sent": limits.max_up, "received": limits.max_down}
    text = "The owner's, where there is one."
    yield Figure("lowcomm_limit_bytes_per_second", text, limit, label)
    text = "Of records, calls, connections."
    yield Figure("lowcomm_refusals_total", text, status.refusals, "what")


def _of_training(status: Status) -> Iterator[Figure]:
    trainer, claims = status.trainer, status.claims
    yield Figure(SWARM_STEP, "Clock of the run.", trainer.swarm_step)
    yield Figure("lowcomm_run_steps", "Swarm steps of the whole run.", trainer.total_steps)
    yield Figure(STEPS, "Inner steps of this node.", trainer.steps)
    yield Figure("lowcomm_skipped_steps_total", "Inner steps skipped.", trainer.skipped_steps)
    yield Figure(TOKENS, "Tokens that this node has trained on.", trainer.tokens)
    rate = trainer.tokens_per_second
    yield Figure("lowcomm_tokens_per_second", "Recent average.", rate)
    losses = {
        "training": trainer.loss,
        "held_out": trainer.val_loss_last,
        "held_out_claimed": claims.val_loss if claims is not None else None,
    }
    yield Figure("lowcomm_loss_nats", "Loss of a token.", losses, "text")
    yield Figure("lowcomm_learning_rate", "Of the last inner step.", trainer.learning_rate)
    if trainer.computing is not None:
        yield Figure(COMPUTING, "In inner steps.", trainer.computing)
        yield Figure(WAITED, "Between inner steps.", sum(trainer.waited.values()))
    if (memory := trainer.memory) is not None:
        taken = {"taken": memory.taken, "most": memory.most, "reckoned": memory.reckoned}
        yield Figure("lowcomm_memory_bytes", "Of trainer and daemon together.", taken, "kind")
    for name, what, text in _OF_DEVICES:
        values = {one.device: getattr(one, what) for one in trainer.accelerators}
        yield Figure(f"lowcomm_accelerator_{name}", text, values, "device")
    yield Figure("lowcomm_trainer_failures_total", "Since the node started.", trainer.failures)


def _of_exchanges(status: Status) -> Iterator[Figure]:
    count = status.exchanges
    outcomes = {
        "applied": count.completed,
        "failed": count.failed,
        "no_partner": count.no_partner,
        "refused": count.refused,
    }
    yield Figure("lowcomm_exchanges_total", "Since the node started.", outcomes, "outcome")
    yield Figure("lowcomm_realignments_total", "Applied with whole weights.", count.realigned)
    yield Figure("lowcomm_exchanges_running", "Under way.", len(status.exchanges_running))
    yield Figure("lowcomm_exchange_age_seconds", "Since one was applied.", count.since_applied)
    text = "Spread of contributions in the block of 256 values where it is largest."
    yield Figure(WORST_BLOCK, text, count.worst_block)


def _of_text(parts: Sequence[TextStatus]) -> Iterator[Figure]:
    if not parts:
        return
    tokens = sum(part.tokens for part in parts)
    epochs = {
        "all": sum(part.tokens * (part.epoch + part.pieces_read / part.pieces) for part in parts),
        "own": sum(part.tokens * part.own_pieces / part.pieces for part in parts),
    }
    epochs = {reader: count / tokens for reader, count in epochs.items()}
    text = "Epochs of packed text read by all peers, and what this node read of the current one."
    yield Figure("lowcomm_text_epochs", text, epochs, "reader")
    fetched, given = (
        sum(getattr(part, name) for part in parts) for name in ("bytes_fetched", "bytes_given")
    )
    text, label = "Of packed text, from and to peers and mirrors.", "direction"
    yield Figure("lowcomm_text_bytes_total", text, {"fetched": fetched, "given": given}, label)
    missing = sum(part.missing for part in parts)
    yield Figure("lowcomm_text_missing_pieces", "Pieces that are being fetched.", missing)


# --- For Prometheus -------------------------------------------------------------------------------


def answer_metrics(status: Status) -> "Response":
    """Answer a request of Prometheus with all figures of a status."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest  # few nodes need it
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
    from starlette.responses import Response  # commands read figures, too, without a server

    run = status.run
    about = {
        "peer_id": status.peer_id,
        "release": status.release,
        "run": run.name if run else "",
        "fingerprint": run.fingerprint if run else "",
        "method": run.method if run else "",
    }
    families: list[Any] = [
        InfoMetricFamily("lowcomm_node", "The node, and the run it takes part in.", about)
    ]
    for name, text, value, label in figures(status):
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(name, text, labels=[label] if label else [])
        for key, number in value.items() if isinstance(value, Mapping) else [("", value)]:
            if number is not None:
                family.add_metric([key] if label else [], number)
        families.append(family)
    collector = cast("Any", SimpleNamespace(collect=lambda: families))
    return Response(generate_latest(collector), media_type=CONTENT_TYPE_LATEST)


# --- Over time ------------------------------------------------------------------------------------


def _column(figure: str) -> Any:
    """Column of samples with a figure; a label stands behind a slash."""
    return field(default=None, metadata={"figure": figure})


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Figures of a node at one moment: rows of the journal, and points of the page and trackers."""

    time: float
    """Unix seconds."""
    phase: str
    waiting: str | None
    swarm_step: int | None = _column(SWARM_STEP)
    steps: int | None = _column(STEPS)
    tokens: int | None = _column(TOKENS)
    loss: float | None = _column(TRAINING_LOSS)
    val_loss: float | None = _column(HELD_OUT)
    tokens_per_second: float | None = _column("lowcomm_tokens_per_second")
    peers: int = _column("lowcomm_peers/alive")
    completed: int = _column("lowcomm_exchanges_total/applied")
    failed: int = _column("lowcomm_exchanges_total/failed")
    bytes_sent: int = _column("lowcomm_content_bytes_total/sent")
    bytes_received: int = _column("lowcomm_content_bytes_total/received")
    memory: int | None = _column("lowcomm_memory_bytes/taken")
    refused: int | None = _column("lowcomm_exchanges_total/refused")
    no_partner: int | None = _column("lowcomm_exchanges_total/no_partner")
    computing: float | None = _column(COMPUTING)
    waited: float | None = _column(WAITED)
    learning_rate: float | None = _column("lowcomm_learning_rate")
    claimed_loss: float | None = _column(CLAIMED_LOSS)
    worst_block: float | None = _column(WORST_BLOCK)
    text_epochs: float | None = _column("lowcomm_text_epochs/all")
    text_own: float | None = _column("lowcomm_text_epochs/own")
    text_fetched: int | None = _column("lowcomm_text_bytes_total/fetched")
    text_given: int | None = _column("lowcomm_text_bytes_total/given")


SAMPLED: Mapping[str, str] = {
    one.name: one.metadata["figure"] for one in fields(Sample) if one.metadata
}
"""Figure of each column that has one. Of those, ``_total`` is since a start of the node, but for
``PERSISTENT``."""
PERSISTENT = (STEPS, TOKENS)
"""Counts from the beginning of the run."""


def sample(time: float, status: Status) -> Sample:
    """Take the figures of a status at a time (Unix seconds)."""
    values: dict[str, float | None] = {}
    for name, _, value, _ in figures(status):
        if isinstance(value, Mapping):
            values |= {f"{name}/{key}": number for key, number in value.items()}
        else:
            values[name] = value
    return Sample(
        time=time,
        phase=status.phase,
        waiting=status.waiting,
        **cast("Any", {column: values.get(figure) for column, figure in SAMPLED.items()}),
    )
