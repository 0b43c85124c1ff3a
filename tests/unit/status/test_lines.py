"""What a node tells where there is no terminal: lines that a person can follow."""

import pytest

from helpers.statuses import make_exchange
from lowcomm_node.fetch import StateAdopted
from lowcomm_node.node.messages import Evaluated, Saved
from lowcomm_node.status.events import OtherEvent, PhaseEntered
from lowcomm_node.status.words import (
    event_in_words,
)
from lowcomm_node.swarm.standing import AddressesChanged, EntryPointSilent, SwarmLost
from lowcomm_node.system.logs import Event

PEER = "12D3KooWL7ptdy7K5PReDZEH2UfJZ4rog4terkXZSMpUEFtSQY1c"


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (PhaseEntered(phase="training"), "training"),
        (
            Evaluated(loss=1.5, tokens=9, swarm_step=20, steps=10),
            "held-out loss 1.5000 of the fast weights at swarm step 20",
        ),
        (
            Evaluated(loss=1.5, tokens=9, swarm_step=20, steps=10, epochs=2.54),
            "held-out loss 1.5000 of the fast weights at swarm step 20, after 2.5 epochs of the "
            "text",
        ),
        (
            Saved(swarm_step=20, path="/x", seconds=1.0, after_trouble=False),
            "checkpoint at swarm step 20",
        ),
        (make_exchange(), None),
        (
            make_exchange(
                outcome="failed", fragment=2, partners=[PEER], reason="the stream broke off"
            ),
            "exchange of fragment 2 with tSQY1c failed: the stream broke off",
        ),
        (
            StateAdopted(donors=(PEER,), swarm_step=7, bytes=2_000_000),
            "copied the state of tSQY1c, 2.0 MB",
        ),
        (
            AddressesChanged(addresses=("192.0.2.1", "2001:db8::1")),
            "this machine's addresses are now 192.0.2.1, 2001:db8::1",
        ),
        (SwarmLost(reason="no peer answers"), "not in the swarm: no peer answers"),
        (OtherEvent(content={"event": "new.kind", "peer": "x"}), "new.kind peer=x"),
    ],
)
def test_each_event_is_a_line_or_part_of_the_progress(event: Event, line: str | None) -> None:
    assert event_in_words(event) == line


def test_what_strangers_wrote_is_one_line_without_control_characters() -> None:
    told = event_in_words(
        EntryPointSilent(peer_id="x", address="/ip4/192.0.2.1", reason="a\nb\x1b[2J")
    )
    assert told == "/ip4/192.0.2.1 does not answer: a b [2J"
