"""What must hold for tasks beside the rest: a defect is told, and ends nothing."""

import asyncio

import pytest

from lowcomm_node.system import tasks
from lowcomm_node.system.tasks import Enduring, endure, start


async def test_work_that_meets_a_defect_goes_on_and_each_defect_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(tasks, "DEFECT_PAUSE", 0.0)
    outcomes = iter((RuntimeError("one"), RuntimeError("one"), RuntimeError("two"), None))
    warnings: list[str] = []

    async def work() -> None:
        if (error := next(outcomes)) is not None:
            raise error

    async with asyncio.timeout(20):
        await endure("nobody looks", work, warnings.append)
    assert warnings == [
        f"nobody looks, because of a defect: RuntimeError('{name}')" for name in ("one", "two")
    ]
    assert next(outcomes, "all") == "all"


def test_an_end_that_is_wanted_passes():
    for error in (KeyboardInterrupt, SystemExit, asyncio.CancelledError):
        with pytest.raises(error), Enduring("nobody looks"):
            raise error


async def test_the_defect_of_a_task_that_nobody_awaits_is_logged(
    monkeypatch: pytest.MonkeyPatch,
):
    told: list[str] = []
    monkeypatch.setattr(tasks.log, "error", lambda event, **more: told.append(more["error"]))

    async def fail() -> None:
        raise RuntimeError("lost")

    await asyncio.gather(start(fail()), return_exceptions=True)
    assert told == ["RuntimeError('lost')"]
