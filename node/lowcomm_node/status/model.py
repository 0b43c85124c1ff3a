"""The records of ``status`` and ``peers``, and their JSON.

The daemon builds them (``node/report.py``), and panel, page, metrics and commands read them. A
field that is newer than release 0.1.0 has a default, for nodes that do not have it yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from lowcomm_node.errors import Unhealthy
from lowcomm_node.net.routes import PeerRoute, RouteSpeed
from lowcomm_node.node.messages import StepFigures, Tokenizing
from lowcomm_node.node.supervisor import Failure
from lowcomm_node.owner.rules import Hold
from lowcomm_node.swarm.standing import SwarmStatus
from lowcomm_node.sync.history import ExchangeStatus, IntervalStatus
from lowcomm_node.system.accelerator import Accelerator
from lowcomm_node.system.machine import NodeMemory

T = TypeVar("T")
_adapter = cache(TypeAdapter[Any])


def to_json(record: object) -> Any:
    """Records as JSON has them, in dictionaries and lists; a number that is not finite is null."""
    return _adapter(Any).dump_python(record, mode="json")


def read(kind: type[T], content: object) -> T:
    """Read a record that a node has sent. Fields that only a newer node has are ignored.

    Raises Unhealthy if a field is missing or of another type.
    """
    try:
        return _adapter(kind).validate_python(content, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the answer"
        raise Unhealthy(
            f"The node's answer can't be read ({place}: {first['msg']}): node and command are of "
            "different releases. Start the node again with the release of this command."
        ) from None


@dataclass(frozen=True, kw_only=True)
class AmendmentText:
    """A change of the run by its creator."""

    text: str
    """The amendment in words."""
    number: int
    """Its place in the chain, from 1."""
    at: int
    """Swarm step from which it holds."""
    settings: Mapping[str, Any]
    """New values by the names of the specification."""


@dataclass(frozen=True, kw_only=True)
class AmendmentStatus(AmendmentText):
    """An amendment of the run."""

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
    """Changes by its creator, oldest first."""
    chat: bool = False
    """Whether it has a chat template."""
    adapts: bool = False
    """Whether it trains an adapter alone."""


@dataclass(frozen=True, kw_only=True)
class CheckpointStatus:
    """A checkpoint on the disk."""

    step: int
    """Swarm step that it was taken at."""
    path: str


@dataclass(frozen=True, kw_only=True)
class Progress(StepFigures):
    """How far training is; null until the trainer has said it."""

    val_loss_first: float | None = None
    """The first loss of the fast weights on held-out text since the start."""
    val_loss_last: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrainerStatus(Progress):
    """State of the trainer; null where it does not run."""

    state: str
    """The phase of the node."""
    pid: int | None = None
    failures: int = 0
    """How often it failed since the node started."""
    last_failure: Failure | None = None
    device: str | None
    """Such as `cpu` or `cuda:0,cuda:1`; null until the model is built."""
    parameters: int | None
    """Of the model; null until it is built."""
    duty: float | None = None
    """Share of the time in which its owner lets steps compute; null until the model is built."""
    total_steps: int | None
    """Swarm steps of the whole run, as amended."""
    remaining: float | None = None
    """Seconds until the end of the run at the recent rate; null while it does not train."""
    tokenizing: Tokenizing | None = None
    """While text is tokenized."""
    memory: NodeMemory | None = None
    """Of trainer and daemon together."""
    accelerators: tuple[Accelerator, ...] = ()
    """Devices that train, by rank."""


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
    """Largest spread of contributions in a block of 256 values, over last merges."""
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
    """Bytes a second sent, recently."""
    down: float = 0.0
    """Bytes a second received, recently."""
    peers: int = 0
    """Peers that this node talks with."""
    turned_away: int = 0
    """Peers that found no place."""


@dataclass(frozen=True, kw_only=True)
class Claims:
    """Claims of other peers about themselves, put together; nobody can check them."""

    val_loss: float
    """Median of their last losses on held-out text, nats a token."""
    told_by: int
    """Number of these peers."""


@dataclass(frozen=True, kw_only=True)
class TextStatus:
    """One part of the run's packed text; bytes are since the node started."""

    name: str
    """As its creator named it."""
    share: float
    """Its part of the windows, from 0 to 1, as amended."""
    tokens: int
    """Of its training text, each epoch."""
    pieces: int
    """Of its training text."""
    epoch: int = 0
    """How often all of it was read before."""
    pieces_read: int = 0
    """Read in this epoch by all peers, as far as their signed statements are plausible."""
    own_pieces: int = 0
    """Read in this epoch by this node."""
    held: int = 0
    """Pieces on this disk, those of held-out text too."""
    missing: int = 0
    """Pieces that this node is fetching."""
    bytes_fetched: int = 0
    bytes_given: int = 0
    waiting: str = ""
    """Why training waits for a piece of it; empty if it does not."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """Everything about a node at one moment."""

    peer_id: str
    release: str
    """Of lowcomm, with the commit."""
    pid: int
    run: RunStatus | None
    phase: str
    """`starting`, `joining`, `syncing`, `training`, `serving`, `paused`, `restarting`, `finishing`,
    `finished` or `left`."""
    joined: bool = False
    """Whether it takes part in the run."""
    waiting: str | None
    """What it waits for, or why it trains alone; null for nothing."""
    waiting_code: str | None = None
    """Its code in the catalogue."""
    unchanged: float = 0.0
    """Seconds since its phase, or what it waits for, changed."""
    leaving: float | None = None
    """Seconds left to leave, below 0 if it should have left; null while it stays."""
    swarm: SwarmStatus | None = None
    pause: Hold | None = None
    """Why it does not train, by its owner's will; null if it may."""
    schedule: str | None = None
    """Hours in which its owner lets it train; null for always."""
    uptime: float
    """Seconds since it started."""
    trainer: TrainerStatus
    exchanges_running: tuple[ExchangeStatus, ...]
    exchanges: ExchangeCounts
    text: tuple[TextStatus, ...] = ()
    """Parts of the run's packed text; empty in a run without."""
    interval: IntervalStatus | None = None
    """How often a fragment is exchanged; null while this node does not exchange."""
    bytes_sent: int
    """Bytes of contents sent since the node started."""
    bytes_received: int
    """Bytes of contents received since the node started."""
    limits: Limits = field(default_factory=Limits)
    peers: int
    """Other peers that are alive."""
    releases: Mapping[str, int] = field(default_factory=dict)
    """Releases of lowcomm that these claim, with the number of each; the 8 most frequent."""
    claims: Claims | None = None
    """Claims of these peers about the swarm, which nobody can check; null without any."""
    silent_peers: int = 0
    """Peers that have a record and do not answer."""
    swarm_peers: int = 0
    """About how many other peers there are, by the number of records in some shards."""
    shards: int = 0
    """Number of these shards; 0: the node knows each peer."""
    dht_peers: int
    checkpoint: CheckpointStatus | None
    """The newest; null if there is none yet."""
    addresses: tuple[str, ...]
    """Where others can call it."""
    entry_points: tuple[str, ...]
    """Multiaddresses that others can give to `--peers`."""
    tunnels: Mapping[str, int] = field(default_factory=dict)
    """Streams of others through libp2p: `open` now, and `refused` because there were too many."""
    refusals: Mapping[str, int] = field(default_factory=dict)
    """Refused records, calls and connections by what and why, such as `call.replayed`."""
    warnings: tuple[str, ...]
    """For the owner, the newest last; 20 at most."""
    warning_codes: tuple[str, ...] = ()
    """Their codes in the catalogue, in the same order."""


@dataclass(frozen=True, kw_only=True)
class PeerStatus(PeerRoute):
    """A peer that is alive, and how exchanges with it went."""

    peer_id: str
    phase: str
    """What it does, as it claims."""
    swarm_step: int
    """How far the swarm is, as it claims."""
    steps: int
    """Its own inner steps, as it claims."""
    tokens: int = 0
    """Tokens that it has trained on, as it claims."""
    tokens_per_second: float
    """As it claims."""
    val_loss: float | None = None
    """Its last loss on held-out text, as it claims; null if it claims none."""
    address: str | None
    """Where it can be called directly."""
    release: str | None = None
    """Of lowcomm, as it claims."""
    name: str = ""
    """Display name by its owner (`--name`); anybody may take any name."""
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
    """1 for a peer without offences; less for what is held against it."""
    left_out: bool
    """Whether it is left out of exchanges for a while."""
    held_against: str
    """Why; empty if nothing is held against it."""


@dataclass(frozen=True, kw_only=True)
class Ping:
    """The answer of ``ping``."""

    peer_id: str
    routes: tuple[RouteSpeed, ...]


@dataclass(frozen=True, kw_only=True)
class Hours:
    """When a node may train."""

    schedule: str | None
    """Schedule as the owner wrote it; null: always."""
