"""What must hold between cells: real gRPC over TLS, shared memory, trainers that follow a
script."""

from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from helpers.exchanging import INTERVAL, NUMEL, Node, Swarm, hear, hear_end, say, swarm
from helpers.wire import DEADLINE
from lowcomm_node.errors import LinkLost
from lowcomm_node.sync import cells
from lowcomm_protocol.codecs.nearby import blocks_of
from lowcomm_protocol.codecs.shards import shard_bounds
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.shards import cell_of
from lowcomm_protocol.spec.names import BLOCK

pytestmark = pytest.mark.slow
CELLS = 2


@asynccontextmanager
async def two_cells() -> AsyncIterator[tuple[Swarm, list[list[Node]]]]:
    """Eight nodes, by cell; there is a slot to give slow weights from."""
    async with swarm(8, 8, slots=4) as one:
        by_cell: defaultdict[int, list[Node]] = defaultdict(list)
        for node in one.nodes:
            node.roster.cells = CELLS
            node.trainer.near = b"\1"
            by_cell[cell_of(one.spec.run_id, node.peer_id, CELLS)].append(node)
        by_size = sorted(by_cell.values(), key=len)
        assert [len(cell) for cell in by_size] == [3, 5]
        yield one, by_size


async def test_groups_form_within_cells_and_each_owner_reads_its_shard_from_another_cell():
    async with two_cells() as (one, by_size):
        for node in one.nodes:
            node.step(INTERVAL)
        for cell, other in (by_size, by_size[::-1]):
            members = sorted(node.peer_id for node in cell)
            bounds = shard_bounds(NUMEL, len(members))
            for node in cell:
                entry = await node.ended()
                mine = members.index(node.peer_id)
                assert (entry.outcome, entry.reason) == ("applied", "mixed with another cell")
                assert sorted([*entry.partners, node.peer_id]) == members
                start = bounds[mine][0]
                (taken,) = node.trainer.taken
                assert taken in {their.trainer.slow_from(start, 1) for their in other}


async def test_a_giver_that_has_gone_costs_no_exchange():
    async with two_cells() as (_, by_size):
        few, many = by_size
        for node in few:
            await node.stop()
        for node in many:
            node.step(INTERVAL)
        for node in many:
            entry = await node.ended()
            assert (entry.outcome, len(entry.partners), entry.reason) == ("applied", 4, "")
            assert node.trainer.taken == []


ASKS = {
    "a fragment that there is not": (pb.Ask(fragment=7, codes=b"\1"), "unknown-fragment"),
    "no block": (pb.Ask(), None),
    "a part of a block": (pb.Ask(start=1, codes=b"\1"), None),
    "blocks beyond the last": (
        pb.Ask(start=BLOCK, codes=b"\1" * blocks_of(NUMEL)),
        None,
    ),
}


@pytest.mark.parametrize("ask", ASKS)
async def test_what_may_not_be_asked_is_refused_before_the_trainer_hears_of_it(ask: str):
    asked, reason = ASKS[ask]
    async with two_cells() as (_, by_size):
        reader, giver = by_size[0][0], by_size[1][0]
        stream = await reader.exchanger.call(giver.peer_id)
        await say(stream, pb.Frame(ask=asked))
        if reason is not None:
            assert (await hear(stream)).refuse.reason == reason
        await hear_end(stream)
        assert "give_slow" not in giver.trainer.asked


async def test_a_reader_hears_why_a_peer_gives_nothing():
    async with two_cells() as (_, by_size):
        reader, giver = by_size[0][0], by_size[1][0]
        giver.exchanger.exchanging = False
        into = memoryview(bytearray(4096))
        with pytest.raises(LinkLost, match="gives no slow weights: it is not training now"):
            await cells.read(reader.exchanger, giver.peer_id, pb.Ask(codes=b"\1"), into, DEADLINE)


async def test_a_peer_gives_once_to_each_and_one_fragment_in_all_between_two_outer_steps():
    async with two_cells() as (_, by_size):
        readers, giver = by_size[0], by_size[1][0]
        half = b"\1" * (blocks_of(NUMEL) // 2)
        kinds = list[str | None]()
        for reader in (readers[0], readers[0], readers[1], readers[2]):
            stream = await reader.exchanger.call(giver.peer_id)
            await say(stream, pb.Frame(ask=pb.Ask(codes=half)))
            kinds.append((await hear(stream)).WhichOneof("kind"))
            await hear_end(stream)
        assert kinds == ["content", "refuse", "content", "refuse"]
