"""Metrics for Prometheus, made from a status each time that it asks, where the owner wants them.

They are served at an address of their own, without a token: Prometheus can't read that of the API,
which is another one after each start.

Names follow Prometheus: base units, ``_total`` for what only grows. Labels have few values: no peer
and no fragment is a label.
"""

from collections.abc import Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from lowcomm_node.catalogue import CATALOGUE
from lowcomm_node.status.model import Status


class NodeCollector(Collector):
    """All metrics of one status."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield them."""
        for family in (_node, _training, _exchanges, _line):
            yield from family(self._status)


def answer_metrics(status: Status) -> Response:
    """Answer a request with all metrics of a status."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(NodeCollector(status))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _node(status: Status) -> Iterator[Metric]:
    run = status.run
    yield InfoMetricFamily(
        "lowcomm_node",
        "The node, and the run that it takes part in.",
        {
            "peer_id": status.peer_id,
            "release": status.release,
            "run": run.name if run else "",
            "fingerprint": run.fingerprint if run else "",
            "method": run.method if run else "",
        },
    )
    phases = {phase: float(phase == status.phase) for phase in CATALOGUE["phases"]}
    yield _gauge("lowcomm_phase", "1 for the phase of the node.", phases, "phase")
    yield _gauge("lowcomm_uptime_seconds", "Since the node started.", status.uptime)
    yield _gauge(
        "lowcomm_waiting", "Whether it waits, or trains alone.", float(status.waiting is not None)
    )
    yield _gauge("lowcomm_warnings", "Warnings that hold.", len(status.warnings))
    memory = status.trainer.memory
    if memory is not None:
        told = {"taken": memory.taken, "most": memory.most, "reckoned": memory.reckoned}
        yield _gauge("lowcomm_memory_bytes", "Of trainer and daemon together.", told, "kind")


def _training(status: Status) -> Iterator[Metric]:
    trainer = status.trainer
    yield _gauge("lowcomm_swarm_step", "Clock of the run.", trainer.swarm_step)
    yield _gauge("lowcomm_run_steps", "Swarm steps of the whole run.", trainer.total_steps)
    yield _counter("lowcomm_steps", "Inner steps of this node.", trainer.steps)
    yield _counter("lowcomm_skipped_steps", "Inner steps skipped.", trainer.skipped_steps)
    yield _counter("lowcomm_tokens", "Tokens that this node has trained on.", trainer.tokens)
    yield _gauge("lowcomm_tokens_per_second", "Of late.", trainer.tokens_per_second)
    claims = status.claims
    losses = {
        "training": trainer.loss,
        "held_out": trainer.val_loss_last,
        "held_out_claimed": claims.val_loss if claims is not None else None,
    }
    yield _gauge("lowcomm_loss_nats", "Loss of a token.", losses, "text")
    yield _gauge("lowcomm_learning_rate", "Of the last inner step.", trainer.learning_rate)
    if trainer.computing is not None:
        waited = sum(trainer.waited.values())
        yield _counter("lowcomm_computing_seconds", "In inner steps.", trainer.computing)
        yield _counter("lowcomm_waited_seconds", "Between inner steps.", waited)
    if (device := trainer.accelerator) is not None:
        text = "Share of its time in which the device computed, or of its cores."
        yield _gauge("lowcomm_accelerator_load_ratio", text, {device.kind: device.load}, "kind")
        held = {"taken": device.memory_taken, "total": device.memory_total}
        yield _gauge("lowcomm_accelerator_memory_bytes", "Of a GPU, by whomever.", held, "kind")
    yield _counter("lowcomm_trainer_failures", "Since the start of the node.", trainer.failures)


def _exchanges(status: Status) -> Iterator[Metric]:
    count = status.exchanges
    outcomes = {
        "applied": count.completed,
        "failed": count.failed,
        "no_partner": count.no_partner,
        "refused": count.refused,
    }
    yield _counter("lowcomm_exchanges", "Since the start of the node.", outcomes, "outcome")
    yield _counter("lowcomm_realignments", "Applied with whole weights.", count.realigned)
    yield _gauge("lowcomm_exchanges_running", "Under way.", len(status.exchanges_running))
    yield _gauge("lowcomm_exchange_age_seconds", "Since one was applied.", count.since_applied)
    yield _gauge(
        "lowcomm_worst_block",
        "Spread of contributions in the block of 256 values where it is largest.",
        count.worst_block,
    )
    peers = {"alive": status.peers, "silent": status.silent_peers}
    yield _gauge("lowcomm_peers", "Other peers of the run.", peers, "state")
    yield _gauge("lowcomm_dht_peers", "Peers of the DHT that are known.", status.dht_peers)


def _line(status: Status) -> Iterator[Metric]:
    limits, sent, received = status.limits, status.bytes_sent, status.bytes_received
    contents = {"sent": sent, "received": received}
    yield _counter("lowcomm_content_bytes", "Of exchanges and states.", contents, "direction")
    now = {"sent": limits.up, "received": limits.down}
    yield _gauge("lowcomm_content_bytes_per_second", "Of late.", now, "direction")
    most = {"sent": limits.max_up, "received": limits.max_down}
    yield _gauge(
        "lowcomm_limit_bytes_per_second", "The owner's, where there is one.", most, "direction"
    )
    yield _counter("lowcomm_refusals", "Of records, calls, connections.", status.refusals, "what")


Values = Mapping[str, float | None] | float | None


def _gauge(name: str, text: str, values: Values, label: str = "") -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=[label] if label else []), values)


def _counter(name: str, text: str, values: Values, label: str = "") -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=[label] if label else []), values)


def _filled(metric: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
    """What is not known has no sample."""
    told = values if isinstance(values, Mapping) else {"": values}
    for one, value in told.items():
        if value is not None:
            metric.add_metric([one] if one else [], value)
    return metric
