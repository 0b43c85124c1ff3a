"""What must hold for who exchanges with whom, in pairs and groups: who is refused and why, what is
due, what waits."""

import asyncio
from dataclasses import replace
from math import ceil
from time import monotonic, time

import pytest

from helpers.exchanging import (
    INTERVAL,
    MIN_STEPS,
    NUMEL,
    Node,
    eventually,
    say,
    swarm,
)
from helpers.scripted_trainer import SIZE, ScriptedTrainer
from helpers.wire import cabled
from lowcomm_node.errors import TrainerLost
from lowcomm_node.sync import exchanger as exchanger_module
from lowcomm_node.sync import frames
from lowcomm_node.sync.history import WE_REFUSED
from lowcomm_protocol.exchange import events
from lowcomm_protocol.exchange.budget import SLACK
from lowcomm_protocol.matching import REFUSAL_TEXT, Refusal
from lowcomm_protocol.messages import exchange_pb2 as pb


async def refused(caller: Node, callee: Node, reason: Refusal) -> None:
    """The caller has been refused for a reason, which both have noted."""
    to_callee, to_caller = (
        caller.exchanger.history.of(callee.peer_id),
        callee.exchanger.history.of(caller.peer_id),
    )
    await eventually(lambda: to_callee.refused, "it is refused")
    assert (to_callee.refused, to_callee.last_reason) == (1, REFUSAL_TEXT[reason])
    assert to_caller.last_reason == f"we refused it: {WE_REFUSED[reason]}"
    assert (to_callee.failed, to_caller.failed) == (0, 0)


async def refused_for_good(caller: Node, callee: Node, reason: Refusal) -> None:
    """As ``refused``, and there was nobody else to call."""
    entry = await caller.ended()
    assert entry.outcome == "no-partner"
    assert entry.left_out == {callee.peer_id: REFUSAL_TEXT[reason]}
    assert REFUSAL_TEXT[reason] in caller.exchanger.history.exchanges[-1].reason
    await refused(caller, callee, reason)
    assert caller.trainer.asked == []
    fragment = entry.fragment
    assert fragment not in caller.exchanger.peer.position.schedule.due(
        caller.exchanger.peer.position.swarm_step
    ), "it waits for its next sync"


async def test_who_has_just_merged_refuses_until_it_has_made_enough_steps():
    async with swarm(2) as one:
        caller, callee = one.nodes
        callee.step(INTERVAL - 1, MIN_STEPS - 1)
        caller.step(INTERVAL)
        await refused_for_good(caller, callee, Refusal.TOO_SOON)
        callee.step(INTERVAL - 1, MIN_STEPS)
        await caller.at_rest()
        caller.step(2 * INTERVAL)
        assert (await caller.ended(2)).outcome == "applied"


@pytest.mark.parametrize(
    ("step", "outcome"), [(11 * INTERVAL - 1, "applied"), (11 * INTERVAL, "no-partner")]
)
async def test_a_step_that_nobody_else_supports_is_refused(step: int, outcome: str):
    async with swarm(2) as one:
        caller, callee = one.nodes
        callee.knows(caller, swarm_step=step, issued=time() + 1)
        caller.step(step)
        assert (await caller.ended()).outcome == outcome
        if outcome == "no-partner":
            await refused(caller, callee, Refusal.IMPLAUSIBLE_STEP)
            assert callee.exchanger.peer.position.swarm_step == INTERVAL - 1


async def test_an_answer_with_a_step_that_nobody_else_supports_is_not_taken():
    async with swarm(2) as one:
        caller, callee = one.nodes
        callee.step(11 * INTERVAL + 1, MIN_STEPS)
        await callee.ended()  # refused for just that, too
        await callee.at_rest()
        caller.knows(callee, swarm_step=11 * INTERVAL + 1, issued=time() + 1)
        caller.step(INTERVAL)
        assert "which nobody else supports" in (await caller.ended()).reason
        told = await callee.ended(2)
        assert f"gave up: claims swarm step {11 * INTERVAL + 1}, which nobody" in told.reason
        assert caller.exchanger.history.of(callee.peer_id).failed == 1
        assert [node.trainer.merges for node in one.nodes] == [[], []]
        assert not callee.exchanger.peer.own_line.stalled_peers, "its line is not to blame"


async def test_who_is_busy_refuses_and_the_next_candidate_is_called():
    async with swarm(0) as one:
        first, second, third, fourth = [await one.node() for _ in range(4)]
        one.meet(first, second)
        first.trainer.holds["capture"].clear()
        first.step(INTERVAL)
        await eventually(lambda: "capture" in second.trainer.asked, "two are under way")
        one.meet(first, second, third)
        third.step(INTERVAL)
        entry = await third.ended()
        assert entry.outcome == "no-partner"
        assert entry.left_out == dict.fromkeys(
            (first.peer_id, second.peer_id), REFUSAL_TEXT[Refusal.BUSY]
        )
        for busy in (first, second):
            await refused(third, busy, Refusal.BUSY)
        one.meet()
        await third.at_rest()
        third.step(2 * INTERVAL)
        assert (await third.ended(2)).partners == (fourth.peer_id,)
        first.trainer.holds["capture"].set()
        assert [(await node.ended()).outcome for node in (first, second)] == ["applied", "applied"]


@pytest.mark.parametrize("short", ["of exchanges", "of slots"])
async def test_who_is_full_refuses_and_does_not_begin(short: str):
    ahead = {
        "progress": ({"synced": 0}, {"synced": 9})
    }  # so that it is the other fragment that it calls for
    async with swarm(0, fragments=2) as one:
        begun = {
            "progress": ({"synced": 0}, {})
        }  # its first fragment is due next at one and a half intervals
        first, second = await one.node(**begun), await one.node(**begun)
        one.slots = 4
        third = await one.node(**ahead)
        one.meet(first, second)
        first.trainer.holds["capture"].clear()
        first.step(INTERVAL)
        await eventually(lambda: "capture" in second.trainer.asked, "two are under way")
        if short == "of slots":
            first.exchanger.peer.position.ready = replace(
                first.exchanger.peer.position.ready, exchanges=2
            )
            first.exchanger.peer.budget.closing.add(0)
        one.meet(first, third)
        third.step(INTERVAL + INTERVAL // 2)
        await refused_for_good(third, first, Refusal.FULL)
        first.step(INTERVAL + INTERVAL // 2)
        assert list(first.exchanger.running) == [1], "the other fragment waits"
        first.trainer.holds["capture"].set()
        assert (await first.ended()).outcome == "applied"
        third.exchanger.exchanging = False
        await eventually(lambda: first.free == 2, "slots are free again")
        first.step(INTERVAL + INTERVAL // 2 + 1)
        assert (await first.ended(2)).fragment == 0
        one.slots = 2
        third.trainer.arena.take(2)  # of its larger arena, so that all are alike in the end


async def test_peers_of_one_address_do_not_take_all_exchanges():
    async with swarm(1, fragments=4, slots=8) as one:
        (node,) = one.nodes
        puppets = [await one.puppet() for _ in range(5)]
        peer = node.exchanger.peer
        now = peer.position.schedule.round_of(2, peer.position.swarm_step)
        firsts = {peer._candidates(2, round_)[0] for round_ in (now, now + 1)}
        *near, far = sorted(puppets, key=lambda puppet: puppet.peer_id in firsts)
        suits = next(k for k in range(99) if peer._candidates(2, k)[0] == near[2].peer_id)
        called = [
            await puppet.hello(node, fragment=number, round=suits)
            for number, puppet in enumerate(near[:3])
        ]
        answers = [answer.WhichOneof("kind") for _, answer in called]
        assert answers == ["accept", "accept", "refuse"], "half of the four"
        assert called[2][1].refuse.reason == Refusal.FULL.value
        called.append(await far.hello(node, fragment=2))
        assert called[3][1].WhichOneof("kind") == "accept", "the node would call it itself"
        async with cabled(node.port, "127.9.0.1") as cable:
            called.append(await near[3].hello(node, cable.port, fragment=3))
            assert called[4][1].WhichOneof("kind") == "accept"
            for stream, _ in called:
                stream.cancel()
            await eventually(lambda: not node.exchanger.running, "all have ended")


async def test_slots_are_kept_until_the_last_word_has_gone():
    async with swarm(2) as one:
        first, second = one.nodes
        first.silent["confirm"].clear()
        first.step(INTERVAL)
        assert (await first.ended()).outcome == "applied"
        assert (first.free, len(second.exchanger.running)) == (0, 1)
        first.step(2 * INTERVAL)
        assert not first.exchanger.running, "the next one waits for slots"
        first.silent["confirm"].set()
        assert (await second.ended()).outcome == "applied"
        await eventually(lambda: first.free == one.slots, "slots are free again")


@pytest.mark.parametrize(("group", "outcome"), [(2, "failed"), (3, "no-partner")])
async def test_a_caller_that_is_gone_before_it_is_accepted_is_noticed(group: int, outcome: str):
    async with swarm(1, group) as one:
        (node,) = one.nodes
        puppet = await one.puppet()
        node.exchanger.roster.in_phase = lambda *_: []  # nobody else is to be called
        node.silent["accept"].clear()
        stream = await puppet.call(node)
        await say(stream, pb.Frame(hello=frames.to_message(puppet.offer())))
        await eventually(lambda: node.waiting_to_say["accept"], "it is to be accepted")
        stream.cancel()
        assert (await node.ended()).outcome == outcome
        assert node.exchanger.history.of(puppet.peer_id).failed == 1


def seconds_of(node: Node, size: int = SIZE) -> int:
    """What an offer of a node must tell of a limit that leaves so many bytes ten seconds."""
    node.exchanger.bandwidth.up.allow(size / 10.0)
    return ceil(10.0 * SLACK)


@pytest.mark.parametrize("limited", [0, 1])
async def test_both_wait_as_long_as_the_limits_of_either_ask_for_who_was_seen_to_need_that(
    limited: int,
):
    async with swarm(2) as one:
        one.nodes[0].exchanger.peer.budget.took(one.nodes[1].peer_id, 7.5)
        for node in one.nodes:
            node.exchanger.peer.budget.durations.append(1.0)
            assert node.exchanger.peer.budget.deadline == 14.0
            node.trainer.holds["capture"].clear()
        seconds_of(one.nodes[limited])
        one.nodes[0].step(INTERVAL)
        await eventually(
            lambda: all("capture" in node.trainer.asked for node in one.nodes), "both have agreed"
        )
        assert [node.exchanger.running[0].one.deadline for node in one.nodes] == [14.0 + 15.0] * 2
        for node in one.nodes:
            node.trainer.holds["capture"].set()
            node.exchanger.bandwidth.up.allow(None)
        assert (await one.nodes[0].ended()).outcome == "applied"


async def test_steps_that_no_exchange_may_wait_for_are_told_with_the_flag():
    async with swarm(2) as one:
        node = one.nodes[0]
        node.allow(longest=14.0)
        node.step(INTERVAL, seconds=28.0)
        assert node.exchanger.running == {}
        told = (
            "with steps of 28 s an exchange may take 28 s, and --exchange-deadline allows 14: "
            "raise that"
        )
        assert node.exchanger.hindrance == told
        node.allow(longest=30.0)
        node.step(INTERVAL + 1)
        assert (await node.ended()).outcome == "applied", "it stays due"


@pytest.mark.parametrize("step", [0.0, 28.0])
async def test_a_deadline_that_passes_names_what_is_missing_and_the_flag(step: float):
    async with swarm(2) as one:
        node = one.nodes[0]
        node.trainer.holds["capture"].clear()
        node.step(INTERVAL)
        await eventually(lambda: "capture" in node.trainer.asked, "they have agreed")
        node.exchanger.peer.budget.pace.append(step)
        node.allow(longest=0.2)
        late = node.exchanger.running[0]
        late.one.set_timers(0.2, 0.2)
        node.exchanger._set_timer()
        await eventually(lambda: late.one.machine.over, "its deadline has passed")
        node.trainer.holds["capture"].set()
        reason = (await node.ended()).reason
        assert "our contribution was not ready" in reason
        assert ("a step takes 28 s here" in reason) == bool(step)
        assert "--exchange-deadline allows 0.2 s: raise it" in reason


async def test_a_caller_that_may_not_wait_so_long_gives_up_at_once_and_blames_nobody():
    async with swarm(2) as one:
        caller, callee = one.nodes
        seconds_of(callee)
        caller.allow(longest=14.0)
        caller.step(INTERVAL)
        entry = await caller.ended()
        assert "needs 15 s for its steps and contents" in entry.left_out[callee.peer_id]
        assert caller.exchanger.peer.trust.trusts(
            callee.peer_id, caller.exchanger.peer.position.steps
        )
        await callee.ended()


async def test_who_has_slept_while_most_peers_trained_on_has_drifted():
    async with swarm(4) as one:
        node, *others = one.nodes
        for behind, other in enumerate(others):
            assert node.exchanger.peer.drift.must_copy(monotonic()) is (behind == 2), (
                f"{behind} of 3 are far ahead"
            )
            node.knows(other, swarm_step=11 * INTERVAL)
        node.step(1)
        node.exchanger.peer._begin(0)
        node.exchanger.stimulate(events.Tick())
        assert node.exchanger.drifted.is_set() and not node.exchanger.running, (
            "nobody is accused of lies"
        )
        node.exchanger.peer.position.swarm_step = INTERVAL
        assert not node.exchanger.peer.drift.must_copy(monotonic()), "a merge heals that"


async def test_who_has_copied_a_state_a_moment_ago_meets_others_before_it_copies_again(monkeypatch):
    began = now = monotonic()
    monkeypatch.setattr(exchanger_module, "monotonic", lambda: now)
    async with swarm(3) as one:
        node, *others = one.nodes
        exchanger = node.exchanger
        node.knows(*others, swarm_step=11 * INTERVAL)
        assert exchanger.peer.drift.must_copy(now)
        assert exchanger.resting is None
        exchanger.peer.drift.rest.copied(took=0.1, now=now)
        assert not exchanger.peer.drift.must_copy(now)
        assert "whose state was copied lately: it is copied again in 10 s" in (
            exchanger.resting or ""
        )
        node.step(INTERVAL)
        assert (await node.ended()).outcome == "applied", "exchanges go on"
        exchanger.peer.position.swarm_step = 0
        now = began + 10.0
        assert exchanger.peer.drift.must_copy(now) and exchanger.resting is None
        exchanger.peer.drift.rest.copied(took=0.1, now=now)
        node.knows(*others, swarm_step=INTERVAL, issued=time() + 1)
        assert exchanger.resting is None, "nothing is wrong any more"


async def test_an_exchange_that_ends_after_its_trainer_keeps_to_that_ones_memory():
    async with swarm(2) as one:
        node, other = one.nodes
        lost = node.trainer
        lost.holds["capture"].clear()
        node.step(INTERVAL)
        await eventually(lambda: "capture" in lost.asked, "an exchange is under way")
        assert lost.arena is not None and lost.arena.free == 0
        node.trainer = ScriptedTrainer(node.peer_id, one.slots, SIZE, one.spec.sync.codec, NUMEL)
        node.exchanger.take_over(node.exchanger._ready, node.trainer)  # type: ignore[arg-type]
        (round_,) = node.exchanger.running.values()
        closing = asyncio.create_task(node.exchanger.close("the trainer failed", 0.0))
        lost.errors["capture"] = TrainerLost("The trainer ended.")
        lost.holds["capture"].set()
        entry = await node.ended()
        assert entry.outcome == "failed" and "captured: The trainer ended." in entry.reason
        await closing
        assert round_.trainer is lost and lost.arena.free == one.slots
        assert node.free == one.slots and node.trainer.asked == [], "the next one never hears of it"
        assert (await other.ended()).outcome == "failed"


async def test_exchanges_that_may_end_in_time_are_not_given_up():
    async with swarm(2) as one:
        node = one.nodes[0]
        node.trainer.holds["capture"].clear()
        node.step(INTERVAL)
        await eventually(lambda: "capture" in node.trainer.asked, "an exchange is under way")
        closing = asyncio.create_task(node.exchanger.close("the node pauses", 60.0))
        await eventually(lambda: not node.exchanger.exchanging, "no more are begun")
        node.trainer.holds["capture"].set()
        await closing
        assert (await node.ended()).outcome == "applied"
        assert node.free == one.slots, "when it returns nothing is left of it"
