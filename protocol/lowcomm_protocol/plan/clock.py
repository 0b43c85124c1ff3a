"""The swarm step: one Lamport-style clock for the schedule of the whole run.

``step += 1`` for every own inner step; on every merge ``step = max(own, partner's)``. The learning
rate, the sync points and the end of the run follow it, so that a late or slow peer is on the
schedule of those it meets.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class SwarmClock:
    """The swarm step of one peer."""

    step: int = 0

    def tick(self) -> int:
        """Count one own inner step."""
        self.step += 1
        return self.step

    def observe(self, step: int) -> int:
        """Take over a partner's step if it is ahead."""
        self.step = max(self.step, step)
        return self.step


FASTER = 8
"""How many times as fast as we one peer may have trained while we merged with nobody."""


def largest_jump(interval: int, alone: int = 0) -> int:
    """How many swarm steps one peer may be ahead of all others: ten intervals, 200 at least.

    The 200 allow for a short pause. ``alone``: own inner steps since our last merge. Of two peers
    that an outage has parted, neither has a third that could speak for the other; without this the
    slower one would refuse the faster one for ever.
    """
    return max(10 * interval, 200, FASTER * alone)


def is_supported(claim: int, own: int, others: Iterable[int], max_jump: int) -> bool:
    """Whether ``claim`` of one peer may move our clock: nobody alone can push the swarm ahead.

    ``others`` are the swarm steps that third peers tell of themselves; ``max_jump`` (swarm steps)
    is what one peer may be ahead of the most advanced of all the others.
    """
    return claim <= max([own, *others]) + max_jump
