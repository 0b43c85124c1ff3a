"""What must hold for what a node hears of its trainer: it shows what it waits for, and until
when."""

from dataclasses import replace

import pytest

from lowcomm_node.catalogue import WaitCode, Waiting, WarningCode
from lowcomm_node.node.ipc import Event
from lowcomm_node.node.messages import Evaluated, Evaluating, Held, NotSaved, Saved, Tokenizing
from lowcomm_node.node.news import EVALUATING, HELD, NOT_SAVED, TOKENIZED, News
from lowcomm_node.node.supervisor import Failures
from lowcomm_node.status.events import Board, Caution
from lowcomm_node.sync.exchanger import Exchanger
from lowcomm_node.trainer.saving import HANGS

PEERS = Waiting(WaitCode.LOOKING_FOR_PEERS, "looking for peers")


def hearing() -> tuple[Board, News]:
    """A board, and what hears for it; no step is heard, so nothing is exchanged."""
    board = Board()
    return board, News(board, Failures(margin=100), object.__new__(Exchanger))


@pytest.mark.parametrize("then", [
    Saved(swarm_step=700, path="/checkpoints/700", seconds=1.0, after_trouble=False),
    NotSaved(reason="No room."),
])  # fmt: skip
def test_a_node_whose_training_waits_for_its_disk_says_so_until_that_is_over(then: Event) -> None:
    board, news = hearing()
    news.hear(Held())
    assert board.waiting == HELD
    news.hear(then)
    assert board.waiting is None


def test_what_else_a_node_waits_for_by_now_is_not_taken_back() -> None:
    board, news = hearing()
    news.hear(Held())
    board.show(PEERS)
    news.hear(NotSaved(reason="No room."))
    assert board.waiting == PEERS


def test_the_newest_reason_why_nothing_is_saved_takes_the_place_of_the_one_before() -> None:
    board, news = hearing()
    for reason in (HANGS, "The disk is gone."):
        news.hear(NotSaved(reason=reason))
    assert board.warnings == [Caution(WarningCode.NOT_SAVED, f"{NOT_SAVED} The disk is gone.")]
    news.hear(Saved(swarm_step=700, path="/checkpoints/700", seconds=1.0, after_trouble=True))
    assert not board.warnings


def test_a_node_that_tokenizes_says_how_far_it_is_and_how_long_it_takes_yet() -> None:
    board, news = hearing()
    progress = Tokenizing(
        done=52_000_000, total=400_000_000, tokens=11_000_000, rate=2.9e6, remaining=120.0
    )
    news.hear(progress)
    assert board.tokenizing == progress
    expected = "tokenizing the text: 13 %, 52.0 MB of 400.0 MB, 2.9 MB/s, about 2:00 left"
    assert board.waiting == Waiting(WaitCode.TOKENIZING, expected)
    news.hear(replace(progress, done=400_000_000, remaining=0.0))
    assert board.waiting == Waiting(WaitCode.STARTING_TRAINER, TOKENIZED)


@pytest.mark.parametrize(("phase", "before"), [("syncing", PEERS), ("training", None)])
def test_a_node_that_evaluates_says_so(phase: str, before: Waiting | None) -> None:
    board, news = hearing()
    board.enter(phase, before)
    news.hear(Evaluating())
    assert board.waiting == EVALUATING
    news.hear(Evaluated(loss=1.5, tokens=512, swarm_step=3, steps=3))
    assert board.waiting is None
