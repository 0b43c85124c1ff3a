"""Trust: a score of each peer from what it did to us. It decays, and is shared with nobody.

    1    nothing is known against it
    0.5  below this it is neither called nor accepted, and its state is not copied
    0    it has just sent what no honest peer sends

**Heavy** offences are those of no honest peer: a contribution that can't be decoded or is
implausible, or a protocol violation. One takes the score to 0, and the distance to 1 halves every
``interval`` steps; each further one doubles that time. **Light** offences hardly ever happen to
honest peers: each subtracts `LIGHT`. A **stumble** is a stream that breaks or stalls, or a norm a
little beyond the plausible, as of sleeping laptops and bad links: `FORGIVEN` of them in a row cost
nothing; each further one before an exchange is applied is a light offence.

An applied exchange makes up for a quarter of a heavy offence, and so does time, slowly. A
realignment makes up for nothing: it costs the others full precision and their momentum. Time is our
own inner steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from cachetools import FIFOCache

from lowcomm_protocol.errors import MAX_REASON, Offence

MAX_PEERS = 4096
"""Peers that are remembered. The one with the oldest last deed is evicted first."""
MAX_DOUBLINGS = 10
BOUND = 0.5
"""The score below which a peer is left out."""
LIGHT = 0.2
"""Amount that a light offence subtracts from the score."""
FORGIVEN = 8
"""Stumbles in a row that cost nothing: as many exchanges may break when a machine stops."""
GOOD = 0.25
"""Part of a heavy offence, and of the distance to 1, that an applied exchange makes up for."""
MEMORY = 128
"""Intervals after which a heavy deed counts half."""
MOST_AT_ONCE = 4
"""A wait counts as several stumbles where it was much longer than usual, but never more."""
PRICE_SECONDS = 3.0
"""Seconds of waiting that cost as much as a light deed."""
PRICE_LASTS = 4
"""Times as long as a peer has kept us waiting lasts half of what that costs it."""


@dataclass
class _Stumbles:
    """What one peer did that honest peers do, too."""

    count: float = 0.0
    """In a row, without an applied exchange in between."""
    seconds: float = 0.0
    """For which it has kept us waiting, less what it has made up for."""
    last: float = float("-inf")
    """When it did that the last time."""


@dataclass(frozen=True)
class Reputation:
    """What is held against one peer."""

    missing: float
    """1 minus the score, at the last change."""
    since: int
    """Own inner steps at that time."""
    half_life: int
    """Own inner steps in which half of the distance comes back."""
    heavy: float
    """Heavy deeds, less those made up for by then."""
    reason: str
    """Of the last deed."""

    def score(self, steps: int) -> float:
        """Between 0 and 1."""
        return 1.0 - self.missing * 0.5 ** (max(0, steps - self.since) / self.half_life)


class Trust:
    """Scores of all peers; ``interval`` is how many steps the first heavy deed costs."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._standings: FIFOCache[str, Reputation] = FIFOCache(MAX_PEERS)
        self._stumbles: FIFOCache[str, _Stumbles] = FIFOCache(MAX_PEERS)

    def stumbled(
        self, peer: str, seconds: float = 0.0, usual: float = 1.0, now: float = 0.0
    ) -> bool:
        """Count a stumble; whether it is one too many, which is a light offence.

        ``seconds``: waited in vain until ``now``, where ``usual`` are expected. Exchanges that
        waited at the same time count as one stumble.
        """
        one = self._stumbles[peer] = self._stumbles.get(peer) or _Stumbles()
        one.seconds += seconds
        if seconds and now - seconds < one.last:
            return False
        one.count += min(MOST_AT_ONCE, max(1.0, seconds / usual))
        if seconds:
            one.last = now
        return one.count > FORGIVEN

    def lost(self, peer: str) -> float:
        """Seconds for which a peer has kept us waiting, less what it has made up for."""
        one = self._stumbles.get(peer)
        return 0.0 if one is None else one.seconds

    def keeping_us(self, since: float) -> Iterator[tuple[str, float]]:
        """The peers that have kept us waiting since then, and for how many seconds in all."""
        known = self._stumbles.items()
        return ((peer, one.seconds) for peer, one in known if one.last >= since)

    def hold(
        self, peer: str, deed: Offence, steps: int, reason: str = "", step_seconds: float = 0.0
    ) -> Reputation:
        """Hold an offence against a peer; its reputation.

        ``step_seconds``: of our inner steps, which turn seconds of waiting into steps; 0 if
        unknown.
        """
        old = self._now(peer, steps)
        if deed is Offence.HEAVY:
            lasts = self._interval << min(round(old.heavy), MAX_DOUBLINGS)
            new = Reputation(1.0, steps, lasts, old.heavy + 1.0, reason[:MAX_REASON])
        else:
            # A peer that is trusted again has served its time: its light deeds last no longer than
            # those of any other.
            half_life = self._interval if 1.0 - old.missing >= BOUND else old.half_life
            lost = self.lost(peer)
            if step_seconds:
                half_life = max(half_life, ceil(PRICE_LASTS * lost / step_seconds))
            new = replace(
                old,
                missing=min(1.0, old.missing + LIGHT * max(1.0, lost / PRICE_SECONDS)),
                half_life=half_life,
                reason=reason[:MAX_REASON],
            )
        self._standings[peer] = new
        return new

    def thank(self, peer: str, steps: int, realigned: bool = False) -> None:
        """Note an applied exchange with this peer; ``realigned``: it makes up for stumbles only."""
        if (one := self._stumbles.get(peer)) is not None:
            one.seconds *= 1.0 - GOOD
            # One that has cost much time is not forgiven for a single exchange that went well.
            one.count *= 0.0 if one.seconds < PRICE_SECONDS else 1.0 - GOOD
        if not realigned and peer in self._standings:
            now = self._now(peer, steps)
            self._standings[peer] = replace(
                now, missing=(1.0 - GOOD) * now.missing, heavy=max(0.0, now.heavy - GOOD)
            )

    def trusts(self, peer: str, steps: int) -> bool:
        """Whether a peer may take part now."""
        return self.score(peer, steps) >= BOUND

    def score(self, peer: str, steps: int) -> float:
        """Between 0 and 1; unknown peers have 1."""
        standing = self._standings.get(peer)
        return 1.0 if standing is None else standing.score(steps)

    def reason(self, peer: str) -> str:
        """The reason of the last deed; empty if there is none."""
        standing = self._standings.get(peer)
        return "" if standing is None else standing.reason

    def left_out(self, steps: int) -> Iterator[str]:
        """The peers that may not take part now."""
        return (peer for peer, standing in self._standings.items() if standing.score(steps) < BOUND)

    def __len__(self) -> int:
        """Peers against whom anything is held."""
        return len(self._standings)

    def _now(self, peer: str, steps: int) -> Reputation:
        old = self._standings.get(peer)
        if old is None:
            return Reputation(0.0, steps, self._interval, 0.0, "")
        heavy = old.heavy * 0.5 ** (max(0, steps - old.since) / (MEMORY * self._interval))
        return replace(
            old, missing=1.0 - old.score(steps), since=max(steps, old.since), heavy=heavy
        )
