"""What must hold for exchanges of three to eight nodes: real gRPC over TLS, shared memory, trainers
that follow a script."""

import pytest

from helpers import group_frames
from helpers.exchanging import (
    INTERVAL,
    NUMEL,
    Node,
    agreed,
    announced,
    eventually,
    hear,
    hear_end,
    say,
    swarm,
)
from helpers.scripted_trainer import contribution, mean_of, shard_sizes
from helpers.wire import soon
from lowcomm_node.errors import TrainerError
from lowcomm_node.sync import frames
from lowcomm_protocol.codecs import codec
from lowcomm_protocol.exchange.events import Outcome
from lowcomm_protocol.messages import exchange_pb2 as pb

pytestmark = pytest.mark.slow


def whole_means(nodes: list[Node], number: int = 1) -> dict[str, bytes]:
    """The means of all shards, if everybody has contributed to all of them."""
    members = sorted(node.peer_id for node in nodes)
    sizes = shard_sizes(nodes[0].spec.sync.codec, nodes[0].trainer.numel, len(members))
    return {
        owner: mean_of(
            owner, {peer: contribution(f"{peer}>{owner}", 0, number, size) for peer in members}
        )
        for owner, size in zip(members, sizes, strict=True)
    }


@pytest.mark.parametrize("group", [3, 4])
async def test_a_group_that_begins_at_once_applies_all_shards_with_all_contributions(group: int):
    async with swarm(group, group) as one:
        for number in (1, 2, 3):
            for node in one.nodes:
                node.step(number * INTERVAL)
            for node in one.nodes:
                entry = await node.ended(number)
                assert (entry.outcome, entry.reason, len(entry.partners)) == (
                    "applied",
                    "",
                    group - 1,
                )
                assert entry.bytes_sent == entry.bytes_received
            agreed(one.nodes, number)
            assert one.nodes[0].trainer.merges[-1].contributions == whole_means(one.nodes, number)
            for node in one.nodes:
                await node.at_rest()
        assert [node.outcomes for node in one.nodes] == [{Outcome.APPLIED: 3}] * group
        assert [node.exchanger.history.in_doubt for node in one.nodes] == [0] * group


async def test_slow_weights_that_differ_go_in_full_precision_for_all():
    async with swarm(2, 4, codec="e3m0") as one:
        for _ in range(2):
            await one.node(slow_digests=("55" * 32,))
        one.meet()
        for node in one.nodes:
            node.step(INTERVAL)
        for node in one.nodes:
            entry = await node.ended()
            assert (entry.outcome, entry.reason) == ("applied", "realigned")
            assert entry.bytes_sent > 4 * NUMEL
        agreed(one.nodes)


DEATHS = {
    "before it tells its links": ("frame", "roll", "none"),
    "before it names the members": ("frame", "members", "none of a leader"),
    "before it is captured": ("trainer", "share", "its own"),
    "before its shares have gone": ("frame", "content", "its own"),
    "while it averages": ("trainer", "reduce", "its own"),
    "before it tells what it holds": ("frame", "held", "none, its mean has come"),
    "before it commits": ("frame", "commit", "none, its mean has come"),
}
"""What of it is held up meanwhile, and which shards that costs."""


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("when", DEATHS)
async def test_a_member_that_dies_costs_no_more_than_its_shard(when: str, place: int):
    what, name, costs = DEATHS[when]
    async with swarm(4, 4) as one:
        dying = one.nodes[place]
        others = [node for node in one.nodes if node is not dying]
        (dying.trainer.holds if what == "trainer" else dying.silent)[name].clear()

        def reached() -> bool:
            return (
                name in dying.trainer.asked
                if what == "trainer"
                else dying.waiting_to_say[name] == 3
            )

        for node in one.nodes:
            node.step(INTERVAL)
        await eventually(reached, f"it comes to {name}")
        await dying.die()
        everybody, alive = {node.peer_id for node in one.nodes}, {node.peer_id for node in others}
        entries = [await node.ended() for node in others]
        assert [entry.outcome for entry in entries] == ["applied"] * 3
        assert agreed(others) == (everybody if "mean has come" in costs else alive)
        # Who dies after the leader has named it, and before it is agreed, is still in the list.
        in_list = costs == "its own" or (costs == "none of a leader" and place == 3)
        assert [entry.reason for entry in entries] == ["3 of 4 shards" if in_list else ""] * 3
        assert all(dying.peer_id in entry.left_out for entry in entries)
        ended = (await dying.ended()).outcome
        assert ended in ("failed", "no-partner") or (
            name == "commit" and agreed(one.nodes) == everybody
        )


@pytest.mark.parametrize("request_", ["receive_share", "receive_mean"])
@pytest.mark.parametrize(("at", "of"), [(0, 1), (1, 3)])
async def test_a_contribution_that_the_trainer_can_not_take_costs_both_ends_a_shard_at_most(
    request_: str, at: int, of: int
):
    async with swarm(4, 4) as one:
        critic, blamed = one.nodes[at], one.nodes[of]
        critic.trainer.errors[request_ + blamed.peer_id] = TrainerError(
            "update too large (norm 9, limit 3)"
        )
        for node in one.nodes:
            node.step(INTERVAL)
        entries = [await node.ended() for node in one.nodes]
        assert [entry.outcome for entry in entries] == ["applied"] * 4
        others = [node for node in one.nodes if node not in (critic, blamed)]
        owners = agreed(others)
        assert len(owners) >= 3 and {node.peer_id for node in others} <= owners
        assert entries[at].left_out == {blamed.peer_id: "update too large (norm 9, limit 3)"}
        doubting = [node for node, entry in zip(one.nodes, entries, strict=True) if entry.in_doubt]
        assert doubting in ([critic], [blamed])


@pytest.mark.parametrize("request_", ["share", "reduce", "merge"])
async def test_a_trainer_that_fails_costs_its_own_node_the_exchange(request_: str):
    async with swarm(3, 3) as one:
        failing, others = one.nodes[1], [one.nodes[0], one.nodes[2]]
        failing.trainer.errors[request_] = TrainerError("out of memory")
        for node in one.nodes:
            node.step(INTERVAL)
        entry = await failing.ended()
        assert entry.outcome == "failed" and "out of memory" in entry.reason
        for node in others:
            assert (await node.ended()).outcome == "applied"
        assert (failing.peer_id in agreed(others)) == (request_ == "merge")


@pytest.mark.parametrize("frame", ["roll", "content", "commit"])
async def test_the_clock_ends_what_nothing_else_ends(frame: str):
    async with swarm(3, 3, hello_deadline=0.2) as one:
        one.nodes[0].silent[frame].clear()
        for node in one.nodes:
            node.allow(longest=0.5)
        for node in one.nodes:
            node.step(INTERVAL)
        for node in one.nodes[1:]:
            await node.ended()
        one.nodes[0].silent[frame].set()
        await one.nodes[0].ended()


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [True, False])
async def test_a_share_of_a_list_that_we_do_not_agree_to_is_not_taken_in(leaves: bool):
    async with swarm(0, 3) as one:
        leader, hasty = await one.puppet(), await one.puppet()
        node = await one.node()
        one.meet()
        stream, _ = await leader.hello(node)
        _, early = await soon(hasty.calls.get())
        await hear(early)
        await say(early, pb.Frame(accept=frames.to_message(hasty.offer())))
        pair = sorted([hasty.peer_id, node.peer_id])
        await say(
            early,
            group_frames.roll(pair),
            group_frames.members(pair),
            announced(bytes(9), part=pb.SHARE),
        )
        (round_,) = node.exchanger.running.values()
        reads = round_.links  # it has come to the share when the list before it was heard
        await eventually(
            lambda: hasty.peer_id in reads and hasty.peer_id in round_.one.machine._lists, "named"
        )
        if leaves:
            node.allow(longest=0.1)
            await node.exchanger.close("the node leaves")
        else:
            both = sorted([leader.peer_id, node.peer_id])
            await say(stream, group_frames.roll(both), group_frames.members(both))
            heard = await hear_end(early)
            assert heard[-1].abandon.reason == "is not in the list of members"
            assert list(round_.one.members) == both
        stream.cancel()
        entry = await node.ended()
        assert entry.outcome == ("no-partner" if leaves else "failed")
        early.cancel()


# Bytes


@pytest.mark.parametrize("group", [2, 4, 8])
@pytest.mark.parametrize(("codec_name", "numel"), [("fp32", 250_000), ("e3m0", 1_000_000)])
async def test_a_member_sends_its_part_and_hardly_more(group: int, codec_name: str, numel: int):
    """2 (n - 1) / n of a coded fragment; beside it what it tells each partner, however large the
    fragment is."""
    async with swarm(group, max(3, group), codec=codec_name, numel=numel) as one:
        for node in one.nodes:
            node.step(INTERVAL)
        entries = [await node.ended() for node in one.nodes]
        assert agreed(one.nodes) == {node.peer_id for node in one.nodes}
        part = 2 * (group - 1) / group * codec(codec_name).coded_size(numel)
        sent = [entry.bytes_sent for entry in entries]
        assert sum(sent) == pytest.approx(group * part, rel=1e-4), (
            "a shard that is larger than others makes those smaller"
        )
        for node, payload in zip(one.nodes, sent, strict=True):
            assert payload <= part + (group - 2) * codec(codec_name).coded_size(256), (
                "shards are cut at blocks"
            )
            told = sum(node.told_bytes.values())
            assert told - payload <= (group - 1) * (400 + 160 * group) + 1e-4 * part
            assert told <= 1.015 * part
