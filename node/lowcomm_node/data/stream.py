"""The batches that a peer trains and evaluates on."""

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowcomm_node.data.local import Split
from lowcomm_node.errors import DataError
from lowcomm_protocol.spec.sections import TextPiece

if TYPE_CHECKING:
    from lowcomm_node.data.packed import PackedHeldOut

IGNORED = -100
"""Target of a token that is read, but not learned."""


class TrainStream:
    """Random windows of a split. Every peer draws its own, from the run's seed and its id alone; a
    batch depends on its number only. Raises DataError if the split is shorter than a window."""

    pieces: tuple[TextPiece, ...] = ()
    """Packed text that is still to be read; there is none."""

    def __init__(self, split: Split, context: int, batch: int, seed: int, peer_id: str) -> None:
        _require(split, context, "training")
        self.batches = 0  # batches drawn so far
        self._split = split
        self._context = context
        self._batch = batch
        self._key = f"train:{seed}:{peer_id}"

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Tokens and targets (the tokens that follow), int64 ``[batch, context]``."""
        self.batches += 1
        key = f"{self._key}:{self.batches - 1}"
        return _windows(self._split, self._context, self._batch, key)

    def is_ready(self) -> bool:
        """Whether the next batch is here; it always is."""
        return True

    def take_ended(self) -> list[tuple[TextPiece, int]]:
        """Pieces of packed text that were read since the last call; there are none."""
        return []

    def state(self) -> dict[str, Any]:
        """The state for ``restore``; plain JSON."""
        return {"batches": self.batches}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        self.batches = int(state["batches"])


def held_out_windows(
    split: "Split | PackedHeldOut", context: int, count: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Tokens and targets, int64 ``[count, context]``, the same on every peer with the same data.
    Packed text may have fewer windows. Raises DataError."""
    if not isinstance(split, Split):
        return split.windows(context, count)
    _require(split, context, "held-out")
    return _windows(split, context, count, f"held-out:{seed}")


def _require(split: Split, context: int, kind: str) -> None:
    if split.tokens <= context:
        raise DataError(
            f"The {kind} text has {split.tokens} tokens, context = {context} needs more: add text "
            "to --data."
        )


def _windows(split: Split, context: int, count: int, stream: str) -> tuple[Tensor, Tensor]:
    generator = np.random.default_rng(int.from_bytes(hashlib.sha256(stream.encode()).digest()))
    starts: NDArray[np.int64] = generator.integers(0, split.tokens - context, size=count)
    tokens = torch.from_numpy(np.stack([split.window(int(start), context + 1) for start in starts]))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
