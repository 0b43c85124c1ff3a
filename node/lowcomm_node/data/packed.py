"""Packed text as a trainer reads it: what was dealt to each piece of a queue, window by window.

Windows of a block follow one another without a gap (`Deal`). The last token of a block has no
target in it, so that target is IGNORED, as are masked tokens.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, zip_longest
from math import floor
from os import pread
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowcomm_node.data.local import Split
from lowcomm_node.data.pack import MASKED
from lowcomm_node.data.stream import IGNORED, TrainStream
from lowcomm_node.errors import DataError
from lowcomm_protocol.reading import Deal
from lowcomm_protocol.spec.run import RunSpec
from lowcomm_protocol.spec.sections import TextPiece

Batch = tuple[Tensor, Tensor]
"""Tokens and targets, int64 ``[windows, context]``."""


Places = NDArray[np.int64]
"""Tokens of a file at which windows begin."""


@dataclass(frozen=True)
class PartFile:
    """The file of one part. Of its pieces only those are read that the daemon has verified."""

    deal: Deal
    path: Path
    vocab: int

    def windows(self, places: Places, ends: Places | int) -> Batch:
        """The windows at these places; token ``ends`` is the target of none. Raises DataError."""
        text, context = self.deal.text, self.deal.context
        width = text.token_bytes
        size = (context + 1) * width
        try:
            with self.path.open("rb", buffering=0) as file:
                read = [pread(file.fileno(), size, int(place) * width) for place in places]
        except OSError as error:
            raise DataError(f"{self.path} can't be read: {error.strerror}.") from None
        data = b"".join(window.ljust(size, b"\0") for window in read)
        tokens = np.frombuffer(data, f"<u{width}").reshape(-1, context + 1).astype(np.int64)
        ignored = places[:, None] + np.arange(1, context + 1) == np.reshape(ends, (-1, 1))
        if text.masked:
            ignored |= tokens[:, 1:] & MASKED != 0
            tokens &= MASKED - 1
        targets = np.where(ignored, IGNORED, tokens[:, 1:])
        # A GPU would answer a wrong token with the loss of its whole process.
        is_known = max(int(tokens[:, :-1].max()), int(targets.max())) < self.vocab
        if min(map(len, read)) < size - width or not is_known:
            raise DataError(
                f"{self.path} is cut off, or has tokens of another vocabulary than the "
                f"tokenizer's {self.vocab}: remove that file, peers send it again."
            )
        return torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(targets)


@dataclass(frozen=True)
class PackedTraining:
    """The training text of a run's parts."""

    parts: tuple[PartFile, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all parts."""
        return sum(part.deal.text.tokens for part in self.parts)


@dataclass(frozen=True)
class PackedHeldOut:
    """The first held-out piece of each part that a run began with: the same on every peer."""

    parts: tuple[PartFile, ...]

    def windows(self, context: int, count: int) -> Batch:
        """At most ``count`` windows, of all parts in turn. Raises DataError if there is none."""
        drawn: list[list[Batch]] = []
        for number, part in enumerate(self.parts):
            text = part.deal.text
            first = text.training_pieces * text.piece_tokens
            tokens = min(text.piece_tokens, text.held_out_tokens)
            order = _permutation(f"held-out:{number}", tokens // context)
            places = first + context * order[: -(-count // len(self.parts)), None]
            drawn.append([part.windows(place, first + tokens) for place in places])
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
    very next batch, once ``add`` has named the pieces of its queue again. A part whose text does
    not come is read again at random, where ``read_again`` says of which pieces.
    """

    def __init__(
        self,
        training: PackedTraining,
        batch: int,
        seed: int,
        shares: Callable[[], Sequence[float]],
    ) -> None:
        """``shares``: of the parts, as they hold now."""
        self.batches = 0  # batches drawn so far
        self._parts = training.parts
        self._batch = batch
        self._seed = seed
        self._shares = shares
        self._queues = [deque[TextPiece]() for _ in self._parts]
        self._drawn: dict[TextPiece, int] = {}
        """Windows drawn of each piece that was begun."""
        self._credits = [0.0 for _ in self._parts]
        """Windows that each part is owed."""
        self._here = set[TextPiece]()
        """Pieces whose blocks are on the disk; a resumed queue may hold others."""
        self._again: dict[int, tuple[int, ...]] = {}
        """By part: pieces to read again while its queue has too few windows."""
        self._ended: list[tuple[TextPiece, int]] = []

    @property
    def pieces(self) -> tuple[TextPiece, ...]:
        """The pieces still to be read, in their order."""
        return tuple(chain.from_iterable(self._queues))

    def add(self, pieces: Iterable[TextPiece]) -> None:
        """Read these pieces, whose blocks are on the disk, after those that the queues hold. Those
        of their parts that stand before them and are not on the disk are left out."""
        for piece in pieces:
            self._again.pop(piece.part, None)
            queue = self._queues[piece.part]
            before = list(queue)[: queue.index(piece)] if piece in queue else list(queue)
            for one in before:
                if one not in self._here:
                    self._drawn.pop(one, None)
                    queue.remove(one)
            if self._left(piece) <= 0:
                self._ended.append((piece, 0))
                continue
            if piece not in queue:
                queue.append(piece)
            self._here.add(piece)

    def read_again(self, part: int, pieces: Iterable[int]) -> None:
        """Draw windows of these pieces at random, until ``add`` brings the next of the part."""
        deal = self._parts[part].deal
        full = deal.text.tokens // deal.text.piece_tokens
        if whole := tuple(piece for piece in pieces if piece < full):
            self._again[part] = whole

    def is_ready(self) -> bool:
        """Whether all windows of the next batch are here."""
        counts, _ = self._allotted()
        return all(
            part in self._again or self._has(part, count) for part, count in enumerate(counts)
        )

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
        for piece in self._queues[part]:
            if count <= 0 or piece not in self._here:
                break
            count -= self._left(piece)
        return count <= 0

    def _left(self, piece: TextPiece) -> int:
        count = self._parts[piece.part].deal.count(piece.piece)
        return count - self._drawn.get(piece, 0)

    def _draw(self, part: int, count: int) -> list[Batch]:
        file, queue = self._parts[part], self._queues[part]
        if not self._has(part, count):
            drawing = _generator(f"again:{self._seed}:{part}:{self.batches}")
            pieces, each = drawing.choice(self._again[part], count), file.deal.text.piece_tokens
            places = pieces * each + drawing.integers(0, each - file.deal.context + 1, count)
            return [file.windows(places, (pieces + 1) * each)]
        batches: list[Batch] = []
        while count:
            piece = queue[0]
            places, end = self._dealt(piece)
            drawn = self._drawn.get(piece, 0)
            taken = places[drawn : drawn + count]
            batches.append(file.windows(taken, end))
            self._drawn[piece] = drawn + len(taken)
            count -= len(taken)
            if drawn + len(taken) == len(places):
                self._ended.append((queue.popleft(), len(places)))
                self._here.discard(piece)
                del self._drawn[piece]
        return batches

    def _dealt(self, piece: TextPiece) -> tuple[Places, int]:
        """First tokens of the windows dealt to a piece, and the end of its block."""
        deal = self._parts[piece.part].deal
        block, each = deal.block(piece.piece), deal.text.piece_tokens
        name = f"block:{self._seed}:{piece.part}:{piece.epoch}:{block.start}"
        order = _permutation(name, deal.windows(piece.piece))
        places = block.start * each + deal.context * order[piece.piece - block.start :: len(block)]
        return places, min(block.stop * each, deal.text.tokens)


def stream_of(
    training: Split | PackedTraining,
    spec: RunSpec,
    peer_id: str,
    shares: Callable[[], Sequence[float]],
) -> TrainStream | PackedStream:
    """The batches that a peer trains on."""
    context, batch, seed = spec.model.context, spec.train.batch, spec.run.seed
    if isinstance(training, PackedTraining):
        return PackedStream(training, batch, seed, shares)
    return TrainStream(training, context, batch, seed, peer_id)


@lru_cache(maxsize=8)  # the pieces of a block share it
def _permutation(name: str, count: int) -> NDArray[np.int64]:
    return _generator(name).permutation(count)


def _generator(name: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()))
