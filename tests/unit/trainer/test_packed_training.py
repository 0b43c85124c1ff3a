"""Training on packed text: it waits for pieces and says so, tells which it has read, and resumes
with the very batches that would have come."""

from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.driven_trainer import Driven, driven
from helpers.packs import write_pack
from lowcomm_node.data.pack import Pack
from lowcomm_node.node.messages import AddText, Evaluate, Evaluated, PieceRead, Save, TextAwaited
from lowcomm_protocol.reading import TextPiece

RUN = """
[data]
source = "packed"
shuffle_bytes = 16384
[[data.parts]]
name = "text"
pieces = "{text.pieces}"
tokens = {text.tokens}
held_out_tokens = {text.held_out_tokens}
piece_bytes = {text.piece_bytes}
"""
FIRST, SECOND = TextPiece(0, 0, 1), TextPiece(0, 0, 0)
WINDOWS = 100 // 2
"""Steps for the second piece, which is the shorter one: 100 windows of 16 tokens."""


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("pack")
    splits = ([rng.integers(1, 256, size)] for size in (8192 + 1600, 600))
    return write_pack(folder / "text.pack", *splits)


def training(folder: Path, pack: Pack, *peers: str):
    return driven(folder, *peers, more=RUN.format(text=pack.text), packs=(str(pack.path),))


def add(one: Driven, *pieces: TextPiece) -> None:
    one.ask(AddText(pieces=pieces))


def test_it_waits_for_text_and_tells_the_pieces_that_it_has_read(tmp_path: Path, pack: Pack):
    with training(tmp_path, pack, "a") as (one,):
        one.steps(0)
        assert [event.waits for event in one.events(TextAwaited)] == [True]
        assert not one.loop._can_step()
        add(one, FIRST)
        assert one.loop._can_step()
        one.steps(WINDOWS)
        assert one.events(PieceRead) == [PieceRead(part=0, epoch=0, piece=1, windows=100)]
        assert [event.waits for event in one.events(TextAwaited)] == [True, False, True]
        one.ask(Evaluate())
        assert one.events(Evaluated)[0].tokens == 600 // 16 * 16, "all of the held-out text"


def test_a_restart_goes_on_with_the_same_batches_once_it_has_its_pieces(tmp_path: Path, pack: Pack):
    with training(tmp_path, pack, "a") as (one,):
        add(one, FIRST, SECOND)
        one.steps(30)
        one.ask(Save())
        expected = [one.replica.stream.next_batch() for _ in range(100)]
    with training(tmp_path, pack, "a") as (again,):
        assert again.built.text == (FIRST, SECOND)
        again.steps(0)
        assert not again.loop._can_step(), "its pieces may have gone from the disk"
        add(again, FIRST, SECOND)
        for batch in expected:
            assert all(map(torch.equal, again.replica.stream.next_batch(), batch))
