"""Packed text in the trainer: each window once, in an order that a resume continues to the bit."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.packs import write_pack
from lowcomm_node.data.pack import MASKED, Pack, PackTokenizer
from lowcomm_node.data.packed import PackedHeldOut, PackedStream, PackedTraining, PartFile
from lowcomm_node.data.stream import IGNORED, held_out_windows
from lowcomm_node.errors import DataError
from lowcomm_protocol.reading import Deal
from lowcomm_protocol.spec.sections import TextPiece

CONTEXT, VOCAB, BLOCK = 512, 60_000, 2
TOKENIZER = PackTokenizer(vocab=VOCAB)


def pack_of(folder: Path, name: str, pieces: int, *, first: int = 0, masked: bool = False) -> Pack:
    """A pack of whole pieces but for the last, in which token n has the number ``first`` + n."""
    size = 8192 // (2 if masked else 1)
    tokens = first + np.arange(pieces * size - 700)
    if masked:
        tokens[::3] |= MASKED
    documents = [tokens], [first + np.arange(3 * CONTEXT + 5)]
    return write_pack(folder / f"{name}.pack", *documents, TOKENIZER, masked=masked)


def parts_of(*packs: Pack) -> PackedTraining:
    """The files of packs as parts of a run, which shuffles two pieces together."""
    return PackedTraining(tuple(file_of(pack) for pack in packs))


def file_of(pack: Pack, path: Path | None = None, vocab: int = VOCAB, context: int = CONTEXT):
    return PartFile(Deal(pack.text, context, BLOCK), path or pack.path, vocab)


def stream_of(training: PackedTraining, batch: int, shares: Sequence[float] = (1.0,)):
    return PackedStream(training, batch, 7, lambda: shares)


def pieces_of(part: int, count: int, epoch: int = 0) -> list[TextPiece]:
    return [TextPiece(part, epoch, piece) for piece in range(count)]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return pack_of(tmp_path_factory.mktemp("packed"), "text", 5)


def test_every_window_is_drawn_once_in_an_order_of_its_epoch(pack: Pack):
    orders = list[list[int]]()
    for epoch in range(2):
        stream, drawn = stream_of(parts_of(pack), 3), list[int]()
        stream.add(pieces_of(0, 5, epoch))
        while stream.is_ready():
            tokens, targets = stream.next_batch()
            assert tokens.shape == targets.shape == (3, CONTEXT) and tokens.dtype == torch.int64
            inner = targets[:, :-1]
            assert torch.equal(inner, tokens[:, 1:])
            ends = np.isin(tokens[:, -1] + 1, (2 * 8192, 4 * 8192, pack.text.tokens))
            assert (targets[ends, -1] == IGNORED).all(), "what follows is in another block"
            assert (targets[~ends, -1] == tokens[~ends, -1] + 1).all()
            drawn += (tokens[:, 0] // CONTEXT).tolist()
        assert len(drawn) == len(set(drawn)) == 78, "16 windows a piece, 14 in the last"
        orders.append(drawn)
    assert orders[0] != orders[1]
    assert {window // 16 for window in orders[0][:16]} == {0, 1}, "a piece gets some of its block's"


def test_the_pieces_that_were_read_are_told_and_a_batch_waits_for_all_of_its_windows(pack: Pack):
    stream = stream_of(parts_of(pack), 15)
    assert not stream.is_ready()
    stream.add([TextPiece(0, 0, 4)])  # 14 windows
    assert not stream.is_ready()
    with pytest.raises(DataError):
        stream.next_batch()
    stream.add([TextPiece(0, 0, 1)])
    stream.next_batch()
    stream.next_batch()
    ended = [(TextPiece(0, 0, 1), 16), (TextPiece(0, 0, 4), 14)]
    assert sorted(stream.take_ended()) == ended and not stream.take_ended()
    assert not stream.pieces and not stream.is_ready()


def test_a_resume_gives_the_same_next_100_batches_to_the_bit(tmp_path: Path, pack: Pack):
    training = parts_of(pack, pack_of(tmp_path, "more", 7, first=100))
    shares = [0.7, 0.3]
    # Many epochs of small packs.
    queue = [one for epoch in range(12) for part in (0, 1) for one in pieces_of(part, 5, epoch)]
    stream = stream_of(training, 8, shares)
    stream.add(queue)
    for _ in range(23):
        stream.next_batch()
    state, again = stream.state(), stream_of(training, 8, shares)
    again.restore(state)
    assert again.pieces == stream.pieces and not again.is_ready(), "nothing is on the disk yet"
    again.add(again.pieces)
    for number in range(100):
        if number == 50:
            shares[:] = [0.25, 0.75]
        one, other = stream.next_batch(), again.next_batch()
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True)), number
    assert stream.state() == again.state()


def test_a_resumed_piece_that_does_not_come_is_left_out(pack: Pack):
    stream = stream_of(parts_of(pack), 4)
    stream.add(pieces_of(0, 3))
    before = stream.next_batch()[0][:, 0]
    again = stream_of(parts_of(pack), 4)
    again.restore(stream.state())
    again.add(pieces_of(0, 3)[1:])
    assert again.pieces == tuple(pieces_of(0, 3)[1:])
    drawn = list[int]()
    while again.is_ready():
        drawn += again.next_batch()[0][:, 0].tolist()
    assert not set(drawn) & set(before.tolist()) and len(drawn) == len(set(drawn)) == 32


def test_a_part_whose_text_does_not_come_is_read_again_until_it_does(pack: Pack):
    stream = stream_of(parts_of(pack), 4)
    stream.read_again(0, [4])
    assert not stream.is_ready(), "of the last piece not all is there"
    stream.read_again(0, [1, 3])
    for _ in range(40):
        tokens, targets = stream.next_batch()
        assert torch.isin(tokens // 8192, torch.tensor([1, 3])).all()
        assert ((targets == tokens + 1) | (targets == IGNORED)).all()
    assert not stream.take_ended()
    stream.add(pieces_of(0, 1))
    read = [stream.next_batch()[0] for _ in range(4)]
    assert stream.take_ended() == [(TextPiece(0, 0, 0), 16)] and not stream.is_ready()
    assert len(torch.cat(read)[:, 0].unique()) == 16


def test_parts_get_their_shares_to_the_window_also_after_an_amendment(tmp_path: Path):
    packs = [pack_of(tmp_path, f"p{n}", 2, first=20_000 * n) for n in range(3)]
    shares = [0.6, 0.3, 0.0]
    stream, drawn = stream_of(parts_of(*packs), 1, shares), Counter[int]()
    for epoch in range(9):
        stream.add([one for part in range(3) for one in pieces_of(part, 2, epoch)])
    for step in range(180):
        if step == 90:
            assert drawn == {0: 60, 1: 30}
            shares[:] = [0.0, 0.5, 0.5]
        drawn[int(stream.next_batch()[0][0, 0]) // 20_000] += 1
    assert drawn == {0: 60, 1: 75, 2: 45}


def test_masked_tokens_are_read_and_not_learned(tmp_path: Path):
    stream = stream_of(parts_of(pack_of(tmp_path, "masked", 2, masked=True)), 4)
    stream.add(pieces_of(0, 2))
    tokens, targets = stream.next_batch()
    assert int(tokens.max()) < 8192 and (tokens[:, 1:] == tokens[:, :-1] + 1).all()
    masked = (tokens + 1) % 3 == 0
    assert (targets[masked] == IGNORED).all()
    assert (targets[~masked][:-1] > 0).all()


def test_all_peers_evaluate_on_the_same_windows_of_all_parts(tmp_path: Path, pack: Pack):
    other = pack_of(tmp_path, "more", 2, first=30_000)
    parts = parts_of(pack, other).parts
    tokens, targets = held_out_windows(PackedHeldOut(parts), CONTEXT, 4, seed=0)
    assert (tokens[:, 0] // 30_000).tolist() == [0, 1, 0, 1], "a slow machine's few are of all"
    assert torch.equal(targets, tokens + 1)
    everything, _ = held_out_windows(PackedHeldOut(parts), CONTEXT, 99, seed=0)
    assert len(everything) == 6 and torch.equal(everything[:4], tokens)
    with pytest.raises(DataError, match="no window of 4096 tokens"):
        held_out_windows(PackedHeldOut((file_of(pack, context=4096),)), 4096, 1, seed=0)


def test_text_of_another_vocabulary_or_that_is_cut_off_is_refused(tmp_path: Path, pack: Pack):
    with pytest.raises(DataError, match="another vocabulary"):
        file_of(pack, vocab=100).windows(np.array([0]), 8192)
    cut = tmp_path / "cut"
    cut.write_bytes(pack.path.read_bytes()[: 5 * pack.text.piece_bytes + 10])
    with pytest.raises(DataError, match="cut off"):
        file_of(pack, cut).windows(np.array([5 * 8192]), 6 * 8192)
