"""What ``status`` and ``peers`` tell, as records, and these records as JSON.

The daemon builds them (``node/report.py``), and panel, page, metrics and commands read them. A
field that is newer than release 0.1.0 has a default, for nodes that do not tell it yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from lowcomm_node.errors import Unhealthy
from lowcomm_node.net.routes import RouteSpeed
from lowcomm_node.node.messages import Tokenizing
from lowcomm_node.swarm.watchdog import SwarmStatus
from lowcomm_node.sync.history import ExchangeStatus, IntervalStatus
from lowcomm_node.system.machine import Accelerator, NodeMemory, Priority

T = TypeVar("T")


_ANYTHING = TypeAdapter[Any](Any)


def to_json(record: object) -> Any:
    """Records as JSON has them, in dictionaries and lists; a number that is not finite is null."""
    return _ANYTHING.dump_python(record, mode="json")


def read(kind: type[T], told: object) -> T:
    """What a node has told, as a record. Fields that only a newer node tells are ignored.

    Raises Unhealthy if a field is missing or of another type.
    """
    try:
        return _reader(kind).validate_python(told, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the answer"
        raise Unhealthy(
            f"The node's answer can't be read ({place}: {first['msg']}): node and command are of "
            "different releases. Start the node again with the release of this command."
        ) from None


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@dataclass(frozen=True, kw_only=True)
class AmendmentStatus:
    """An amendment of the run."""

    number: int
    """Its place in the chain, from 1."""
    at: int
    """Swarm step from which it holds."""
    settings: Mapping[str, Any]
    """What it changes, by the names of the specification."""
    text: str
    """The same in words."""
    in_force: bool
    """Whether this node has reached that step."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The run that a node takes part in."""

    name: str
    """As its creator named it."""
    description: str = ""
    """What it is about, as amended."""
    run_id: str
    """SHA-256 of its signed specification, hexadecimal."""
    fingerprint: str
    """The beginning of the run id, as commands take it."""
    method: str
    """Name of the preset."""
    creator: str
    """Peer id of its creator."""
    steps: int
    """Swarm steps of the whole run, as amended."""
    amendments: tuple[AmendmentStatus, ...] = ()
    """What its creator has changed, oldest first."""


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Why a node does not train, by its owner's will."""

    rule: str
    """What the owner set: `owner` (the command), `schedule`, `in-use` or `battery`."""
    reason: str
    """The same in words."""
    until: float | None
    """When it ends (Unix seconds); null if that is not known."""


@dataclass(frozen=True, kw_only=True)
class LastFailure:
    """The last failure of the trainer."""

    kind: str
    """`died`, `hung`, `memory`, `diverged`, `unfit` or `error`."""
    reason: str
    """A sentence."""
    step: int
    """Inner steps that this node had done."""


@dataclass(frozen=True, kw_only=True)
class CheckpointStatus:
    """A checkpoint on the disk."""

    step: int
    """Swarm step that it was taken at."""
    path: str
    """Its folder."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far training is; null until the trainer has told it."""

    steps: int | None = None
    """Inner steps of this node, from the beginning of the run."""
    swarm_step: int | None = None
    """Clock of the run: how far the swarm is, as this node knows."""
    tokens: int | None = None
    """Tokens that this node has trained on, from the beginning of the run."""
    tokens_per_second: float | None = None
    """Tokens a second, of late."""
    loss: float | None = None
    """Loss of the last inner step; null also if it is not finite."""
    skipped_steps: int | None = None
    """Inner steps that were skipped, as loss or gradients were not finite."""
    learning_rate: float | None = None
    """Of the last inner step."""
    micro_batch: int | None = None
    """Windows of a batch that go through the model at once here."""
    activation_checkpointing: bool | None = None
    """Whether activations are computed again in the backward pass, to take less memory."""
    computing: float | None = None
    """Seconds in inner steps since the trainer started."""
    waited: Mapping[str, float] = field(default_factory=dict)
    """Seconds since then in which training waited between two steps, by what for: such as
    `capture`, `merge`, `evaluate`, `save`."""
    val_loss_first: float | None = None
    """The first loss of the fast weights on held-out text since the start."""
    val_loss_last: float | None = None
    """The last one."""


@dataclass(frozen=True, kw_only=True)
class TrainerStatus(Progress):
    """The trainer."""

    state: str
    """The phase of the node."""
    pid: int | None = None
    """Its process; null if none runs."""
    failures: int = 0
    """How often it failed since the node started."""
    last_failure: LastFailure | None = None
    """The last time that it failed."""
    overdue: str | None = None
    """What it hangs at, if it does and the node could not end it."""
    device: str | None
    """Such as `cpu` or `cuda`; null until the model is built."""
    parameters: int | None
    """Of the model; null until it is built."""
    total_steps: int | None
    """Swarm steps of the whole run, as amended."""
    tokenizing: Tokenizing | None = None
    """While text is tokenized."""
    memory: NodeMemory | None = None
    """Memory of trainer and daemon together; null if the trainer does not run."""
    priority: Priority | None = None
    """How it makes way for other programs of the machine; null if it does not run."""
    accelerator: Accelerator | None = None
    """What the device does that trains; null if the trainer does not run."""


@dataclass(frozen=True, kw_only=True)
class ExchangeCounts:
    """What became of exchanges since the node started."""

    completed: int = 0
    """Exchanges that were applied."""
    refused: int = 0
    """Offers that were refused, by others and by this node."""
    failed: int = 0
    """Exchanges that began and were not applied."""
    no_partner: int = 0
    """Exchanges for which no peer was found."""
    in_doubt: int = 0
    """Exchanges of which the last word was lost."""
    realigned: int = 0
    """Applied exchanges that carried whole slow weights, because those of the members differed."""
    realigned_share: float | None = None
    """Their part of all applied ones."""
    worst_block: float | None = None
    """Largest spread of contributions in a block of 256 values, over the last merge of each
    fragment."""
    since_applied: float | None = None
    """Seconds since one was applied last; null if none was since the node started."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The owner's limits on traffic, and what is used of them."""

    max_up: float | None = None
    """Bytes a second of contents sent; null: no limit."""
    max_down: float | None = None
    """Bytes a second of contents received; null: no limit."""
    max_peers: int = 0
    """Peers to talk with at once."""
    up: float = 0.0
    """Bytes a second sent, of late."""
    down: float = 0.0
    """Bytes a second received, of late."""
    peers: int = 0
    """Peers that this node talks with."""
    turned_away: int = 0
    """Peers that found no place."""


@dataclass(frozen=True, kw_only=True)
class Claims:
    """What other peers tell of themselves, put together; nobody can check it."""

    val_loss: float
    """Median of their last losses on held-out text, nats a token."""
    told_by: int
    """Peers that tell one."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """Everything about a node at one moment."""

    peer_id: str
    """Its peer id."""
    release: str
    """Of lowcomm, with the commit."""
    pid: int
    """Its process."""
    run: RunStatus | None
    """The run; null until it is found."""
    phase: str
    """`starting`, `joining`, `syncing`, `training`, `paused`, `restarting`, `finishing`, `finished`
    or `left`."""
    joined: bool = False
    """Whether it takes part in the run."""
    waiting: str | None
    """What it waits for, or why it trains alone; null for nothing."""
    waiting_code: str | None = None
    """Its code in the catalogue."""
    unchanged: float = 0.0
    """Seconds since its phase, or what it waits for, changed."""
    leaving: float | None = None
    """Seconds that it may still take to leave, below 0 if it should have left; null while it
    stays."""
    swarm: SwarmStatus | None = None
    """How it stands to the swarm; null before it looks."""
    pause: Pause | None = None
    """Why it does not train, by its owner's will; null if it may."""
    schedule: str | None = None
    """Hours in which its owner lets it train; null for always."""
    uptime: float
    """Seconds since it started."""
    trainer: TrainerStatus
    """The trainer."""
    exchanges_running: tuple[ExchangeStatus, ...]
    """Exchanges under way."""
    exchanges: ExchangeCounts
    """What became of exchanges since the node started."""
    interval: IntervalStatus | None = None
    """How often a fragment is exchanged; null while this node does not exchange."""
    bytes_sent: int
    """Bytes of contents sent since the node started."""
    bytes_received: int
    """Bytes of contents received since the node started."""
    limits: Limits = field(default_factory=Limits)
    """The owner's limits on traffic."""
    peers: int
    """Other peers that are alive."""
    releases: Mapping[str, int] = field(default_factory=dict)
    """Releases of lowcomm that these tell, with how many tell each; the 8 most frequent."""
    claims: Claims | None = None
    """What those tell of the swarm, which nobody can check; null if none tells anything."""
    silent_peers: int = 0
    """Peers that have a record and do not answer."""
    dht_peers: int
    """Peers of the DHT that are known."""
    checkpoint: CheckpointStatus | None
    """The newest; null if there is none yet."""
    addresses: tuple[str, ...]
    """Where others are told to call it."""
    entry_points: tuple[str, ...]
    """Multiaddresses that others can give to `--peers`."""
    tunnels: Mapping[str, int] = field(default_factory=dict)
    """Streams of others through libp2p: `open` now, and `refused` because there were too many."""
    refusals: Mapping[str, int] = field(default_factory=dict)
    """Records, calls and connections that were refused, by what and why, such as
    `call.replayed`."""
    warnings: tuple[str, ...]
    """What the owner should know, the newest last; 20 at most."""
    warning_codes: tuple[str, ...] = ()
    """Their codes in the catalogue, in the same order."""


@dataclass(frozen=True, kw_only=True)
class PeerStatus:
    """A peer that is alive, and how exchanges with it went."""

    peer_id: str
    """Its peer id."""
    phase: str
    """What it does, as it tells."""
    swarm_step: int
    """How far the swarm is, as it tells."""
    steps: int
    """Its own inner steps, as it tells."""
    tokens_per_second: float
    """As it tells."""
    val_loss: float | None = None
    """Its last loss on held-out text, as it tells; null if it tells none."""
    address: str | None
    """Where it can be called directly."""
    release: str | None = None
    """Of lowcomm, as it tells."""
    name: str = ""
    """What its owner calls it (`--name`); anybody may take any name."""
    age: float
    """Seconds since its record was issued."""
    completed: int
    """Exchanges with it that were applied."""
    refused: int
    """Offers that it refused."""
    failed: int
    """Streams that were lost."""
    last_reason: str
    """Why the last exchange with it was not applied; empty if none failed."""
    last_code: str | None = None
    """Its code in the catalogue."""
    score: float
    """1 for a peer of which nothing bad is known; less for what is held against it."""
    left_out: bool
    """Whether it is left out of exchanges for a while."""
    held_against: str
    """Why; empty if nothing is held against it."""
    route: str | None
    """How it is reached: `direct IP:PORT`, `punched` or `relay NAME`; null if it is not."""
    route_reason: str | None
    """Why not at all, or not by the better route."""
    round_trip: float | None
    """Seconds."""
    rate_up: float | None
    """Bytes a second at which contents were sent to it last."""
    rate_down: float | None
    """Bytes a second at which contents came from it last."""


@dataclass(frozen=True, kw_only=True)
class Ping:
    """What ``ping`` found."""

    peer_id: str
    """The peer."""
    routes: tuple[RouteSpeed, ...]
    """Each route to it."""


@dataclass(frozen=True, kw_only=True)
class Hours:
    """When a node may train."""

    schedule: str | None
    """As its owner wrote it; null for always."""


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """A model that was written for other programs."""

    path: str
    """Its folder."""
    step: int
    """Swarm step of the checkpoint."""
    missing: str
    """What an average of several peers lacks; empty for nothing."""


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """What a node has given to its run, and where its model lies."""

    steps: int
    """Inner steps of this node, from the beginning of the run."""
    tokens: int
    """Tokens that it has trained on, from the beginning of the run."""
    exchanges: int
    """Exchanges that were applied since this start."""
    bytes_sent: int
    """Bytes of contents sent since this start."""
    checkpoint: str | None
    """Folder of the newest checkpoint; null if there is none."""
