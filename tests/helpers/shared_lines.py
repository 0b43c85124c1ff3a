"""A virtual network in which all traffic of a peer shares one line."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from lowcomm_node.simulation.network import Conditions, Network, SimulatedStream

PIECE = 32 * 1024
"""Bytes that go over a shared line at a time."""


class Queue:
    """One direction of a peer's line: contents go one after the other, as nodes send them."""

    def __init__(self, network: Network, rate: float) -> None:
        self._network = network
        self._rate = rate
        self._waiting: deque[tuple[SimulatedStream, int, Callable[[int], None]]] = deque()
        self._busy = False
        self.carried = 0
        """Bytes."""

    def take(self, stream: SimulatedStream, size: int, passed: Callable[[int], None]) -> None:
        """Carry so many bytes; ``passed`` is told each piece of them that has passed."""
        self._waiting.append((stream, size, passed))
        self._go_on()

    def _go_on(self) -> None:
        while not self._busy and self._waiting:
            stream, left, passed = self._waiting.popleft()
            if stream.broken or stream.closed:
                continue
            self._busy, piece = True, min(left, PIECE)
            done = partial(self._passed, stream, left, piece, passed)
            self._network.after(piece / self._rate, done)

    def _passed(
        self, stream: SimulatedStream, left: int, piece: int, passed: Callable[[int], None]
    ) -> None:
        self._busy = False
        self.carried += piece
        if left > piece:
            self._waiting.appendleft((stream, left - piece, passed))
        passed(piece)
        self._go_on()


class LineNetwork(Network):
    """Streams over the lines of both ends; ``line``: bytes a second up and down."""

    def __init__(self, seed: int, conditions: Conditions, line: tuple[float, float]) -> None:
        super().__init__(seed, conditions)
        self.line = line
        self._lines: dict[str, tuple[Queue, Queue]] = {}
        self._behind: dict[tuple[SimulatedStream, str], list[Callable[[], None]]] = {}
        """By stream and sender: what was sent after contents that are still under way."""

    def send(
        self,
        stream: SimulatedStream,
        sender: str,
        kind: str,
        payload: Any = None,
        size: int = 0,
        late: float = 0.0,
    ) -> None:
        if sender in stream.closed or stream.broken:
            return
        if (behind := self._behind.get((stream, sender))) is not None:
            behind.append(lambda: self.send(stream, sender, kind, payload, size, late))
        elif size:
            self._carry(stream, sender, size, lambda: self.send(stream, sender, kind, payload))
        else:
            super().send(stream, sender, kind, payload, size, late)

    def line_of(self, peer: str) -> tuple[Queue, Queue]:
        """Both directions of a peer's line."""
        if peer not in self._lines:
            up, down = self.line
            self._lines[peer] = (Queue(self, up), Queue(self, down))
        return self._lines[peer]

    def _carry(
        self, stream: SimulatedStream, sender: str, size: int, arrive: Callable[[], None]
    ) -> None:
        """Over the line of the sender, and piece by piece over that of the receiver."""
        left = size
        self._behind[stream, sender] = []
        up, down = self.line_of(sender)[0], self.line_of(stream.other(sender))[1]

        def passed(piece: int) -> None:
            nonlocal left
            left -= piece
            if not left:
                waiting = [arrive, *self._behind.pop((stream, sender))]
                for send in waiting:
                    send()

        up.take(stream, size, lambda piece: down.take(stream, piece, passed))
