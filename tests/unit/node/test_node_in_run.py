"""What must hold for a node in a run: it shows what it waits for, and saves before it leaves."""

import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.waiting import until_async
from lowcomm_node.catalogue import WaitCode, Waiting, WarningCode
from lowcomm_node.node.entry import LEAVE_DEADLINE
from lowcomm_node.node.ipc import Event
from lowcomm_node.node.messages import (
    Amend,
    Checkpoint,
    Held,
    NotSaved,
    Save,
    Saved,
    Tokenizing,
)
from lowcomm_node.node.run import HELD, LONGEST_LEAVE, NOT_SAVED, TOKENIZED, Run
from lowcomm_node.status.events import Board, Caution
from lowcomm_node.status.model import CheckpointStatus, Progress
from lowcomm_node.trainer.saving import HANGS
from lowcomm_protocol.exchange.events import Outcome
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.spec.amendments import Chain, SpecTimeline, write_amendment
from lowcomm_protocol.spec.run import parse_toml, sign_run

PEERS = Waiting(WaitCode.LOOKING_FOR_PEERS, "looking for peers")
SAVED = {"swarm_step": 700, "steps": 350, "tokens": 89_600}


class OneThatRunsOn:
    """A trainer whose last steps nobody has heard of when it saves."""

    async def ask(self, request: Save) -> Checkpoint:
        return Checkpoint(path="/checkpoints/700", **SAVED)


async def test_a_node_that_saves_tells_of_the_steps_in_its_checkpoint() -> None:
    async def train(on: bool) -> None:
        assert not on

    board = Board()
    board.advance(swarm_step=696, steps=346, tokens=88_576, loss=1.5)
    training = object.__new__(Run)
    training._board = board
    training._supervisor = SimpleNamespace(train=train, trainer=OneThatRunsOn())
    await training._save()
    assert board.checkpoint == CheckpointStatus(step=700, path="/checkpoints/700")
    assert board.progress == Progress(**SAVED, loss=1.5)


@pytest.mark.parametrize(
    ("step", "saved", "seconds"),
    [
        (0.1, 0.1, 45.4),
        (28.0, None, 45 + 2 * (28 + 44)),
        (28.0, 5.0, 111.0),
        (500.0, 9.0, LONGEST_LEAVE),
    ],
)
def test_a_node_gets_as_long_to_leave_as_a_step_and_a_checkpoint_take(
    step: float, saved: float | None, seconds: float
) -> None:
    training = hearing()
    training.ready = SimpleNamespace(parameters=110_000_000)
    training.exchanger = SimpleNamespace(
        peer=SimpleNamespace(budget=SimpleNamespace(step_seconds=step))
    )
    training._save_seconds = saved
    assert training.leave_seconds == pytest.approx(seconds)
    training.ready = None
    assert training.leave_seconds == LEAVE_DEADLINE


@pytest.mark.parametrize("applied", [0, 1])
async def test_a_node_that_leaves_saves_at_once_and_again_after_a_merge_before_it_evaluates(
    applied: int,
) -> None:
    did: list[str] = []
    history = SimpleNamespace(outcomes=Counter())
    saved = asyncio.Event()

    async def act(name: str, answer: Any, *given: Any) -> Any:
        did.append(name)
        if name == "save":
            saved.set()
        return answer

    async def close(reason: str, patience: float) -> None:
        await asyncio.wait_for(saved.wait(), 20)
        history.outcomes[Outcome.APPLIED] += applied

    async def ask(request: Any) -> Any:
        return await act(request.wire_name, Checkpoint(path="/700", **SAVED))

    trainer = SimpleNamespace(ask=ask)
    training = hearing()
    training._supervisor = SimpleNamespace(train=partial(act, "hold", None), trainer=trainer)
    training.exchanger = SimpleNamespace(close=close, history=history)
    await training.conclude(1.0)
    assert did == ["hold", "save"] * (1 + applied) + ["evaluate"]
    did.clear()
    await training._save_while_exchanges_end(1.0)
    assert did == ["hold", "save"] * (1 + applied)


def hearing() -> Run:
    """The part of a node's training that hears its trainer."""
    training = object.__new__(Run)
    training._board = Board()
    return training


async def test_a_node_that_stays_goes_on_when_the_creator_makes_the_run_longer() -> None:
    creator = Identity(b"c" * 32)
    run = sign_run(parse_toml('[run]\nname = "a"\nsteps = 400\n'), creator)
    training, announced, told = hearing(), list[str](), list[str]()

    async def announce(phase: str) -> None:
        announced.append(phase)

    async def ask(request: Amend) -> None:
        told.append(request.amendments)

    amending = SimpleNamespace(course=SpecTimeline(run.spec))
    training._admission = SimpleNamespace(amending=amending)
    membership: Any = SimpleNamespace(announce=announce)
    training._settings = SimpleNamespace(stay=False)
    training._supervisor = SimpleNamespace(runs=True, trainer=SimpleNamespace(ask=ask))
    training._over = asyncio.Event()
    training._amended = asyncio.Event()
    training._board.advance(swarm_step=400)
    assert not await training._goes_on(membership), "who does not stay leaves"

    training._settings.stay = True

    async def announced_often(times: int) -> bool:
        return len(announced) == times

    waits = asyncio.create_task(training._goes_on(membership))
    await until_async(lambda: announced_often(2), 5, "it waits")
    same = write_amendment(creator, run, Chain(), 0, {"run.description": "no longer than before"})
    amending.course = SpecTimeline(run.spec, same)
    await training.amend()
    await until_async(lambda: announced_often(3), 5, "it waits on")
    longer = write_amendment(creator, run, same, 0, {"run.steps": 500})
    amending.course = SpecTimeline(run.spec, longer)
    await training.amend()
    assert await waits
    assert told == [same.data.decode(), longer.data.decode()]


@pytest.mark.parametrize("then", [
    Saved(swarm_step=700, path="/checkpoints/700", seconds=1.0, after_trouble=False),
    NotSaved(reason="No room."),
])  # fmt: skip
def test_a_node_whose_training_waits_for_its_disk_says_so_until_that_is_over(then: Event) -> None:
    news = hearing()
    board = news._board
    news.hear(Held())
    assert board.waiting == HELD
    news.hear(then)
    assert board.waiting is None


def test_the_newest_reason_why_nothing_is_saved_takes_the_place_of_the_one_before() -> None:
    news = hearing()
    board = news._board
    for reason in (HANGS, "The disk is gone."):
        news.hear(NotSaved(reason=reason))
    assert board.warnings == [Caution(WarningCode.NOT_SAVED, f"{NOT_SAVED} The disk is gone.")]
    news.hear(Saved(swarm_step=700, path="/checkpoints/700", seconds=1.0, after_trouble=True))
    assert not board.warnings


def test_a_node_that_tokenizes_says_how_far_it_is_and_how_long_it_takes_yet() -> None:
    news = hearing()
    board = news._board
    progress = Tokenizing(
        done=52_000_000, total=400_000_000, tokens=11_000_000, rate=2.9e6, remaining=120.0
    )
    news.hear(progress)
    assert board.tokenizing == progress
    expected = "tokenizing the text: 13 %, 52.0 MB of 400.0 MB, 2.9 MB/s, about 2:00 left"
    assert board.waiting == Waiting(WaitCode.TOKENIZING, expected)
    news.hear(replace(progress, done=400_000_000, remaining=0.0))
    assert board.waiting == Waiting(WaitCode.STARTING_TRAINER, TOKENIZED)
