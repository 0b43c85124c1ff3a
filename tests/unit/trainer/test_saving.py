"""When a checkpoint is begun, and when training waits for one: a kill at any instant costs one
interval at most."""

import asyncio
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import pytest

from helpers.tiny import tiny_settings
from helpers.trainer_thread import TrainerThread
from lowcomm_node.node import ipc
from lowcomm_node.node.messages import Done, Evaluate, Held, InnerStepTaken, Saved, Train
from lowcomm_node.storage.checkpoint import CheckpointInfo, CheckpointStore
from lowcomm_node.trainer.saving import FIRST_PAUSE, HANGS, LONGEST_PAUSE, PATIENCE, Saving

EVERY = 20


class Disk:
    """A trainer's steps, one a second, and a disk whose writes take some of them."""

    def __init__(self, every: int, resumed: int = 0) -> None:
        self.saving = Saving(every, resumed)
        self.steps = self.on_disk = resumed
        self.now = 0.0
        self.begun: list[int] = []
        self.waited = self.worst = 0
        self._writing: tuple[int, float] | None = None

    def live(self, steps: int, takes: float) -> None:
        """So many steps, with writes that take so many seconds."""
        end = self.steps + steps
        while self.steps < end:
            if not self.saving.holds(self.steps, self.now):
                self.steps += 1
                if self.saving.is_due(self.steps, self.now):
                    self.saving.began(self.steps)
                    self.begun.append(self.steps)
                    self._writing = (self.steps, self.now + takes)
            else:
                self.waited += 1
            self.now += 1.0
            if self._writing and self.now >= self._writing[1]:
                self.on_disk, self._writing = self._writing[0], None
                self.saving.succeeded(self.steps)
            self.worst = max(self.worst, self.steps - self.on_disk)


@pytest.mark.parametrize("every", [1, 2, 3, 10, 25, 100])
@pytest.mark.parametrize("seed", range(5))
def test_whatever_a_write_takes_a_kill_costs_one_interval_at_most(every: int, seed: int) -> None:
    random, disk = Random(seed), Disk(every)
    for _ in range(100):
        disk.live(
            every,
            random.choice(
                [0.0, 1.0, *(min(part * every, PATIENCE - 1) for part in (0.25, 0.5, 1.0, 3.0))]
            ),
        )
    assert disk.worst <= every


def test_a_disk_that_hangs_holds_training_for_a_while_only() -> None:
    saving = Saving(10)
    saving.began(10)
    assert saving.holds(10, 0.0) and saving.holds(10, PATIENCE - 1)
    assert not saving.holds(10, PATIENCE) and saving.trouble == HANGS
    assert not saving.holds(400, PATIENCE + 1) and not saving.is_due(400, PATIENCE + 1)
    assert saving.succeeded(400), "that it went well after all is news"
    assert saving.trouble is None and saving.is_due(400, PATIENCE + 2)


def test_after_a_save_that_failed_the_next_ones_wait_longer_and_longer() -> None:
    saving, now = Saving(10), 0.0
    pauses = []
    for number in range(8):
        assert saving.is_due(10, now)
        saving.began(10)
        assert saving.failed("No room.", now) == (number == 0), "it is news once"
        assert not saving.holds(500, now), "training goes on"
        pauses.append(next(wait for wait in range(0, 2000, 5) if saving.is_due(10, now + wait)))
        now += pauses[-1]
    assert (
        pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
        and pauses[-1] == LONGEST_PAUSE
    )
    saving.began(13)
    assert not saving.holds(500, now), "nor does it wait for a try that may fail"
    assert saving.succeeded(13) and saving.trouble is None
    assert not saving.is_due(21, now) and saving.is_due(22, now)
    saving.began(22)
    assert saving.failed("No room.", now) and saving.is_due(23, now + FIRST_PAUSE), (
        "the pauses begin anew"
    )
    saving.began(23)
    assert saving.succeeded(23)
    saving.began(33)
    assert not saving.succeeded(33)


async def test_a_trainer_waits_for_a_disk_that_is_slower_and_goes_on_once_all_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, save = Event(), CheckpointStore.save

    def slow(*arguments: Any, **named: Any) -> CheckpointInfo:
        assert written.wait(60)
        return save(*arguments, **named)

    monkeypatch.setattr(CheckpointStore, "save", slow)
    trainer = TrainerThread()
    await trainer.start(tiny_settings(tmp_path, "a", checkpoint_every=EVERY))
    try:
        await trainer.ask(Train(on=True))
        seen = await until_told(trainer, Held)
        assert [one.steps for one in steps_of(seen)] == list(range(1, EVERY + 1))
        assert await trainer.ask(Evaluate()) == Done(), "it serves requests meanwhile"
        assert not steps_of(drain(trainer))
        written.set()
        seen = await until_told(trainer, Saved)
        assert not steps_of(seen), "no step before it was written"
        await until_told(trainer, InnerStepTaken)
    finally:
        written.set()
        await trainer.stop()


async def until_told(
    trainer: TrainerThread, kind: type[ipc.TrainerEvent]
) -> list[ipc.TrainerEvent]:
    """News up to one of this kind."""
    seen: list[ipc.TrainerEvent] = []
    while not (seen and isinstance(seen[-1], kind)):
        seen.append(await asyncio.wait_for(trainer.news.get(), 60))
        assert len(seen) < 200, f"{kind} is not told"
    return seen


def drain(trainer: TrainerThread) -> list[ipc.TrainerEvent]:
    """News that have come."""
    return [trainer.news.get_nowait() for _ in range(trainer.news.qsize())]


def steps_of(news: list[ipc.TrainerEvent]) -> list[InnerStepTaken]:
    """Those of steps."""
    return [one for one in news if isinstance(one, InnerStepTaken)]
