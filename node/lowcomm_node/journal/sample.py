"""What is written down of a node every few seconds."""

from dataclasses import dataclass, fields
from operator import attrgetter

from lowcomm_node.status.model import Status


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Figures of a node at one moment. Counts are since its start."""

    time: float
    """Unix seconds."""
    phase: str
    """As `phase` in `status`."""
    waiting: str | None
    """What it waits for, or why it trains alone."""
    swarm_step: int | None
    """Clock of the run."""
    steps: int | None
    """Inner steps of this node, from the beginning of the run."""
    tokens: int | None
    """Tokens that it has trained on, from the beginning of the run."""
    loss: float | None
    """Nats a token, of the last inner step."""
    val_loss: float | None
    """Nats a token, of the last evaluation on held-out text."""
    tokens_per_second: float | None
    """Of late."""
    peers: int
    """Other peers that are alive."""
    completed: int
    """Exchanges that were applied."""
    failed: int
    """Exchanges that began and were not applied."""
    bytes_sent: int
    """Of contents."""
    bytes_received: int
    """Of contents."""
    memory: int | None
    """Bytes that trainer and daemon take."""
    refused: int | None = None
    """Offers that were refused, by others and by this node."""
    no_partner: int | None = None
    """Exchanges for which no peer was found."""
    computing: float | None = None
    """Seconds in inner steps since the trainer started."""
    waited: float | None = None
    """Seconds since then in which training waited between two steps."""
    learning_rate: float | None = None
    """Of the last inner step."""
    claimed_loss: float | None = None
    """Median of the last losses on held-out text that other peers tell of theirs."""
    release: str | None = None
    """Of this node."""
    releases: str | None = None
    """Those that other peers tell, with how many tell each, such as `0.2.0 (3), 0.1.0 (1)`."""

    def row(self) -> tuple[float | int | str | None, ...]:
        """Its fields, in the order of COLUMNS."""
        return _ROW(self)


COLUMNS = tuple(one.name for one in fields(Sample))
_ROW = attrgetter(*COLUMNS)


def sample(time: float, status: Status) -> Sample:
    """Of a status at a time (Unix seconds)."""
    trainer = status.trainer
    memory = trainer.memory
    return Sample(
        time=time,
        phase=status.phase,
        waiting=status.waiting,
        swarm_step=trainer.swarm_step,
        steps=trainer.steps,
        tokens=trainer.tokens,
        loss=trainer.loss,
        val_loss=trainer.val_loss_last,
        tokens_per_second=trainer.tokens_per_second,
        peers=status.peers,
        completed=status.exchanges.completed,
        failed=status.exchanges.failed,
        bytes_sent=status.bytes_sent,
        bytes_received=status.bytes_received,
        memory=memory.taken if memory is not None else None,
        refused=status.exchanges.refused,
        no_partner=status.exchanges.no_partner,
        computing=trainer.computing,
        waited=sum(trainer.waited.values()) if trainer.computing is not None else None,
        learning_rate=trainer.learning_rate,
        release=status.release,
        releases=", ".join(f"{name} ({count})" for name, count in sorted(status.releases.items())),
        claimed_loss=status.claims.val_loss if status.claims is not None else None,
    )
