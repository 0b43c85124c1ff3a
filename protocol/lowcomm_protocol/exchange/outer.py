"""The outer step: what a group of any size does with its members' progress, from one vector a peer.

``theta`` fast weights, ``phi`` slow weights, ``delta`` outer momentum, ``D = theta - phi``
progress, all of one fragment as flat float32 vectors on one device. Means are over the group,
``gamma`` is ``consensus``. A rule (rules.py) moves ``phi`` and ``delta`` by
``pooled``::

    pooled = gain * mean(D) - gamma * (phi - mean(phi))

A peer sends one vector, ``c = gain * D + gamma * phi``; the rule says which gain. One is enough::

    gain * mean(D) - gamma * (phi_i - mean(phi)) = gain * D_i - (c_i - mean(c))

For gamma = 0 that is ``mean(c)`` itself. Nothing is subtracted and added again, so members that
start equal stay equal to the bit.
"""

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import torch

from lowcomm_protocol.codecs import BLOCK
from lowcomm_protocol.errors import PlanError, SpecError
from lowcomm_protocol.exchange import outer_kernels as kernels
from lowcomm_protocol.rows import array_of
from lowcomm_protocol.spec.outer import OuterSettings

MAX_CLAIM = 2


def contribution(
    settings: OuterSettings, phi: torch.Tensor, theta: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """What a peer sends: ``c = gain * (theta - phi) + consensus * phi``, float32 [numel].

    It is written into ``out`` if that is given.

    Raises `PlanError` for vectors that are not alike.
    """
    sent = torch.empty_like(phi) if out is None else out
    _check_alike(phi=phi, theta=theta, out=sent)
    gain, pull = np.float32(settings.gain), np.float32(settings.consensus)
    kernels.contributed(array_of(theta), array_of(phi), gain, pull, array_of(sent))
    return sent


def mean_contribution(
    contributions: Sequence[torch.Tensor],
    weights: Sequence[float] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean of the group's contributions as everyone decoded them: float32 [numel], in ``out`` or a
    new vector.

    Summed in the order given, which all members must share, so all get the same bits. ``weights``
    (at least 0, any sum) weigh whole contributions, so with a consensus term also the slow weights
    that it pulls to: a peer that has trained on more counts for more in both. ``out`` must be none
    of them. Raises `PlanError` for vectors that are not alike, `SpecError` for invalid weights.
    """
    if not contributions:
        raise PlanError("a mean of no contributions: pass at least the peer's own")
    total = torch.empty_like(contributions[0]) if out is None else out
    named = {f"contribution {index}": one for index, one in enumerate(contributions)}
    _check_alike(**named, out=total)
    count = len(contributions)
    shares = normalized([1.0] * count if weights is None else weights, count)
    for place, (one, share) in enumerate(zip(contributions, shares, strict=True)):
        add = kernels.add_scaled if place else kernels.scaled
        add(array_of(total), array_of(one), np.float32(share))
    return total


def token_weights(tokens: Sequence[int]) -> list[float]:
    """Weights of contributions from the tokens that each member claims to have trained on.

    A claim can't be checked, so none counts for more than `MAX_CLAIM` times the lower median of the
    group's; in a pair that bounds a liar's weight to two thirds. A peer that has trained on nothing
    counts as one token.
    """
    usual = sorted(max(1, claim) for claim in tokens)[(len(tokens) - 1) // 2]
    return [float(min(max(1, claim), MAX_CLAIM * usual)) for claim in tokens]


def worst_block_spread(vectors: Sequence[torch.Tensor]) -> float:
    """Standard deviation across vectors, as root mean square in the block of 256 values where that
    is largest.

    Of weights of a healthy swarm it stays below 6e-3. A single block that runs away shows here long
    before it shows in the loss. Raises `PlanError` for vectors that are not alike.
    """
    _check_alike(**{f"vector {index}": one for index, one in enumerate(vectors)})
    # The squares of all differences between two of n vectors sum to n times those from their mean.
    sums = np.zeros(-(-vectors[0].numel() // BLOCK), dtype=np.float32)
    for one, other in combinations(vectors, 2):
        kernels.add_squares_apart(array_of(one), array_of(other), sums)
    return float(sums.max(initial=0.0) / BLOCK) ** 0.5 / len(vectors)


def outer_step(
    settings: OuterSettings,
    phi: torch.Tensor,
    delta: torch.Tensor,
    mean_c: torch.Tensor,
    progress: torch.Tensor | None = None,
    own_decoded: torch.Tensor | None = None,
) -> None:
    """One outer step of one peer, in place on ``phi`` and ``delta``; all vectors float32 [numel].

    ``mean_c`` is the group's mean. A pair also gives ``progress``, D at capture, and
    ``own_decoded``, the peer's contribution as the others decoded it: then what coding lost stays
    with its owner. Without them all who start equal end equal to the bit, as the members of a group
    must. Raises `PlanError` for vectors that are not alike.
    """
    _check_alike(phi=phi, delta=delta, mean_c=mean_c)
    mean = pooled = array_of(mean_c)
    if settings.consensus and progress is not None and own_decoded is not None:
        _check_alike(phi=phi, progress=progress, own_decoded=own_decoded)
        pooled, gain = np.empty_like(mean), np.float32(settings.gain)
        kernels.pooled_of_own(array_of(progress), array_of(own_decoded), mean, gain, pooled)
    elif settings.consensus:
        pooled = np.empty_like(mean)
        kernels.pooled_of_mean(mean, array_of(phi), np.float32(settings.consensus), pooled)
    settings.rule.step(settings, array_of(phi), array_of(delta), pooled)


def merge(
    settings: OuterSettings,
    theta: torch.Tensor,
    phi_new: torch.Tensor,
    theta_captured: torch.Tensor,
) -> bool:
    """Bring a finished outer step into the fast weights; whether all values are finite. All vectors
    float32 [numel].

    shift: ``theta += phi_new - theta_captured``, which keeps the inner steps done since the
    capture; a value that has not moved since becomes ``phi_new`` exactly, without rounding. mix:
    ``theta = mix * theta + (1 - mix) * phi_new``.

    In place, and ``theta_captured`` becomes what ``theta`` was, so that it can be undone: one pass
    does what a merge into another vector and a copy back would do in two. Raises `PlanError` for
    vectors that are not alike.
    """
    _check_alike(theta=theta, phi_new=phi_new, theta_captured=theta_captured)
    now, slow, captured = array_of(theta), array_of(phi_new), array_of(theta_captured)
    if settings.merge == "mix":
        return bool(kernels.mixed(now, slow, np.float32(1.0 - settings.mix), captured))
    return bool(kernels.shifted(now, slow, captured))


def are_finite(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite, of two float32 vectors in host memory: one pass."""
    return bool(kernels.both_finite(array_of(one).view(np.uint32), array_of(other).view(np.uint32)))


def apart(vector: torch.Tensor, base: torch.Tensor, pull: float, out: torch.Tensor) -> torch.Tensor:
    """``vector - pull * base`` in ``out``, which may be ``vector``; product and difference are
    rounded to float32."""
    _check_alike(vector=vector, base=base, out=out)
    kernels.pooled_of_mean(array_of(vector), array_of(base), np.float32(pull), array_of(out))
    return out


def square_apart(vector: torch.Tensor, base: torch.Tensor, pull: float) -> float:
    """The squared norm of ``vector - pull * base``: the same bits on every processor.

    The difference is rounded to float32, the sum to float64 from blocks of 256 on.
    """
    _check_alike(vector=vector, base=base)
    array, onto = array_of(vector), array_of(base)
    return float(kernels.square_and_product_of_apart(array, onto, onto, np.float32(pull))[0])


def square_and_cosine_apart(
    vector: torch.Tensor, theta: torch.Tensor, phi: torch.Tensor, pull: float, own_square: float
) -> tuple[float, float]:
    """`square_apart` of ``vector`` and ``phi``, to the same bits, and the cosine between that
    difference and ``theta - phi``, whose squared norm is ``own_square``; 0 for no length."""
    _check_alike(vector=vector, theta=theta, phi=phi)
    arrays = array_of(vector), array_of(theta), array_of(phi)
    square, product = kernels.square_and_product_of_apart(*arrays, np.float32(pull))
    lengths = math.sqrt(own_square * float(square))
    return float(square), float(product) / lengths if 0.0 < lengths < math.inf else 0.0


def normalized(weights: Sequence[float], count: int) -> list[float]:
    """Weights of ``count`` contributions that sum to 1. Raises `SpecError` for invalid ones."""
    valid = len(weights) == count and all(0.0 <= one < math.inf for one in weights)
    total = sum(weights) if valid else 0.0
    if not 0.0 < total < math.inf:
        raise SpecError(
            f"weights {list(weights)} of {count} contributions: give one finite number of at least "
            "0 each, not all 0"
        )
    return [one / total for one in weights]


def _check_alike(**vectors: torch.Tensor) -> None:
    """All float32, 1-D, of one length: torch would broadcast or promote what is not, without a
    word."""
    first, one = next(iter(vectors.items()))
    for name, vector in vectors.items():
        if vector.dtype is not torch.float32 or vector.dim() != 1 or vector.shape != one.shape:
            raise PlanError(
                f"{name}: a vector of {vector.dtype} and shape {tuple(vector.shape)} beside "
                f"{first} with {one.numel()} values: pass float32 of shape ({one.numel()},)"
            )
