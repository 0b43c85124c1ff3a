"""The settings of the outer step (outer.py), and whether they hold a swarm together.

Without torch and NumPy: bootstrap servers and daemons check specifications, and compute no more.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from lowcomm_protocol.errors import SpecError
from lowcomm_protocol.spec.names import OUTER_RULES

if TYPE_CHECKING:  # NumPy is loaded where somebody computes
    import numpy as np
    import numpy.typing as npt

    Vector = npt.NDArray[np.float32]


FORGOTTEN = 64
"""Intervals after which a momentum fades no further: little is left of it."""


@dataclass(frozen=True)
class OuterSettings:
    """The outer optimizer and the merge of a run; see ``SyncSettings``."""

    kind: str
    """Of ``names.OUTER_RULES``."""
    outer_lr: float
    momentum: float
    consensus: float
    merge: Literal["mix", "shift"]
    mix: float
    memory: float = 0.0

    @property
    def rule(self) -> "OuterRule":
        """Entry that ``kind`` names."""
        return OUTER_RULES[self.kind]

    @property
    def gain(self) -> float:
        """Factor of the progress in a contribution."""
        return self.rule.gain(self)

    def after(self, intervals: int) -> "OuterSettings":
        """The settings of an outer step that comes ``intervals`` after the one before.

        The momentum fades in each interval, however rare exchanges are. By products alone: powers
        may round differently elsewhere.
        """
        memory = self.memory
        for _ in range(min(intervals, FORGOTTEN) - 1):
            memory *= self.memory
        return replace(self, memory=memory)


class OuterRule(ABC):
    """How slow weights and outer momentum follow from the mean of a group's contributions.

    Modules of rules import NumPy and numba only where they compute.
    """

    @abstractmethod
    def gain(self, settings: OuterSettings) -> float:
        """Factor of the progress in a contribution."""

    @property
    def remembers(self) -> bool:
        """Whether the rule heeds ``memory``."""
        return False

    @abstractmethod
    def dynamics(self, settings: OuterSettings) -> tuple[float, float, float, float]:
        """(p, q, r, s) of the rule without any progress: see ``consensus_radius``."""

    @abstractmethod
    def step(
        self, settings: OuterSettings, phi: "Vector", delta: "Vector", pooled: "Vector"
    ) -> None:
        """One outer step, in place on ``phi`` and ``delta``; ``pooled``: the mean.

        All are float32 [numel] of a piece. Must give the same bits on every processor.
        """


def consensus_radius(settings: OuterSettings, group: int, swarm: int | None = None) -> float:
    """Factor by which the mean square of the peers' disagreement changes in one outer step without
    any progress.

    Groups of ``group`` are drawn at random from ``swarm`` peers (None: very many). With x the
    distance of phi to the group's mean, an outer step is ``phi' = phi + p*delta + q*x`` and
    ``delta' = r*delta + s*x``. For peers alike and uncorrelated but for their zero sum, E[x*x] =
    E[x*phi] = k*E[phi^2] and E[x*delta] = k*E[phi*delta], with k = (1 - 1/group) * swarm / (swarm -
    1). So the three second moments follow a matrix, whose spectral radius this is.
    """
    k = (1.0 - 1.0 / group) * (1.0 if swarm is None else swarm / (swarm - 1.0))
    p, q, r, s = settings.rule.dynamics(settings)
    # The matrix less the identity: its entries keep the digits that decide whether 1 is reached.
    return 1.0 + _largest_real_eigenvalue(
        (
            (q * k * (2.0 + q), 2.0 * p * (1.0 + q * k), p * p),
            (s * k * (1.0 + q), (r - 1.0) + (p * s + q * r) * k, p * r),
            (s * s * k, 2.0 * r * s * k, (r - 1.0) * (r + 1.0)),
        )
    )


def _largest_real_eigenvalue(matrix: tuple[tuple[float, float, float], ...]) -> float:
    """Of a 3x3 matrix.

    A matrix that takes second moments to second moments keeps a cone, so its spectral radius is its
    largest real eigenvalue (Krein and Rutman). Above that the characteristic polynomial grows and
    is convex (Gauss and Lucas), so Newton's method descends to it from any bound.
    """
    (a, b, c), (d, e, f), (g, h, i) = matrix
    trace = a + e + i
    minors = (a * e - b * d) + (a * i - c * g) + (e * i - f * h)
    determinant = a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)
    x = max(sum(map(abs, row)) for row in matrix)
    while True:
        value = ((x - trace) * x + minors) * x - determinant
        slope = (3.0 * x - 2.0 * trace) * x + minors
        if value <= 0.0 or slope <= 0.0 or not x - value / slope < x:
            return x
        x -= value / slope


def validate_outer(settings: OuterSettings, group: int) -> None:
    """Raise `SpecError` when settings do not work together, or a consensus term makes peers
    diverge.

    Tested for pairs too, because a group that has lost members is a smaller one and less stable.
    """
    if settings.memory and not settings.rule.remembers:
        raise SpecError(
            f"memory = {settings.memory!r} is not valid for {settings.kind}, which has none: use "
            'memory = 0, or outer = "noloco"'
        )
    # Over a slow line there may be next to nothing left of the memory.
    rare = replace(settings, memory=0.0)
    for size in sorted({2, group}) if settings.consensus else ():
        if _diverges(settings, size) or _diverges(rare, size):
            raise SpecError(
                f"{settings.kind} with consensus = {settings.consensus} and momentum = "
                f"{settings.momentum} diverges in groups of {size}: use a consensus below "
                f"{_largest_consensus(settings, size):.3g}, or less momentum"
            )


def _diverges(settings: OuterSettings, group: int) -> bool:
    # A very small consensus rounds to a radius of 1.
    return consensus_radius(settings, group) > 1.0 + 1e-9


def _largest_consensus(settings: OuterSettings, group: int) -> float:
    """The consensus where the radius reaches 1, by bisection below that of ``settings``."""
    low, high = 0.0, settings.consensus
    for _ in range(60):
        middle = (low + high) / 2.0
        diverges = _diverges(replace(settings, consensus=middle), group)
        low, high = (low, middle) if diverges else (middle, high)
    return low
