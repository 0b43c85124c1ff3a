"""What must hold for stories: a node tells how an exchange went, and another machine decides the
same."""

import json
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from helpers.exchanging import INTERVAL, swarm
from helpers.stimuli import RecordedPeer
from lowcomm_node.errors import NodeError
from lowcomm_node.sync import exchanger, history
from lowcomm_protocol.exchange import events, underway


@pytest.mark.parametrize("group", [2, 3])
async def test_what_a_node_tells_of_an_exchange_is_decided_again_the_same(
    monkeypatch, tmp_path, group
):
    monkeypatch.setattr(exchanger, "Peer", RecordedPeer)
    file = tmp_path / "story.json"
    async with swarm(group, group) as one:
        for node in one.nodes:
            node.step(INTERVAL)
        for node in one.nodes:
            assert (await node.ended()).outcome == "applied"
            await node.at_rest()
            file.write_text(json.dumps(node.exchanger.history.story(1)))
            peer = node.exchanger.peer
            assert isinstance(peer, RecordedPeer)
            decided = [effect for stimulus in peer.log.stimuli for effect in stimulus.effects]
            of_peer = (events.Began, events.Accept, events.Refuse, events.CancelCall, events.Over)
            carried_out = [
                replace(effect, exchange=0) for effect in decided if not isinstance(effect, of_peer)
            ]
            assert [
                effect
                for _, effects in underway.replay(json.loads(file.read_text()))
                for effect in effects
            ] == carried_out
            assert isinstance(carried_out[-1], events.Apply)


async def test_the_log_of_a_defect_carries_the_story():
    async def fail() -> None:
        raise AssertionError("of ours")

    async with swarm(2) as one:
        node, other = one.nodes
        other.trainer.holds["capture"].clear()
        node.step(INTERVAL)
        with capture_logs() as logs:
            node.exchanger.running[0]._start(fail())
            assert "please report it with the log" in (await node.ended()).reason
        other.trainer.holds["capture"].set()
        (entry,) = [entry for entry in logs if entry["event"] == "exchange.defect"]
        again = underway.replay(json.loads(entry["story"]))
        assert again[0] == (0.0, [events.Dial(peer=other.peer_id)])
        assert len(node.exchanger.history.stories) == 1, "it is kept, too"


async def test_stories_are_bounded_and_one_that_is_not_kept_is_refused_with_the_remedy(monkeypatch):
    async with swarm(2) as one:
        node = one.nodes[0]
        record = node.exchanger.history
        with pytest.raises(NodeError, match="wait until an exchange has ended"):
            record.story(1)
        node.step(INTERVAL)
        await node.ended()
        (told,) = record.stories
        monkeypatch.setattr(history, "MAX_STORIES", 3)
        for _ in range(9):
            record._keep(told)
        assert len(record.stories) == 3
        for last in (0, 4):
            with pytest.raises(NodeError, match=rf"of exchange {last} .* choose 1 .* to 3"):
                record.story(last)
        monkeypatch.setattr(history, "MAX_STORY_EVENTS", 2 * len(told.events))
        record._keep(told)
        assert len(record.stories) == 2, "long stories leave room for fewer"
