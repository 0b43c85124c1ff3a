"""What must hold for every codec: exact bytes, the same bytes again, and nothing bad gets
through."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numba.core import caching

from lowcomm_protocol.codecs import codec, kernels
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import CODECS

NAMES = [name for name, entry in CODECS.items() if not entry.only_in_pairs]
LONG_SCALES, SHORT_SCALES = ("int8", "e3m0"), ("q2",)
BLOCKWISE = LONG_SCALES + SHORT_SCALES
BLOCK_BYTES = {"int8": 260, "e3m0": 132, "q2": 66}
vectors = hnp.arrays(
    np.float32,
    st.integers(0, 600),
    elements=st.floats(-(2.0**127), 2.0**127, width=32),
    fill=st.just(np.float32(0)),
)
coarse = hnp.arrays(
    np.float32,
    st.integers(1, 300),
    elements=st.sampled_from([0, 1, -1, 0.99, 2.2, -2.3, 3.5, 9, 80]),
)
"""Blocks of few magnitudes, which lie on both sides of the middle between two levels, or all on
one."""


def encoded(name: str, values) -> bytes:
    vector = np.asarray(values, dtype=np.float32)
    out = bytearray(codec(name).coded_size(vector.size))
    assert codec(name).encode(vector, memoryview(out)) == len(out)
    return bytes(out)


def decoded(name: str, data: bytes, numel: int) -> np.ndarray:
    out = np.full(numel, np.float32(-77.0))
    codec(name).decode(data, out)
    return out


def relative_error(name: str, values: np.ndarray) -> float:
    restored = decoded(name, encoded(name, values), values.size).astype(np.float64)
    return float(np.mean((values - restored) ** 2) / np.mean(values.astype(np.float64) ** 2))


def test_fp32_layout_is_little_endian_binary32():
    assert encoded("fp32", [1.0, -2.5]) == bytes.fromhex("0000803f 000020c0")


def test_bf16_layout_is_the_upper_half_rounded_to_even():
    values = [1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -2.0]
    assert encoded("bf16", values) == bytes.fromhex("803f 803f 823f 813f 00c0")


def test_int8_layout_is_a_scale_then_codes_with_ties_to_even():
    assert encoded("int8", [63.5, -63.5, 0.25, 0.75, -0.5, 0.0]) == bytes.fromhex(
        "0000003f 7f 81 00 02 ff 00"
    )


def test_e3m0_layout_is_a_scale_then_two_values_a_byte_the_first_one_low():
    values = [16, -16, 8, -8, 4, 2, 1, 0.5, 0.25, -0.25, 0.0, -0.0, -1.0]
    assert encoded("e3m0", values) == bytes.fromhex("0000803f f7 e6 45 23 91 00 0b")


def test_q2_layout_is_a_scale_then_four_values_a_byte_the_first_one_lowest():
    values = [2.0, -2.0, 7.0, -7.0, 2.0, 7.0]
    assert encoded("q2", values) == bytes.fromhex("0040") + bytes([0b11_01_10_00, 0b01_00])
    assert np.array_equal(decoded("q2", encoded("q2", values), 6), np.float32(values))


@given(vector=st.one_of(vectors, coarse))
def test_q2_has_two_magnitudes_a_block_and_every_value_has_the_nearest(vector):
    restored = decoded("q2", encoded("q2", vector), vector.size)
    for start in range(0, vector.size, 256):
        part, got = (
            vector[start : start + 256].astype(np.float64),
            restored[start : start + 256].astype(np.float64),
        )
        scale = struct.unpack("<I", b"\0\0" + encoded("q2", vector)[start // 256 * 66 :][:2])[0]
        scale = float(np.uint32(scale).view(np.float32))
        edge = np.where(np.abs(part) >= 2.25 * scale, 3.5 * scale, scale)
        assert np.array_equal(got, np.where(part < 0, -edge, edge))


@pytest.mark.parametrize("numel", [0, 1, 2, 255, 256, 257, 512, 513])
def test_coded_sizes_are_exact(numel):
    blocks = -(-numel // 256)
    sizes = {name: codec(name).coded_size(numel) for name in NAMES}
    assert sizes == {
        "fp32": 4 * numel,
        "bf16": 2 * numel,
        "int8": numel + 4 * blocks,
        "e3m0": (numel + 1) // 2 + 4 * blocks,
        "q2": (numel + 3) // 4 + 2 * blocks,
    }


@pytest.mark.parametrize("name", NAMES)
@given(vector=st.one_of(vectors, coarse))
def test_coding_what_was_decoded_gives_the_same_bytes(name, vector):
    data = encoded(name, vector)
    restored = decoded(name, data, vector.size)
    assert np.isfinite(restored).all()
    assert encoded(name, restored) == data


@given(vector=vectors)
def test_bf16_is_torchs_bf16(vector):
    expected = torch.from_numpy(vector.copy()).to(torch.bfloat16).float().numpy()
    assert decoded("bf16", encoded("bf16", vector), vector.size).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("name", "gaussian", "student"),
    [
        ("fp32", 0.0, 0.0),
        ("bf16", 2.8e-6, 2.8e-6),
        ("int8", 5e-5, 2.9e-4),
        ("e3m0", 0.038, 0.030),
        ("q2", 0.117, 0.30),
    ],
)
def test_relative_errors_are_those_of_the_formats(name, gaussian, student):
    rng = np.random.default_rng(0)
    assert relative_error(name, rng.standard_normal(1 << 18).astype(np.float32)) == pytest.approx(
        gaussian, rel=0.12
    )
    assert relative_error(name, rng.standard_t(3, 1 << 18).astype(np.float32)) == pytest.approx(
        student, rel=0.12
    )


@pytest.mark.parametrize("name", BLOCKWISE)
@pytest.mark.parametrize("extreme", [np.finfo(np.float32).max, 2.0**-94, 2.0**-98, 1e-45, 3e-39])
def test_extreme_blocks_stay_finite_and_stable(name, extreme):
    data = encoded(name, [extreme, -extreme, extreme / 3])
    restored = decoded(name, data, 3)
    assert np.isfinite(restored).all()
    assert encoded(name, restored) == data
    if extreme > 2.0**-90 and name in LONG_SCALES:
        assert restored[0] == pytest.approx(extreme, rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_do_not_depend_on_flushing_subnormals(name):
    values = np.array([2.0**-93, 2.0**-96, 1e-40, -3e-39, 2.0**-120], dtype=np.float32)
    usual = encoded(name, values)
    torch.set_flush_denormal(True)
    try:
        flushed = encoded(name, values)
    finally:
        torch.set_flush_denormal(False)
    assert flushed == usual


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 299])
def test_nan_and_infinity_are_refused_with_their_place(name, bad, at):
    vector = np.ones(300, dtype=np.float32)
    vector[at] = bad
    with pytest.raises(CodecError, match=rf"value {at} of 300 is -?(nan|inf)"):
        encoded(name, vector)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "vector",
    [
        np.ones(4),
        np.ones((2, 2), np.float32),
        np.ones(8, np.float32)[::2],
        np.float32(1).reshape(()),
    ],
    ids=["float64", "2-D", "strided", "0-D"],
)
def test_arrays_that_are_not_flat_float32_are_refused(name, vector):
    data = bytearray(codec(name).coded_size(4))
    with pytest.raises(CodecError, match=name):
        codec(name).encode(vector, memoryview(data))
    with pytest.raises(CodecError, match=name):
        codec(name).decode(data, vector)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("difference", [-1, 1, 4])
def test_buffers_of_the_wrong_length_are_refused(name, difference):
    vector = np.ones(256, np.float32)
    wrong = bytearray(codec(name).coded_size(256) + difference)
    with pytest.raises(CodecError, match="exactly"):
        codec(name).encode(vector, memoryview(wrong))
    with pytest.raises(CodecError, match="exactly"):
        codec(name).decode(bytes(wrong), vector)


def refused_untouched(name: str, data: bytes, numel: int) -> None:
    out = np.full(numel, np.float32(5.0))
    with pytest.raises(CodecError, match=name):
        codec(name).decode(data, out)
    assert (out == 5.0).all()


@pytest.mark.parametrize(
    ("name", "infinity"), [("fp32", "0000807f"), ("fp32", "0100c0ff"), ("bf16", "80ff")]
)
def test_coded_nan_and_infinity_are_refused_before_anything_is_written(name, infinity):
    good = encoded(name, np.ones(100_000))
    refused_untouched(name, good + bytes.fromhex(infinity), 100_001)


@pytest.mark.parametrize("name", LONG_SCALES)
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1.0, -0.0, 1e-40, 2.0**-101, 2.2e37])
@pytest.mark.parametrize("block", [0, 1])
def test_scales_that_no_encoder_writes_are_refused_before_anything_is_written(name, scale, block):
    data = bytearray(encoded(name, np.ones(300)))
    at = block * BLOCK_BYTES[name]
    data[at : at + 4] = struct.pack("<f", scale)
    refused_untouched(name, bytes(data), 300)


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        (name, bits)
        for name in SHORT_SCALES
        for bits in (0x7F80, 0x7FC0, 0xFF80, 0xBF80, 0x8000, 0x0001, 0x0D7F)
    ]
    + [("q2", 0x7E93)],
)
@pytest.mark.parametrize("block", [0, 1])
def test_short_scales_that_no_encoder_writes_are_refused_before_anything_is_written(
    name, scale, block
):
    data = bytearray(encoded(name, np.ones(300)))
    at = block * BLOCK_BYTES[name]
    data[at : at + 2] = scale.to_bytes(2, "little")
    refused_untouched(name, bytes(data), 300)


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("int8", 4, 0x80),
        ("int8", 260 + 4 + 44, 0x80),
        ("e3m0", 4, 0x80),
        ("e3m0", 4, 0x08),
        ("e3m0", 132 + 26, 0x17),
        ("q2", 66 + 2 + 11, 0b100),
        ("q2", 66 + 2 + 11, 0b10000000),
    ],
    ids=[
        "-128",
        "-128 at the end",
        "high -0",
        "low -0",
        "filled padding",
        "q2 low",
        "q2 high",
    ],
)
def test_codes_that_no_encoder_writes_are_refused_before_anything_is_written(name, at, value):
    data = bytearray(encoded(name, np.ones(301)))
    data[at] = value
    refused_untouched(name, bytes(data), 301)


@pytest.mark.parametrize("name", BLOCKWISE)
@given(data=st.data())
def test_whatever_decodes_is_finite(name, data):
    numel = data.draw(st.integers(0, 270))
    size = codec(name).coded_size(numel)
    out = np.zeros(numel, np.float32)
    try:
        codec(name).decode(data.draw(st.binary(min_size=size, max_size=size)), out)
    except CodecError:
        return
    assert np.isfinite(out).all()


def test_an_unknown_codec_is_refused_with_the_nearest_name():
    with pytest.raises(
        CodecError,
        match=r"'e3mo' is not known; did you mean 'e3m0'\? There are fp32, bf16, int8, .*mod8$",
    ):
        codec("e3mo")
    with pytest.raises(CodecError, match=r"is not known\. There are fp32"):
        codec("")


@pytest.mark.parametrize("failing", ["save", "load"])
def test_kernels_compile_when_the_cache_fails_at_the_first_call(monkeypatch, failing):
    def fail(*_: object) -> None:
        raise (OSError if failing == "save" else EOFError)("the cache is broken")

    monkeypatch.setattr(caching.IndexDataCacheFile, failing, fail)
    made = kernels.kernel(lambda value: value + 1)
    assert [made(41), made(1)] == [42, 2]
