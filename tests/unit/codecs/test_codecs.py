"""What must hold for every codec: exact bytes, the same bytes again, and nothing bad gets
through."""

import struct
from hashlib import sha256
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numba.core import caching

from lowcomm_protocol.codecs import CODECS, codec, coder, kernels
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import codecs_for_groups

NAMES = codecs_for_groups()
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


def test_e3m0_takes_the_nearest_magnitude_and_the_larger_of_two_as_near():
    magnitudes = np.array([0, 0.25, 0.5, 1, 2, 4, 8, 16])
    values = np.concatenate([[16.0], np.linspace(-16, 16, 4097)]).astype(np.float32)
    distance = np.abs(np.abs(values)[:, None] - magnitudes)
    nearest = 7 - np.argmin(distance[:, ::-1], axis=1)
    got = np.concatenate([decoded("e3m0", encoded("e3m0", [16.0, one]), 2)[1:] for one in values])
    assert np.array_equal(got, np.sign(values) * magnitudes[nearest])


def test_q2_layout_is_a_scale_then_four_values_a_byte_the_first_one_lowest():
    values = [2.0, -2.0, 7.0, -7.0, 2.0, 7.0]
    assert encoded("q2", values) == bytes.fromhex("0040") + bytes([0b11_01_10_00, 0b01_00])
    assert np.array_equal(decoded("q2", encoded("q2", values), 6), np.float32(values))


def test_q2_fits_its_scale_by_least_squares_and_rounds_it_to_bf16():
    values = np.array([2.0, 3.0, -10.0, 1.0, 0.0, -0.0], dtype=np.float32)
    scale = (2.0 + 3.0 + 3.5 * 10.0 + 1.0) / (
        5 + 3.5**2
    )  # 2.377, and the middle between the levels is at 5.3
    short = encoded("bf16", [scale])
    assert encoded("q2", values) == short + bytes([0b00_11_00_00, 0b00_00])


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


@pytest.mark.parametrize(("name", "block_bytes"), BLOCK_BYTES.items())
def test_the_second_block_has_a_scale_of_its_own_and_may_be_short(name, block_bytes):
    values = [*[0.0] * 255, 1.0] if name in LONG_SCALES else [-1.0] * 255 + [1.0]
    data = encoded(name, [*values, 2.0])
    scale_bytes = 4 if name in LONG_SCALES else 2
    assert data[:scale_bytes] == encoded(name, [1.0])[:scale_bytes]
    assert data[block_bytes:] == encoded(name, [2.0])
    assert len(data) == block_bytes + scale_bytes + 1
    assert np.isclose(decoded(name, data, 257)[255:], [1.0, 2.0], rtol=1e-4).all()


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


@pytest.mark.parametrize("name", BLOCKWISE)
@given(vector=st.one_of(vectors, coarse))
def test_what_is_sent_of_a_block_is_nearer_to_it_than_zeros_are(name, vector):
    restored = decoded(name, encoded(name, vector), vector.size)
    for start in range(0, vector.size, 256):
        part, got = vector[start : start + 256].astype(np.float64), restored[start : start + 256]
        largest = np.abs(part).max()
        if largest > 2.0**-90:
            lost, whole = np.sum(((part - got) / largest) ** 2), np.sum((part / largest) ** 2)
            assert lost <= whole * (1 - 1 / 257)
            assert np.abs(part - got).max() <= largest


@given(vector=vectors)
def test_fp32_is_exact(vector):
    assert decoded("fp32", encoded("fp32", vector), vector.size).tobytes() == vector.tobytes()


@given(vector=vectors)
def test_bf16_is_torchs_bf16(vector):
    expected = torch.from_numpy(vector.copy()).to(torch.bfloat16).float().numpy()
    assert decoded("bf16", encoded("bf16", vector), vector.size).tobytes() == expected.tobytes()


@given(vector=vectors)
def test_int8_is_within_half_a_step(vector):
    restored = decoded("int8", encoded("int8", vector), vector.size).astype(np.float64)
    for start in range(0, vector.size, 256):
        part = vector[start : start + 256].astype(np.float64)
        step = np.abs(part).max() / 127
        assert np.abs(part - restored[start : start + 256]).max() <= step * 0.5005 + 127 * 2.0**-100


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


@pytest.mark.parametrize("name", SHORT_SCALES)
@pytest.mark.parametrize("at", range(13))
def test_zeros_of_either_sign_are_positive_between_other_values(name, at):
    values = -np.ones(13, dtype=np.float32)
    values[at] = 0.0
    data = encoded(name, values)
    assert decoded(name, data, 13)[at] > 0
    values[at] = -0.0
    assert encoded(name, values) == data


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("numel", [1, 256, 300])
def test_what_a_sender_keeps_is_what_others_decode(name, numel):
    values = np.resize(np.float32([-0.0, 1.0, -3.0, 0.0, 2.25, -1e-40, 0.7]), numel)
    for vector in (values, values * 2.0**-99, np.full(numel, np.float32(-2.0)), values * 0.0):
        sent = vector.astype(np.float32)
        out = bytearray(codec(name).coded_size(numel))
        codec(name).send(sent, memoryview(out))
        assert bytes(out) == encoded(name, vector)
        assert sent.tobytes() == decoded(name, bytes(out), numel).tobytes()


@pytest.mark.parametrize("count", [2, 256])
def test_a_block_whose_values_would_all_take_the_outer_level_of_q2_takes_the_inner_one(count):
    data = encoded("q2", np.resize(np.float32([1.0, -1.3]), count))
    assert not any(byte & 0b01010101 for byte in data[2:])
    restored = decoded("q2", data, count)
    assert np.abs(restored) == pytest.approx(1.15, rel=0.01)
    assert encoded("q2", restored) == data


@pytest.mark.parametrize("name", BLOCKWISE)
@pytest.mark.parametrize("extreme", [np.finfo(np.float32).max, 2.0**-94, 2.0**-98, 1e-45, 3e-39])
def test_extreme_blocks_stay_finite_and_stable(name, extreme):
    data = encoded(name, [extreme, -extreme, extreme / 3])
    restored = decoded(name, data, 3)
    assert np.isfinite(restored).all()
    assert encoded(name, restored) == data
    if extreme > 2.0**-90 and name in LONG_SCALES:
        assert restored[0] == pytest.approx(extreme, rel=1e-4)


@pytest.mark.parametrize("name", SHORT_SCALES)
def test_scales_go_down_to_2_to_the_minus_100(name):
    assert encoded(name, [2.0**-100]) == bytes.fromhex("800d 00")
    assert encoded(name, [-(2.0**-100) * (1 - 2.0**-7)]) == bytes(3)
    assert encoded(name, [2.0**-99, 0, 0]) == bytes(3)


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


def test_bf16_refuses_what_would_round_to_infinity():
    largest = np.float32(2.0**128 - 2.0**119 - 2.0**104)
    assert np.isfinite(decoded("bf16", encoded("bf16", [largest]), 1)).all()
    with pytest.raises(CodecError, match="value 1 of 2"):
        encoded("bf16", [1.0, -np.nextafter(largest, np.float32(np.inf))])


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


@pytest.mark.parametrize("name", NAMES)
def test_read_only_targets_are_refused(name):
    vector = np.ones(3, np.float32)
    with pytest.raises(CodecError, match="read-only"):
        codec(name).encode(vector, memoryview(bytes(codec(name).coded_size(3))))
    data = encoded(name, vector)
    vector.flags.writeable = False
    assert encoded(name, vector) == data
    with pytest.raises(CodecError, match="read-only"):
        codec(name).decode(data, vector)


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


@pytest.mark.parametrize("name", SHORT_SCALES)
@pytest.mark.parametrize("numel", [9, 256, 300])
def test_codes_behind_a_scale_of_zero_are_refused(name, numel):
    size = codec(name).coded_size(numel)
    assert (decoded(name, bytes(size), numel) == 0).all()
    for at in (2, size - 1):
        data = bytearray(size)
        data[at] = 1
        refused_untouched(name, bytes(data), numel)


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


def test_every_codec_of_the_table_is_found_under_its_own_name():
    assert [codec(name).name for name in NAMES] == NAMES
    assert {name: coder(name, 1).name for name in CODECS if name not in NAMES} == {
        f"mod{n}": f"mod{n}" for n in (3, 4, 6, 8)
    }


def test_an_unknown_codec_is_refused_with_the_nearest_name():
    with pytest.raises(
        CodecError,
        match=r"'e3mo' is not known; did you mean 'e3m0'\? There are fp32, bf16, int8, .*mod8$",
    ):
        codec("e3mo")
    with pytest.raises(CodecError, match=r"is not known\. There are fp32"):
        codec("")


def test_kernels_compile_without_a_writable_folder(monkeypatch):
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    assert kernels.kernel(lambda value: value + 1)(41) == 42


@pytest.mark.parametrize("failing", ["save", "load"])
def test_kernels_compile_when_the_cache_fails_at_the_first_call(monkeypatch, failing):
    def fail(*_: object) -> None:
        raise (OSError if failing == "save" else EOFError)("the cache is broken")

    monkeypatch.setattr(caching.IndexDataCacheFile, failing, fail)
    made = kernels.kernel(lambda value: value + 1)
    assert [made(41), made(1)] == [42, 2]


def test_a_kernel_is_compiled_anew_where_the_parts_that_it_may_call_have_changed(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert sha256(Path(kernels.__file__).read_bytes()).hexdigest()[:12] == kernels.SHARED
    kept = []
    for version in (kernels.SHARED, kernels.SHARED, "another"):
        monkeypatch.setattr(kernels, "SHARED", version)

        def incremented(value):
            return value + 1

        assert kernels.kernel(incremented)(41) == 42
        kept.append({path.name for path in tmp_path.rglob("*.nbi")})
    assert kept[0] == kept[1] and len(kept[0]) == 1 and len(kept[2]) == 2
