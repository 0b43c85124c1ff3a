"""The state of a tunnel that outlives its streams: unacknowledged bytes, and progress. No I/O.

    gRPC ── room, add, end ──► │         │ ── outgoing, sent ──► current stream
                               │ Session │
    gRPC ◄────── pieces ────── │         │ ◄────── feed ─────── current stream

Bytes taken from gRPC are kept until the other side acknowledges them. When a stream breaks off,
each side tells the other on the next one how many bytes it has received, and both resume there.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lowcomm_node.net.frames import (
    ACK_EVERY,
    MAX_LENGTH,
    Ack,
    Decoder,
    Part,
    Signal,
    numbered,
    word,
)
from lowcomm_protocol.errors import ProtocolViolation


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Memory of the sessions, in bytes."""

    slab: int = MAX_LENGTH
    """The unit that a session allocates, and sends as one piece."""
    window: int = 4 * 1024**2
    """Maximum of one session. 4 MiB under way are 40 MB/s at a round trip of a tenth of a
    second."""
    shared: int = 64 * 1024**2
    """Maximum of all sessions; beyond it each gets only its least."""
    spare: int = 16 * 1024**2
    """Freed memory kept for reuse."""
    ack_every: int = ACK_EVERY

    @property
    def least(self) -> int:
        """What a session may hold in any case. With less, no ACK would ever be due."""
        return 2 * self.ack_every + self.slab


class Slabs:
    """Memory shared by the sessions of one node."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        self.sizes = sizes or Sizes()
        self._spare: list[memoryview] = []
        self.used = 0
        """Bytes that sessions hold."""

    def take(self, held: int) -> memoryview | None:
        """A slab for a session that holds ``held`` bytes; None if it must wait for
        acknowledgements."""
        sizes = self.sizes
        if held >= sizes.window or (held >= sizes.least and self.used >= sizes.shared):
            return None
        self.used += sizes.slab
        return self._spare.pop() if self._spare else memoryview(bytearray(sizes.slab))

    def give_back(self, slab: memoryview) -> None:
        """Free a slab. It may be overwritten."""
        self.used -= self.sizes.slab
        if len(self._spare) * self.sizes.slab < self.sizes.spare:
            self._spare.append(slab)


class Kept:
    """Our unacknowledged bytes, up to ``end``; each slab but the last is full."""

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
        """Count bytes that were put into the room."""
        self.end += size

    def at(self, number: int) -> memoryview:
        """The contiguous bytes from a number on."""
        if number >= self.end:
            return memoryview(b"")
        index, offset = divmod(number - self._base, self._size)
        return self._held[index][offset : self.end - self._base - self._size * index]

    def release(self, number: int) -> None:
        """Free the bytes before a number."""
        while self._held and number >= self._base + self._size:
            self._slabs.give_back(self._held.popleft())
            self._base += self._size

    def clear(self) -> None:
        """Free everything; no more bytes will come."""
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
        """Words that go out after the current piece."""
        self._head = b""
        self._piece = 0
        """Unsent remainder: ``_head`` holds words, and then this many bytes from ``_next`` on."""
        self._next = 0
        self._furthest = 0
        """The maximum of ``_next``. Bytes lost on the way to the other side are sent again."""
        self.acked = 0
        """Bytes that the other side has acknowledged."""
        self._told = 0
        self.received = 0
        """Bytes that have come from the other side."""
        self.repeated = 0
        """Bytes that were sent more than once."""
        self.ended = self.got_end = self.is_gone = False
        """``ended``: this side has finished; ``got_end``: so has the other; ``is_gone``: it gave
        up."""

    @property
    def done(self) -> bool:
        """Whether both sides have finished, and our end was acknowledged."""
        return self.got_end and self.ended and self.acked == self._kept.end + 1

    # bytes of ours

    def room(self) -> memoryview | None:
        """Where the next bytes of ours go; None while too many are unacknowledged, or after the
        end."""
        return None if self.ended else self._kept.room()

    def add(self, size: int) -> None:
        """Count bytes that were put into the room."""
        self._kept.add(size)

    def end(self) -> None:
        """Finish: no more bytes will come."""
        self.ended = True

    def outgoing(self) -> list[bytes | memoryview]:
        """What to write to the stream next; empty: nothing."""
        if not self._head and not self._piece:
            self._begin_piece()
        parts: list[bytes | memoryview] = [self._head] if self._head else []
        if self._piece:
            parts.append(self._kept.at(self._next)[: self._piece])
        return parts

    def sent(self, size: int) -> None:
        """The stream has taken ``size`` bytes of ``outgoing``."""
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
        """The parts of received data. Feed each before the stream is lost, or never."""
        return self._decoder.feed(data)

    def feed(self, parts: Iterable[Part]) -> list[memoryview]:
        """Process parts; returns the bytes for gRPC. Raises ProtocolViolation."""
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
                # END has a number of its own, so that its ACK tells that it has come.
                self._receive(1)
                self.got_end = True
                self.acknowledge()
        if self.received - self._told >= self._ack_every:
            self.acknowledge()
        return pieces

    def acknowledge(self) -> None:
        """Queue an ACK, unless the other side already has one."""
        if self.received > self._told:
            self._told = self.received
            self._controls += numbered(Signal.ACK, self.received)

    def _receive(self, count: int) -> None:
        if self.got_end:
            raise ProtocolViolation("sent something into a tunnel after its end")
        self.received += count

    def _acknowledged(self, number: int, most: int) -> None:
        # An ACK frees memory: none may free what was not sent.
        if not self.acked <= number <= most:
            raise ProtocolViolation(f"acknowledged {number} where {self.acked} to {most} are due")
        self.acked = number
        self._kept.release(min(number, self._kept.end))

    # streams come and go

    def break_off(self) -> None:
        """The stream is lost, with the bytes under way."""
        # Half a word may have come, and words of ours are lost: ``resume`` tells numbers anew.
        self._decoder = Decoder()
        self._head = self._controls = b""
        self._piece = 0

    def resume(self, number: int, greeting: bytes = b"") -> None:
        """Continue on a new stream, which begins with ``greeting``; the other side has ``number``
        bytes.

        Raises ProtocolViolation if it can't have that many.
        """
        self._acknowledged(number, self._furthest)
        self.repeated += self._next - number
        self._next = number
        self._head = greeting
        self._told = self.received

    def farewell(self) -> bytes:
        """The word that ends the session; empty where the other side could misread it."""
        return b"" if self._head or self._piece else word(Signal.GONE)

    def close(self) -> None:
        """Free the memory."""
        self.ended = True
        self._kept.clear()
