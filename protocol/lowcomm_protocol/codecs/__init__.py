"""Codecs: how a float32 vector becomes bytes on the wire. One file a codec, with its layout byte by byte.

A `Codec` is a pure function of a vector. A `Coder` is what a peer keeps for one fragment: a codec, and for those that
learn from exchange to exchange (modulo) what they have learned.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from lowcomm_protocol.codecs.base import Codec
from lowcomm_protocol.codecs.bf16 import Bf16
from lowcomm_protocol.codecs.coder import Coder
from lowcomm_protocol.codecs.e3m0 import E3m0
from lowcomm_protocol.codecs.fp32 import Fp32
from lowcomm_protocol.codecs.int8 import Int8
from lowcomm_protocol.codecs.modulo import ModuloCoder
from lowcomm_protocol.errors import CodecError

__all__ = ["CODECS", "CODEC_NAMES", "MODULO_BITS", "Codec", "Coder", "codec", "coder"]

CODECS: Mapping[str, Codec] = MappingProxyType({one.name: one for one in (Fp32(), Bf16(), Int8(), E3m0())})

MODULO_BITS: Mapping[str, int] = MappingProxyType({"mod3": 3, "mod4": 4, "mod6": 6, "mod8": 8})
"""Bits a value of each codec that decodes next to the receiver's own vector."""
CODEC_NAMES = (*CODECS, *MODULO_BITS)


def coder(name: str, numel: int) -> Coder:
    """A fresh coder of ``numel`` values. Raises `CodecError` for a name that there is none of."""
    return ModuloCoder(MODULO_BITS[name], numel) if name in MODULO_BITS else Coder(codec(name), numel)


def codec(name: str) -> Codec:
    """The codec of this name. Raises `CodecError` for a name that there is none of, with the nearest one."""
    if name not in CODECS:
        nearest = get_close_matches(name, CODECS, n=1, cutoff=0.0)
        raise CodecError(f"codec {name!r} does not exist: use {nearest[0]!r}, or another of {', '.join(CODECS)}")
    return CODECS[name]
