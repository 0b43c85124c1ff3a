"""Judges the contributions of others to one exchange, before they enter a mean.

A contribution is judged by the norm of its progress, by its direction where nobody could outvote
it, and by the last one of the same peer. Lessons about others are kept only if the outer step is
applied.
"""

from dataclasses import dataclass, field

from torch import Tensor

from lowcomm_protocol.errors import ImplausibleError
from lowcomm_protocol.exchange.judging import Bound, Brought, Directions, Repeats, UsualNorm
from lowcomm_protocol.exchange.outer import square_and_cosine_apart, square_apart


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
        return self.gain * self._own_square(start, stop) ** 0.5

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

    def _own_square(self, start: int, stop: int) -> float:
        return square_apart(self.theta[start:stop], self.phi[start:stop], 1.0)

    def _norm_and_cosine(self, vector: Tensor, start: int) -> tuple[float, float]:
        """`norm_of` a contribution, and the cosine between its progress and ours, in one pass."""
        here = slice(start, start + vector.numel())
        own = self._own_square(here.start, here.stop)
        theta, phi = self.theta[here], self.phi[here]
        square, cosine = square_and_cosine_apart(vector, theta, phi, self.pull, own)
        return square**0.5, cosine
