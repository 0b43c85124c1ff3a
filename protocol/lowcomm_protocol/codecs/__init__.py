"""Codecs: how a float32 vector becomes bytes on the wire. One file a codec, with its layout byte by
byte.

A `Codec` is a pure function of a vector. A `Coder` is what a peer keeps for one fragment: a codec,
and for those that learn from exchange to exchange (modulo) what they have learned; with feedback
also what coding has lost so far.

The table of all codecs is ``spec.names.CODECS``. To add one, write its file and a line there;
another package calls ``CODECS.register``.
"""

from collections.abc import Callable
from typing import cast

from lowcomm_protocol.codecs.base import Codec, FixedCodec
from lowcomm_protocol.codecs.coder import Coder
from lowcomm_protocol.codecs.feedback import FeedbackCoder, Residual
from lowcomm_protocol.codecs.shards import ShardCoder
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import BLOCK, CODECS, CodecEntry, load

__all__ = [
    "BLOCK",
    "CODECS",
    "Codec",
    "CodecEntry",
    "Coder",
    "FixedCodec",
    "Residual",
    "ShardCoder",
    "codec",
    "coder",
    "shard_coder",
]


def coder(name: str, numel: int, feedback: bool = False) -> Coder:
    """A fresh coder of ``numel`` values for pairs. Raises `CodecError` for a name that there is
    none of.

    ``feedback``: what coding loses is sent in the next exchange. It changes nothing for exact
    codecs.
    """
    found = _find(name)
    if not isinstance(found, Codec):
        made = found(numel)
        return FeedbackCoder(made) if feedback else made
    made = Coder(found, numel)
    return FeedbackCoder(made) if feedback and not found.is_exact else made


def shard_coder(name: str, numel: int, feedback: bool = False) -> ShardCoder:
    """A fresh coder of ``numel`` values for groups. Raises `CodecError` as ``codec`` does."""
    found = codec(name)
    return ShardCoder(found, numel, feedback and not found.is_exact)


def codec(name: str) -> FixedCodec:
    """The codec of this name, whose size is known before coding, as groups need it.

    Raises `CodecError` for a name that there is none of, and for a codec that serves pairs alone.
    """
    found = _find(name)
    if not isinstance(found, FixedCodec):
        reason = CODECS[name].only_in_pairs or "has a size that is known only after coding"
        raise CodecError(f"codec {name!r} {reason}: use it in pairs, with group = 2")
    return found


def _find(name: str) -> Codec | Callable[[int], Coder]:
    if name not in CODECS:
        raise CodecError(f"codec {name!r} is {CODECS.unknown(name)}")
    made = CODECS[name].codec
    return cast("Codec | Callable[[int], Coder]", load(made) if isinstance(made, str) else made)
