"""Codecs: how a float32 vector becomes bytes on the wire. One file a codec, with its layout byte by byte.

A `Codec` is a pure function of a vector. A `Coder` is what a peer keeps for one fragment: a codec, and for those that
learn from exchange to exchange (modulo) what they have learned; with feedback also what coding has lost so far.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from lowcomm_protocol.codecs.base import Codec
from lowcomm_protocol.codecs.bf16 import Bf16
from lowcomm_protocol.codecs.coder import Coder
from lowcomm_protocol.codecs.e3m0 import E3m0
from lowcomm_protocol.codecs.feedback import FeedbackCoder, Residual
from lowcomm_protocol.codecs.fp32 import Fp32
from lowcomm_protocol.codecs.int8 import Int8
from lowcomm_protocol.codecs.kernels import BLOCK
from lowcomm_protocol.codecs.modulo import ModuloCoder
from lowcomm_protocol.codecs.q1 import Q1
from lowcomm_protocol.codecs.q2 import Q2
from lowcomm_protocol.codecs.shards import ShardCoder
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import CODEC_NAMES, MODULO_BITS

__all__ = [
    "BLOCK",
    "CODECS",
    "CODEC_NAMES",
    "MODULO_BITS",
    "Codec",
    "Coder",
    "Residual",
    "ShardCoder",
    "codec",
    "coder",
    "shard_coder",
]

CODECS: Mapping[str, Codec] = MappingProxyType({one.name: one for one in (Fp32(), Bf16(), Int8(), E3m0(), Q2(), Q1())})


def coder(name: str, numel: int, feedback: bool = False) -> Coder:
    """A fresh coder of ``numel`` values. Raises `CodecError` for a name that there is none of.

    ``feedback``: what coding loses is sent in the next exchange. fp32 loses nothing, so there it changes nothing.
    """
    made = ModuloCoder(MODULO_BITS[name], numel) if name in MODULO_BITS else Coder(codec(name), numel)
    return FeedbackCoder(made) if feedback and name != "fp32" else made


def shard_coder(name: str, numel: int, feedback: bool = False) -> ShardCoder:
    """A fresh coder of ``numel`` values for groups. Raises `CodecError` for a name that there is none of."""
    return ShardCoder(codec(name), numel, feedback and name != "fp32")


def codec(name: str) -> Codec:
    """The codec of this name. Raises `CodecError` for a name that there is none of, with the nearest one."""
    if name not in CODECS:
        nearest = get_close_matches(name, CODECS, n=1, cutoff=0.0)
        raise CodecError(f"codec {name!r} does not exist: use {nearest[0]!r}, or another of {', '.join(CODECS)}")
    return CODECS[name]
