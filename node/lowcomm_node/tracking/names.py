"""The one table of what sinks are told, by the names of the metrics.

A label of a metric is the part behind the slash. What Prometheus counts from each start of the node
is counted on here over all its starts.
"""

from collections.abc import Callable
from dataclasses import dataclass

from lowcomm_node.journal.sample import Sample


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    text: str
    read: Callable[[Sample], float | None]
    counts: bool = False
    """Whether it begins anew with each start."""


SWARM_STEP = "lowcomm_swarm_step"
TOKENS = "lowcomm_tokens_total"
TRAINING_LOSS = "lowcomm_loss_nats/training"
COMPUTING = "lowcomm_computing_seconds_total"
WAITED = "lowcomm_waited_seconds_total"

SAMPLED: tuple[Series, ...] = (
    Series(SWARM_STEP, "Clock of the run.", lambda one: one.swarm_step),
    Series("lowcomm_steps_total", "Inner steps of this node.", lambda one: one.steps),
    Series(TOKENS, "Tokens that this node has trained on.", lambda one: one.tokens),
    Series("lowcomm_tokens_per_second", "Of late.", lambda one: one.tokens_per_second),
    Series(TRAINING_LOSS, "Nats a token, of the last inner step.", lambda one: one.loss),
    Series("lowcomm_learning_rate", "Of the last inner step.", lambda one: one.learning_rate),
    Series(COMPUTING, "Seconds in inner steps.", lambda one: one.computing, counts=True),
    Series(WAITED, "Seconds between inner steps.", lambda one: one.waited, counts=True),
    Series("lowcomm_exchanges_total/applied", "Exchanges.", lambda one: one.completed, counts=True),
    Series("lowcomm_exchanges_total/failed", "Exchanges.", lambda one: one.failed, counts=True),
    Series(
        "lowcomm_exchanges_total/no_partner",
        "Exchanges for which no peer was found.",
        lambda one: one.no_partner,
        counts=True,
    ),
    Series(
        "lowcomm_exchanges_total/refused",
        "Offers that were refused, by others and by this node.",
        lambda one: one.refused,
        counts=True,
    ),
    Series(
        "lowcomm_content_bytes_total/sent",
        "Of exchanges and states.",
        lambda one: one.bytes_sent,
        counts=True,
    ),
    Series(
        "lowcomm_content_bytes_total/received",
        "Of exchanges and states.",
        lambda one: one.bytes_received,
        counts=True,
    ),
    Series("lowcomm_peers/alive", "Other peers of the run.", lambda one: one.peers),
    Series("lowcomm_memory_bytes/taken", "Of trainer and daemon.", lambda one: one.memory),
)
"""Of a sample, every ten seconds."""

WAITING = "lowcomm_waiting_ratio"
HELD_OUT = "lowcomm_loss_nats/held_out"
WORST_BLOCK = "lowcomm_worst_block"
OTHERS: dict[str, str] = {
    WAITING: "Share of the trainer's time since the point before in which training waited; of no "
    "metric, Prometheus divides the two counters.",
    HELD_OUT: "Nats a token, at each evaluation.",
    WORST_BLOCK: "Distance of the weights at a merge: spread of the contributions in the block of "
    "256 values where it was largest.",
}
LOSSES = (TRAINING_LOSS, HELD_OUT)
"""What is shown against tokens, too."""
