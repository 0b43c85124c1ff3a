"""Whom to leave out: peers that sent what no honest one sends.

A strike is for a contribution that can't be decoded, is implausible, or breaks the protocol; a lost connection is none. After
a strike a peer is left out for a while that doubles with each further one, and an exchange with it that is applied wipes all
out: an honest peer that was unlucky comes back soon, and a liar hardly ever. Time is our own inner steps.
"""

from collections import OrderedDict
from dataclasses import dataclass

MAX_PEERS = 4096
"""Peers that are remembered; the one struck longest ago is forgotten first."""
MAX_DOUBLINGS = 10


@dataclass(frozen=True)
class Strikes:
    """What is held against one peer."""

    count: int
    until: int
    """Own inner steps when it is let in again."""


class Trust:
    """Strikes of all peers; ``interval`` is how many steps the first one lasts."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._strikes: OrderedDict[str, Strikes] = OrderedDict()

    def strike(self, peer: str, steps: int) -> Strikes:
        """Hold one more against a peer."""
        old = self._strikes.pop(peer, Strikes(0, 0))
        lasts = self._interval << min(old.count, MAX_DOUBLINGS)
        new = self._strikes[peer] = Strikes(old.count + 1, steps + lasts)
        if len(self._strikes) > MAX_PEERS:
            self._strikes.popitem(last=False)
        return new

    def forgive(self, peer: str) -> None:
        """An exchange with this peer was applied: nothing is held against it any more."""
        self._strikes.pop(peer, None)

    def trusts(self, peer: str, steps: int) -> bool:
        """Whether a peer may take part now."""
        strikes = self._strikes.get(peer)
        return strikes is None or steps >= strikes.until

    def strikes(self) -> dict[str, Strikes]:
        """Everything held against anybody."""
        return dict(self._strikes)
