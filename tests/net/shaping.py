"""What a link does to packets: when each arrives, and which never do. No clock and no sockets: time
is an argument."""

import heapq
from dataclasses import dataclass
from itertools import groupby
from random import Random

from segments import Shape, cut, shape_of

BURST = 0.005
"""Seconds: what arrives in one piece has taken the link no longer than this; packets of a slow link
come one by one."""
BUCKET = 0.01
"""Seconds of its rate that an idle link may catch up on: the emulator's process is not always awake
when a packet comes."""
_LOST, _LATE, _KEPT = range(3)
_LONG_AGO = float("-inf")


@dataclass(frozen=True)
class Link:
    """One direction of a link."""

    rate: float | None = None
    """Bits a second, headers of IP included; None: as fast as this machine can."""
    delay: float = 0.0
    """Seconds, from the moment the last bit has been sent."""
    jitter: float = 0.0
    """Seconds: each packet takes up to so much longer, without overtaking."""
    loss: float = 0.0
    """Probability of each packet of the wire to be lost."""
    reorder: float = 0.0
    """Probability of each packet to be late by ``late``, and so to be overtaken."""
    late: float = 0.01
    """Seconds."""
    queue: int | None = None
    """Bytes that may wait to be sent, where there is a rate; more is dropped at the tail. None:
    what the link sends in 0.1 s, and at least 64 KiB."""
    seed: int = 0
    """The same seed loses and delays the same packets, by their number."""

    def __post_init__(self) -> None:
        for name in ("loss", "reorder"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)} is no probability")
        for name in ("delay", "jitter", "late"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} = {getattr(self, name)} s: must not be negative")
        if self.rate is not None and not self.rate > 0:
            raise ValueError(
                f"rate = {self.rate} bit/s: must be positive; to carry nothing, there is outage()"
            )

    @property
    def limit(self) -> float:
        """Bytes that may wait."""
        if self.queue is not None:
            return self.queue
        return max(65536.0, 0.1 * (self.rate or 0) / 8)


@dataclass
class Counters:
    """What has become of the packets of one direction; bytes are those of the wire."""

    offered: int = 0
    offered_bytes: int = 0
    lost: int = 0
    """By chance."""
    dropped: int = 0
    """Because the queue was full."""
    cut_off: int = 0
    """By an outage: offered during one, or under way when it began."""
    late: int = 0
    """Held back, so that others could overtake."""
    refused: int = 0
    """Not taken by the receiver, whose device was down."""
    delivered: int = 0
    delivered_bytes: int = 0
    worst_late: float = 0.0
    """Seconds after its time that a packet was handed over, at worst: our distortion."""


class Direction:
    """One direction of a link: pieces are offered, and are due some time later."""

    def __init__(self, link: Link, name: str) -> None:
        self.counters = Counters()
        self.down = False
        self._name = name
        self._under_way: list[tuple[float, int, bytes, int, int]] = []
        """Heap: when it arrives, number, piece, packets, bytes."""
        self._number = 0
        self._free = self._last = _LONG_AGO
        """When the sender is free, and when the last packet arrives that is not late."""
        self.link = link

    @property
    def link(self) -> Link:
        """What the link does; a new one begins its seed anew, and holds for what is offered from
        now on."""
        return self._link

    @link.setter
    def link(self, link: Link) -> None:
        self._link = link
        self._loss, self._jitter, self._reorder = (
            Random(f"{what}:{link.seed}:{self._name}") for what in ("loss", "jitter", "reorder")
        )

    @property
    def next(self) -> float | None:
        """When something is due."""
        return self._under_way[0][0] if self._under_way else None

    def outage(self, down: bool) -> None:
        """Cut the link, with all that is under way, or mend it."""
        self.down = down
        if down:
            self.counters.cut_off += sum(packets for _, _, _, packets, _ in self._under_way)
            self._under_way.clear()
            self._free = _LONG_AGO

    def offer(self, piece: bytes, now: float) -> None:
        """Take a piece from the sender."""
        link, counters, shape = self._link, self.counters, shape_of(piece)
        counters.offered += shape.segments
        counters.offered_bytes += shape.total
        if self.down:
            counters.cut_off += shape.segments
        elif link.loss or link.reorder or (shape.segments > 1 and link.rate is not None):
            self._offer_runs(piece, shape, now)
        else:
            self._send(piece, shape, now, late=False)

    def due(self, now: float) -> bytes | None:
        """The next piece that has arrived by now."""
        if not self._under_way or self._under_way[0][0] > now:
            return None
        when, _, piece, packets, size = heapq.heappop(self._under_way)
        self.counters.worst_late = max(self.counters.worst_late, now - when)
        self.counters.delivered += packets
        self.counters.delivered_bytes += size
        return piece

    def _offer_runs(self, piece: bytes, shape: Shape, now: float) -> None:
        """Draw for each packet on its own; neighbours of the same fate stay together, as far as a
        burst goes."""
        link, counters = self._link, self.counters
        together = shape.segments
        if link.rate is not None:
            together = max(1, int(link.rate * BURST / 8 / (shape.headers + shape.payload)))
        fates = (
            [self._fate() for _ in range(shape.segments)]
            if link.loss or link.reorder
            else [_KEPT] * shape.segments
        )
        first = 0
        for fate, run in groupby(fates):
            last = first + len(list(run))
            if fate == _LOST:
                counters.lost += last - first
                first = last
            while first < last:
                end = min(last, first + (1 if fate == _LATE else together))
                part = piece if end - first == shape.segments else cut(piece, first, end)
                self._send(part, shape_of(part), now, fate == _LATE)
                first = end

    def _fate(self) -> int:
        # All are drawn in any case: the fate of a packet depends on its number alone.
        lost = self._link.loss > 0 and self._loss.random() < self._link.loss
        late = self._link.reorder > 0 and self._reorder.random() < self._link.reorder
        return _LOST if lost else _LATE if late else _KEPT

    def _send(self, piece: bytes, shape: Shape, now: float, late: bool) -> None:
        link, counters = self._link, self.counters
        leaves = now
        if link.rate is not None:
            begins = max(now - BUCKET, self._free)
            room = link.limit - (begins - now) * link.rate / 8
            if room < shape.total:
                fitting = max(0, int(room / (shape.headers + shape.payload)))
                counters.dropped += shape.segments - fitting
                if not fitting:
                    return
                piece = cut(piece, 0, fitting)
                shape = shape_of(piece)
            self._free = begins + shape.total * 8 / link.rate
            leaves = max(now, self._free)
        arrives = leaves + link.delay
        if link.jitter:
            arrives += link.jitter * self._jitter.random()
        if late:
            arrives += link.late
            counters.late += shape.segments
        else:
            arrives = self._last = max(self._last, arrives)
        self._number += 1
        heapq.heappush(self._under_way, (arrives, self._number, piece, shape.segments, shape.total))
