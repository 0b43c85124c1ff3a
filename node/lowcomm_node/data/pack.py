"""A pack: one text as tokens, in a file of whole pieces that a run pins by their digests.

NAME.pack          pieces of training text, then of held-out text, the last of each kind padded
                   with zeros; tokens are little-endian integers of 2 or 4 bytes
NAME.pack.pieces   SHA-256 of each piece, 32 bytes a piece
NAME.pack.json     description, signed by the pack's maker
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from lowcomm_node.errors import ConfigError, DataError
from lowcomm_node.storage.files import read_small, sync, write_atomic
from lowcomm_protocol.errors import SignatureError
from lowcomm_protocol.identity import Identity, verify
from lowcomm_protocol.spec.document import encode, expected_in_words
from lowcomm_protocol.spec.sections import (
    BYTES,
    DIGEST_BYTES,
    PIECE_BYTES,
    SMALLEST_PIECE,
    PackedText,
    Settings,
    Token,
)

ENDING = ".pack"
MASKED = 1 << 31
"""Bit of a token of 4 bytes that is read, but not learned."""
MOST_PIECES = 16 * 64
"""Pieces of a text below 16 GiB, about: 16 for each of 64 peers."""
MAX_DESCRIPTION_BYTES = 64 * 1024
_PURPOSE = "pack"
Count = Annotated[int, Field(ge=0, le=1 << 50)]
Show = Callable[[int, int, int], None]
"""Takes bytes done, bytes in all, and tokens made of them."""


class PackTokenizer(Settings):
    """Tokenizer of a pack, named as in ``[data]`` of a run."""

    name: Literal["bytes", "builtin:stories", "local"] = "bytes"
    sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """SHA-256 of the tokenizer.json; empty where there is no file."""
    vocab: Annotated[int, Field(ge=1, le=1_000_000)] = BYTES
    """Exclusive upper bound of the tokens."""
    begin_tokens: Annotated[tuple[Token, ...], Field(strict=False, max_length=8)] = ()
    """Tokens before each document."""
    end_token: Token | None = None
    """Token after each document; None: documents have no end."""


class PackDescription(Settings):
    """What is in a pack."""

    text: PackedText
    """Entry of ``[[data.parts]]``, with the default share and no mirrors."""
    tokenizer: PackTokenizer
    documents: Count = 0
    held_out_documents: Count = 0
    duplicates: Count = 0
    """Documents left out as copies of others."""
    licence: Annotated[str, Field(max_length=200)] = ""
    words: Annotated[str, Field(max_length=4000)] = ""
    """Words of the maker to people."""


@dataclass(frozen=True)
class Pack:
    """A pack on disk, whose list of digests is the one described; pieces are not read yet."""

    path: Path
    description: PackDescription
    maker: str
    """Peer id of the signer; empty: a private pack."""
    digests: bytes = field(repr=False)
    """SHA-256 of each piece, one after another."""

    @property
    def text(self) -> PackedText:
        """Entry of ``[[data.parts]]``."""
        return self.description.text

    def tokens(self, piece: int) -> NDArray[Any]:
        """Memory map of the tokens of a piece without its padding, uint16 or uint32."""
        text = self.text
        first = 0 if piece < text.training_pieces else text.training_pieces
        count = text.held_out_tokens if first else text.tokens
        left = min(text.piece_tokens, count - (piece - first) * text.piece_tokens)
        place = piece * text.piece_bytes
        return np.memmap(self.path, f"<u{text.token_bytes}", "r", offset=place, shape=(left,))

    def first_wrong_piece(self, show: Show = lambda *_: None) -> int | None:
        """Read all pieces, several at a time; the first that differs from its digest."""
        size = self.text.piece_bytes
        for piece, digest in enumerate(_digests_of(self.path, size, self.text.piece_count)):
            if digest != self.digests[piece * DIGEST_BYTES : (piece + 1) * DIGEST_BYTES]:
                return piece
            show((piece + 1) * size, self.text.size, (piece + 1) * self.text.piece_tokens)
        return None


def read_pack(path: Path, is_private: bool = False) -> Pack:
    """Open a pack: its sizes, list of digests and signature are checked, its pieces are not.
    Raises DataError."""
    data = read_small(_beside(path, ".json"), MAX_DESCRIPTION_BYTES)
    description, maker = read_description(data, is_private)
    text = description.text
    digests = read_small(_beside(path, ".pieces"), text.piece_count * DIGEST_BYTES)
    if sha256(digests).hexdigest() != text.pieces:
        raise DataError(
            f"{path}.pieces is missing, or not the list of {path}.json: copy all three files of "
            "the pack again."
        )
    size = path.stat().st_size if path.is_file() else 0
    if size != text.size:
        raise DataError(
            f"{path} has {size:,} bytes, its description says {text.size:,}: copy it again."
        )
    return Pack(path, description, maker, digests)


def find_packs(*paths: Path) -> list[Pack]:
    """The packs at paths, or in folders, by name. Raises ConfigError, DataError."""
    found: list[Pack] = []
    for path in paths:
        packs = sorted(path.glob(f"*{ENDING}")) if path.is_dir() else [path]
        if not packs or not all(pack.is_file() for pack in packs):
            raise ConfigError(
                f"{path} is neither a pack nor a folder of packs: name a file that `lowcomm-node "
                "data pack` wrote."
            )
        found += map(read_pack, packs)
    return found


def read_description(data: bytes, is_private: bool = False) -> tuple[PackDescription, str]:
    """The description, and the peer id of its signer; none signs a private one. Raises
    DataError."""
    try:
        envelope = json.loads(data)
        content, maker = envelope["description"], str(envelope["maker"])
        document = encode(content)
        signature = bytes.fromhex(envelope["signature"])
        description = PackDescription.model_validate_json(document)
        if is_private and signature != sha256(document).digest():
            raise ValueError
        if not is_private:
            verify(maker, _PURPOSE, document, signature)
    except SignatureError as error:
        raise DataError(f"The description of a pack: {error} Copy it again.") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[:80]
        raise DataError(
            f"The description of a pack: {where}: {expected_in_words(first)}: copy it again, or "
            "install the release that wrote it."
        ) from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise DataError(
            "The description of a pack is missing or damaged: copy NAME.pack, NAME.pack.pieces and "
            "NAME.pack.json together."
        ) from None
    return description, maker


def token_type(vocab: int, masked: bool) -> np.dtype[Any]:
    """Type of the tokens of a pack."""
    return np.dtype("<u4" if masked or vocab > 1 << 16 else "<u2")


def seal(
    path: Path,
    data: Path,
    sizes: tuple[int, int],
    maker: Identity | None,
    tokenizer: PackTokenizer,
    piece_bytes: int | None,
    masked: bool,
    facts: Mapping[str, Any],
    show: Show = lambda *_: None,
) -> Pack:
    """Make a pack of a file of training tokens and the file ``held_out`` beside it, whose first
    ``sizes`` bytes are its tokens.

    May be called again after a crash, with the files as they are. Raises DataError if it would be
    too large, DiskFull.
    """
    width = token_type(tokenizer.vocab, masked).itemsize
    train_bytes, held_out_bytes = sizes
    piece_bytes = piece_bytes or piece_bytes_of(sum(sizes))
    start = -(-train_bytes // piece_bytes) * piece_bytes
    end = start + -(-held_out_bytes // piece_bytes) * piece_bytes
    with data.open("r+b") as file, data.with_name("held_out").open("rb") as held_out:
        file.truncate(train_bytes)
        file.truncate(start)
        file.seek(start)
        shutil.copyfileobj(held_out, file, PIECE_BYTES)
        file.truncate(end)
    sync(data)
    digests = bytearray()
    for digest in _digests_of(data, piece_bytes, end // piece_bytes):
        digests += digest
        done = len(digests) // DIGEST_BYTES * piece_bytes
        show(done, end, done // width)
    name = re.sub(r"[^a-z0-9._-]+", "-", path.name.lower().removesuffix(ENDING)).lstrip("._-")
    try:
        text = PackedText(
            name=name[:64] or "text",
            pieces=sha256(digests).hexdigest(),
            tokens=train_bytes // width,
            held_out_tokens=held_out_bytes // width,
            piece_bytes=piece_bytes,
            token_bytes=4 if width == 4 else 2,
            masked=masked,
        )
        description = PackDescription(text=text, tokenizer=tokenizer, **facts)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise DataError(f"{path.name}: {expected_in_words(first)}.") from None
    write_atomic(_beside(path, ".pieces"), bytes(digests))
    write_atomic(_beside(path, ".json"), write_description(description, maker))
    data.replace(path)
    sync(path.parent)
    return Pack(path, description, maker.peer_id if maker else "", bytes(digests))


def piece_bytes_of(size: int) -> int:
    """Bytes of a piece, for a pack of about ``size`` bytes."""
    largest = 1 << max(0, (size // MOST_PIECES).bit_length() - 1)
    return max(SMALLEST_PIECE, min(PIECE_BYTES, largest))


def write_description(description: PackDescription, maker: Identity | None) -> bytes:
    """The signed description, for people and `read_description`. A private one has a digest in
    place of a signature, so that nobody else takes it."""
    content = description.model_dump(mode="json")
    document, peer_id = encode(content), maker.peer_id if maker else ""
    signature = maker.sign(_PURPOSE, document) if maker else sha256(document).digest()
    whole = {"description": content, "maker": peer_id, "signature": signature.hex()}
    return json.dumps(whole, indent=1, ensure_ascii=False).encode() + b"\n"


def _digests_of(path: Path, size: int, count: int) -> Iterator[bytes]:
    """SHA-256 of each piece of a file, in order; several are read at a time."""
    threads = min(8, os.cpu_count() or 1)
    descriptor = os.open(path, os.O_RDONLY)

    try:
        with ThreadPoolExecutor(threads) as pool:
            for first in range(0, count, 8 * threads):
                yield from pool.map(
                    lambda piece: sha256(os.pread(descriptor, size, piece * size)).digest(),
                    range(first, min(count, first + 8 * threads)),
                )
    finally:
        os.close(descriptor)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)
