"""What must hold for trainers that share a fragment out: real replicas, real requests, without a
network between them."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest

from helpers.tiny import tiny_settings
from helpers.trainer_thread import TrainerThread
from lowcomm_node.errors import TrainerError, Unusable
from lowcomm_node.node.messages import (
    AverageShard,
    CaptureContribution,
    Drop,
    InnerStepTaken,
    Merge,
    Part,
    Receive,
    Resent,
    TakeOver,
    Train,
    WriteOuterSteps,
)
from lowcomm_protocol.exchange.kinds import GROUP

pytestmark = pytest.mark.slow

IN_GROUPS = """
[sync]
method = "streaming-diloco"
group = 3
fragments = 2
overlap = 0
interval = 10
min_steps = 1
"""
PEERS = ("a", "b", "c")


async def start(folder: Path) -> dict[str, TrainerThread]:
    """Three trainers that have made a few steps each."""
    trainers = {peer: TrainerThread() for peer in PEERS}
    for peer, trainer in trainers.items():
        ready = await trainer.start(tiny_settings(folder, peer, IN_GROUPS))
        assert ready.slots == 2 * GROUP.slots + 1, "and one to give slow weights from"
    await step(trainers)
    return trainers


async def step(trainers: dict[str, TrainerThread]) -> None:
    """All make a few steps, about the same number: the progress of others must look plausible."""
    for trainer in trainers.values():
        await trainer.ask(Train(on=True))
        for _ in range(8):
            while not isinstance(await trainer.news.get(), InnerStepTaken):
                pass
        await trainer.ask(Train(on=False))


Slots = dict[str, list[int]]


async def nothing(slots: Slots) -> None:
    """Nobody has missed anything."""


async def missed(trainer: TrainerThread, steps: int, slot: int, offset: int) -> Resent:
    return await trainer.ask(WriteOuterSteps(fragment=0, steps=steps, slot=slot, offset=offset))


async def receive(
    trainer: TrainerThread, part: Part, peer: str, slot: int, offset: int, size: int
) -> None:
    await trainer.ask(
        Receive(fragment=0, part=part, peer=peer, slot=slot, offset=offset, size=size)
    )


async def exchange(
    trainers: dict[str, TrainerThread],
    realign: bool,
    owners: list[str],
    before: Callable[[Slots], Awaitable[None]] = nothing,
) -> list[tuple[str, str]]:
    """Share fragment 0 out as a group does, and merge the shards of these owners; digests of slow
    weights and momenta. ``before``: what happens while it is captured."""
    peers = tuple(trainers)
    slots = {peer: trainer.arena.take(GROUP.slots) for peer, trainer in trainers.items()}
    shared = {
        peer: await trainer.ask(
            CaptureContribution(
                fragment=0, slot=slots[peer][0], realign=realign, ahead=0, members=peers
            )
        )
        for peer, trainer in trainers.items()
    }
    await before(slots)
    sizes = [max(one.sizes[shard] for one in shared.values()) for shard in range(len(peers))]
    assert {one.sizes[peers.index(peer)] for peer, one in shared.items()} == {0}
    for mine, owner in enumerate(peers):
        for place, peer in enumerate(peers):
            if peer != owner:
                offset, size = sum(shared[peer].sizes[:mine]), sizes[mine]
                data = trainers[peer].arena.view(slots[peer][0], offset + size)[offset:]
                trainers[owner].arena.view(slots[owner][1], (place + 1) * size)[place * size :] = (
                    data
                )
                await receive(
                    trainers[owner], Part.SHARE, peer, slots[owner][1], place * size, size
                )
    tokens = {peer: count for peer, count in {"a": 10, "b": 20, "c": 30}.items() if peer in peers}
    for offset, size, owner in zip(accumulate(sizes[:-1], initial=0), sizes, peers, strict=True):
        told = await trainers[owner].ask(
            AverageShard(fragment=0, tokens=tokens, slot=slots[owner][2], offset=offset)
        )
        assert (told.size, told.left_out) == (size, {})
        data = trainers[owner].arena.view(slots[owner][2], offset + size)[offset:]
        for peer, trainer in trainers.items():
            if peer != owner:
                trainer.arena.view(slots[peer][2], offset + size)[offset:] = data
                await receive(trainer, Part.MEAN, owner, slots[peer][2], offset, size)
    merged = [
        await trainer.ask(Merge(fragment=0, swarm_step=5, over=dict.fromkeys(owners, 0)))
        for trainer in trainers.values()
    ]
    for peer, trainer in trainers.items():
        for slot in slots[peer]:
            trainer.arena.give_back(slot)
    return [(one.slow_digest, one.momentum_digest) for one in merged]


async def test_all_hold_the_same_slow_weights_after_whole_and_partial_exchanges(tmp_path: Path):
    trainers = await start(tmp_path)
    try:
        digests = []
        for realign, owners in (
            (False, ["a", "b", "c"]),
            (False, ["a", "c"]),
            (True, ["a", "b", "c"]),
        ):
            told = await exchange(trainers, realign, owners)
            assert len(set(told)) == 1, "equal to the bit"
            digests.append(told[0])
            await step(trainers)
        assert len(set(digests)) == 3, "each of them has changed something"
    finally:
        for trainer in trainers.values():
            await trainer.stop()


async def test_a_trainer_that_missed_two_exchanges_takes_them_over_and_holds_the_same(
    tmp_path: Path,
):
    trainers = await start(tmp_path)
    owners, there = ["a", "b", "c"], {peer: trainers[peer] for peer in "ab"}
    try:
        await exchange(trainers, False, owners)
        await step(trainers)
        for shards in (["a", "b"], ["b"]):
            (held,) = set(await exchange(there, False, shards))
            await step(there)

        async def hand_over(slots: Slots) -> None:
            room = 4096
            size = (await missed(trainers["b"], 2, slots["b"][0], room)).size
            data = trainers["b"].arena.view(slots["b"][0], room + size)[room:]
            trainers["c"].arena.view(slots["c"][0], room + size)[room:] = data
            slow, momentum = held
            take_over = TakeOver(
                fragment=0,
                steps=2,
                slot=slots["c"][0],
                offset=room,
                size=size,
                slow_digest=slow,
                momentum_digest=momentum,
            )
            with pytest.raises(Unusable, match="do not lead to what most hold"):
                await trainers["c"].ask(replace(take_over, momentum_digest="00" * 32))
            await trainers["c"].ask(take_over)

        told = await exchange(trainers, False, owners, hand_over)
        assert len(set(told)) == 1, "equal to the bit, the momentum too"
        await step(trainers)

        async def ask(slots: Slots) -> None:
            # What came before those that it took over leads elsewhere.
            with pytest.raises(TrainerError, match="1 outer steps are kept"):
                await missed(trainers["c"], 2, slots["c"][0], 4096)

        assert len(set(await exchange(trainers, False, owners, ask))) == 1
    finally:
        for trainer in trainers.values():
            await trainer.stop()


async def test_what_can_not_be_used_is_told_and_costs_nothing_else(tmp_path: Path):
    trainers = await start(tmp_path)
    try:
        one = trainers["a"]
        shares, received, _ = one.arena.take(3)
        with pytest.raises(TrainerError):
            await receive(one, Part.SHARE, "b", received, 0, 10)
        size = (
            await one.ask(
                CaptureContribution(fragment=0, slot=shares, realign=False, ahead=0, members=PEERS)
            )
        ).sizes[1]
        with pytest.raises(TrainerError, match="exactly"):
            await receive(one, Part.SHARE, "b", received, 0, size + 1)
        await one.ask(Drop(fragment=0))
        with pytest.raises(TrainerError):
            await one.ask(AverageShard(fragment=0, tokens={"a": 1}, slot=received, offset=0))
        await one.ask(
            CaptureContribution(fragment=0, slot=shares, realign=False, ahead=0, members=PEERS)
        )
        await one.ask(Drop(fragment=0))
    finally:
        for trainer in trainers.values():
            await trainer.stop()
