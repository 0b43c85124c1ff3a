"""What must hold for slow weights that one cell reads from another."""

import numpy as np
import pytest

from lowcomm_protocol.codecs.base import Vector
from lowcomm_protocol.codecs.nearby import NearbyReader, give, largest
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import BLOCK

NUMEL = 5 * BLOCK + 100
START = 2 * BLOCK


def vectors(apart: float, seed: int = 0) -> tuple[Vector, Vector]:
    """Ours and theirs, from START on."""
    random = np.random.default_rng(seed)
    ours = random.normal(0, 0.1, NUMEL - START).astype(np.float32)
    return ours, ours + random.uniform(-apart, apart, ours.size).astype(np.float32)


def coded(reader: NearbyReader, theirs: Vector) -> memoryview:
    out = memoryview(bytearray(largest(theirs.size)))
    return out[: give(theirs, reader.codes(START, NUMEL), out)]


def test_the_second_read_takes_four_bits_a_value_and_is_as_near_as_its_steps() -> None:
    reader = NearbyReader(NUMEL)
    ours, theirs = vectors(1e-3)
    first = coded(reader, theirs)
    assert len(first) > 2 * theirs.size
    reader.read(START, ours, first)
    second = coded(reader, theirs)
    assert len(second) < 0.55 * theirs.size
    # A step is a quarter of the range, which bf16 may have shown half a step wider.
    assert np.abs(reader.read(START, ours, second) - (theirs - ours)).max() < 4e-4


def test_a_block_beyond_its_steps_counts_as_equal_and_comes_as_bf16_the_next_time() -> None:
    reader = NearbyReader(NUMEL)
    ours, theirs = vectors(1e-3)
    reader.read(START, ours, coded(reader, theirs))
    theirs[BLOCK : 2 * BLOCK] += 0.05
    beyond = reader.read(START, ours, coded(reader, theirs))
    assert not beyond[BLOCK : 2 * BLOCK].any()
    assert beyond[:BLOCK].any() and beyond[2 * BLOCK :].any()
    beyond = reader.read(START, ours, coded(reader, theirs))
    assert np.abs(beyond - (theirs - ours)).max() < 1e-3


def test_what_is_no_vector_of_this_length_is_refused() -> None:
    reader = NearbyReader(NUMEL)
    ours, theirs = vectors(1e-3)
    data = coded(reader, theirs)
    for wrong in (data[:-1], memoryview(bytes(data) + b"0"), data[:3], memoryview(b"")):
        with pytest.raises(CodecError, match="values of another cell"):
            reader.read(START, ours, wrong)
    out = memoryview(bytearray(largest(theirs.size)))
    with pytest.raises(CodecError, match="step codes"):
        give(theirs, reader.codes(START, NUMEL)[1:], out)
    theirs[7] = np.inf
    with pytest.raises(CodecError, match="not finite"):
        give(theirs, reader.codes(START, NUMEL), out)


def test_remainders_of_any_bytes_are_finite_and_near_ours() -> None:
    reader = NearbyReader(NUMEL)
    ours, theirs = vectors(1e-3)
    reader.read(START, ours, coded(reader, theirs))
    data = bytearray(coded(reader, theirs))
    random = np.random.default_rng(1)
    for _ in range(50):
        data[random.integers(len(data))] = random.integers(256)
        try:
            beyond = reader.read(START, ours, memoryview(data))
        except CodecError:
            continue
        assert np.isfinite(beyond).all()
