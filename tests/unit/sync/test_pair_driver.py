"""What must hold for exchanges of two nodes: real gRPC over TLS, real shared memory, trainers that
follow a script."""

import asyncio

import pytest

from helpers import group_frames
from helpers.exchanging import (
    INTERVAL,
    Node,
    announced,
    chunks,
    eventually,
    hear,
    hear_content,
    hear_end,
    node_and_puppet,
    say,
    swarm,
)
from helpers.scripted_trainer import SIZE, contribution
from helpers.wire import soon
from lowcomm_protocol.exchange import events
from lowcomm_protocol.exchange.events import Outcome


def merged_all(nodes: list[Node], number: int = 1) -> None:
    """Every node has merged the ``number``-th contributions of all, and nothing else."""
    contributions = {node.peer_id: contribution(node.peer_id, 0, number, SIZE) for node in nodes}
    for node in nodes:
        assert len(node.trainer.merges) == number
        assert node.trainer.merges[-1].contributions == contributions


async def test_a_pair_merges_once_with_both_contributions():
    async with swarm(2) as one:
        first, second = one.nodes
        second.step(INTERVAL)
        for node, other in ((first, second), (second, first)):
            entry = await node.ended()
            assert (entry.outcome, entry.partners) == ("applied", (other.peer_id,))
            assert (entry.bytes_sent, entry.bytes_received) == (SIZE, SIZE)
            assert node.news == [entry]
            assert node.exchanger.history.of(other.peer_id).completed == 1
            assert node.trainer.merges[0].tokens == {
                peer.peer_id: peer.trainer.tokens for peer in one.nodes
            }
            assert node.trainer.merges[0].swarm_step == other.trainer.steps
            assert node.exchanger.peer.position.swarm_step == INTERVAL
        merged_all(one.nodes)
        for node in one.nodes:
            await node.at_rest()
        first.step(INTERVAL)
        second.step(INTERVAL + 1)
        assert not first.exchanger.running
        assert not second.exchanger.running, "this round is done at both ends"


async def test_peers_that_begin_at_once_make_one_exchange():
    async with swarm(2) as one:
        for number in (1, 2, 3):
            for node in one.nodes:
                node.step(number * INTERVAL)
            for node in one.nodes:
                await node.ended(number)
            merged_all(one.nodes, number)
            for node in one.nodes:
                await node.at_rest()
        assert [node.outcomes for node in one.nodes] == [{Outcome.APPLIED: 3}] * 2
        first, second = ([entry.id for entry in node.news] for node in one.nodes)
        assert first == second, "both ends call an exchange the same"
        assert len(set(first)) == 3
        for node in one.nodes:
            for entry in node.news:
                told = entry.moments
                assert told["met"] <= told["captured"] <= told["sent"] <= told["decided"]
                assert told["received"] <= told["decoded"] <= told["decided"]
                assert told["decided"] <= round(entry.seconds, 3)


# Deaths and hostile frames in a pair


@pytest.mark.parametrize("calls", [True, False])
async def test_a_partner_that_is_gone_in_the_midst_of_it_costs_one_exchange(calls: bool):
    async with node_and_puppet() as (node, puppet):
        stream = await puppet.agree(node, calls)
        await say(stream, announced(puppet.content), chunks(puppet.content)[0])
        stream.cancel()
        entry = await node.ended()
        assert (entry.outcome, node.trainer.merges) == ("failed", [])
        assert node.exchanger.history.of(puppet.peer_id).failed == 1
        assert len(entry.id) == 32, "the members were known"
        assert "decided" not in entry.moments


@pytest.mark.parametrize("calls", [True, False])
async def test_a_frame_that_is_not_due_in_a_pair_costs_one_exchange(calls: bool):
    async with node_and_puppet() as (node, puppet):
        stream = await puppet.agree(node, calls)
        if calls:
            await say(stream, group_frames.roll(sorted([puppet.peer_id, node.peer_id])))
        else:
            again = announced(puppet.content)
            await say(stream, announced(puppet.content), *chunks(puppet.content), again)
        why = "sent 'roll' after 'hello'" if calls else "began a second contribution"
        assert why in (await node.ended()).reason
        await hear_end(stream)
        stream.cancel()


@pytest.mark.parametrize("calls", [True, False])
async def test_a_puppet_that_does_all_right_is_merged_with(calls: bool):
    async with node_and_puppet() as (node, puppet):
        stream = await puppet.agree(node, calls)
        assert await hear_content(stream) == contribution(node.peer_id, 0, 1, SIZE)
        await say(stream, announced(puppet.content), *chunks(puppet.content), puppet.confirm(node))
        assert (await hear(stream)).confirm == puppet.confirm(node).confirm
        assert (await node.ended()).outcome == "applied"
        assert node.trainer.merges[0].contributions[puppet.peer_id] == puppet.content
        assert node.exchanger.standing(puppet.peer_id)["score"] == 1.0
        closing = asyncio.create_task(soon(stream.close()))
        if not calls:
            stream.cancel()
        await closing


async def test_what_waits_for_a_capture_that_comes_after_the_end_is_not_decoded_any_more():
    async with node_and_puppet() as (node, puppet):
        capture, drop = node.trainer.holds["capture"], node.trainer.holds["drop"]
        capture.clear()
        drop.clear()
        stream = await puppet.agree(node, calls=False)
        await say(stream, announced(puppet.content), *chunks(puppet.content))
        (round_,) = node.exchanger.running.values()
        await eventually(lambda: round_.bytes_received == SIZE, "all has come")
        round_.tell(events.GaveUp(reason="its deadline has passed"))
        capture.set()
        await eventually(lambda: "drop" in node.trainer.asked, "it is being dropped")
        await eventually(round_._captured.is_set, "the capture was answered")
        drop.set()
        assert (await node.ended()).outcome == "failed"
        await hear_end(stream)
        stream.cancel()
        await node.at_rest()
        assert "receive" not in node.trainer.asked
        assert len(node.exchanger.peer.trust) == 0, "nothing is held against the partner"
