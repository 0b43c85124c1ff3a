"""Judges the contributions of others to one exchange, before they enter a mean.

A contribution is judged by the norm of its progress, by its direction where nobody could outvote
it, and by the last one of the same peer. Lessons about others are kept only if the outer step is
applied.
"""

import math
from collections import deque
from dataclasses import dataclass, field, replace
from statistics import median_low

import torch
from cachetools import FIFOCache
from torch import Tensor

from lowcomm_protocol.codecs import BLOCK
from lowcomm_protocol.errors import ImplausibleError, Offence
from lowcomm_protocol.exchange.outer import square_and_cosine_apart, square_apart

PLAUSIBLE = 3.0
"""A contribution may have this many times our own norm, or this many times the usual norm."""
HEAVY = 3.0
"""A norm above this many times what its sender's claims explain is a heavy deed, below it a
stumble. In simulated swarms, honest peers of a tenth of the speed, late, or stopped for 20 s stayed
below 3, but not below 2."""
HEAVY_IN_PAIRS = 8.0
"""The same in pairs with a consensus term. Contributions carry slow weights there, which drift
apart while a peer stands still: one that was stopped for 20 s on a busy machine reached 3.5."""
MAX_CLAIM = 2
"""A claim to have trained for longer counts up to this many times an interval, or our own steps."""
GROWTH = 0.75
"""Progress grows with the steps to this power. Measured: between 0.5 (noise) and 1 (a steady
direction)."""
MIN_RATES = 2.0**-100
"""Keeps `growth` from dividing by zero."""
MIN_COSINE = -0.25
"""A contribution whose cosine with our progress is lower points against it."""
MIN_MEAN_COSINE = -0.06
"""The same for the mean cosine of a peer's recent contributions, from `MIN_COSINES` on."""
MIN_COSINES = 4
RECENT = 16
"""How many values are recent: cosines of a peer, or norms (half of them our own)."""
MAX_LONE = 4.0
"""In a swarm of two, the partner's last norm counts up to this many times what was applied."""
USUAL_NORMS = 15
"""Peers whose contributions are remembered; the least recent one is forgotten first."""


def plausible_norm(own: float, usual: float) -> float:
    """The largest plausible norm of a contribution, given our own and the usual one (0: none)."""
    return PLAUSIBLE * max(own, usual)


def believed_steps(steps: int, ahead: int, interval: int, little_known: bool, most: int = 0) -> int:
    """For how many inner steps another peer has trained since its last merge, as far as we believe
    its claim.

    ``steps``: our own since the last merge. ``ahead``: how many more the peer claims.
    ``little_known``: whether nothing is usual yet, as in a replica's first interval; otherwise any
    peer may have trained for one ``interval``, whatever it claims. ``most``: how far claims count
    at least.
    """
    # Nobody can check a claim, and a larger one permits a larger norm: so it counts up to a bound.
    ours = max(1, steps)
    without_claim = ours if little_known else max(ours, interval)
    return min(max(without_claim, ours + ahead), max(MAX_CLAIM * max(ours, interval), most))


def growth(ours: float, theirs: float) -> float:
    """How many times our norm the progress of a peer may have that has trained for longer.

    ``ours``, ``theirs``: the sums of the learning rates of the steps.
    """
    # Not the numbers of steps: in warm-up, progress grows with their square.
    return max(1.0, theirs / max(ours, MIN_RATES)) ** GROWTH


@dataclass(frozen=True)
class Bound:
    """How large the progress of another peer may be."""

    own: float
    """Norm of our own progress."""
    usual: float
    """The usual norm; 0 if nothing is known."""
    growth: float = 1.0
    """How many times our norm is expected of the peer, as far as we believe its claim."""
    claimed_growth: float = 1.0
    """The same if we believe whatever an honest peer may claim."""
    parted: float = 1.0
    """The same for slow weights that have parted from ours: `believed_steps` bounds it, too."""
    heavy: float = HEAVY
    """A norm above this many times the explained one is a heavy offence."""
    realigns: bool = False
    """Whether slow weights have drifted apart, which may be nobody's fault."""

    @property
    def grown(self) -> float:
        """Our norm if we had trained for as long as the peer."""
        return self.own * self.growth

    @property
    def limit(self) -> float:
        """The largest norm that enters a mean."""
        # Not in ``grown``: what is usual, and what coders expect, is progress.
        return plausible_norm(max(self.grown, self.own * self.parted), self.usual)

    @property
    def explained(self) -> float:
        """The largest norm of an honest peer that has trained for as long as it claims."""
        return max(self.limit, plausible_norm(self.own * self.claimed_growth, self.usual))

    def part(self, own: float, share: float) -> "Bound":
        """The bound for a part of the vector, which holds a ``share`` of its values and in which
        our own progress has the norm ``own``."""
        # Progress is seldom spread evenly: ours may lie in this part, and theirs elsewhere.
        root = share**0.5
        return replace(self, own=max(own, root * self.own), usual=root * self.usual)

    def check(self, norm: float) -> None:
        """Raise `ImplausibleError`, with the offence that it is, for a norm above the limit."""
        if norm <= self.limit:
            return
        # The default covers NaN, for which no comparison holds.
        deed = Offence.HEAVY
        if norm <= self.heavy * self.explained or (self.realigns and norm < math.inf):
            deed = None if norm <= self.explained else Offence.STUMBLE
        raise ImplausibleError(f"update too large (norm {norm:.3g}, limit {self.limit:.3g})", deed)


class Directions:
    """Whether contributions point along our progress or against it, for each peer.

    Used where a mean is of two: progress that points against ours undoes what we have learned.
    """

    def __init__(self) -> None:
        self._cosines: FIFOCache[str, deque[float]] = FIFOCache(USUAL_NORMS)

    def check(self, peer: str, cosine: float) -> None:
        """Raises `ImplausibleError` if this contribution, or the mean of the peer's recent ones,
        points against ours. ``cosine``: between its progress and ours."""
        # It is never a deed: of two that differ, nobody can say which is wrong, and an honest peer
        # of a tenth of our speed points back from where we have gone.
        recent = self._cosines[peer] = self._cosines.get(peer) or deque(maxlen=RECENT)
        recent.append(cosine)
        mean, against = sum(recent) / len(recent), ""
        if len(recent) >= MIN_COSINES and mean < MIN_MEAN_COSINE:
            against = f"{mean:.2f} on average"
        elif cosine < MIN_COSINE:
            against = f"{cosine:.2f}"
        if against:
            raise ImplausibleError(f"update points the opposite way (cosine {against})", None)


class UsualNorm:
    """The usual norm of contributions: the lower median of recently applied ones, or of what each
    peer brought last if that is larger."""

    def __init__(self, before: float = 0.0) -> None:
        """``before``: what was usual before a restart; 0 if nothing is known."""
        # A median: a liar that is applied once, while our own norm is large as in the first steps
        # of a run, would raise a mean for long.
        self._recent = deque([before] if before else [], maxlen=RECENT)
        self._last: dict[str, float] = {}

    @property
    def learned(self) -> float:
        """The usual norm of applied contributions; 0 if there are none."""
        return median_low(self._recent) if self._recent else 0.0

    @property
    def value(self) -> float:
        """The usual norm; 0 if nothing is known."""
        learned = self.learned
        norms = list(self._last.values())  # a copy at once: other threads decode and add to it
        # Refused contributions count, too. If most peers are further away than is plausible, we
        # must come closer: two halves of a swarm that have drifted apart would refuse each other
        # for ever. One liar does not move the lower median of several.
        if len(norms) == 1:
            return max(learned, min(norms[0], MAX_LONE * learned))
        return max(learned, median_low(norms)) if norms else learned

    def is_lone(self, peer: str) -> bool:
        """Whether no other peer has brought anything lately."""
        return not self._last.keys() - {peer}

    def saw(self, peer: str, norm: float) -> None:
        """Remember the norm that a peer has brought, unless it is infinite or NaN."""
        if not math.isfinite(norm):
            return
        self._last.pop(peer, None)
        self._last[peer] = norm
        if len(self._last) > USUAL_NORMS:
            del self._last[next(iter(self._last))]

    def applied(self, norm: float, own: float) -> None:
        """Learn from an applied contribution, compared with which ours had the norm ``own``."""
        # At most what our own norm makes plausible: a partner that always brings the most that it
        # may would raise the bound each time.
        self._recent += (own, min(norm, plausible_norm(own, 0.0)))


SAMPLE = 64
"""Blocks of 256 values that are compared, spread over the fragment."""
FEWEST = 8
"""Of the compared blocks this many, or all, must have been coded alike both times."""
CONTRIBUTIONS = 32
"""Peers whose last contribution is kept: 2 MiB of each fragment at most."""
ROUNDING = 1e-3
"""Part of a step that values may be off."""


@dataclass(frozen=True)
class Brought:
    """The sample of one contribution."""

    values: Tensor
    """Float32 [blocks, 256]."""
    steps: Tensor
    """Of the lattice: float32 [blocks, 1]; 0 where equal values are decoded to equal values."""
    ours: Tensor
    """Of our own contribution then, as others decoded it: float32 [blocks, 256]."""


class Repeats:
    """The last contribution of each peer to one fragment of ``numel`` values that was applied."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        count = -(-numel // BLOCK)
        looked_at = min(SAMPLE, count)
        numbers = [place * count // looked_at for place in range(looked_at)]
        self._blocks = torch.tensor(numbers, dtype=torch.long)
        self._places = (self._blocks[:, None] * BLOCK + torch.arange(BLOCK)).clamp(max=numel - 1)
        self._last: FIFOCache[str, Brought] = FIFOCache(CONTRIBUTIONS)

    def sample(self, contribution: Tensor, steps: Tensor, ours: Tensor) -> Brought:
        """What is kept of a contribution, float32 [numel].

        ``steps``: of the lattice of each of its blocks, float32. ``ours``: our own, float32
        [numel].
        """
        sampled = contribution[self._places], steps[self._blocks, None], ours[self._places]
        return Brought(*sampled)

    def repeats(self, peer: str, brought: Brought) -> bool:
        """Whether a peer brings what it brought when it was applied last."""
        last = self._last.get(peer)
        if last is None:
            return False
        alike = ((brought.steps > 0) == (last.steps > 0)).flatten()
        cells = (brought.steps + last.steps) / 2
        ours = _moved(last.ours, brought.ours, cells) & alike
        if int(ours.sum()) < max(min(FEWEST, len(alike)), int(alike.sum()) / 2):
            return False
        return not bool((_moved(last.values, brought.values, cells) & alike).any())

    def applied(self, peer: str, brought: Brought) -> None:
        """Remember what was applied; the peer that was applied longest ago is forgotten."""
        self._last[peer] = brought


def _moved(before: Tensor, now: Tensor, cells: Tensor) -> Tensor:
    """Which blocks hold a value that has moved by more than coding explains: bool [blocks]."""
    apart = (now - before).abs()
    return torch.where(cells > 0, apart >= cells * (1 - ROUNDING), apart > 0).any(dim=1)


@dataclass(kw_only=True)
class Judge:
    """Judges contributions by our own progress ``theta - phi``, and by usual norms."""

    theta: Tensor
    phi: Tensor
    pull: float
    """``consensus``, or 1 in a realignment: ``pull * phi`` of a contribution is no progress."""
    gain: float
    bound: Bound
    usual: UsualNorm
    """Learns the norms that others bring."""
    directions: Directions
    """Learns whether their progress points along ours."""
    repeats: Repeats = field(default_factory=lambda: Repeats(0))
    """Recognizes contributions that were applied before; in a group, to our shard."""
    norms: dict[str, float] = field(default_factory=dict)
    """Plausible norms of this exchange, by peer."""
    _brought: dict[str, Brought] = field(default_factory=dict)

    def norm_of(self, vector: Tensor, start: int = 0) -> float:
        """Norm of the progress in a contribution from ``start`` on."""
        base = self.phi[start : start + vector.numel()]
        return square_apart(vector, base, self.pull) ** 0.5

    def own_norm(self, start: int = 0, stop: int | None = None) -> float:
        """Norm of our own progress, times its gain in a contribution."""
        stop = self.theta.numel() if stop is None else stop
        return self.gain * square_apart(self.theta[start:stop], self.phi[start:stop], 1.0) ** 0.5

    def check_whole(self, peer: str, vector: Tensor) -> float:
        """Norm of the progress in a pair. Raises ImplausibleError if it is too large, or points
        against us where no other peer is known."""
        cosine = None
        if self.usual.is_lone(peer):
            norm, cosine = self._norm_and_cosine(vector, 0)
        else:
            norm = self.norm_of(vector)
        self.usual.saw(peer, norm)
        self.bound.check(norm)
        if cosine is not None:
            self.directions.check(peer, cosine)
        return norm

    def check_part(self, peer: str, vector: Tensor, start: int) -> float:
        """Norm of the progress in a shard, scaled to the whole fragment. Raises ImplausibleError
        if it is too large."""
        share = vector.numel() / self.theta.numel()
        norm = self.norm_of(vector, start)
        self.usual.saw(peer, norm / share**0.5)
        self.bound_of_part(vector, start).check(norm)
        return norm / share**0.5

    def bound_of_part(self, vector: Tensor, start: int) -> Bound:
        """How large the progress in a shard may be."""
        own = self.own_norm(start, start + vector.numel())
        return self.bound.part(own, vector.numel() / self.theta.numel())

    def check_direction(self, peer: str, vector: Tensor, start: int) -> None:
        """Raise ImplausibleError for progress that points against ours."""
        _, cosine = self._norm_and_cosine(vector, start)
        self.directions.check(peer, cosine)

    def check_repeat(self, peer: str, vector: Tensor, steps: Tensor, ours: Tensor) -> None:
        """Raise ImplausibleError if a peer resends its previous contribution.

        ``steps``: of the lattice of each block; ``ours``: our own contribution.
        """
        brought = self.repeats.sample(vector, steps, ours)
        if self.repeats.repeats(peer, brought):
            raise ImplausibleError("sent its previous update again")
        self._brought[peer] = brought

    def learn(self) -> None:
        """Learn from this exchange: its outer step is applied."""
        for norm in self.norms.values():
            self.usual.applied(norm, self.bound.grown)
        for peer, brought in self._brought.items():
            self.repeats.applied(peer, brought)

    def _norm_and_cosine(self, vector: Tensor, start: int) -> tuple[float, float]:
        """`norm_of` a contribution, and the cosine between its progress and ours, in one pass."""
        here = slice(start, start + vector.numel())
        theta, phi = self.theta[here], self.phi[here]
        own = square_apart(theta, phi, 1.0)
        square, cosine = square_and_cosine_apart(vector, theta, phi, self.pull, own)
        return square**0.5, cosine
