"""What must hold for the trainer's life: how it ended is known, one that hangs is ended, one that
is slow is not."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest

from helpers.light_trainer import LightTrainer
from helpers.waiting import until_async
from lowcomm_node.errors import TrainerError, TrainerLost
from lowcomm_node.node import supervisor as supervisor_module
from lowcomm_node.node.ipc import FailureKind, TrainerEvent
from lowcomm_node.node.messages import Cooling, InnerStepTaken, Save, TrainerSettings, failure_of
from lowcomm_node.node.supervisor import (
    FACTOR,
    FIRST_PAUSE,
    FIRST_STEP,
    MOST,
    Failure,
    Failures,
    Supervisor,
    TrainerPace,
)
from lowcomm_node.system import tasks
from lowcomm_node.system.machine import GIB, memory_of

pytestmark = pytest.mark.slow

SETTINGS = TrainerSettings(spec="", peer_id="", checkpoints="", data_cache="")
DEADLINE = 20.0


@asynccontextmanager
async def supervised(
    *behaviours: str, least_silence: float = 60.0
) -> AsyncIterator[tuple[Supervisor, list[TrainerEvent]]]:
    """A supervisor whose trainers behave so, one after the other; all are ended."""
    told: list[TrainerEvent] = []
    lives, before = iter(behaviours), psutil.Process().children()
    one = Supervisor(lambda: LightTrainer(next(lives)), told.append, least_silence=least_silence)
    try:
        yield one, told
    finally:
        await one.stop()
        assert set(psutil.Process().children()) <= set(before)


def steps_of(told: list[TrainerEvent]) -> list[int]:
    return [event.steps for event in told if isinstance(event, InnerStepTaken)]


async def lost(one: Supervisor) -> TrainerLost:
    with pytest.raises(TrainerLost) as caught:
        async with asyncio.timeout(DEADLINE):
            await one.wait_lost()
    return caught.value


async def test_one_that_takes_more_memory_than_is_allowed_is_ended_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor_module, "TICK", 0.02)
    allowed = (memory_of(os.getpid()) + 128 * 2**20) / GIB
    async with supervised(f"eat:5:{256 * 2**20}") as (one, told):
        await one.start(SETTINGS.model_copy(update={"max_memory": allowed}))
        await one.train(True)
        error = await lost(one)
        assert "--max-memory allows" in str(error) and steps_of(told)[:4] == [1, 2, 3, 4]
        assert (await one.explain(error)).kind is FailureKind.MEMORY


async def test_processes_of_all_devices_are_looked_at_and_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor_module, "TICK", 0.02)
    most = memory_of(os.getpid()) + 128 * 2**20
    async with supervised("rank:1", f"rank:{256 * 2**20}") as (one, _):
        settings = SETTINGS.model_copy(update={"max_memory": most / GIB})
        await one.start(settings)
        await until_async(lambda: bool(one.accelerators and one.memory), DEADLINE, "a look at both")
        seen = [(each.device, each.kind, each.speed) for each in one.accelerators]
        assert seen == [("cpu", "cpu", 1.0), ("cpu (rank 1)", "cpu", 0.5)]
        await one.stop()
        assert one.accelerators == ()
        await one.start(settings)
        assert "--max-memory allows" in str(await lost(one))


async def test_a_defect_in_news_or_in_a_look_ends_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "TICK", 0.02)
    monkeypatch.setattr(tasks, "DEFECT_PAUSE", 0.01)
    failures = [RuntimeError("no such process")] * 2
    warnings: list[str] = []
    heard: list[TrainerEvent] = []

    def look(pid: int, shared: bool = True) -> int:
        if failures:
            raise failures.pop()
        return 2 * GIB if heard else 0

    def hear(event: TrainerEvent) -> None:
        heard.append(event)
        raise RuntimeError("an odd event")

    monkeypatch.setattr(supervisor_module, "memory_of", look)
    one = Supervisor(lambda: LightTrainer(""), hear, warn=warnings.append)
    try:
        await one.start(SETTINGS.model_copy(update={"max_memory": 1.0}))
        await one.train(True)
        assert "--max-memory allows" in str(await lost(one))
        assert sorted("odd" in text for text in warnings) == [False, True], warnings
    finally:
        await one.stop()


async def test_one_that_is_killed_is_lost_with_the_reason_and_another_takes_its_place() -> None:
    async with supervised("die:3", "") as (one, told):
        await one.start(SETTINGS)
        first = one.pid
        await one.train(True)
        error = await lost(one)
        assert steps_of(told) == [1, 2]
        failure = await one.explain(error)
        assert (failure.kind, failure.step) == (FailureKind.DIED, 2) and "SIGKILL" in failure.reason
        assert not one.runs
        with pytest.raises(TrainerLost):
            await one.trainer.ask(Save())
        await one.stop()
        with pytest.raises(TrainerError, match="does not run now"):
            _ = one.trainer
        await one.start(SETTINGS)
        assert one.runs and one.pid != first and one.restarts == 1


async def test_one_that_can_not_be_built_says_so_itself() -> None:
    async with supervised("refuse:78:name it with --data PATH") as (one, _):
        with pytest.raises(TrainerError, match="--data PATH") as caught:
            await one.start(SETTINGS)
        assert not isinstance(caught.value, TrainerLost)
        assert (await one.explain(caught.value)).kind is FailureKind.UNFIT


@pytest.mark.slow
async def test_one_that_hangs_is_killed_and_one_that_is_held_does_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor_module, "TICK", 0.05)
    async with supervised("", least_silence=2.0) as (one, heard):
        await one.start(SETTINGS)
        await one.train(True)
        await until_async(lambda: len(heard) > 5, DEADLINE, "steps")
        await one.train(False)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3.0):
                await one.wait_lost()
        await one.train(True)
        count = len(heard)
        await until_async(lambda: len(heard) > count, DEADLINE, "steps again")
        assert one.pid is not None
        one.trainer.news.put_nowait(Cooling(why="its GPU is hot"))
        os.kill(one.pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3.0):
                await one.wait_lost()
        one.trainer.news.put_nowait(Cooling(why=""))
        error = await lost(one)
        assert "hangs: no step for" in str(error)
        with pytest.raises(TrainerLost):  # whoever waits for it must not wait for long
            await asyncio.wait_for(one.trainer.ask(Save()), DEADLINE)
        assert (await one.explain(error)).kind is FailureKind.HUNG


# its pace


def pace(steps: int, gap: float, least: float = 60.0) -> TrainerPace:
    """A pace after so many steps, at time ``steps * gap``."""
    one = TrainerPace(0.0, least)
    one.tick(0.0)
    for number in range(1, steps + 1):
        tick(one, (number - 1) * gap, number * gap)
        one.stepped()
    return one


def tick(one: TrainerPace, start: float, end: float) -> None:
    """Ticks of a second."""
    now = start
    while now < end:
        now = min(end, now + 1.0)
        one.tick(now)


def test_the_deadline_follows_the_longest_usual_silence() -> None:
    assert pace(1, 4.0).deadline == FIRST_STEP, "the first step may compile"
    assert pace(10, 1.0).deadline == 60.0
    assert pace(10, 4.0).deadline == pytest.approx(FACTOR * 4.0)
    one = pace(10, 4.0)
    tick(one, 40.0, 60.0)
    one.stepped()  # it evaluated
    assert one.deadline == pytest.approx(FACTOR * 20.0)


# its failures


def failure(kind: FailureKind = FailureKind.DIED, step: int = 100) -> Failure:
    return Failure(kind=kind, reason="It broke.", step=step)


def test_pauses_grow_and_after_enough_failures_it_is_given_up() -> None:
    one = Failures(margin=50)
    one.stepped(1)
    pauses = [one.failed(failure()) for _ in range(MOST)]
    assert pauses == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE, 8 * FIRST_PAUSE, None]
    assert one.farewell().startswith(
        f"The trainer failed {MOST} times in a row, the last time at step 100: It broke; see"
    )
    assert "`lowcomm-node join`" in one.farewell()


def test_failures_are_forgiven_once_it_has_got_further() -> None:
    one = Failures(margin=50)
    for _ in range(3 * MOST):
        one.stepped(149)
        assert one.count == 0 or one.failed(failure()) is not None
        one.stepped(150)
        assert one.count == 0
        assert one.failed(failure()) == FIRST_PAUSE
    one = Failures(margin=50)
    for number in range(MOST):
        one.stepped(149)
        assert (one.failed(failure()) is None) == (number == MOST - 1), (
            "steps that were taken before are no progress"
        )


def test_no_node_leaves_as_another_machine_is_gone_again_and_again() -> None:
    one = Failures(margin=50)
    pauses = [one.failed(failure(FailureKind.LENDER)) for _ in range(3 * MOST)]
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE] and None not in pauses
    one.stepped(1)
    assert one.failed(failure(FailureKind.LENDER)) == FIRST_PAUSE and one.count == 0


@pytest.mark.parametrize(
    ("kind", "tries"),
    [
        (FailureKind.UNFIT, 1),
        (FailureKind.DIVERGED, 2),
        (FailureKind.MEMORY, 2),
        (FailureKind.DIED, MOST),
    ],
)
def test_what_another_try_can_not_heal_is_not_tried_again_and_again(
    kind: FailureKind, tries: int
) -> None:
    one = Failures(margin=50)
    assert [one.failed(failure(kind)) is None for _ in range(tries)] == [False] * (tries - 1) + [
        True
    ]


def test_running_out_of_memory_is_told_from_other_errors() -> None:
    import torch

    for error in (
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("MPS backend out of memory (MPS allocated: 8.0 GiB)"),
        RuntimeError(
            "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"
        ),
        MemoryError(),
    ):
        assert failure_of(error).kind is FailureKind.MEMORY
    assert (
        failure_of(RuntimeError("CUDA error: an illegal memory access was encountered")).kind
        is FailureKind.ERROR
    )


def test_silence_does_not_count_while_other_programs_keep_it_from_running() -> None:
    one = pace(10, 1.0)
    for second in range(11, 611):
        one.tick(float(second), waited=0.9 * (second - 10))
    assert one.silence == pytest.approx(60.0)
    one.stepped()
    assert one.deadline == pytest.approx(FACTOR * 60.0), "nor is it learned"
