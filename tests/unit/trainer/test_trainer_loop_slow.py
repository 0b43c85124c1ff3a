"""What must hold for a trainer whose steps take long: what needs no step boundary does not wait for
one."""

import asyncio
import threading
from pathlib import Path

import pytest

from helpers.tiny import tiny_settings
from lowcomm_node.node.messages import Capture, Part, Receive, Stepped, Train
from lowcomm_node.node.process import TrainerThread
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.exchange.kinds import PAIR

IN_PAIRS = """
[sync]
method = "noloco"
fragments = 1
interval = 10
min_steps = 1
overlap = 0
"""
SOON = 30.0


async def test_a_contribution_is_decoded_while_a_step_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begun, may_end, take_step = threading.Event(), threading.Event(), Replica.take_step

    def slow_step(replica: Replica) -> None:
        if replica.peer_id == "a" and replica.steps == 1:
            begun.set()
            may_end.wait(SOON)
        take_step(replica)

    monkeypatch.setattr(Replica, "take_step", slow_step)
    trainers = {peer: TrainerThread() for peer in ("a", "b")}
    try:
        for peer, trainer in trainers.items():
            await trainer.start(tiny_settings(tmp_path, peer, IN_PAIRS))
            await trainer.ask(Train(on=True))
            while not isinstance(await trainer.news.get(), Stepped):
                pass
        a, b = trainers["a"], trainers["b"]
        await b.ask(Train(on=False))
        assert a.arena and b.arena
        (theirs, _), (_, slot) = b.arena.take(PAIR.slots), a.arena.take(PAIR.slots)
        sent = await b.ask(Capture(fragment=0, slot=theirs, realign=True, ahead=0))
        assert await asyncio.to_thread(begun.wait, SOON)
        capturing = asyncio.create_task(a.ask(Capture(fragment=0, slot=0, realign=True, ahead=0)))
        may_end.set()
        await capturing
        begun.clear()
        may_end.clear()
        monkeypatch.setattr(
            Replica,
            "take_step",
            lambda replica: (begun.set(), may_end.wait(SOON), take_step(replica))[-1],
        )
        assert await asyncio.to_thread(begun.wait, SOON), "the next step is under way"
        (size,) = sent.sizes
        a.arena.view(slot, size)[:] = b.arena.view(theirs, size)
        async with asyncio.timeout(SOON / 2):
            received = await a.ask(
                Receive(fragment=0, part=Part.WHOLE, peer="b", slot=slot, offset=0, size=size)
            )
            assert received.again is None
        assert not may_end.is_set()
    finally:
        may_end.set()
        for trainer in trainers.values():
            await trainer.stop()
