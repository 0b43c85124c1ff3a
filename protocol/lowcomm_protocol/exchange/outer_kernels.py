"""The arithmetic of the outer step that peers must agree on to the bit: each operation is rounded
to float32, on any processor.

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
from lowcomm_protocol.codecs.kernels import kernel, part
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
def scaled(out: Vector, one: Vector, share: Any) -> None:
    """``out = share * one``."""
    for i in range(out.size):
        out[i] = np.float32(share * one[i])


@kernel
def scaled_sum(out: Vector, one: Vector, other: Vector, share: Any, other_share: Any) -> None:
    """``out = share * one + other_share * other``, each product rounded first."""
    for i in range(out.size):
        out[i] = np.float32(np.float32(share * one[i]) + np.float32(other_share * other[i]))


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
