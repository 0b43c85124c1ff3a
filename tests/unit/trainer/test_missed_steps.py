"""What must hold for outer steps that one replica hands over to another: real replicas and codecs,
without a network between them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowcomm_node.trainer.capture import HEAD, PastStep, read_steps
from lowcomm_protocol.codecs import shard_coder
from lowcomm_protocol.codecs.shards import shard_bounds
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import MAX_GROUP

NUMEL = 3000


def step_of(members: int, applied: set[int], codec: str = "q2", seed: int = 0) -> PastStep:
    """An outer step whose means are random."""
    coder, random, means = shard_coder(codec, NUMEL), np.random.default_rng(seed), []
    for shard, (start, stop) in enumerate(shard_bounds(NUMEL, members)):
        values = random.standard_normal(stop - start).astype(np.float32)
        out = memoryview(bytearray(coder.codec.coded_size(stop - start)))
        coder.reduce(values, start, out)
        if shard in applied:
            means.append((shard, bytes(out)))
    return PastStep(members, means)


@pytest.mark.parametrize("codec", ["q2", "e3m0", "int8", "bf16"])
@pytest.mark.parametrize("members", [2, 5, MAX_GROUP])
def test_steps_come_as_they_went(codec, members):
    applied = set(range(0, members, 2))
    steps = [step_of(members, applied, codec, seed) for seed in (1, 2)]
    data = b"".join(one.pack() for one in steps)
    coder, bounds = shard_coder(codec, NUMEL), shard_bounds(NUMEL, members)
    for one, (moved, mean) in zip(
        steps, read_steps(memoryview(data), coder, NUMEL, 2), strict=True
    ):
        assert moved == tuple(bounds[shard] for shard in sorted(applied))
        for (start, stop), (_, coded) in zip(moved, one.means, strict=True):
            wanted = np.empty(stop - start, dtype=np.float32)
            coder.codec.decode(memoryview(coded), wanted)
            assert np.array_equal(mean[start:stop].numpy(), wanted)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        step_of(3, {0, 1, 2}).pack()[:-1],
        step_of(3, {0, 1, 2}).pack() + b"-",
        step_of(3, {0}).pack() * 2,
        HEAD.pack(1, 1),
        HEAD.pack(MAX_GROUP + 1, 1),
        HEAD.pack(3, 0),
        HEAD.pack(3, 8) + step_of(3, {0}).pack()[HEAD.size :],
    ],
)
def test_what_are_no_steps_is_refused(data):
    with pytest.raises(CodecError):
        list(read_steps(memoryview(data), shard_coder("q2", NUMEL), NUMEL, 1))


@given(st.binary(max_size=2000), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_steps_or_refused(data, steps):
    try:
        for moved, mean in read_steps(memoryview(data), shard_coder("q2", NUMEL), NUMEL, steps):
            assert all(mean[start:stop].isfinite().all() for start, stop in moved)
    except CodecError:
        pass
