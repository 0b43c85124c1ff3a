"""Means that one liar can't move far, and what a contribution may look like at all.

All vectors are progress as the receiver sees it (contribution minus ``consensus`` times its own
slow weights), flat float32.

    mean      weighted; every contribution counts as it is
    clip      norms above `CLIP` times the group's lower median are scaled down to it, and what points against all
              others together is left out, the worst first; then weighted
    median    of each coordinate; weights don't count
    trimmed   of each coordinate the largest and the smallest are left out; weights don't count

In a group of two there is no majority: all four are the mean there. So every contribution is judged
before it enters any mean: its norm (`Bound`), and of two its direction (`Directions`).

Sources: Sun et al., 1911.07963 (norm bounds); Yin et al., 1803.01498 (median and trimmed mean).
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from lowcomm_protocol.deeds import Deed
from lowcomm_protocol.errors import ImplausibleError, SpecError
from lowcomm_protocol.exchange.outer import mean_contribution
from lowcomm_protocol.spec.names import MEANS, Mean

CLIP = 1.5
PLAUSIBLE = 3.0
"""A single contribution may have this many times the norm of our own, or of what has been usual."""
FAR = 3.0
"""A norm beyond this many times the largest that the claims of an honest peer explain is a heavy
deed; up to it, a stumble. Honest peers of a tenth of the speed, late, or stopped for 20 s stayed
below it in simulated swarms; 2 was too little."""
FAR_APART = 8.0
"""The same in pairs whose contributions carry slow weights, which part while a peer stands still: a
node that was stopped for 20 s on a busy machine was at 3.5."""
LONGER = 2
"""What a peer claims to have trained for counts for at most this many times an interval, or our own
steps."""
GROWTH = 0.75
"""Progress grows with this power of the steps: measured between 0.5, that of noise, and 1, that of
a clear direction."""
TINY = 2.0**-100
AGAINST = 3.0
"""Noise of honest peers rarely points against the others by more than so many standard
deviations."""
OPPOSED, CONTRARY, ENOUGH = -0.25, -0.06, 4
"""Cosine of one contribution, and mean cosine of the last few, below which progress points against
ours."""
RECENT = 16
"""Norms, half of them our own, whose lower median is what was usual of late."""
ALONE = 4.0
"""In a swarm of two, the other's last contribution counts for at most so many times what was
applied."""
REMEMBERED = 15
"""Peers whose last contribution tells what is usual."""


def robust_mean(
    kind: Mean, contributions: Sequence[torch.Tensor], weights: Sequence[float]
) -> torch.Tensor:
    """Mean of a group's contributions: a new vector.

    The owner of a shard computes it, and the others take it as the owner has coded it. So these
    bits may depend on the processor, as norms do whose sums torch splits by the width of its
    registers.

    Raises `SpecError` for an unknown kind, `PlanError` for vectors that are not alike.
    """
    if kind not in MEANS:
        raise SpecError(f"mean = {kind!r} is not known: use one of {', '.join(MEANS)}")
    if kind == "mean" or len(contributions) < 3:
        return mean_contribution(contributions, weights)
    if kind == "clip":
        return _clipped(contributions, weights)
    ordered = torch.stack(list(contributions)).sort(dim=0).values
    cut = (len(contributions) - 1) // 2 if kind == "median" else 1
    return ordered[cut : len(contributions) - cut].mean(dim=0)


def plausible_norm(own: float, usual: float) -> float:
    """The largest norm that a single contribution may have, given our own and what has been usual
    (0: nothing yet)."""
    return PLAUSIBLE * max(own, usual)


def believed_steps(steps: int, ahead: int, interval: int, little_known: bool, most: int = 0) -> int:
    """Inner steps that another peer may have trained for, as far as its claim counts.

    ``steps``: our own since the last merge; ``ahead``: how many more the other claims;
    ``interval``: steps that any peer may have trained for without a claim, unless ``little_known``:
    in the first interval of a replica, while nothing is usual yet, only claims count. A claim can't
    be checked: it counts up to `LONGER` times an interval or our own steps, and up to ``most``
    where that is more.
    """
    ours = max(1, steps)
    without_claim = ours if little_known else max(ours, interval)
    return min(max(without_claim, ours + ahead), max(LONGER * max(ours, interval), most))


def growth(ours: float, theirs: float) -> float:
    """How many times our norm another peer's progress may have that has trained for longer.

    ``ours``, ``theirs``: sums of the learning rates of the steps. Warm-up makes progress grow with
    the square of the steps; as a power of these sums it grows alike from the first step to the
    last.
    """
    return max(1.0, theirs / max(ours, TINY)) ** GROWTH


@dataclass(frozen=True)
class Bound:
    """How large the progress of another peer may be, given ours."""

    own: float
    """Norm of our own progress."""
    usual: float
    """What has been usual; 0 if nothing is known."""
    growth: float = 1.0
    """How many times ours the other's is, as far as its claims count."""
    claimed: float = 1.0
    """The same where all that any honest peer may claim is believed."""
    far: float = FAR
    """Beyond so many times what is explained it is a heavy deed."""
    apart: bool = False
    """In a realignment: slow weights have parted, and how far may be nobody's fault."""

    @property
    def grown(self) -> float:
        """Our norm as the other's is compared with it."""
        return self.own * self.growth

    @property
    def most(self) -> float:
        """The largest norm that enters a mean."""
        return plausible_norm(self.grown, self.usual)

    @property
    def explained(self) -> float:
        """The largest norm that an honest peer can have that has trained for as long as it
        claims."""
        return max(self.most, plausible_norm(self.own * self.claimed, self.usual))

    def part(self, own: float, share: float) -> "Bound":
        """Of a part that holds a ``share`` of all values, in which our own progress has the norm
        ``own``.

        Progress is seldom spread evenly: a part may have its share of the whole norm, or as much as
        ours has there.
        """
        root = share**0.5
        return replace(self, own=max(own, root * self.own), usual=root * self.usual)

    def check(self, norm: float, what: str) -> None:
        """Raises ImplausibleError for a norm above the bound.

        How far above says what it costs the sender.
        """
        if norm <= self.most:
            return
        deed = Deed.HEAVY
        if norm <= self.far * self.explained or (self.apart and norm < math.inf):
            deed = None if norm <= self.explained else Deed.STUMBLE
        raise ImplausibleError(
            f"{what} of norm {norm:.3g} where {self.most:.3g} is plausible", deed
        )


class Directions:
    """Whether the progress of each peer points along ours or against it: cosines of its last
    contributions.

    For where nobody can outvote a peer: in a mean of two, progress that points against ours undoes
    what we have learned.
    """

    def __init__(self) -> None:
        self._cosines: dict[str, deque[float]] = {}

    def check(self, peer: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Raises ImplausibleError where a contribution points against ours, or the peer's last ones
        do.

        It is held against nobody, however often it happens: of two that differ, nobody can say
        which is wrong, and the progress of a peer of a tenth of our speed points back from where we
        have gone.
        """
        lengths = float(((ours @ ours) * (theirs @ theirs)).sqrt())
        cosine = float(ours @ theirs) / lengths if 0.0 < lengths < math.inf else 0.0
        kept = self._cosines.pop(peer, None) or deque(maxlen=RECENT)
        self._cosines[peer] = kept
        kept.append(cosine)
        while len(self._cosines) > REMEMBERED:
            del self._cosines[next(iter(self._cosines))]
        mean = sum(kept) / len(kept)
        if len(kept) >= ENOUGH and mean < CONTRARY:
            raise ImplausibleError(
                f"brings progress that points against ours (cosine {mean:.2f} of late)", None
            )
        if cosine < OPPOSED:
            raise ImplausibleError(
                f"brings progress that points against ours (cosine {cosine:.2f})", None
            )


class UsualNorm:
    """What norm contributions usually have: of late, or more if most peers bring more.

    Of late is the lower median of what was applied and of our own at those times. A liar that is
    applied at a moment when ours is large, as in the first steps of a run, so raises the bound for
    that moment alone; a mean would keep it raised.

    What each peer brought last counts, used or refused, by its lower median: a single liar does not
    move that. And where most are further away than was plausible, it is we who must come closer:
    otherwise two halves of a swarm that have once drifted apart would refuse each other for ever.
    Of a lone partner, whom nobody can judge, a bounded part counts; and what was applied teaches no
    more than our own norm makes plausible, or a partner that always brings as much as it may would
    raise the bound each time.
    """

    def __init__(self, before: float = 0.0) -> None:
        """``before``: what was usual before a restart; 0 if nothing is known."""
        self._recent = deque([before] if before else [], maxlen=RECENT)
        self._last: dict[str, float] = {}

    @property
    def learned(self) -> float:
        """What was usual of late, whatever peers have brought without being applied.

        0 if nothing is known.
        """
        return _lower_median(self._recent) if self._recent else 0.0

    @property
    def value(self) -> float:
        """As of now; 0 if nothing is known."""
        learned, norms = (
            self.learned,
            list(self._last.values()),
        )  # a copy at once: they are decoded on other threads
        if len(norms) == 1:
            return max(learned, min(norms[0], ALONE * learned))
        return max(learned, _lower_median(norms)) if norms else learned

    def is_lone(self, peer: str) -> bool:
        """Whether no other peer has brought anything of late."""
        return not self._last.keys() - {peer}

    def saw(self, peer: str, norm: float) -> None:
        """Remember what a peer has brought; a norm beyond float32 is none."""
        if not math.isfinite(norm):
            return
        self._last.pop(peer, None)
        self._last[peer] = norm
        while len(self._last) > REMEMBERED:
            del self._last[next(iter(self._last))]

    def applied(self, norm: float, own: float) -> None:
        """Learn from a contribution that was applied, when ours would have had the norm ``own``."""
        self._recent += (own, min(norm, plausible_norm(own, 0.0)))


def _lower_median(norms: Iterable[float]) -> float:
    ordered = sorted(norms)
    return ordered[(len(ordered) - 1) // 2]


def _clipped(contributions: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    norms = [float((one @ one).sqrt()) for one in contributions]
    bound = CLIP * _lower_median(norms)
    clipped = [
        one * (bound / norm) if norm > bound else one
        for one, norm in zip(contributions, norms, strict=True)
    ]
    # All directions count alike here: of three, one liar of 1.5 times the norm would outweigh what
    # the others share.
    kept = _of_one_mind(
        [one / max(norm, TINY) for one, norm in zip(contributions, norms, strict=True)]
    )
    return mean_contribution([clipped[place] for place in kept], [weights[place] for place in kept])


def _of_one_mind(directions: Sequence[torch.Tensor]) -> list[int]:
    """The places of contributions that do not point against the rest together.

    The worst is left out first, then the next. Of three, a flipped one cancels the second for the
    third, so that the little in which honest ones differ would speak against one of them, too. All
    are kept where the rest would be no majority: that is noise, not an attack.
    """
    kept = list(range(len(directions)))
    while 2 * len(kept) > len(directions):
        total = torch.stack([directions[place] for place in kept]).sum(dim=0)
        cosines = [_cosine(directions[place], total - directions[place]) for place in kept]
        worst = min(cosines)
        if worst >= -AGAINST / directions[0].numel() ** 0.5:
            return kept
        del kept[cosines.index(worst)]
    return list(range(len(directions)))


def _cosine(one: torch.Tensor, others: torch.Tensor) -> float:
    # Not against the mean or median of all, which contain it: where noise is larger than what the
    # peers have in common, a vector points along its own share of them, flipped or not.
    lengths = float(((one @ one) * (others @ others)).sqrt())
    return float(one @ others) / lengths if lengths > 0.0 else 0.0
