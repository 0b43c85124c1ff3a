"""What must hold for error feedback: nothing is lost in the long run, nothing runs away, and only
commit changes anything."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lowcomm_protocol.codecs import Residual, codec
from lowcomm_protocol.codecs.shards import residual_add, residual_keep
from lowcomm_protocol.spec.names import BLOCK

PLAIN = ("bf16", "int8", "e3m0", "q2")
LIMIT = 16


class Sender:
    """A vector that is sent again and again, with feedback or without."""

    def __init__(self, name: str, numel: int, feedback: bool = True) -> None:
        self.codec, self.numel = codec(name), numel
        self.lost = Residual(numel) if feedback else None

    def code(self, vector: np.ndarray) -> None:
        """Encode; ``vector`` becomes what the other end decodes."""
        out = memoryview(bytearray(self.codec.coded_size(self.numel)))
        if self.lost is None:
            self.codec.send(vector, out)
        else:
            self.lost.send(self.codec, vector, 0, out)

    def sent(self, vector: np.ndarray) -> np.ndarray:
        """What arrives of a vector in an exchange that is applied."""
        out = vector.astype(np.float32)
        self.code(out)
        if self.lost is not None:
            self.lost.commit([(0, self.numel)])
        return out

    @property
    def residual(self) -> np.ndarray:
        assert self.lost is not None
        return residual_of(self.lost)


def residual_of(one: Residual) -> np.ndarray:
    return one.state()


def gaussian(numel: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(numel).astype(np.float32)


@pytest.mark.parametrize("name", PLAIN)
def test_in_the_long_run_the_mean_of_what_was_sent_is_the_mean_of_what_was_wanted(name):
    numel, count = 2 * BLOCK, 800
    mean = gaussian(numel)
    errors = {}
    for feedback in (False, True):
        one, total = Sender(name, numel, feedback), np.zeros(numel)
        for seed in range(count):
            vector = mean + 3 * gaussian(numel, seed + 1)
            total += one.sent(vector) - vector.astype(np.float64)
        errors[feedback] = np.sqrt(np.mean((total / count) ** 2))
    # the residual is at most a few times one exchange's error, and that is shared by all exchanges
    assert errors[True] < 0.02
    assert errors[True] < 0.1 * errors[False]


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("shape", ["lone", "gaussian", "student"])
def test_a_residual_stays_within_a_few_times_the_largest_value_of_its_block(name, shape):
    values = {
        "lone": np.eye(1, BLOCK)[0],
        "gaussian": gaussian(BLOCK),
        "student": np.random.default_rng(0).standard_t(3, BLOCK),
    }[shape].astype(np.float32)
    one, worst = Sender(name, BLOCK), 0.0
    for _ in range(400):
        assert np.isfinite(one.sent(values)).all()
        worst = max(worst, np.abs(one.residual).max() / np.abs(values).max())
    assert worst <= {"bf16": 0.01, "int8": 0.01, "e3m0": 0.5, "q2": LIMIT}[name]


large = st.floats(-(2.0**127), 2.0**127, width=32)


@settings(max_examples=60)
@given(
    st.sampled_from(PLAIN),
    hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 300)), elements=large),
)
@example("bf16", np.tile(np.float32([2.0**127, -(2.0**127), 2.0**126.99]), (40, 1)))
def test_what_can_be_coded_without_feedback_can_be_coded_with_it_and_the_residual_stays_in_bounds(
    name, vectors
):
    one = Sender(name, vectors.shape[1])
    largest = np.zeros(vectors.shape[1])
    for vector in vectors:
        assert np.isfinite(one.sent(vector)).all()
        for start in range(0, vector.size, BLOCK):
            block = slice(start, start + BLOCK)
            largest[block] = np.maximum(
                largest[block], np.abs(vector[block].astype(np.float64)).max()
            )
        # the values are found again as wanted - residual, which rounds
        assert (np.abs(one.residual) <= np.minimum(LIMIT * largest * 1.001 + 1e-26, 2.0**126)).all()


def lost(wanted: np.ndarray, arrived: np.ndarray, residual: np.ndarray) -> np.ndarray:
    error = wanted.copy()
    residual_keep(arrived, residual, error)
    return error


@pytest.mark.parametrize("name", PLAIN)
@given(
    numel=st.sampled_from([0, 1, 9, 255, 256, 257, 600]),
    seed=st.integers(0, 2**16),
    size=st.sampled_from([1.0, 1e-30, 1e30, 1.5e38]),
)
def test_sending_keeps_and_restores_as_each_step_alone_does(name, numel, seed, size):
    draw = np.random.default_rng(seed)
    given, before = (draw.standard_t(2, (2, numel)) * size).clip(-1.6e38, 1.6e38).astype(np.float32)
    before = (before * np.float32(0.5)).clip(-(2.0**126), 2.0**126)
    one = Residual(numel + 3)
    one.restore(np.concatenate([np.zeros(3, np.float32), before]))
    chosen, sent, wanted = codec(name), given.copy(), np.empty_like(given)
    data, expected = (bytearray(chosen.coded_size(numel)) for _ in range(2))
    one.send(chosen, sent, 3, memoryview(data), np.full(numel, np.nan, np.float32))
    decoded = given.copy()
    residual_add(decoded, before, wanted)
    chosen.encode(decoded, memoryview(expected))
    chosen.decode(expected, decoded)
    assert data == expected
    assert sent.tobytes() == decoded.tobytes()
    one.commit([(3, numel + 3)])
    assert one.state()[3:].tobytes() == lost(wanted, decoded, before).tobytes()
