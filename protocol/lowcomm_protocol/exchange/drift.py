"""Whether a peer is too far from most others for exchanges to bring it back, and when it copies a
state. Pure.

Either the others leave it out, and have for a while: what it brings is implausible, and the more so
the longer it trains alone. Or they are far ahead, as they confirm each other, because this machine
slept. Or its slow weights are others than those of most of a group that must hold the same."""

from math import ceil

from lowcomm_protocol.exchange.events import Surroundings
from lowcomm_protocol.exchange.position import Position
from lowcomm_protocol.exchange.rest import Rest
from lowcomm_protocol.plan import largest_jump

WITNESSES = 2
"""Peers that must leave us out before we believe that we are wrong: one alone could be a liar, or
as wrong as we."""
DRIFTED = 2
"""Intervals without an exchange after which peers that leave us out are believed."""
ENDURED = 50
"""Intervals of training before we look again, where nobody could hand over a state."""
MAX_PEERS = 1024


class Drift:
    """What tells that we have drifted, and what was done about it."""

    def __init__(self, position: Position, surroundings: Surroundings) -> None:
        self._position = position
        self._around = surroundings
        self._left_out_by: set[str] = set()
        """Peers that have left us out, or did not believe our swarm step, since the last exchange
        that was applied."""
        self._endured_until = 0
        self._stranded = False
        self.rest = Rest()
        """After a copy that was to bring us back."""

    def left_out(self, peer: str) -> None:
        """A peer leaves us out."""
        if len(self._left_out_by) < MAX_PEERS:
            self._left_out_by.add(peer)

    def strand(self) -> None:
        """Our slow weights are others than those of most, and nobody can hand over the steps
        between."""
        self._stranded = True

    def forget(self) -> None:
        """An exchange was applied, or nothing of it holds any more."""
        self._left_out_by.clear()

    def restart(self) -> None:
        """The state is another one now."""
        self.forget()
        self._stranded = False
        self._endured_until = 0

    def endure(self) -> None:
        """Nobody could hand over a state: train on, rather than ask again and again."""
        self._endured_until = self._position.steps + ENDURED * self._position.interval

    def must_copy(self, now: float) -> bool:
        """Whether to copy the state of others now: exchanges can't bring us back to them."""
        position = self._position
        if position.ready is None or position.steps < self._endured_until or self.rest.left(now):
            return False
        return self._is_far()

    def resting(self, now: float) -> str | None:
        """Why we train on though we are far from most peers; None if we aren't, or copy soon."""
        seconds = self.rest.left(now)
        if self._position.ready is None or not seconds or not self._is_far():
            return None
        return (
            "still far from most peers, whose state was copied of late: it is copied again in "
            f"{ceil(seconds)} s at the earliest"
        )

    def _is_far(self) -> bool:
        if self._stranded:
            return True
        position = self._position
        # This is asked at each step where an exchange is due. A look at the furthest peer is cheap,
        # one at all peers of a large swarm is not.
        far = position.swarm_step + largest_jump(position.interval)
        if not self._left_out_by and self._around.furthest(but=position.me) <= far:
            return False
        training = self._around.training()
        # Others must support the step that a peer claims: a single liar is not ahead.
        ahead = sum(step > far and position.supports(peer, step) for peer, step in training)
        left_out = sum(peer in self._left_out_by for peer, _ in training)
        # As long as exchanges are applied, those that leave us out are the ones that err.
        if position.steps_alone < DRIFTED * position.interval or left_out < WITNESSES:
            left_out = 0
        # Not their sum: a peer that is ahead and leaves us out is one peer.
        return 2 * max(ahead, left_out) > len(training)
