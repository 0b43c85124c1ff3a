"""What must hold for what a node holds against a peer: real exchanges, with a puppet that does not
do what it should."""

from time import monotonic

import pytest

from helpers.exchanging import (
    INTERVAL,
    Node,
    Puppet,
    announced,
    chunks,
    hear_end,
    node_and_puppet,
    say,
)
from helpers.wire import soon
from lowcomm_node.sync.link import FREE_CHUNKS, LEAST_CHUNK
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.trust import FORGIVEN

pytestmark = pytest.mark.slow


def score(node: Node, peer: Puppet) -> float:
    return node.exchanger.standing(peer.peer_id)["score"]


def has_stumbled(node: Node, peer: Puppet) -> None:
    """As often as costs nothing."""
    for _ in range(FORGIVEN):
        assert not node.exchanger.peer.trust.stumbled(peer.peer_id)


@pytest.mark.parametrize(("again", "left"), [(False, 1.0), (True, 0.8)])
async def test_who_breaks_off_in_the_midst_of_an_exchange_loses_a_little_if_it_goes_on(
    again: bool, left: float
):
    async with node_and_puppet() as (node, puppet):
        if again:
            has_stumbled(node, puppet)
        stream = await puppet.agree(node, calls=True)
        await say(stream, announced(puppet.content), chunks(puppet.content)[0])
        stream.cancel()
        await node.ended()
        assert score(node, puppet) == left
        assert node.exchanger.standing(puppet.peer_id)["left_out"] is False


async def test_who_says_that_it_gives_up_loses_nothing():
    async with node_and_puppet() as (node, puppet):
        stream = await puppet.agree(node, calls=True)
        await say(stream, pb.Frame(abandon=pb.Abandon(reason="leaves")))
        await node.ended()
        assert score(node, puppet) == 1.0
        await hear_end(stream)


@pytest.mark.parametrize(
    "first", [pb.Frame(), pb.Frame(confirm=pb.Confirm()), pb.Frame(hello=pb.Offer(protocol=3))]
)
async def test_who_says_no_proper_hello_is_left_out_and_told_so_the_next_time(first: pb.Frame):
    async with node_and_puppet() as (node, puppet):
        stream = await puppet.call(node)
        await say(stream, first)
        await hear_end(stream)
        assert (score(node, puppet), node.exchanger.running) == (0.0, {})
        assert node.exchanger.standing(puppet.peer_id)["held_against"]
        again, answer = await puppet.hello(node)
        assert answer.refuse.reason == "not-trusted"
        await hear_end(again)
        node.step(INTERVAL)
        assert "nobody else is training" in (await node.ended()).reason, "nor is it called"


@pytest.mark.parametrize(("again", "left"), [(False, 1.0), (True, 0.8)])
async def test_who_calls_and_says_nothing_loses_a_little_if_it_goes_on(again: bool, left: float):
    async with node_and_puppet(hello_deadline=0.2) as (node, puppet):
        if again:
            has_stumbled(node, puppet)
        stream = await puppet.call(node)
        await hear_end(stream)
        assert score(node, puppet) == left


async def test_who_drops_its_call_before_it_says_hello_loses_nothing():
    """So does each call that crosses another, or whose exchange ends before it has begun."""
    async with node_and_puppet() as (node, puppet):
        stream = await puppet.call(node)
        await stream.close()
        assert score(node, puppet) == 1.0
        assert node.exchanger.standing(puppet.peer_id)["held_against"] == ""


async def test_a_contribution_in_crumbs_is_refused_before_it_has_cost_much():
    async with node_and_puppet() as (node, puppet):
        stream = await puppet.agree(node, calls=True)
        most = FREE_CHUNKS + len(puppet.content) // LEAST_CHUNK
        crumbs = [
            pb.Frame(chunk=pb.Chunk(offset=at, data=puppet.content[at : at + 1]))
            for at in range(most + 1)
        ]
        await say(stream, announced(puppet.content), *crumbs)
        assert "in pieces of less than 1024" in (await node.ended()).reason
        assert score(node, puppet) == 0.0
        await hear_end(stream)


@pytest.mark.parametrize("calls", [True, False])
async def test_a_contribution_that_drips_is_given_up_long_before_the_deadline(calls: bool):
    async with node_and_puppet() as (node, puppet):
        node.allow(longest=4.0)
        has_stumbled(node, puppet)
        stream = await puppet.agree(node, calls)
        await say(stream, announced(puppet.content))
        entry = await soon(node.ended())
        assert "too slowly for the deadline" in entry.reason + str(entry.left_out)
        assert entry.seconds < 3.0
        assert score(node, puppet) == 0.8
        await hear_end(stream)


async def test_the_owner_is_told_who_keeps_exchanges_waiting():
    async with node_and_puppet() as (node, puppet):
        trust = node.exchanger.peer.trust
        trust.stumbled(puppet.peer_id, seconds=9.0, now=monotonic())
        assert node.exchanger.kept_waiting is None, "so much happens to honest peers"
        trust.stumbled(puppet.peer_id, seconds=25.0, now=monotonic())
        told = node.exchanger.kept_waiting
        assert told is not None and f"{puppet.peer_id[-6:]} for 34 s" in told
