"""Codecs: how a float32 vector becomes bytes on the wire (docs/protocol.md).

A `FixedCodec` is a pure function of a vector. A `Coder` is what a peer keeps for one fragment in
pairs: a codec, and for those that learn from exchange to exchange (modulo) what they have learned.
A `ShardCoder` is the same for groups, with what coding has lost so far.

The table of all codecs is ``spec.names.CODECS``. To add one, write its file and a line there;
another package calls ``CODECS.register``.
"""

from collections.abc import Callable
from typing import cast

from lowcomm_protocol.codecs.base import Coder, FixedCodec
from lowcomm_protocol.codecs.shards import Residual, ShardCoder
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import BLOCK, CODECS, CodecEntry, load

__all__ = [
    "BLOCK",
    "CODECS",
    "CodecEntry",
    "Coder",
    "FixedCodec",
    "Residual",
    "ShardCoder",
    "codec",
    "coder",
    "shard_coder",
]


def coder(name: str, numel: int) -> Coder:
    """A fresh coder of ``numel`` values for pairs. Raises `CodecError` for an unknown name."""
    found = _find(name)
    return Coder(found, numel) if isinstance(found, FixedCodec) else found(numel)


def shard_coder(name: str, numel: int, feedback: bool = False) -> ShardCoder:
    """A fresh coder of ``numel`` values for groups; ``feedback``: send what coding loses next
    time.

    Raises `CodecError` as ``codec`` does.
    """
    found = codec(name)
    return ShardCoder(found, numel, feedback and not found.is_exact)


def codec(name: str) -> FixedCodec:
    """The codec of this name. Raises `CodecError` if it is unknown, or for pairs alone."""
    found = _find(name)
    if not isinstance(found, FixedCodec):
        raise CodecError(
            f"codec {name!r} {CODECS[name].only_in_pairs}: use it in pairs, with group = 2"
        )
    return found


def _find(name: str) -> FixedCodec | Callable[[int], Coder]:
    if name not in CODECS:
        raise CodecError(f"codec {name!r} is {CODECS.unknown(name)}")
    made = CODECS[name].codec
    return cast(
        "FixedCodec | Callable[[int], Coder]", load(made) if isinstance(made, str) else made
    )
