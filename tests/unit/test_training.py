"""What must hold when a node stops training: it tells of where it stands as it has saved it."""

from types import SimpleNamespace
from typing import Any

import pytest

from lowcomm_node.bulletin import Bulletin
from lowcomm_node.trainer.saving import HANGS
from lowcomm_node.training import HELD, NOT_SAVED, Training

SAVED = {"swarm_step": 700, "steps": 350, "tokens": 89_600}


class OneThatRunsOn:
    """A trainer whose last steps nobody has heard of when it saves."""

    async def save(self) -> dict[str, Any]:
        return {**SAVED, "path": "/checkpoints/700"}


async def test_a_node_that_saves_tells_of_the_steps_in_its_checkpoint() -> None:
    async def train(on: bool) -> None:
        assert not on

    bulletin = SimpleNamespace(
        progress={"swarm_step": 696, "steps": 346, "tokens": 88_576, "loss": 1.5}, checkpoint=None
    )
    training = object.__new__(Training)
    training._bulletin = bulletin
    training._supervisor = SimpleNamespace(train=train, trainer=OneThatRunsOn())
    await training._save()
    assert bulletin.checkpoint == {"step": 700, "path": "/checkpoints/700"}
    assert bulletin.progress == {**SAVED, "loss": 1.5}


@pytest.mark.parametrize("then", [
    {"event": "saved", "swarm_step": 700, "path": "/checkpoints/700", "after_trouble": False},
    {"event": "not-saved", "reason": "No room."},
])  # fmt: skip
def test_a_node_whose_training_waits_for_its_disk_says_so_until_that_is_over(then: dict[str, Any]) -> None:
    training = hearing()
    training.on_news({"event": "held"})
    assert training._bulletin.waiting == HELD
    training.on_news(then)
    assert training._bulletin.waiting is None


def test_what_else_a_node_waits_for_by_now_is_not_taken_back() -> None:
    training = hearing()
    training.on_news({"event": "held"})
    training._bulletin.show("peers")
    training.on_news({"event": "not-saved", "reason": "No room."})
    assert training._bulletin.waiting == "peers"


def test_the_newest_reason_why_nothing_is_saved_takes_the_place_of_the_one_before() -> None:
    training = hearing()
    for reason in (HANGS, "The disk is gone."):
        training.on_news({"event": "not-saved", "reason": reason})
    assert training._bulletin.warnings == [f"{NOT_SAVED} The disk is gone."]
    training.on_news({"event": "saved", "swarm_step": 700, "path": "/checkpoints/700", "after_trouble": True})
    assert not training._bulletin.warnings


def test_a_node_that_tokenizes_says_how_far_it_is_and_how_long_it_takes_yet() -> None:
    training = hearing()
    progress = {"done": 52_000_000, "total": 400_000_000, "tokens": 11_000_000, "rate": 2.9e6, "remaining": 120.0}
    training.on_news({"event": "tokenizing", **progress})
    assert training._bulletin.tokenizing == progress
    expected = "tokenizing the text: 13 %, 52.0 MB of 400.0 MB, 2.9 MB/s, about 2:00 left"
    assert training._bulletin.waiting == expected


def hearing() -> Training:
    """The part of a node's training that hears its trainer."""
    training = object.__new__(Training)
    training._bulletin = Bulletin()
    return training
