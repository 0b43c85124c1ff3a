"""What the daemon and its trainer say to each other.

One JSON object a line, in both directions:

    daemon  → trainer   {"do": NAME, "id": N, ...}
    trainer → daemon    {"re": N, ...} or {"re": N, "error": TEXT}     an answer
                        {"event": NAME, ...}      news: step, skipped, evaluated, held, saved, not-saved, finished, failed

Coded fragments pass through slots of a shared memory file (``arena.py``); only their number travels in a line.
"""

import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lowcomm_protocol.errors import LowcommError

if TYPE_CHECKING:  # or what only starts a trainer would load codecs
    from collections.abc import Mapping

    from lowcomm_node.errors import Unusable
    from lowcomm_protocol.state.pieces import Runs

MAX_LINE = 4 * 1024 * 1024
PAIR_SLOTS = 2
"""Slots of an exchange in a pair: our contribution, and theirs."""
GROUP_SLOTS = 3
"""Slots of an exchange in a group, however many take part: what we contribute to the shards of the others, what they
contribute to ours, and the means of all shards."""


def slots_each(group: int) -> int:
    """How many slots one exchange takes."""
    return GROUP_SLOTS if group > 2 else PAIR_SLOTS


def is_foreseen(error: Exception) -> bool:
    """Whether its text tells what happened: it is ours, the system's or torch's, and no defect."""
    return isinstance(error, LowcommError | OSError | MemoryError | RuntimeError)


def said(error: Exception) -> str:
    """What an error says; of one that nobody foresaw also its kind and place, as its text alone may be a bare key."""
    if is_foreseen(error):
        return str(error) or type(error).__name__
    *_, last = traceback.extract_tb(error.__traceback__) or [None]
    place = f" in {Path(last.filename).name}, line {last.lineno}" if last else ""
    return f"{type(error).__name__}{place}: {error}. That is a defect of lowcomm: please report it."


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """What a trainer is started with; JSON-able."""

    spec: str
    """Document of the run, as it was signed."""
    amendments: str = ""
    """The chain of its amendments, as it travels; empty where there is none."""
    peer_id: str
    checkpoints: str
    """Folder of this run's checkpoints."""
    data_cache: str
    data: str | None = None
    field: str = "text"
    """Of JSON lines and Parquet, where the text lies."""
    tokenizer: str | None = None
    device: str = "auto"
    threads: int | None = None
    max_memory: float | None = None
    max_vram: float | None = None
    """GiB of the GPU's memory."""
    home: str = "."
    max_disk: float | None = None
    """GiB that the files of the home may take."""
    keep: int = 3
    checkpoint_every: int = 100
    exchanges: int = 4
    """How many fragments may be under way at once."""

    def to_dict(self) -> dict[str, Any]:
        """For the line that starts the trainer."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The counterpart of ``to_dict``."""
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What the trainer has built or resumed."""

    device: str
    parameters: int
    plan: str
    """Digest of the fragment plan."""
    numels: tuple[int, ...]
    """Values of each fragment."""
    sizes: tuple[tuple[int, int], ...]
    """Fewest and most coded bytes of each fragment as a whole."""
    realign_sizes: tuple[int, ...]
    """Bytes of each fragment where slow weights are brought together again (fp32)."""
    slots: int
    slot_bytes: int
    swarm_step: int
    steps: int
    tokens: int
    progress: tuple[dict[str, int], ...]
    """Counters of each fragment: fields of FragmentProgress."""
    slow_digests: tuple[str, ...]
    """SHA-256 of each fragment's slow weights, hexadecimal."""
    resumed: int | None
    """Step of the checkpoint that was loaded."""
    skipped: tuple[str, ...] = ()
    """Checkpoints that could not be used, and why."""
    runs: "tuple[Runs, ...]" = ()
    """The slices of each fragment, as ``pieces.plan_pieces`` takes them."""
    momentum_digests: tuple[str, ...] = ()
    """The same of each fragment's outer momentum."""
    ranges: bool = False
    """Whether coders have ranges to pass on."""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Read the answer to ``build``, or to ``adopt``."""
        lists = {key: tuple(value) for key, value in data.items() if isinstance(value, list)}
        return cls(**{**{k: v for k, v in data.items() if k not in ("re", "event")}, **lists})


@dataclass(frozen=True, kw_only=True)
class Captured:
    """Our contribution, coded into its slot."""

    size: int
    digest: bytes
    steps: int
    """Own inner steps when it was captured."""


@dataclass(frozen=True)
class Reduced:
    """The mean of our shard, coded into its slot."""

    size: int
    digest: bytes
    left_out: "Mapping[str, Unusable]"
    """Contributors that are not in it, and why."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Our contribution to a group, coded into its slot: what each owner gets, one after the other in the order of members."""

    sizes: tuple[int, ...]
    """0 for our own shard."""
    digests: tuple[bytes, ...]
    steps: int
    """Own inner steps when it was captured."""


@dataclass(frozen=True, kw_only=True)
class Again:
    """Blocks of a member's contribution that can't be decoded next to ours, and must come again."""

    blocks: bytes
    size: int
    """Bytes that they will take."""


@dataclass(frozen=True, kw_only=True)
class Merged:
    """An outer step was applied."""

    swarm_step: int
    merged_steps: int
    merged_tokens: int
    slow_digest: str
    momentum_digest: str = ""
    worst_block: float = 0.0
    """Spread of the contributions in the block of 256 values where it is largest."""
