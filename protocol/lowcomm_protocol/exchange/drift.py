"""Whether a peer is too far from most others for exchanges to bring it back, and when it copies a state. Pure.

Either the others leave it out, and have for a while: what it brings is implausible, and the more so the
longer it trains alone. Or they are far ahead, as they confirm each other, because this machine slept.
"""

from collections.abc import Callable, Sequence
from math import ceil

from lowcomm_protocol.exchange.rest import Rest

WITNESSES = 2
"""Peers that must leave us out before we believe that we are wrong: one alone could be a liar, or as wrong as we."""
DRIFTED = 2
"""Intervals without an exchange after which peers that leave us out are believed."""
ENDURED = 50
"""Intervals of training before we look again, where nobody could hand over a state."""
MAX_PEERS = 1024


class Drift:
    """What tells that we have drifted, and what was done about it."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._left_out_by: set[str] = set()
        """Peers that have left us out, or did not believe our swarm step, since the last exchange that was applied."""
        self._endured_until = 0
        self.rest = Rest()
        """After a copy that was to bring us back."""

    def left_out(self, peer: str) -> None:
        """A peer leaves us out."""
        if len(self._left_out_by) < MAX_PEERS:
            self._left_out_by.add(peer)

    def forget(self) -> None:
        """An exchange was applied, or nothing of it holds any more."""
        self._left_out_by.clear()

    def restart(self) -> None:
        """The state is another one now."""
        self.forget()
        self._endured_until = 0

    def endure(self, steps: int) -> None:
        """Nobody could hand over a state: train on, or we would ask again and again instead of training."""
        self._endured_until = steps + ENDURED * self._interval

    def must_copy(self, now: float, steps: int, is_far: Callable[[], bool]) -> bool:
        """Whether to copy the state of others now."""
        return steps >= self._endured_until and not self.rest.left(now) and is_far()

    def is_far(self, training: Sequence[tuple[str, int]], ahead: int, alone: int) -> bool:
        """Whether most of those that train are too far away.

        ``training``: peers and their swarm steps; ``ahead``: how many of them are too far ahead of us, and
        confirmed by others; ``alone``: own inner steps since the last merge.
        """
        left_out = sum(peer in self._left_out_by for peer, _ in training)
        if alone < DRIFTED * self._interval or left_out < WITNESSES:
            left_out = 0
        return 2 * max(ahead, left_out) > len(training)

    @property
    def is_suspected(self) -> bool:
        """Whether anybody leaves us out."""
        return bool(self._left_out_by)

    def resting(self, now: float, is_far: Callable[[], bool]) -> str | None:
        """Why we train on though we are far from most peers; None if we are not, or copy their state soon."""
        seconds = self.rest.left(now)
        if not seconds or not is_far():
            return None
        return f"still far from most peers, whose state was copied of late: it is copied again in {ceil(seconds)} s at the earliest"
