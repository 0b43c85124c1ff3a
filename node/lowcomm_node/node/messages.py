"""The table of messages between the daemon and its trainer.

To add a message, add its class: it becomes a frozen dataclass with a name on the wire (``ipc.py``).
A request also needs its entry in the ``handlers`` of the module that does the work; the daemon
sends it with ``Trainer.ask``. Coded fragments pass through slots of shared memory (``ipc.Arena``).
"""

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from lowcomm_node.errors import Diverged, TrainerError, Unusable
from lowcomm_node.node.ipc import AS_JSON, Answer, FailureKind, Request, TrainerEvent, TrainerFailed
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_protocol.errors import CodecError, ImplausibleError, LowcommError, Offence
from lowcomm_protocol.spec.sections import TextPiece

# What a trainer is started with, and how it ends


class TrainerSettings(NodeSettings):
    """Settings of one trainer: those of the owner, but the invite, and those of the run."""

    home: Path = Path("/")
    spec: str
    """Document of the run, as it was signed."""
    amendments: str = ""
    """The chain of its amendments, as it travels; empty where there is none."""
    peer_id: str
    checkpoints: str
    """Folder of this run's checkpoints."""
    slow: str = ""
    """Folder for the slow weights of large models; empty: they stay in memory."""
    data_cache: str
    start: tuple[str, ...] = ()
    """Files with the weights that the run begins with; none beside a checkpoint."""
    packs: tuple[str, ...] = ()
    """Files of the run's packed text, in the order of its parts, with holes where pieces are
    missing."""
    exchanges: int = 4
    """Fragments that may be under way at once."""
    workers: tuple[tuple[str, str], ...] = ()
    """The name of each lender, and that of the socket by which its worker is reached."""


# Answers


class Done(Answer, name="done"):
    """The request was carried out."""


class RequestFailed(Answer, name="refused"):
    """The request failed."""

    text: str
    exit_code: int = 1
    """Of a command that this error ends."""
    unusable: bool = False
    """Whether what another peer brought is the reason."""
    deed: Offence | None = Offence.HEAVY
    """Offence of that peer."""

    def to_error(self) -> TrainerError:
        """The error that the daemon raises."""
        error = Unusable(self.text, self.deed) if self.unusable else TrainerError(self.text)
        error.exit_code = self.exit_code
        return error


@dataclass(frozen=True, kw_only=True)
class TrainingDevice:
    """A device that trains, and the process that computes on it."""

    __pydantic_config__ = AS_JSON
    name: str
    """Torch's name of it, with the rank of a second process on the same device."""
    pid: int
    gpu: str = ""
    """UUID of a card of NVIDIA; empty for another device."""
    seconds: float | None = None
    """Seconds of a product of matrices at the start; None where it trains alone."""


class Ready(Answer, name="ready"):
    """State that the trainer has built, resumed or adopted."""

    device: str
    parameters: int
    plan: str
    """Digest of the fragment plan."""
    numels: tuple[int, ...]
    """Values of each fragment."""
    sizes: tuple[tuple[int, int], ...]
    """Fewest and most coded bytes of each fragment as a whole."""
    realign_sizes: tuple[int, ...]
    """Bytes of each fragment in a realignment (fp32)."""
    slots: int
    slot_bytes: int
    swarm_step: int
    steps: int
    tokens: int
    progress: tuple[Mapping[str, int], ...]
    """Counters of each fragment: the fields of FragmentProgress."""
    slow_digests: tuple[str, ...]
    """SHA-256 of each fragment's slow weights, hexadecimal."""
    resumed: int | None
    """Step of the checkpoint that was loaded."""
    skipped: tuple[str, ...] = ()
    """Checkpoints that could not be used, and why."""
    runs: tuple[tuple[tuple[int, bool], ...], ...] = ()
    """The slices of each fragment, as ``pieces.plan_pieces`` takes them."""
    momentum_digests: tuple[str, ...] = ()
    """SHA-256 of each fragment's outer momentum, hexadecimal."""
    ranges: bool = False
    """Whether coders have ranges to pass on."""
    reckoned: int = 0
    """Estimate of the memory that daemon and trainer need at most, in bytes."""
    devices: tuple[TrainingDevice, ...] = ()
    """All that train, by rank."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Devices that the owner named and that can't be used, and why."""
    duty: float = 1.0
    """Share of the time in which steps compute."""
    unlimited: str = ""
    """Why the power of a card is not limited as its owner wants; empty if it is."""
    text: tuple[TextPiece, ...] = ()
    """Pieces of packed text that are still to be read, in their order; the first of each part may
    be half read."""


class Generated(Answer, name="generated"):
    """Text that the model wrote."""

    text: str


class Shared(Answer, name="shared"):
    """Our contribution, coded into its slot: what each member gets, one after the other."""

    sizes: tuple[int, ...]
    """In a group, 0 for our own shard; in a pair there is one, for the partner."""
    digests: tuple[bytes, ...]
    steps: int
    """Own inner steps when it was captured."""
    near: bytes = b""
    """Steps of the blocks of our shard, to ask another cell; empty where there is none."""


@dataclass(frozen=True, kw_only=True)
class Retransmit:
    """Blocks of a contribution that can't be decoded next to ours, and must come again."""

    __pydantic_config__ = AS_JSON
    blocks: bytes
    least: int
    most: int
    """Fewest and most bytes that they will take."""


class Received(Answer, name="received"):
    """A part was decoded, but for these blocks."""

    again: Retransmit | None


class Resent(Answer, name="resent"):
    """Blocks of our contribution, coded again into a slot; or outer steps that another lacks."""

    size: int
    digest: bytes


class ShardAveraged(Answer, name="reduced"):
    """The mean of our shard, coded into its slot."""

    size: int
    digest: bytes
    refused: Mapping[str, RequestFailed]
    """Contributors that are not in it, and why."""

    @property
    def left_out(self) -> dict[str, TrainerError]:
        """The same as errors."""
        return {peer: refusal.to_error() for peer, refusal in self.refused.items()}


class OuterStepApplied(Answer, name="merged"):
    """An outer step was applied."""

    swarm_step: int
    merged_steps: int
    merged_tokens: int
    slow_digest: str
    momentum_digest: str = ""
    worst_block: float = 0.0
    """Spread of the contributions in the block of 256 values where it is largest."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each stage has taken in the trainer."""


class Written(Answer, name="written"):
    """A checkpoint, or a state for joiners, on the disk, and the counters in it."""

    path: str
    """Of a state for joiners its name in their folder."""
    swarm_step: int
    steps: int = 0
    tokens: int = 0


# Requests: the life of a trainer


class Build(Request[Ready], name="build", holds_steps=True):
    """Build or resume the replica."""

    settings: TrainerSettings


class Train(Request[Done], name="train"):
    """Take inner steps, or hold them."""

    on: bool


class Amend(Request[Done], name="amend"):
    """Follow these amendments from the next step boundary on."""

    amendments: str


class Evaluate(Request[Done], name="evaluate", holds_steps=True):
    """Measure the loss on held-out text."""


class Generate(Request[Generated], name="generate", holds_steps=True):
    """Sample text from the fast weights."""

    prompt: str
    tokens: int
    temperature: float
    seed: int
    chat: tuple[str, ...] = ()
    """Texts of a conversation, the owner's and the model's in turn, in place of the prompt."""
    before: bool = False
    """Whether to leave the adapter aside."""


class Save(Request[Written], name="save"):
    """Write a checkpoint."""


class WriteSnapshot(Request[Written], name="snapshot"):
    """Write our state for joiners into a folder."""

    folder: str


class Adopt(Request[Ready], name="adopt", holds_steps=True):
    """Take over the state that was downloaded into a folder."""

    folder: str
    back: bool = False
    """Whether its swarm step holds also where ours is ahead of it."""


class AddText(Request[Done], name="text"):
    """Read these pieces once those before them are read. Their blocks are here, and verified."""

    pieces: tuple[TextPiece, ...]


class ReadAgain(Request[Done], name="read-again"):
    """Draw windows of these pieces at random, until text of their part is added."""

    part: int
    pieces: tuple[int, ...]


class Stop(Request[Done], name="stop"):
    """End, once what is being written is written."""


# Requests: exchanges. Slot, offset and size are a place in the shared memory.


class CaptureContribution(Request[Shared], name="capture"):
    """Capture our contribution and code it into a slot."""

    fragment: int
    slot: int
    realign: bool
    ahead: int
    """Inner steps that the others claim to have trained longer than we."""
    apart: int = 0
    """Inner steps since slow weights have parted."""
    members: tuple[str, ...] = ()
    """Of a group, sorted: the k-th owns shard k. A pair has none to name."""


class Part(StrEnum):
    """Parts of an exchange that a member brings."""

    WHOLE = "whole"  # in a pair: its contribution
    AGAIN = "again"  # in a pair: blocks of it that had to come again
    SHARE = "share"  # in a group: its contribution to our shard
    MEAN = "mean"  # in a group: the mean of its shard


class Receive(Request[Received], name="receive", at_boundary=False):
    """Decode a part."""

    fragment: int
    part: Part
    peer: str
    slot: int
    offset: int
    size: int


class Resend(Request[Resent], name="resend", at_boundary=False):
    """Code blocks of our contribution again."""

    fragment: int
    blocks: bytes
    slot: int


class GiveSlow(Request[Resent], name="give-slow", at_boundary=False):
    """Code slow weights into a slot, for another cell."""

    fragment: int
    start: int
    codes: bytes
    """The step of each block, as its reader asks for it."""
    slot: int


class TakeSlow(Request[Done], name="take-slow", at_boundary=False):
    """Take in slow weights of another cell, in our shard."""

    fragment: int
    slot: int
    offset: int
    size: int


class AverageShard(Request[ShardAveraged], name="reduce", at_boundary=False):
    """Average our shard and code the mean."""

    fragment: int
    tokens: Mapping[str, int]
    """By contributor: its weight in the mean."""
    slot: int
    offset: int


class WriteOuterSteps(Request[Resent], name="missed", at_boundary=False):
    """Write the last outer steps of a fragment into a slot, for a member that lacks them."""

    fragment: int
    steps: int
    slot: int
    offset: int


class TakeOver(Request[Done], name="take-over", at_boundary=False):
    """Let the outer step of an exchange follow steps that we lacked."""

    fragment: int
    steps: int
    slot: int
    offset: int
    size: int
    slow_digest: str
    momentum_digest: str
    """SHA-256 of what they lead to, hexadecimal; empty where no momentum is kept."""


class Merge(Request[OuterStepApplied], name="merge", at_boundary=False):
    """Take the outer step, and merge once it is ripe."""

    fragment: int
    swarm_step: int
    over: Mapping[str, int]
    """In a pair the weight of each contribution, in a group the owners of the shards applied."""
    keep_momentum: bool = False
    """Whether a realignment leaves the outer momentum as it is."""


class Drop(Request[Done], name="drop"):
    """Forget a capture, and write nothing more to its slots."""

    fragment: int


# Events


class Tokenizing(TrainerEvent, name="tokenizing"):
    """Progress of tokenizing the text, in bytes."""

    done: int
    total: int
    tokens: int
    rate: float
    """Bytes a second."""
    remaining: float | None
    """Seconds; None while unknown."""


@dataclass(frozen=True, kw_only=True)
class LenderFigures:
    """A machine of the owner that computes for this node."""

    __pydantic_config__ = AS_JSON
    name: str
    away: str = ""
    """Why it does not compute now; empty if it does."""
    windows: int = 0
    """Windows of the last step that it computed; 0 also where its line costs more than it saves."""
    blocks: tuple[int, int] | None = None
    """The blocks of the model that it holds: from the first up to the second; None where it
    computes whole windows."""
    computing: float = 0.0
    """Recent seconds in which it computed one window; its blocks, in the last step."""
    moving: float = 0.0
    """Recent seconds of a step in which weights and gradients were on their way; of blocks, in
    which training waited for it."""
    moved: int = 0
    """Bytes of weights, gradients, states and text, since the trainer started."""


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Figures of the last inner step."""

    steps: int | None = None
    """Inner steps of this node, from the beginning of the run."""
    swarm_step: int | None = None
    """Clock of the run: how far the swarm is, as this node knows."""
    tokens: int | None = None
    """Tokens that this node has trained on, from the beginning of the run."""
    tokens_per_second: float | None = None
    """Recent average."""
    loss: float | None = None
    """Nats a token; null also if it is not finite."""
    skipped_steps: int | None = None
    """Inner steps that were skipped, as loss or gradients were not finite."""
    learning_rate: float | None = None
    micro_batch: int | None = None
    """Windows of a batch that go through the model at once."""
    activation_checkpointing: bool | None = None
    """Whether activations are computed again in the backward pass, to take less memory."""
    computing: float | None = None
    """Seconds in inner steps since the trainer started."""
    waited: Mapping[str, float] = field(default_factory=dict)
    """Seconds since then in which training waited between two steps, by what for: such as
    `capture`, `merge`, `evaluate`, `save`; `duty` is rest between micro-batches, too, and `heat`
    until a GPU has cooled."""
    lenders: tuple[LenderFigures, ...] = ()
    """Other machines of the owner, in the order of --with."""


class InnerStepTaken(TrainerEvent, StepFigures, name="step"):
    """An inner step was taken or skipped."""

    steps: int = 0
    swarm_step: int = 0
    tokens: int = 0
    seconds: float = 0.0


class LenderAwaited(TrainerEvent, name="lender-awaited"):
    """Training waits for a machine that holds blocks of the model, or no longer."""

    why: str
    """Names and reasons; empty once all is well."""


class PieceRead(TrainerEvent, name="piece-read"):
    """All windows of a piece of packed text were drawn."""

    part: int
    epoch: int
    piece: int
    windows: int


class TextAwaited(TrainerEvent, name="text-awaited"):
    """Training waits for packed text, or does so no longer."""

    waits: bool


class Cooling(TrainerEvent, name="cooling"):
    """Training waits until the card has cooled, or does so no longer."""

    why: str
    """In words; empty if it does not."""


class MicroBatch(TrainerEvent, name="micro-batch"):
    """Steps are cut in another way from now on."""

    micro_batch: int
    """Windows that go through the model at once."""
    activation_checkpointing: bool
    """Whether the backward pass computes blocks again."""
    why: str = "out of memory"
    """Always `out of memory`."""


class Skipped(TrainerEvent, name="skipped"):
    """The first of inner steps in a row whose loss or gradients are not finite."""

    steps: int
    skipped_steps: int


class Evaluating(TrainerEvent, name="evaluating"):
    """An evaluation has begun."""


class Evaluated(TrainerEvent, name="evaluated"):
    """The loss on held-out text."""

    loss: float | None
    """Nats a token; None if it is not finite."""
    tokens: int
    """Tokens of which it is the mean."""
    swarm_step: int
    steps: int
    epochs: float = 0.0
    """Tokens that this node has trained on, over those of its text."""


class Held(TrainerEvent, name="held"):
    """Training waits for a checkpoint that is being written."""


class Saved(TrainerEvent, name="saved"):
    """A checkpoint is on the disk."""

    swarm_step: int
    path: str
    seconds: float
    after_trouble: bool
    """Whether the save before it failed."""


class NotSaved(TrainerEvent, name="not-saved"):
    """A checkpoint could not be saved."""

    reason: str


class Finished(TrainerEvent, name="finished"):
    """The run is over."""

    swarm_step: int
    steps: int


class Ended(TrainerEvent, name="ended"):
    """The trainer is gone. The daemon's end reports this one itself."""

    reason: str


# Errors of the trainer, as the daemon gets them


def is_foreseen(error: Exception) -> bool:
    """Whether the text of an error explains it: those of lowcomm, the system and torch."""
    return isinstance(error, LowcommError | OSError | MemoryError | RuntimeError)


def text_of(error: Exception) -> str:
    """Text of an error. A defect gets its type and place, since its text may be a bare key."""
    if is_foreseen(error):
        return str(error) or type(error).__name__
    *_, last = traceback.extract_tb(error.__traceback__) or [None]
    place = f" in {Path(last.filename).name}, line {last.lineno}" if last else ""
    defect = "That is a defect of lowcomm: please report it."
    return f"{type(error).__name__}{place}: {error}. {defect}"


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device or the host had no room for a tensor."""
    # torch's are RuntimeErrors that say so: of CUDA, of cuBLAS, of Level Zero, and of the host.
    signs = ("out of memory", "can't allocate memory", "not enough memory", "alloc failed")
    text = str(error).lower().replace("_", " ") if isinstance(error, RuntimeError) else ""
    text = text.replace("device memory", "memory")
    return isinstance(error, MemoryError) or any(sign in text for sign in signs)


def refusal_of(error: Exception) -> RequestFailed:
    """Why a request failed, whose fault that is, and the exit code that it should lead to."""
    return RequestFailed(
        text=text_of(error),
        exit_code=getattr(error, "exit_code", 1),
        unusable=isinstance(error, CodecError | ImplausibleError),
        deed=error.deed if isinstance(error, ImplausibleError) else Offence.HEAVY,
    )


def failure_of(error: Exception) -> TrainerFailed:
    """Why training ends."""
    reason = text_of(error)
    kind = FailureKind.MEMORY if is_out_of_memory(error) else FailureKind.ERROR
    kind = FailureKind.DIVERGED if isinstance(error, Diverged) else kind
    return TrainerFailed(reason=reason, kind=kind, exit_code=getattr(error, "exit_code", 1))
