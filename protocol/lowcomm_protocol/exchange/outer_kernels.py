"""The arithmetic between capture and merge: each operation is rounded to float32, on any processor,
so that peers agree to the bit. One pass each, and nothing is allocated but blocks of 256 values.

torch fuses a multiplication and an addition where a processor can (FMA), and rounds twice where it
can't, so its results differ between processors. These loops are compiled without fast math, and
LLVM then contracts nothing.

A value below 2**-100 becomes 0. A momentum that is no longer fed decays towards subnormal numbers,
which are slow, and which a thread may flush or keep: no subnormal number enters the arithmetic, so
both compute the same.

All kernels stand in this file for the reason that codecs/kernels.py gives.
"""

from typing import Any

import numpy as np

from lowcomm_protocol.codecs.base import Vector
from lowcomm_protocol.codecs.kernels import INFINITE, MAGNITUDE, kernel, part, peak_of
from lowcomm_protocol.spec.names import BLOCK

SMALLEST = np.float32(2.0**-100)


@part
def _kept(value: Any) -> Any:
    """The value, or 0 where it is smaller than `SMALLEST`."""
    return np.float32(0.0) if abs(value) < SMALLEST else value


@part
def _folded(squares: Any) -> Any:
    """The sum of 256 values, which are lost: always the same halves are added, many at a time."""
    for k in range(128):
        squares[k] += squares[k + 128]
    for k in range(64):
        squares[k] += squares[k + 64]
    for k in range(32):
        squares[k] += squares[k + 32]
    for k in range(16):
        squares[k] += squares[k + 16]
    for k in range(8):
        squares[k] += squares[k + 8]
    for k in range(4):
        squares[k] += squares[k + 4]
    return (squares[0] + squares[2]) + (squares[1] + squares[3])


@kernel
def nesterov(phi: Vector, delta: Vector, pooled: Vector, rate: Any, momentum: Any) -> None:
    """``delta = momentum * delta - pooled``, ``phi -= rate * (momentum * delta - pooled)``, in
    place."""
    for i in range(phi.size):
        gradient = _kept(-pooled[i])
        velocity = _kept(np.float32(np.float32(momentum * delta[i]) + gradient))
        delta[i] = velocity
        step = _kept(np.float32(rate * np.float32(gradient + np.float32(momentum * velocity))))
        phi[i] = np.float32(phi[i] - step)


@kernel
def noloco(phi: Vector, delta: Vector, pooled: Vector, momentum: Any) -> None:
    """``delta = momentum * delta + pooled``, ``phi += delta``, in place."""
    for i in range(phi.size):
        velocity = np.float32(np.float32(momentum * delta[i]) + pooled[i])
        delta[i] = velocity
        phi[i] = np.float32(phi[i] + velocity)


@kernel
def remembering(
    phi: Vector, delta: Vector, pooled: Vector, momentum: Any, memory: Any, new: Any
) -> None:
    """``step = momentum * delta + pooled``, ``phi += step``, ``delta = memory * delta + new *
    step``, in place."""
    for i in range(phi.size):
        step = _kept(np.float32(np.float32(momentum * delta[i]) + pooled[i]))
        phi[i] = np.float32(phi[i] + step)
        delta[i] = _kept(np.float32(np.float32(memory * delta[i]) + np.float32(new * step)))


@kernel
def contributed(theta: Vector, phi: Vector, gain: Any, pull: Any, out: Vector) -> None:
    """``out = gain * (theta - phi) + pull * phi``; without the second term for ``pull = 0``."""
    if pull == np.float32(0.0):
        for i in range(out.size):
            out[i] = np.float32(gain * np.float32(theta[i] - phi[i]))
        return
    for i in range(out.size):
        progress = np.float32(gain * np.float32(theta[i] - phi[i]))
        out[i] = np.float32(progress + np.float32(pull * phi[i]))


@kernel
def pooled_of_own(progress: Vector, sent: Vector, mean: Vector, gain: Any, out: Vector) -> None:
    """``out = gain * progress - (sent - mean)``."""
    for i in range(out.size):
        apart = np.float32(sent[i] - mean[i])
        out[i] = np.float32(np.float32(gain * progress[i]) - apart)


@kernel
def pooled_of_mean(mean: Vector, phi: Vector, pull: Any, out: Vector) -> None:
    """``out = mean - pull * phi``."""
    for i in range(out.size):
        out[i] = np.float32(mean[i] - np.float32(pull * phi[i]))


@part
def _magnitude(value: Any) -> Any:
    return np.float32(value).view(np.uint32) & MAGNITUDE


@kernel
def shifted(theta: Vector, phi: Vector, captured: Vector) -> Any:
    """``theta += phi - captured``, and ``phi`` where theta is as captured; whether all is finite.

    ``captured`` becomes what theta was.
    """
    largest = np.uint32(0)
    for i in range(theta.size):
        before = theta[i]
        moved = np.float32(before + np.float32(phi[i] - captured[i]))
        value = phi[i] if before == captured[i] else moved
        theta[i], captured[i] = value, before
        largest = max(largest, _magnitude(value))
    return largest < INFINITE


@kernel
def mixed(theta: Vector, phi: Vector, share: Any, captured: Vector) -> Any:
    """``theta += share * (phi - theta)``, from the nearer end; whether all is finite.

    ``captured`` becomes what theta was.
    """
    largest, from_theta = np.uint32(0), share < np.float32(0.5)
    rest = np.float32(np.float32(1.0) - share)
    for i in range(theta.size):
        before = theta[i]
        way = np.float32(phi[i] - before)
        near = np.float32(before + np.float32(share * way))
        far = np.float32(phi[i] - np.float32(rest * way))
        value = near if from_theta else far
        theta[i], captured[i] = value, before
        largest = max(largest, _magnitude(value))
    return largest < INFINITE


@kernel
def both_finite(bits: Any, others: Any) -> Any:
    """Whether no value of two vectors, given as their bits, is NaN or infinite."""
    return max(peak_of(bits, 0, bits.size), peak_of(others, 0, others.size)) < INFINITE


@kernel
def scaled(out: Vector, one: Vector, share: Any) -> None:
    """``out = share * one``."""
    for i in range(out.size):
        out[i] = np.float32(share * one[i])


@kernel
def add_scaled(out: Vector, one: Vector, share: Any) -> None:
    """``out += share * one``, the product rounded first."""
    for i in range(out.size):
        out[i] = np.float32(out[i] + np.float32(share * one[i]))


@kernel
def add_squares_apart(one: Vector, other: Vector, sums: Vector) -> None:
    """Add to each block of ``sums`` the squares of ``one - other`` in its 256 values."""
    squares = np.zeros(BLOCK, dtype=np.float32)
    for block in range(sums.size):
        ours = one[block * BLOCK : (block + 1) * BLOCK]
        theirs = other[block * BLOCK : (block + 1) * BLOCK]
        for k in range(ours.size):
            apart = ours[k] - theirs[k]
            squares[k] = apart * apart
        for k in range(ours.size, BLOCK):
            squares[k] = np.float32(0.0)
        sums[block] += _folded(squares)


@kernel
def square_and_product_of_apart(
    one: Vector, other: Vector, base: Vector, pull: Any
) -> tuple[Any, Any]:
    """The sum of the squares of ``one - pull * base``, and that of its products with ``other -
    base``: in float64 over sums of 256 values each."""
    squares, products = np.zeros(BLOCK, dtype=np.float32), np.zeros(BLOCK, dtype=np.float32)
    square, product = 0.0, 0.0
    for start in range(0, one.size, BLOCK):
        a, b = one[start : start + BLOCK], other[start : start + BLOCK]
        c = base[start : start + BLOCK]
        for k in range(a.size):
            apart = np.float32(a[k] - np.float32(pull * c[k]))
            squares[k] = apart * apart
            products[k] = np.float32(b[k] - c[k]) * apart
        for k in range(a.size, BLOCK):
            squares[k] = products[k] = np.float32(0.0)
        square += np.float64(_folded(squares))
        product += np.float64(_folded(products))
    return square, product
