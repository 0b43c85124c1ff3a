"""What must hold when a node stops training: it tells of where it stands as it has saved it."""

import asyncio
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.waiting import until_async
from lowcomm_node.node.lifecycle import LEAVE_DEADLINE, LONGEST_LEAVE, Training
from lowcomm_node.node.messages import Amend, Checkpoint, Save
from lowcomm_node.status.events import Board
from lowcomm_node.status.model import CheckpointStatus, Progress
from lowcomm_protocol.exchange.events import Outcome
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.spec.amendments import Chain, Course, write_amendment
from lowcomm_protocol.spec.run import parse_toml, sign_run

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
    training = object.__new__(Training)
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
    training._exchanger = SimpleNamespace(
        peer=SimpleNamespace(budget=SimpleNamespace(step_seconds=step))
    )
    training.news = SimpleNamespace(save_seconds=saved)
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
    training._exchanger = SimpleNamespace(close=close, history=history)
    await training.conclude(1.0)
    assert did == ["hold", "save"] * (1 + applied) + ["evaluate"]
    did.clear()
    await training.hurry_out()
    assert did == ["hold", "save"] * (1 + applied)


def hearing() -> Training:
    """The part of a node's training that hears its trainer."""
    training = object.__new__(Training)
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

    training._amending = SimpleNamespace(course=Course(run.spec))
    training._membership = SimpleNamespace(announce=announce)
    training._settings = SimpleNamespace(stay=False)
    training._supervisor = SimpleNamespace(runs=True, trainer=SimpleNamespace(ask=ask))
    training.news = SimpleNamespace(over=asyncio.Event())
    training._amended = asyncio.Event()
    training._board.advance(swarm_step=400)
    assert not await training._goes_on(), "who does not stay leaves"

    training._settings.stay = True

    async def announced_often(times: int) -> bool:
        return len(announced) == times

    waits = asyncio.create_task(training._goes_on())
    await until_async(lambda: announced_often(2), 5, "it waits")
    same = write_amendment(creator, run, Chain(), 0, {"run.description": "no longer than before"})
    training._amending.course = Course(run.spec, same)
    await training.amend()
    await until_async(lambda: announced_often(3), 5, "it waits on")
    longer = write_amendment(creator, run, same, 0, {"run.steps": 500})
    training._amending.course = Course(run.spec, longer)
    await training.amend()
    assert await waits
    assert told == [same.data.decode(), longer.data.decode()]
