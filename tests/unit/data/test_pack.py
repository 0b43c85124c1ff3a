"""Packs: what is written is read again, and what is not so is refused with its name."""

import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from helpers.packs import write_pack
from lowcomm_node.data.pack import (
    DataError,
    Pack,
    PackDescription,
    PackTokenizer,
    find_packs,
    piece_bytes_of,
    read_pack,
    write_description,
)
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.spec.sections import PIECE_BYTES, SMALLEST_PIECE, PackedText

MAKER = Identity(bytes(range(32)))


def small_pack(folder: Path, documents: int = 40, **more: object) -> Pack:
    """A pack of documents of 1,000 tokens, of which each tenth is held out."""
    made = [np.r_[np.full(999, number % 200 + 1), 0] for number in range(documents)]
    held_out, train = made[::10], [one for number, one in enumerate(made) if number % 10]
    return write_pack(folder / "small.pack", train, held_out, **more)  # pyright: ignore[reportArgumentType]


def test_a_pack_holds_the_tokens_of_each_split_in_pieces_of_their_own(tmp_path: Path):
    pack = small_pack(tmp_path)
    assert read_pack(pack.path) == pack
    text = pack.text
    assert (text.tokens, text.held_out_tokens, text.piece_bytes) == (36_000, 4_000, SMALLEST_PIECE)
    assert (text.training_pieces, text.piece_count) == (5, 6)
    assert pack.path.stat().st_size == text.size == 6 * SMALLEST_PIECE
    read = np.concatenate([pack.tokens(piece) for piece in range(5)])
    assert len(read) == 36_000 and list(read[[0, 998, 999, 1000]]) == [2, 2, 0, 3]
    assert list(np.unique(pack.tokens(5))) == [0, 1, 11, 21, 31]
    assert text.pieces == sha256(pack.digests).hexdigest() and text.name == "small"


def test_masked_tokens_have_four_bytes(tmp_path: Path):
    pack = small_pack(tmp_path, masked=True)
    assert pack.text.token_bytes == 4 and pack.text.masked
    assert pack.tokens(0).dtype == np.uint32


def test_the_first_wrong_piece_is_named(tmp_path: Path):
    pack = small_pack(tmp_path)
    assert pack.first_wrong_piece() is None
    with pack.path.open("r+b") as file:
        for piece in (4, 2):
            file.seek(piece * SMALLEST_PIECE + 7)
            file.write(b"\xff")
    assert pack.first_wrong_piece() == 2


def test_other_files_than_those_described_are_refused(tmp_path: Path):
    pack = small_pack(tmp_path)
    description, digests = tmp_path / "small.pack.json", tmp_path / "small.pack.pieces"
    whole = description.read_text()
    for wrong, words in (
        (whole.replace('"tokens": 36000', '"tokens": 36001'), "signature"),
        (whole.replace('"documents": 0', '"documents": -1'), "documents"),
        (whole.replace('"maker": "12D3', '"maker": "12D4'), "peer id"),
        ("[" * 60_000, "missing or damaged"),
        ("{}", "missing or damaged"),
    ):
        description.write_text(wrong)
        with pytest.raises(DataError, match=words):
            read_pack(pack.path)
    description.write_text(whole)
    digests.write_bytes(bytes(len(pack.digests)))
    with pytest.raises(DataError, match="list"):
        read_pack(pack.path)
    digests.write_bytes(pack.digests)
    with pack.path.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(DataError, match="98,305 bytes"):
        read_pack(pack.path)


def test_a_folder_has_its_packs_by_name(tmp_path: Path):
    small_pack(tmp_path)
    write_pack(tmp_path / "A B.pack", [np.arange(9)], [np.arange(3)])
    assert [pack.text.name for pack in find_packs(tmp_path)] == ["a-b", "small"]
    assert json.loads((tmp_path / "A B.pack.json").read_text())["maker"] == MAKER.peer_id


def test_pieces_are_smaller_in_small_texts():
    assert piece_bytes_of(100) == SMALLEST_PIECE
    assert piece_bytes_of(1 << 30) == 1 << 20
    assert piece_bytes_of(1 << 43) == PIECE_BYTES


def test_a_pack_of_a_trillion_tokens_opens_without_reading_it(tmp_path: Path):
    count = 119_210
    tokens = 119_209 * PIECE_BYTES // 2
    digests = b"".join(sha256(piece.to_bytes(4)).digest() for piece in range(count))
    pinned = sha256(digests).hexdigest()
    text = PackedText(name="large", pieces=pinned, tokens=tokens, held_out_tokens=1)
    described = PackDescription(text=text, tokenizer=PackTokenizer(vocab=50_257))
    path = tmp_path / "large.pack"
    with path.open("wb") as file:
        file.truncate(text.size)
    (tmp_path / "large.pack.pieces").write_bytes(digests)
    (tmp_path / "large.pack.json").write_bytes(write_description(described, MAKER))
    pack = read_pack(path)
    assert pack.text.piece_count == count and len(pack.digests) == 32 * count
    assert pack.tokens(count - 1).shape == (1,)
