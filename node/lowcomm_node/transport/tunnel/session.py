"""What outlives the streams of a tunnel: bytes that may have to be sent again, and how far both
sides have come. No I/O.

    gRPC ── room, add, end ──► │         │ ── outgoing, sent ──► stream of the moment
                               │ Session │
    gRPC ◄────── pieces ────── │         │ ◄────── feed ─────── stream of the moment

Nothing that was taken from gRPC is dropped before the other side has acknowledged it. When a stream
breaks off, each side tells the other on the next one how many numbers it has received, and sends on
from there.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lowcomm_node.transport.tunnel.frames import ACK_EVERY, MAX_LENGTH, Ack, Decoder, Part, Signal, numbered, word
from lowcomm_protocol.errors import ProtocolViolation


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much memory sessions take, in bytes."""

    slab: int = MAX_LENGTH
    """What a session takes at once, and sends as one piece."""
    window: int = 4 * 1024**2
    """The most that one may hold: 4 MiB on the way are 40 MB/s over a tenth of a second."""
    shared: int = 64 * 1024**2
    """What all may hold; beyond that, each its least."""
    spare: int = 16 * 1024**2
    """What is kept for later use."""
    ack_every: int = ACK_EVERY

    @property
    def least(self) -> int:
        """What each session may hold, whatever the others do: with less, no ACK would ever be
        due."""
        return 2 * self.ack_every + self.slab


class Slabs:
    """Memory that the sessions of one node share."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        self.sizes = sizes or Sizes()
        self._spare: list[memoryview] = []
        self.used = 0
        """Bytes that sessions hold."""

    def take(self, held: int) -> memoryview | None:
        """A slab for a session that holds so many bytes; None if it must wait until the other side
        acknowledges."""
        sizes = self.sizes
        if held >= sizes.window or (held >= sizes.least and self.used >= sizes.shared):
            return None
        self.used += sizes.slab
        return self._spare.pop() if self._spare else memoryview(bytearray(sizes.slab))

    def give_back(self, slab: memoryview) -> None:
        """It may be overwritten."""
        self.used -= self.sizes.slab
        if len(self._spare) * self.sizes.slab < self.sizes.spare:
            self._spare.append(slab)


class Kept:
    """The bytes of ours that are not acknowledged, up to ``end``; each slab but the last is
    full."""

    def __init__(self, slabs: Slabs) -> None:
        self._slabs = slabs
        self._size = slabs.sizes.slab
        self._held: deque[memoryview] = deque()
        self._base = 0
        """The number of the first byte of the first slab."""
        self.end = 0

    def room(self) -> memoryview | None:
        """Where the next bytes go; None if there is no room."""
        held = self._size * len(self._held)
        if self.end == self._base + held:
            slab = self._slabs.take(held)
            if slab is None:
                return None
            self._held.append(slab)
        return self._held[-1][(self.end - self._base) % self._size :]

    def add(self, size: int) -> None:
        """So many bytes were put into the room."""
        self.end += size

    def at(self, number: int) -> memoryview:
        """The bytes from a number on, as far as they lie together."""
        if number >= self.end:
            return memoryview(b"")
        index, offset = divmod(number - self._base, self._size)
        return self._held[index][offset : self.end - self._base - self._size * index]

    def release(self, number: int) -> None:
        """Bytes before a number are not needed any more."""
        while self._held and number >= self._base + self._size:
            self._slabs.give_back(self._held.popleft())
            self._base += self._size

    def clear(self) -> None:
        """None is needed any more, and no more will come."""
        while self._held:
            self._slabs.give_back(self._held.popleft())
        self._base = self.end


class Session:
    """One side of a session."""

    def __init__(self, slabs: Slabs) -> None:
        self._kept = Kept(slabs)
        self._ack_every = slabs.sizes.ack_every
        self._decoder = Decoder()
        self._controls = b""
        """Words that go out when the piece that is being sent is complete."""
        self._head = b""
        self._piece = 0
        """What the stream has still to take: words, and behind them so many bytes from ``_next``
        on."""
        self._next = 0
        self._furthest = 0
        """The most that ``_next`` has ever been: what was lost on the way to the other side is sent
        again."""
        self.acked = 0
        """Numbers that the other side has told to have received."""
        self._told = 0
        self.received = 0
        """Numbers that have come from the other side."""
        self.repeated = 0
        """Numbers that were sent more than once."""
        self.ended = self.got_end = self.is_gone = False
        """Whether this side has no more to send; the other side neither; the other side has given
        the session up."""

    @property
    def done(self) -> bool:
        """Whether both sides have said all, and ours was acknowledged."""
        return self.got_end and self.ended and self.acked == self._kept.end + 1

    # bytes of ours

    def room(self) -> memoryview | None:
        """Where the next bytes of ours go; None while too many are unacknowledged, or after the
        end."""
        return None if self.ended else self._kept.room()

    def add(self, size: int) -> None:
        """So many bytes were put into the room."""
        self._kept.add(size)

    def end(self) -> None:
        """No more will come."""
        self.ended = True

    def outgoing(self) -> list[bytes | memoryview]:
        """What the stream is to take next; empty: nothing."""
        if not self._head and not self._piece:
            self._begin_piece()
        parts: list[bytes | memoryview] = [self._head] if self._head else []
        if self._piece:
            parts.append(self._kept.at(self._next)[: self._piece])
        return parts

    def sent(self, size: int) -> None:
        """The stream has taken so many bytes of ``outgoing``."""
        words = min(size, len(self._head))
        self._head = self._head[words:]
        size = size - words
        self._piece -= size
        self._advance(size)

    def _begin_piece(self) -> None:
        self._head = self._controls
        self._controls = b""
        self._piece = len(self._kept.at(self._next))
        if self._piece:
            self._head += word(self._piece)
        elif self.ended and self._next == self._kept.end:
            self._head += word(Signal.END)
            self._advance(1)

    def _advance(self, count: int) -> None:
        self._next += count
        self._furthest = max(self._furthest, self._next)

    # what comes in

    def decode(self, data: memoryview) -> Iterator[Part]:
        """The parts of what has come from the stream, each to be fed before the stream is lost, or
        never."""
        return self._decoder.feed(data)

    def feed(self, parts: Iterable[Part]) -> list[memoryview]:
        """The bytes for gRPC in these parts. Raises ProtocolViolation."""
        pieces: list[memoryview] = []
        for part in parts:
            if isinstance(part, memoryview):
                self._receive(len(part))
                pieces.append(part)
            elif isinstance(part, Ack):
                self._acknowledged(part.number, self._next)
            elif part is Signal.GONE:
                self.is_gone = True
            else:
                self._receive(1)
                self.got_end = True
                self.acknowledge()
        if self.received - self._told >= self._ack_every:
            self.acknowledge()
        return pieces

    def acknowledge(self) -> None:
        """Tell the other side how much has come, if it does not know."""
        if self.received > self._told:
            self._told = self.received
            self._controls += numbered(Signal.ACK, self.received)

    def _receive(self, count: int) -> None:
        if self.got_end:
            raise ProtocolViolation("sent something into a tunnel after its end")
        self.received += count

    def _acknowledged(self, number: int, most: int) -> None:
        if not self.acked <= number <= most:
            raise ProtocolViolation(f"acknowledged {number} where {self.acked} to {most} are due")
        self.acked = number
        self._kept.release(min(number, self._kept.end))

    # streams come and go

    def break_off(self) -> None:
        """The stream is lost, with what was on its way."""
        self._decoder = Decoder()
        self._head = self._controls = b""
        self._piece = 0

    def resume(self, number: int, greeting: bytes = b"") -> None:
        """There is a stream, on which ``greeting`` goes first; the other side has received so many.

        Raises ProtocolViolation if it can't have.
        """
        self._acknowledged(number, self._furthest)
        self.repeated += self._next - number
        self._next = number
        self._head = greeting
        self._told = self.received

    def farewell(self) -> bytes:
        """What tells the other side that the session is over; nothing where it could be taken for
        something else."""
        return b"" if self._head or self._piece else word(Signal.GONE)

    def close(self) -> None:
        """Give back the memory."""
        self.ended = True
        self._kept.clear()
