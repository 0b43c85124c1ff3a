"""The buffers that callers hand in."""

import numpy as np
import pytest

from lowcomm_protocol.codecs.modulo import ModuloCoder
from lowcomm_protocol.errors import CodecError

BLOCK = 256


def values(numel: int) -> np.ndarray:
    return np.random.default_rng(numel).normal(0, 0.05, numel).astype(np.float32)


def test_an_encoding_that_fails_leaves_a_coder_that_knows_nothing_of_its_own():
    one = ModuloCoder(4, 3 * BLOCK)
    vector = values(3 * BLOCK)
    vector[-1] = np.nan
    with pytest.raises(CodecError, match="block 2 is not finite"):
        one.encode(vector, memoryview(bytearray(one.max_size)))
    with pytest.raises(CodecError, match="encode first"):
        one.decode(memoryview(bytes(one.min_size)), np.zeros(3 * BLOCK, np.float32))


def test_a_scratch_is_used_in_place_of_a_new_vector_until_the_end():
    one, scratch = ModuloCoder(3, 600), np.zeros(600, np.float32)
    one.encode(values(600), memoryview(bytearray(one.max_size)), scratch)
    assert scratch.tobytes() == values(600).tobytes(), "what we have, before it is coded"


@pytest.mark.parametrize(
    "scratch",
    [np.zeros(599, np.float32), np.zeros(600), np.zeros(1200, np.float32)[::2]],
    ids=["short", "float64", "strided"],
)
def test_a_scratch_that_does_not_fit_is_refused(scratch):
    one = ModuloCoder(3, 600)
    with pytest.raises(CodecError, match="scratch"):
        one.encode(values(600), memoryview(bytearray(one.max_size)), scratch)
