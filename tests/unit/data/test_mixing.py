"""What must hold where windows come from several pieces at once: each is read once, pieces end one
after the other, and a resumed stream draws the very same batches."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lowcomm_node.data.packed import PackedStream, PackedTraining, PartFile
from lowcomm_node.data.stream import IGNORED
from lowcomm_protocol.reading import TextPiece, count_mixed
from lowcomm_protocol.spec.sections import PackedText

CONTEXT, BATCH, PER_PIECE = 1024, 4, 8
PIECE_BYTES = 2 * CONTEXT * PER_PIECE


def text_of(pieces: int, piece_bytes: int = PIECE_BYTES) -> PackedText:
    tokens = pieces * piece_bytes // 2
    return PackedText(
        name="a", pieces="0" * 64, tokens=tokens, held_out_tokens=1, piece_bytes=piece_bytes
    )


@pytest.fixture
def training(tmp_path: Path) -> PackedTraining:
    """Each token is the number of its window."""
    text, path = text_of(512), tmp_path / "a.pack"
    (np.arange(512 * PER_PIECE * CONTEXT) // CONTEXT).astype("<u2").tofile(path)
    return PackedTraining((PartFile(text, path, 1 << 16),))


def stream_of(training: PackedTraining) -> PackedStream:
    return PackedStream(training, CONTEXT, BATCH, 0, lambda: (1.0,))


def test_batches_mix_pieces_and_every_window_is_read_once(training: PackedTraining) -> None:
    stream, mixed = stream_of(training), count_mixed(training.parts[0].text, 1)
    pieces = [TextPiece(0, 0, number) for number in range(60, 0, -1)]
    stream.add(pieces)
    windows, ended, at_once = Counter[int](), list[tuple[TextPiece, int]](), list[int]()
    while stream.is_ready():
        tokens, targets = stream.next_batch()
        windows.update(tokens[:, 0].tolist())
        assert ((targets == tokens) | (targets == IGNORED) | (targets == tokens + 1)).all()
        at_once.append(len({int(number) // PER_PIECE for number in tokens[:, 0]}))
        new = stream.take_ended()
        assert len(new) <= 3, "they end one after the other"
        ended += new
    assert windows == Counter(range(PER_PIECE, 61 * PER_PIECE))
    assert mixed == 12 and np.mean(at_once) > 2.5
    assert sorted(ended) == [(piece, PER_PIECE) for piece in sorted(pieces)]
    places = [pieces.index(piece) - place for place, (piece, _) in enumerate(ended)]
    assert max(map(abs, places)) <= mixed, "about in the order of the queue"
    assert not stream.pieces and not stream._open and not stream._drawn


def test_a_resumed_stream_draws_the_same_and_waits_for_all_that_it_mixes(
    training: PackedTraining,
) -> None:
    stream = stream_of(training)
    stream.add(TextPiece(0, 0, number) for number in range(20))
    for _ in range(7):
        stream.next_batch()
    again = stream_of(training)
    again.restore(json.loads(json.dumps(stream.state())))
    first, *rest = again.pieces
    again.add(rest[:0])
    assert not again.is_ready()
    again.add([first, *rest])
    while stream.is_ready():
        for ours, theirs in zip(again.next_batch(), stream.next_batch(), strict=True):
            assert ours.equal(theirs)
    assert not again.is_ready() and again.take_ended()


def test_large_pieces_small_texts_and_many_parts_are_mixed_less() -> None:
    assert count_mixed(text_of(1024), 1) == 12
    assert count_mixed(text_of(256), 1) == 8
    assert count_mixed(text_of(3), 1) == 2
    assert count_mixed(text_of(1024, 1 << 24), 1) == 2
    assert [count_mixed(text_of(1024), parts) for parts in (2, 5, 8)] == [7, 2, 1]
