"""What must hold for coding in pieces: the same bytes and values as at once, however they are
cut."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowcomm_protocol.codecs import CODECS, Coder, coder
from lowcomm_protocol.codecs.base import Codec
from lowcomm_protocol.codecs.modulo import ModuloCoder
from lowcomm_protocol.codecs.pieces import pieces_of
from lowcomm_protocol.errors import CodecError

BLOCK = 256
sizes = st.sampled_from([0, 1, 7, 255, 256, 257, 520, 1030, 1280])


def made(name: str, numel: int, feedback: bool) -> Coder:
    """A coder that knows ranges of all blocks but each third."""
    one = coder(name, numel, feedback)
    if name.startswith("mod"):
        ranges = np.full(-(-numel // BLOCK), 1e-3, dtype=np.float32)
        ranges[2::3] = -1
        one.inherit({"range": ranges})
    return one


def values(numel: int) -> np.ndarray:
    return np.random.default_rng(numel).normal(0, 0.05, numel).astype(np.float32)


def arrivals(data: bytes, cuts: list[int]) -> list[memoryview]:
    return [memoryview(data)[:cut] for cut in sorted(min(cut, len(data)) for cut in cuts)]


@pytest.mark.parametrize("name", CODECS)
@given(numel=sizes, piece=st.integers(1, 700), feedback=st.booleans())
def test_pieces_give_the_bytes_of_the_whole(name, numel, piece, feedback):
    one, two = made(name, numel, feedback), made(name, numel, feedback)
    at_once, in_pieces = values(numel), values(numel)
    whole, out = bytearray(one.max_size), bytearray(two.max_size)
    size, sent = one.encode(at_once, memoryview(whole)), b""
    for end in two.encoding(in_pieces, memoryview(out), piece=piece):
        sent += out[len(sent) : end]
    assert sent == whole[:size]
    assert in_pieces.tobytes() == at_once.tobytes()


@pytest.mark.parametrize("name", CODECS)
@given(numel=sizes, cuts=st.lists(st.integers(0, 6000), max_size=5))
def test_what_is_decoded_while_it_comes_is_what_is_decoded_at_once(name, numel, cuts):
    sender, one, two = (made(name, numel, False) for _ in range(3))
    own = values(numel) + np.float32(1e-4)
    out = bytearray(sender.max_size)
    data = bytes(out[: sender.encode(values(numel), memoryview(out))])
    for receiver in (one, two):
        receiver.encode(own.copy(), memoryview(bytearray(sender.max_size)))
    at_once, coming = np.zeros(numel, np.float32), np.zeros(numel, np.float32)
    again = one.decode(memoryview(data), at_once)
    decoding, done = two.decoding(coming), [0]
    for came in arrivals(data, cuts):
        done.append(decoding.take(came))
        assert coming[: done[-1]].tobytes() == at_once[: done[-1]].tobytes()
    assert all(before <= after <= numel for before, after in pairwise(done))
    assert decoding.finish(memoryview(data)) == again
    assert coming.tobytes() == at_once.tobytes()
    assert two.lattice_steps.tobytes() == one.lattice_steps.tobytes()


@pytest.mark.parametrize("name", CODECS)
def test_blocks_are_decoded_before_the_rest_has_come(name):
    sender, receiver = made(name, 4 * BLOCK, False), made(name, 4 * BLOCK, False)
    out = bytearray(sender.max_size)
    size = sender.encode(values(4 * BLOCK), memoryview(out))
    receiver.encode(values(4 * BLOCK), memoryview(bytearray(sender.max_size)))
    decoding = receiver.decoding(np.zeros(4 * BLOCK, np.float32))
    assert 0 < decoding.take(memoryview(out)[: size * 3 // 4]) < 4 * BLOCK


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("difference", [-1, 1])
def test_a_whole_that_is_too_short_or_too_long_is_refused_at_the_end(name, difference):
    sender, receiver = made(name, 700, False), made(name, 700, False)
    out = bytearray(sender.max_size + 1)
    size = sender.encode(values(700), memoryview(out))
    receiver.encode(values(700), memoryview(bytearray(sender.max_size)))
    decoding = receiver.decoding(np.zeros(700, np.float32))
    decoding.take(memoryview(out)[: size // 2])
    with pytest.raises(CodecError, match=name):
        decoding.finish(memoryview(out)[: size + difference])


@pytest.mark.parametrize("name", CODECS)
@given(data=st.binary(max_size=3000), cuts=st.lists(st.integers(0, 3000), max_size=3))
def test_hostile_bytes_in_pieces_are_refused_or_finite(name, data, cuts):
    receiver = made(name, 300, False)
    receiver.encode(values(300), memoryview(bytearray(receiver.max_size)))
    out = np.zeros(300, np.float32)
    decoding = receiver.decoding(out)
    try:
        for came in arrivals(data, cuts):
            decoding.take(came)
        decoding.finish(memoryview(data))
    except CodecError:
        pass
    assert np.isfinite(out).all()


def test_an_encoding_in_pieces_that_fails_leaves_a_coder_that_knows_nothing_of_its_own():
    one = made("mod4", 3 * BLOCK, False)
    vector = values(3 * BLOCK)
    vector[-1] = np.nan
    with pytest.raises(CodecError, match="block 2 is not finite"):
        one.encode(vector, memoryview(bytearray(one.max_size)))
    with pytest.raises(CodecError, match="encode first"):
        one.decoding(np.zeros(3 * BLOCK, np.float32))


class Whole(Codec):
    """From another package, of a size that is not known before: its bytes backwards."""

    name = "whole"

    def _sizes(self, numel):
        return 0, 4 * numel

    def _write(self, vector, out):
        out[:] = vector.view(np.uint8)[::-1]
        return out.size

    def _decode(self, data, out):
        out.view(np.uint8)[:] = data[::-1]


def test_a_codec_that_does_not_stand_in_blocks_is_coded_at_once():
    one, vector = Coder(Whole(), 600), values(600)
    out = bytearray(2400)
    assert list(one.encoding(vector, memoryview(out), piece=BLOCK)) == [2400]
    got = np.zeros(600, np.float32)
    decoding = one.decoding(got)
    assert decoding.take(memoryview(out)[:2000]) == 0
    assert decoding.finish(memoryview(out)) == b""
    assert got.tobytes() == values(600).tobytes()


@given(numel=st.integers(0, 3000), piece=st.integers(-1, 3000))
def test_pieces_are_whole_blocks_and_cover_the_vector(numel, piece):
    ranges = list(pieces_of(numel, piece))
    assert ranges[0][0] == 0 and ranges[-1][1] == numel
    assert all(one[1] == other[0] and one[1] % BLOCK == 0 for one, other in pairwise(ranges))


@pytest.mark.parametrize("name", ["mod3", "q2"])
def test_a_scratch_is_used_in_place_of_a_new_vector_until_the_end(name):
    one, scratch = coder(name, 600, feedback=name == "q2"), np.zeros(600, np.float32)
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
