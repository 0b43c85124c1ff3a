"""What must hold for the timers of an exchange: each is told once, in time, however often the deadline is extended."""

import asyncio
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.tunnelling import soon
from helpers.waiting import until_async
from lowcomm_node.sync import driver as rounds
from lowcomm_node.sync.pair_driver import PairRound
from lowcomm_protocol.exchange import base
from virtual import OFFER


class Told(PairRound):
    """An exchange that only listens to its timers."""

    def __init__(self) -> None:
        node = SimpleNamespace(peer_id="me", trainer=None, arena=None, step_seconds=0.0, longest=60.0)
        super().__init__(node, OFFER, ["a"], [0, 1], called=False)  # pyright: ignore[reportArgumentType]
        self.told: list[str] = []
        self.heard = asyncio.Event()

    def handle(self, event: Any) -> None:
        self.told.append(type(event).__name__)
        self.heard.set()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "HELLO_DEADLINE", 0.2)


GATHERING, DEADLINE = base.GatheringClosed.__name__, base.DeadlinePassed.__name__


async def test_an_extension_after_the_deadline_tells_nothing_twice():
    round_ = Told()
    round_.set_timers(0.2)
    await until_async(lambda: asyncio.sleep(0, round_.told == [GATHERING, DEADLINE]), 10, "the deadline has passed")
    round_.set_timers(0.6)
    await until_async(lambda: asyncio.sleep(0, len(round_.told) == 3), 10, "it is over")
    assert round_.told == [GATHERING, DEADLINE, DEADLINE]
    assert monotonic() - round_.began >= 0.8, "the second one comes when that is due"


async def test_what_was_due_when_the_deadline_was_extended_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch):
    round_ = Told()
    round_.set_timers(20.0)
    # The loop was held up: the time has passed, and its timer has not run yet.
    monkeypatch.setattr(rounds, "monotonic", lambda: round_.began + 0.3)
    round_.set_timers(40.0)
    await soon(round_.heard.wait(), 5)
    assert round_.told == [GATHERING]
    for timer in round_._timers:
        timer.cancel()
