"""What must hold for the wire of every codec: the bytes of these vectors never change under one
name and version."""

from hashlib import sha256

import numpy as np
import pytest

from lowcomm_protocol.codecs import CODECS, coder
from lowcomm_protocol.codecs.modulo import ModuloCoder
from lowcomm_protocol.spec.names import codec_in_offer

GOLDEN = {
    "fp32": ("e36318f68b4608ff", "e2f146ef940587a1"),
    "bf16": ("9296c1ae6cd0532f", "58953aa355a41109"),
    "int8": ("b2391bb5d6745c97", "8bb0d843b8637d08"),
    "e3m0": ("e1fd948a829dedba", "adfc09e8e480a2c9"),
    "q2": ("25243584bc17a428", "d00b11c993c31249"),
    "mod3/3": ("d7427f4a4125fabe", "fa1029590f12b114"),
    "mod4/3": ("89d15aea1272abfe", "7d0a26dd73b54a7c"),
    "mod6/3": ("7375af4c2bc6ba48", "61a2fe09f60f247b"),
    "mod8/3": ("465dc1047d351584", "a38f39cf112bb4ac"),
}
"""SHA-256 of 1001 values and of 5, its first 16 digits, by what offers call the codec."""


def vector(numel: int, scale: float) -> np.ndarray:
    """Values of both signs and of many sizes, from integers alone."""
    mixed = np.arange(numel, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(31)
    uniform = (mixed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24) - np.float32(0.5)
    return uniform * uniform * uniform * np.float32(scale)


def digest(name: str, numel: int) -> str:
    """Of the bytes, and of what they are decoded to at the sender."""
    one, values = coder(name, numel), vector(numel, 0.125)
    if isinstance(one, ModuloCoder):
        ranges = np.abs(vector(-(-numel // 256), 0.01)) + np.float32(1e-5)
        ranges[1::3] = -1.0
        one.restore({"range": ranges})
    out = memoryview(bytearray(one.max_size))
    size = one.encode(values, out)
    return sha256(bytes(out[:size]) + values.tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_writes_the_bytes_of_its_version(name):
    assert (digest(name, 1001), digest(name, 5)) == GOLDEN[codec_in_offer(name)]
