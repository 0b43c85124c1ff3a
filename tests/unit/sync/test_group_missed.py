"""What must hold where a node has missed exchanges of its group: it takes over what it lacks, and
nobody realigns. Real gRPC over TLS, shared memory, trainers that follow a script."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import monotonic

import pytest

from helpers.exchanging import INTERVAL, NUMEL, Node, Swarm, eventually, swarm
from lowcomm_node.errors import TrainerError, Unusable

pytestmark = pytest.mark.slow
STRANDED = "our slow weights are others than those of most, which nobody can hand over"
NOW = "33" * 32
"""Digest of the slow weights of scripted trainers after a merge."""


@asynccontextmanager
async def one_behind(size: int = 3) -> AsyncIterator[tuple[Swarm, Node, Sequence[Node]]]:
    """A group whose last node has missed the first exchange; that node, and the others."""
    async with swarm(size, size, codec="e3m0", size=NUMEL // 2) as one:
        *others, behind = one.nodes
        behind.exchanger.exchanging = False
        assert await outcomes(others, 1) == {("applied", "")}
        behind.exchanger.exchanging = True
        yield one, behind, others


async def outcomes(nodes: Sequence[Node], round_: int) -> set[tuple[str, str]]:
    """What comes of the exchange of a round at each of these nodes."""
    for node in nodes:
        await node.at_rest()
    known = [len(node.exchanger.history.exchanges) for node in nodes]
    for node in nodes:
        node.step(round_ * INTERVAL)
    ended = [await node.ended(count + 1) for node, count in zip(nodes, known, strict=True)]
    return {(one.outcome, one.reason) for one in ended}


async def test_a_node_takes_over_what_it_has_missed():
    async with one_behind() as (one, behind, others):
        for node in others:
            node.trainer.holds["missed"].clear()
        meeting = asyncio.create_task(outcomes(one.nodes, 2))
        await eventually(
            lambda: any("missed" in node.trainer.asked for node in others), "a node is asked"
        )
        for node in others:
            node.trainer.holds["missed"].set()
        assert await meeting == {("applied", ""), ("applied", "took over 1 missed step")}
        assert behind.trainer.taken_over == [(b"step ", (NOW, ""))]
        assert sum(node.trainer.asked.count("missed") for node in others) == 1
        assert all(entry.bytes_sent < 4 * NUMEL for entry in behind.exchanger.history.exchanges)
        # From now on it is as all others.
        assert await outcomes(one.nodes, 3) == {("applied", "")}
        assert len(behind.trainer.taken_over) == 1


async def test_what_does_not_lead_to_what_most_hold_is_held_against_who_sent_it():
    async with one_behind() as (one, behind, others):
        behind.trainer.errors["take_over"] = Unusable("does not lead to what most hold")
        ended = await outcomes(one.nodes, 2)
        # It costs the others the shard of the one that goes.
        assert ended == {
            ("applied", "2 of 3 shards"),
            ("failed", "what we had missed does not come"),
        }
        (donor,) = [node for node in others if "missed" in node.trainer.asked]
        assert not behind.exchanger.peer.trusts(donor.peer_id)
        assert len(behind.trainer.merges) == 0, "nothing follows from means without those before"


async def test_a_node_that_can_not_take_over_copies_a_state_after_two_exchanges():
    async with one_behind() as (one, behind, others):
        for node in others:
            node.trainer.errors["missed"] = TrainerError("fewer outer steps are kept")
        for round_ in (2, 3):
            assert ("failed", "what we had missed does not come") in await outcomes(
                one.nodes, round_
            )
            assert not behind.exchanger.peer.drift.must_copy(monotonic())
        assert await outcomes(one.nodes, 4) == {
            ("applied", ""),
            ("failed", STRANDED),
        }
        assert behind.exchanger.peer.drift.must_copy(monotonic())
