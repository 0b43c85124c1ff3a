"""Packed text as a trainer reads it: verified pieces in a queue, each of their windows once.

Neighbours in a text are alike, and a model that reads only one piece for a while forgets the others
(docs/methods.md). So windows come from several pieces at once, more of the older ones: pieces end
one after the other.

The n-th window of a piece has the tokens ``[n * context, (n + 1) * context)``. The
last token of a piece has no target in it, so that target is IGNORED, as are masked tokens.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from math import floor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowcomm_node.data.pack import MASKED
from lowcomm_node.data.shards import Split
from lowcomm_node.data.stream import IGNORED, TrainStream
from lowcomm_node.errors import DataError
from lowcomm_protocol.reading import count_mixed
from lowcomm_protocol.spec.run import RunSpec
from lowcomm_protocol.spec.sections import PackedText, TextPiece

Batch = tuple[Tensor, Tensor]
"""Tokens and targets, int64 ``[windows, context]``."""


@dataclass(frozen=True)
class PartFile:
    """The file of one part. Of its pieces only those are read that the daemon has verified."""

    text: PackedText
    path: Path
    vocab: int

    def load(self, piece: int) -> NDArray[Any]:
        """The tokens of a piece without its padding, uint16 or uint32, in memory. Raises
        DataError."""
        text = self.text
        first = 0 if piece < text.training_pieces else text.training_pieces
        count = text.held_out_tokens if first else text.tokens
        count = min(text.piece_tokens, count - (piece - first) * text.piece_tokens)
        place = piece * text.piece_bytes
        try:
            tokens = np.fromfile(self.path, f"<u{text.token_bytes}", count, offset=place)
        except OSError as error:
            raise DataError(f"{self.path} can't be read: {error.strerror}.") from None
        # A GPU would answer a wrong token with the loss of its whole process.
        values = tokens & ~np.uint32(MASKED) if text.masked else tokens
        if len(tokens) != count or int(values.max()) >= self.vocab:
            raise DataError(
                f"Piece {piece} of {self.path} is cut off, or has tokens of another vocabulary "
                f"than the tokenizer's {self.vocab}: remove that file, peers send it again."
            )
        return tokens

    def windows(self, tokens: NDArray[Any], numbers: NDArray[np.int64], context: int) -> Batch:
        """Windows of a piece, by their numbers."""
        places = numbers[:, None] * context + np.arange(context + 1)
        taken = tokens[np.minimum(places, len(tokens) - 1)].astype(np.int64)
        ignored = places[:, 1:] == len(tokens)
        if self.text.masked:
            ignored |= taken[:, 1:] & MASKED != 0
            taken &= MASKED - 1
        targets = np.where(ignored, IGNORED, taken[:, 1:])
        return torch.from_numpy(taken[:, :-1].copy()), torch.from_numpy(targets)


@dataclass(frozen=True)
class PackedTraining:
    """The training text of a run's parts."""

    parts: tuple[PartFile, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all parts."""
        return sum(part.text.tokens for part in self.parts)


@dataclass(frozen=True)
class PackedHeldOut:
    """The first held-out piece of each part that a run began with: the same on every peer."""

    parts: tuple[PartFile, ...]

    def windows(self, context: int, count: int) -> Batch:
        """At most ``count`` windows, of all parts in turn. Raises DataError if there is none."""
        drawn: list[list[Batch]] = []
        for number, part in enumerate(self.parts):
            tokens = part.load(part.text.training_pieces)
            order = _permutation(f"held-out:{number}", len(tokens) // context)
            numbers = order[: -(-count // len(self.parts)), None]
            drawn.append([part.windows(tokens, one, context) for one in numbers])
        turns = chain.from_iterable(zip_longest(*drawn))
        chosen = [one for one in turns if one is not None][:count]
        if not chosen:
            raise DataError(
                f"The held-out text has no window of {context} tokens: the run's creator must pack "
                "more text, or lower model.context."
            )
        tokens, targets = zip(*chosen, strict=True)
        return torch.cat(tokens), torch.cat(targets)


class PackedStream:
    """Batches from queues of pieces, one queue a part.

    Shares of the parts hold over many batches, to the window. A resumed stream goes on with the
    very next batch, once ``add`` has named the pieces of its queue again.
    """

    def __init__(
        self,
        training: PackedTraining,
        context: int,
        batch: int,
        seed: int,
        shares: Callable[[], Sequence[float]],
    ) -> None:
        """``shares``: of the parts, as they hold now."""
        self.batches = 0  # batches drawn so far
        self._parts = training.parts
        self._context = context
        self._batch = batch
        self._seed = seed
        self._shares = shares
        self._queues = [deque[TextPiece]() for _ in self._parts]
        self._mixed = [count_mixed(part.text, len(self._parts)) for part in self._parts]
        """Pieces at the head of each queue that windows are drawn from."""
        self._drawn: dict[TextPiece, int] = {}
        """Windows drawn of each piece that was begun."""
        self._credits = [0.0 for _ in self._parts]
        """Windows that each part is owed."""
        self._here = set[TextPiece]()
        """Pieces on the disk; a resumed queue may hold others."""
        self._open: dict[TextPiece, tuple[NDArray[Any], NDArray[np.int64]]] = {}
        """Tokens, and the order of windows, of pieces that are being read."""
        self._ended: list[tuple[TextPiece, int]] = []

    @property
    def pieces(self) -> tuple[TextPiece, ...]:
        """The pieces still to be read, in their order."""
        return tuple(chain.from_iterable(self._queues))

    def add(self, pieces: Iterable[TextPiece]) -> None:
        """Read these pieces, which are on the disk, after those that the queues hold. Pieces of
        their parts that stand before them and are not on the disk are left out."""
        for piece in pieces:
            queue = self._queues[piece.part]
            before = list(queue)[: queue.index(piece)] if piece in queue else list(queue)
            for one in before:
                if one not in self._here:
                    self._drawn.pop(one, None)
                    queue.remove(one)
            if not self._count(piece):
                self._ended.append((piece, 0))
                continue
            if piece not in queue:
                queue.append(piece)
            self._here.add(piece)

    def is_ready(self) -> bool:
        """Whether all windows of the next batch are here."""
        counts, _ = self._allotted()
        return all(self._has(part, count) for part, count in enumerate(counts))

    def next_batch(self) -> Batch:
        """Tokens and targets, int64 ``[batch, context]``. Raises DataError if the text is not
        here."""
        if not self.is_ready():
            raise DataError("The next batch of packed text is not here yet.")
        counts, self._credits = self._allotted()
        parts = [batch for part, count in enumerate(counts) for batch in self._draw(part, count)]
        tokens, targets = zip(*parts, strict=True)
        self.batches += 1
        return torch.cat(tokens), torch.cat(targets)

    def take_ended(self) -> list[tuple[TextPiece, int]]:
        """Pieces whose last window was drawn since the last call, and their windows."""
        ended, self._ended = self._ended, []
        return ended

    def state(self) -> dict[str, Any]:
        """The state for ``restore``; plain JSON."""
        return {
            "batches": self.batches,
            "pieces": [
                [one.part, one.epoch, one.piece, self._drawn.get(one, 0)] for one in self.pieces
            ],
            "credits": list(self._credits),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        self._here.clear()
        self._open.clear()
        self._drawn.clear()
        for queue in self._queues:
            queue.clear()
        self.batches = int(state["batches"])
        for *place, drawn in state["pieces"]:
            piece = TextPiece(*place)
            self._queues[piece.part].append(piece)
            self._drawn[piece] = int(drawn)
        self._credits = [float(owed) for owed in state["credits"]]

    def _allotted(self) -> tuple[list[int], list[float]]:
        """Windows of each part in the next batch, and what parts are owed after it."""
        shares, counts = self._shares(), [0 for _ in self._parts]
        owed = [
            credit + self._batch * share / sum(shares) if share else 0.0
            for credit, share in zip(self._credits, shares, strict=True)
        ]
        counts = [max(0, floor(windows)) for windows in owed]
        taking = [part for part, share in enumerate(shares) if share]
        while sum(counts) < self._batch:
            counts[max(taking, key=lambda part: owed[part] - counts[part])] += 1
        while sum(counts) > self._batch:
            filled = [part for part in taking if counts[part]]
            counts[min(filled, key=lambda part: owed[part] - counts[part])] -= 1
        return counts, [windows - count for windows, count in zip(owed, counts, strict=True)]

    def _has(self, part: int, count: int) -> bool:
        queue = self._queues[part]
        # Without one of them a resumed stream would draw other windows than it has drawn before.
        if count and not self._here.issuperset(islice(queue, self._mixed[part])):
            return False
        for piece in queue:
            if count <= 0 or piece not in self._here:
                break
            count -= self._count(piece) - self._drawn.get(piece, 0)
        return count <= 0

    def _count(self, piece: TextPiece) -> int:
        text = self._parts[piece.part].text
        tokens = min(text.piece_tokens, text.tokens - piece.piece * text.piece_tokens)
        return tokens // self._context

    def _draw(self, part: int, count: int) -> list[Batch]:
        queue, numbers = self._queues[part], dict[TextPiece, list[np.int64]]()
        drawing = _generator(f"mixing:{self._seed}:{part}:{self.batches}")
        for place in drawing.random((count, 2)).min(1) if count else ():
            mixed = [one for one in islice(queue, self._mixed[part]) if one in self._here]
            piece = mixed[int(place * len(mixed))]
            order, drawn = self._opened(piece)[1], self._drawn.get(piece, 0)
            numbers.setdefault(piece, []).append(order[drawn])
            self._drawn[piece] = drawn + 1
            if drawn + 1 == len(order):
                queue.remove(piece)
                self._ended.append((piece, len(order)))
        batches = [
            self._parts[part].windows(self._opened(piece)[0], np.array(of_piece), self._context)
            for piece, of_piece in numbers.items()
        ]
        for piece in [one for one in numbers if one not in queue]:
            del self._open[piece], self._drawn[piece]
            self._here.discard(piece)
        return batches

    def _opened(self, piece: TextPiece) -> tuple[NDArray[Any], NDArray[np.int64]]:
        if piece not in self._open:
            name = f"piece:{self._seed}:{piece.epoch}:{piece.part}:{piece.piece}"
            order = _permutation(name, self._count(piece))
            self._open[piece] = self._parts[piece.part].load(piece.piece), order
        return self._open[piece]


def stream_of(
    training: Split | PackedTraining,
    spec: RunSpec,
    peer_id: str,
    shares: Callable[[], Sequence[float]],
) -> TrainStream | PackedStream:
    """The batches that a peer trains on."""
    context, batch, seed = spec.model.context, spec.train.batch, spec.run.seed
    if isinstance(training, PackedTraining):
        return PackedStream(training, context, batch, seed, shares)
    return TrainStream(training, context, batch, seed, peer_id)


def _permutation(name: str, count: int) -> NDArray[np.int64]:
    return _generator(name).permutation(count)


def _generator(name: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()))
