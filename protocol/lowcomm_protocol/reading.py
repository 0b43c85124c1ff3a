"""Who reads which piece of the packed text: rules that every peer follows, without a coordinator.

    choose ──► claim, in our signed record ──► fetch ──► does another keep it? ──► read
      ▲                                                        │ yes                 │
      ├────────────────────────────────────────────────────────┘                     │
      └── statement: all that we have read of a part in an epoch, signed, in the DHT ◄┘

Each peer walks the pieces of an epoch in an order of its own, and takes the first that no living
peer claims and nobody has read. The next epoch begins when none is left. No clock, no I/O.

Others lie. A claim counts while its peer lives, and a peer has at most ``MAX_CLAIMS``. A statement
counts up to what its peer can have read, so that a liar takes no more than the share of one peer
out of an epoch. All peers that we have never met count together no more than those that we know.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from heapq import nlargest
from itertools import count
from statistics import median_low

import numpy as np
from cachetools import FIFOCache
from numpy.typing import NDArray

from lowcomm_protocol.errors import RecordError
from lowcomm_protocol.identity import Identity, verify
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import (
    DIGEST_BYTES,
    MAX_CLAIMS,
    PIECE_CLAIM_BYTES,
    read_signed,
    sign,
)
from lowcomm_protocol.spec.run import RunSpec
from lowcomm_protocol.spec.sections import MAX_PACK_PIECES, MAX_PARTS, PackedText, TextPiece

MAX_STATEMENT_BYTES = 28 * 1024
"""Bytes of a signed statement. One of 200,000 pieces always fits."""
MAX_EPOCH = 1 << 24
MAX_MET, MAX_STATEMENTS = 8192, 1024
"""Peers that are remembered as met, and those of which we keep a statement on one epoch."""
MOST_WAYS = 8
"""Times in a row that we give way to the claim of another: a liar must not keep us from reading."""
_READ = 0x80
_PURPOSE = "pieces read"
Pieces = NDArray[np.bool_]
"""For each piece of training text of a part, whether it is one of those meant."""
Place = tuple[int, int]
"""A part, and an epoch of it."""


@dataclass(frozen=True)
class PieceClaim:
    """A piece that a peer reads, or will read next."""

    piece: TextPiece
    is_kept: bool
    """Whether its trainer has it, so that it is not given back any more."""


def write_claims(claims: Sequence[PieceClaim]) -> bytes:
    """Field ``reading`` of a record. Claims after the first ``MAX_CLAIMS`` are left out."""
    return b"".join(
        (claim.piece.part | _READ * claim.is_kept).to_bytes(1)
        + claim.piece.epoch.to_bytes(3)
        + claim.piece.piece.to_bytes(3)
        for claim in claims[:MAX_CLAIMS]
    )


@lru_cache(maxsize=4096)  # records repeat them
def read_claims(data: bytes) -> tuple[PieceClaim, ...]:
    """The claims in a record, whose length was checked; they may name pieces that do not exist."""
    return tuple(
        PieceClaim(
            TextPiece(
                part=data[start] & ~_READ,
                epoch=int.from_bytes(data[start + 1 : start + 4]),
                piece=int.from_bytes(data[start + 4 : start + 7]),
            ),
            is_kept=bool(data[start] & _READ),
        )
        for start in range(0, len(data), PIECE_CLAIM_BYTES)
    )


@dataclass(frozen=True)
class ReadStatement:
    """What one peer says that it has read of a part in an epoch."""

    run_id: str
    peer_id: str
    issued_ms: int
    """Unix time; of two the one issued later holds."""
    part: int
    epoch: int
    bitmap: bytes = field(repr=False)
    """The first piece in the highest bit; it may end early."""
    data: bytes = field(repr=False)
    """As it was signed."""

    def bits(self, number: int) -> int:
        """The first ``number`` pieces as a number, the first in the highest bit."""
        size = -(-number // 8)
        return int.from_bytes(self.bitmap[:size].ljust(size, b"\0")) >> (8 * size - number)


def write_statement(
    identity: Identity, run_id: str, place: Place, pieces: Pieces, issued_ms: int
) -> bytes:
    """A signed statement. Where it would be too long, it leaves out the last pieces."""
    part, epoch = place
    while True:
        bitmap = zlib.compress(np.packbits(pieces).tobytes(), 9)
        message = pb.PiecesRead(
            run_id=bytes.fromhex(run_id),
            peer_id=identity.peer_id,
            issued_ms=issued_ms,
            part=part,
            epoch=epoch,
            pieces=bitmap,
        )
        data = sign(identity, _PURPOSE, message)
        if len(data) <= MAX_STATEMENT_BYTES:
            return data
        pieces = pieces[: len(pieces) * 7 // 8]


def read_statement(data: bytes) -> ReadStatement:
    """Check form, bounds and signature of a statement. Raises RecordError, SignatureError."""
    signed, message = read_signed(data, pb.PiecesRead, "statement of pieces", MAX_STATEMENT_BYTES)
    if message.part >= MAX_PARTS or message.epoch >= MAX_EPOCH:
        raise RecordError("A statement on a part or an epoch that does not exist is refused.")
    if len(message.run_id) != DIGEST_BYTES:
        raise RecordError("A statement on a run without an id is refused.")
    bitmap = _inflate(message.pieces)
    verify(message.peer_id, _PURPOSE, signed.payload, signed.signature)
    return ReadStatement(
        run_id=message.run_id.hex(),
        peer_id=message.peer_id,
        issued_ms=message.issued_ms,
        part=message.part,
        epoch=message.epoch,
        bitmap=bitmap,
        data=data,
    )


def _inflate(data: bytes) -> bytes:
    most, decoder = MAX_PACK_PIECES // 8, zlib.decompressobj()
    try:
        bitmap = decoder.decompress(data, most + 1)
    except zlib.error:
        bitmap = b""
    if not decoder.eof or decoder.unused_data or len(bitmap) > most:
        raise RecordError(f"A statement whose bitmap is none of up to {most} bytes is refused.")
    return bitmap


@dataclass(frozen=True)
class Deal:
    """How the windows of a part are dealt to its pieces.

    Neighbours in a text are alike, and a model that reads them together forgets the rest
    (docs/methods.md). So each epoch shuffles the windows of a block, which is so many neighbouring
    pieces, and deals them to these pieces in turn.
    """

    text: PackedText
    context: int
    size: int
    """Pieces of a block; the last block may have fewer."""

    def block(self, piece: int) -> range:
        """The pieces of the block of a piece."""
        first = piece - piece % self.size
        return range(first, min(first + self.size, self.text.training_pieces))

    def windows(self, piece: int) -> int:
        """Windows of the block of a piece; tokens that fill no window are not read."""
        block, each = self.block(piece), self.text.piece_tokens
        return max(0, min(len(block) * each, self.text.tokens - block.start * each)) // self.context

    def count(self, piece: int) -> int:
        """Windows that are dealt to a piece."""
        block = self.block(piece)
        return len(range(piece - block.start, self.windows(piece), len(block)))


def deals_of(spec: RunSpec) -> tuple[Deal, ...]:
    """For each part of a run."""
    size = spec.data.shuffle_bytes
    return tuple(
        Deal(text, spec.model.context, max(1, size // text.piece_bytes)) for text in spec.data.parts
    )


Ranks = NDArray[np.uint64]


def rank(seed: int, place: Place, peer_id: str, pieces: Ranks) -> Ranks:
    """The rank of pieces in the order of a peer: the lowest comes first.

    SplitMix64 of the piece's number and a key of all else.
    """
    part, epoch = place
    values = pieces * np.uint64(0x9E3779B97F4A7C15) + _key(seed, part, epoch, peer_id)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values ^ (values >> np.uint64(31))


@lru_cache(maxsize=4096)
def _key(seed: int, part: int, epoch: int, peer_id: str) -> np.uint64:
    name = f"reading:{seed}:{part}:{epoch}:{peer_id}"
    return np.uint64(int.from_bytes(sha256(name.encode()).digest()[:8]))


@dataclass(frozen=True)
class _Said:
    """A statement that we keep."""

    issued_ms: int
    data: bytes
    bits: int
    size: int
    """Number of pieces."""


class SharedReading:
    """What is read, and what is claimed, of the packed text of a run, as one peer knows it."""

    def __init__(self, spec: RunSpec, run_id: str, peer_id: str) -> None:
        self._seed, self._run_id, self._peer_id = spec.run.seed, run_id, peer_id
        self._deals, self._interval = deals_of(spec), spec.sync.interval
        self._counts = [text.training_pieces for text in spec.data.parts]
        self._per_step = [spec.train.batch / max(1, deal.count(0)) for deal in self._deals]
        """Most pieces of each part that a peer reads in a step."""
        self._clock = 0
        self._claims: dict[Place, dict[int, list[tuple[str, bool]]]] = {}
        """Of the living peers: who claims each piece, and whether that is kept."""
        self._own: dict[Place, int] = {}
        self._said: dict[Place, dict[str, _Said]] = {}
        self._met: FIFOCache[str, bool] = FIFOCache(MAX_MET)
        self._began: dict[Place, int] = {}
        """Swarm steps at which epochs began, of those that we have seen begin."""
        self.epochs = [0 for _ in self._counts]
        """The epoch of each part that we read in."""
        self._is_new = [True for _ in self._counts]
        """Whether we have read nothing of a part yet."""
        self._gave_way = 0
        self._counted: dict[Place, tuple[int, int]] = {}
        """What counts as read, and the swarm step at which that was reckoned."""

    # what we know

    def follow(self, clock: int, claims: Mapping[str, Sequence[PieceClaim]]) -> None:
        """Take in the swarm step, and the claims of the living peers, without ours.

        ``clock``: a swarm step that no single peer can push ahead.
        """
        self._clock, self._claims = max(self._clock, clock), {}
        first: list[list[int]] = [[] for _ in self._counts]
        for peer, claimed in claims.items():
            self._met[peer] = True
            epochs: dict[int, int] = {}
            for claim in claimed:
                part, epoch = place = claim.piece.part, claim.piece.epoch
                epochs[part] = min(epoch, epochs.get(part, epoch))
                theirs = self._claims.setdefault(place, {})
                theirs.setdefault(claim.piece.piece, []).append((peer, claim.is_kept))
            for part, epoch in epochs.items():
                if part < len(first):
                    first[part].append(epoch)
        for part, epochs_of_others in enumerate(first):
            # One peer alone may take along only somebody who has read nothing yet.
            if len(epochs_of_others) > 1 or (epochs_of_others and self._is_new[part]):
                self._go_to(part, max(self.epochs[part], median_low(epochs_of_others)))

    def read(self, piece: TextPiece) -> None:
        """Note a piece that we have read."""
        self._gave_way, number = 0, self._counts[piece.part]
        self._counted.clear()
        self._is_new[piece.part] = False
        if 0 <= piece.piece < number and piece.epoch >= self.epochs[piece.part] - 1:
            place = piece.part, piece.epoch
            self._own[place] = self._own.get(place, 0) | 1 << (number - 1 - piece.piece)

    def hear(self, statement: ReadStatement, is_met: bool = False) -> None:
        """Take in a statement of another peer, or an older one of ours. ``is_met``: we have met
        its peer before."""
        place, peer = (statement.part, statement.epoch), statement.peer_id
        if statement.run_id != self._run_id or statement.part >= len(self._counts):
            return
        if is_met:
            self._met[peer] = True
        bits = statement.bits(self._counts[statement.part])
        self._counted.clear()
        if peer == self._peer_id:
            self._own[place] = self._own.get(place, 0) | bits
            return
        said = self._said.setdefault(place, {})
        if peer in said and said[peer].issued_ms >= statement.issued_ms:
            return
        if peer not in said and len(said) >= MAX_STATEMENTS:
            stranger = next((one for one in said if one not in self._met), None)
            if peer not in self._met or stranger is None:
                return
            del said[stranger]
        said[peer] = _Said(statement.issued_ms, statement.data, bits, bits.bit_count())

    def resume(self, place: Place) -> None:
        """Go on in an epoch that we had read in before."""
        part, epoch = place
        if part < len(self.epochs) and epoch > self.epochs[part]:
            self._go_to(part, epoch)
            self._is_new[part] = False

    def readers(self, part: int, pieces: Iterable[int]) -> set[str]:
        """The living peers that are said to have some of these pieces, since they read what the
        blocks of these deal."""
        size, ours = self._deals[part].size, self.epochs[part]
        blocks = {piece // size for piece in pieces}
        return {
            peer
            for epoch in (ours - 1, ours, ours + 1)
            for dealt, claimed in self._claims.get((part, epoch), {}).items()
            if dealt // size in blocks
            for peer, is_kept in claimed
            if is_kept
        }

    def forget(self, peer_id: str) -> None:
        """Believe a peer no longer that was removed from the run."""
        self._met.pop(peer_id, None)
        self._counted.clear()
        for said in self._said.values():
            said.pop(peer_id, None)

    def peers(self) -> set[str]:
        """The other peers whose statements we keep."""
        return {peer for said in self._said.values() for peer in said}

    def places(self) -> list[Place]:
        """Parts and epochs whose statements matter: our epoch, the one before it, and the next."""
        return [
            (part, epoch)
            for part, ours in enumerate(self.epochs)
            for epoch in (ours - 1, ours, ours + 1)
            if epoch >= 0
        ]

    def own(self, place: Place) -> Pieces | None:
        """What we have read of a part in an epoch; None: nothing."""
        return self._unpacked(place, self._own[place]) if self._own.get(place) else None

    def statements(self, place: Place) -> dict[str, bytes]:
        """The statements of other peers that we have met, as they were signed."""
        said = self._said.get(place, {})
        return {peer: one.data for peer, one in said.items() if peer in self._met}

    def pieces_read(self, place: Place) -> Pieces:
        """What has been read of a part in an epoch by anybody, as far as we believe it."""
        at, bits = self._counted.get(place, (self._clock - self._interval, 0))
        if self._clock >= at + self._interval:
            bits = self._count(place)
            self._counted[place] = self._clock, bits
        return self._unpacked(place, bits)

    def _count(self, place: Place) -> int:
        said, bits = self._said.get(place, {}), self._own.get(place, 0)
        met = {peer: one for peer, one in said.items() if peer in self._met}
        largest = nlargest(2, met.values(), key=lambda one: one.size)
        for one in met.values():
            others = next((other.size for other in largest if other is not one), 0)
            bits |= self._believed(place, one, others)
        room, largest_size = bits.bit_count(), largest[0].size if largest else 0
        strangers = (one for peer, one in sorted(said.items()) if peer not in met)
        for one in strangers if room else ():
            new = self._believed(place, one, largest_size, room)
            room -= new.bit_count()
            bits |= new
        return bits

    # what to read

    def choose(self, part: int, mine: Iterable[TextPiece] = ()) -> TextPiece | None:
        """The piece to read next, beside those that are ``mine``; None in a part without windows.

        A peer reads what a block deals before it goes to another one, whose pieces it must fetch.
        """
        if self._deals[part].count(0) == 0:
            return None
        ours, size = list(mine), np.uint64(self._deals[part].size)
        # What a peer gave back that has gone is read, though the next epoch has begun.
        current = self.epochs[part]
        returns = (part, current) in self._began or (part, current - 1) in self._own
        for epoch in count(current - returns):
            place = part, epoch
            free = ~self.pieces_read(place)
            claimed = [piece for piece in self._claims.get(place, {}) if piece < len(free)]
            free[claimed] = False
            free[[one.piece for one in ours if (one.part, one.epoch) == place]] = False
            if epoch == self.epochs[part] and not free.any():
                self._go_to(part, epoch + 1)
                self._began.setdefault((part, epoch + 1), self._clock)
            pieces = np.flatnonzero(free).astype(np.uint64)
            if len(pieces):
                of_blocks = rank(self._seed, place, self._peer_id, ~(pieces // size))
                pieces = pieces[of_blocks == of_blocks.min()]
                ranks = rank(self._seed, place, self._peer_id, pieces)
                return TextPiece(part, epoch, int(pieces[ranks.argmin()]))
        return None

    def gives_way(self, piece: TextPiece) -> bool:
        """Whether to leave a piece that we have claimed, and not begun, to another peer."""
        if self._gave_way >= MOST_WAYS:
            return False
        place = piece.part, piece.epoch

        def comes_first(peer_id: str) -> int:
            pieces = np.array([piece.piece], np.uint64)
            return int(rank(self._seed, place, peer_id, pieces)[0])

        ours = comes_first(self._peer_id)
        claims = self._claims.get(place, {}).get(piece.piece, [])
        gives = any(is_kept or comes_first(peer) < ours for peer, is_kept in claims)
        gives = gives or bool(self.pieces_read(place)[piece.piece])
        self._gave_way += gives
        return gives

    def _go_to(self, part: int, epoch: int) -> None:
        """Read a later epoch, and forget what does not matter any more."""
        if epoch == self.epochs[part]:
            return
        self.epochs[part] = epoch
        for kept in (self._own, self._said, self._began):
            for place in [one for one in kept if one[0] == part and one[1] < epoch - 1]:
                del kept[place]

    def _believed(self, place: Place, said: _Said, others: int, most: int = MAX_PACK_PIECES) -> int:
        """What we believe of a statement. ``others``: pieces in the longest one of another peer."""
        part, epoch = place
        began = 0 if epoch == 0 else self._began.get(place)
        if began is not None:
            pieces = (self._clock - began) * self._per_step[part]
        else:  # a single peer can't have read far more than all others
            pieces = max(others, self._own.get(place, 0).bit_count())
        # What it has read since it stated its step, and a piece that is shorter than the others.
        most = min(most, int(pieces + self._interval * self._per_step[part]) + 1)
        if said.size <= most:
            return said.bits
        end = int(np.flatnonzero(self._unpacked(place, said.bits))[most])
        rest = self._counts[part] - end
        return said.bits >> rest << rest

    def _unpacked(self, place: Place, bits: int) -> Pieces:
        number = self._counts[place[0]]
        size = -(-number // 8)
        data = np.frombuffer((bits << (8 * size - number)).to_bytes(size), np.uint8)
        return np.unpackbits(data, count=number).astype(np.bool_)


def supported_step(own: int, others: Iterable[int]) -> int:
    """The highest swarm step that we, or two other peers, have reached."""
    return max(own, min(two) if len(two := nlargest(2, others)) == 2 else 0)
