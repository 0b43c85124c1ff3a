"""What a node tells where there is no terminal: lines that a person can follow."""

from dataclasses import replace
from typing import Any

import pytest

from helpers.statuses import make_status
from lowcomm_node.status.lines import contribution, event_in_words, farewell, progress_in_words

PEER = "12D3KooWL7ptdy7K5PReDZEH2UfJZ4rog4terkXZSMpUEFtSQY1c"


@pytest.mark.parametrize(
    ("event", "line"),
    [
        ({"event": "phase", "phase": "training"}, "training"),
        ({"event": "evaluated", "loss": 1.5, "swarm_step": 20}, "held-out loss 1.5000 at swarm step 20"),
        ({"event": "saved", "swarm_step": 20, "path": "/x"}, "checkpoint at swarm step 20"),
        ({"event": "exchange.applied", "partners": [PEER]}, None),
        (
            {"event": "exchange.failed", "fragment": 2, "partners": [PEER], "reason": "the stream broke off"},
            "exchange of fragment 2 with tSQY1c failed: the stream broke off",
        ),
        ({"event": "state.adopted", "donors": [PEER], "bytes": 2_000_000}, "copied the state of tSQY1c, 2.0 MB"),
        ({"event": "swarm.lost", "reason": "no peer answers"}, "not in the swarm: no peer answers"),
        ({"event": "new.kind", "time": 1.0, "peer": "x"}, "new.kind peer=x"),
    ],
)
def test_each_event_is_a_line_or_part_of_the_progress(event: dict[str, object], line: str | None) -> None:
    assert event_in_words(event) == line


def test_what_strangers_wrote_is_one_line_without_control_characters() -> None:
    told = event_in_words({"event": "door.closed", "address": "/ip4/192.0.2.1", "reason": "a\nb\x1b[2J"})
    assert told == "/ip4/192.0.2.1 does not answer: a b [2J"


def test_progress_tells_step_loss_speed_exchanges_and_why_it_is_alone() -> None:
    status = make_status(
        trainer={"swarm_step": 120, "total_steps": 2000, "loss": 2.25, "tokens_per_second": 14_200.0},
        exchanges={"completed": 12}, bytes_sent=1_200_000, peers=1,
    )  # fmt: skip
    line = "step 120 of 2000, loss 2.2500, 14.2k tokens/s, 12 exchanges, 1.2 MB sent, 1 other peer"
    assert progress_in_words(status) == line
    alone = replace(status, peers=0, waiting="training alone: no other peer is alive")
    assert progress_in_words(alone).endswith("0 other peers; training alone: no other peer is alive")


def test_at_the_end_it_tells_what_was_given_where_the_model_lies_and_how_to_use_it() -> None:
    told: dict[str, Any] = {"exchanges": {"completed": 210, "refused": 9}, "bytes_sent": 1_200_000}
    checkpoint = {"step": 1240, "path": "/home/me/step-0000001240"}
    status = make_status(trainer={"steps": 1234, "tokens": 631_808}, checkpoint=checkpoint, **told)
    given = contribution(status)
    lines = farewell(given, "bin/lowcomm-node", " --home '/a b'").splitlines()
    assert lines == [
        "contributed: 1,234 steps, 631.8k tokens; since this start 210 exchanges applied, 1.2 MB sent",
        "the model:   /home/me/step-0000001240",
        "try it:      bin/lowcomm-node generate \"def \" --home '/a b'",
        "export it:   bin/lowcomm-node checkpoint export FOLDER --home '/a b'",
    ]
    nothing = contribution(make_status(**told))
    assert farewell(nothing, "x").splitlines() == [
        "contributed: 0 steps, 0 tokens; since this start 210 exchanges applied, 1.2 MB sent"
    ]
