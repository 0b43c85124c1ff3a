"""``[start]``: the weights that a run begins with, where it does not begin with random ones.

The section pins files by size and digest, whoever they come from. A file travels in pieces of
``PIECE_BYTES``; the last one is shorter. ``pieces`` pins the list of their digests, so that one
wrong piece is found as soon as it has come.
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import Annotated, Self

from pydantic import Field, model_validator

from lowcomm_protocol.spec.settings import Settings

PIECE_BYTES = 16 * 1024 * 1024
MAX_FILES = 64
"""With so many the specification still fits into its record."""
MAX_FILE_BYTES = 1 << 40
DIGEST_BYTES = 32

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class StartFile(Settings):
    """One file of weights."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.safetensors$")]
    """Its name alone: it never is a path."""
    size: Annotated[int, Field(ge=1, le=MAX_FILE_BYTES)]
    """Bytes."""
    sha256: Digest
    pieces: Digest
    """SHA-256 of the SHA-256s of its pieces, one after the other."""


class StartSettings(Settings):
    """``[start]``: ``init --from`` fills it in. No files: random weights, drawn from the seed."""

    files: Annotated[tuple[StartFile, ...], Field(strict=False, max_length=MAX_FILES)] = ()
    """Files of weights in safetensors, under the names of transformers."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        if len({file.name for file in self.files}) < len(self.files):
            raise ValueError("two files have the same name: each is listed once")
        return self

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def count_pieces(size: int) -> int:
    """How many pieces a file of so many bytes has."""
    return -(-size // PIECE_BYTES)


def digest_of_pieces(digests: Sequence[bytes]) -> str:
    """What ``StartFile.pieces`` says of a file whose pieces have these digests."""
    return sha256(b"".join(digests)).hexdigest()
