"""What must hold for the status of a node: numbers mean what they are called, and JSON can carry
them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.statuses import make_exchange
from lowcomm_node.node.ipc import FailureKind
from lowcomm_node.node.messages import Cooling
from lowcomm_node.node.report import NodeState, report, why_no_exchange
from lowcomm_node.node.supervisor import Failure
from lowcomm_node.node.training import Training
from lowcomm_node.owner.limits import Allowance
from lowcomm_node.owner.rules import Hold, Rule
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.status.events import Board
from lowcomm_node.status.model import to_json
from lowcomm_node.status.words import speed_in_words
from lowcomm_node.sync.history import History
from lowcomm_protocol.exchange.events import Outcome

SETTINGS = NodeSettings(home=Path("/home/nobody"))


def view(**known: Any) -> NodeState:
    """A node that has only just begun, but for what is known."""
    supervisor = SimpleNamespace(
        pid=None,
        restarts=0,
        last_failure=None,
        memory=None,
        accelerators=(),
    )
    usual: dict[str, Any] = {
        "availability": SimpleNamespace(hold=None, schedule=None),
        "peer_id": "me", "departure": SimpleNamespace(left=None), "board": Board(),
        "supervisor": supervisor,
        "settings": SETTINGS, "allowance": Allowance(SETTINGS),
    }  # fmt: skip
    return NodeState(**usual | known)


def test_a_pause_is_told_with_its_reason_and_a_failure_with_its_own():
    before = report(view())
    assert (before.pause, before.trainer.last_failure) == (None, None)
    hold = Hold(Rule.OWNER, "paused by you until 14:30", 1e9)
    one = view(availability=SimpleNamespace(hold=hold, schedule=None))
    one.board.enter("paused", None)
    one.supervisor.last_failure = Failure(kind=FailureKind.HUNG, reason="It hangs.", step=7)
    status = report(one)
    assert (status.waiting, status.waiting_code) == ("paused by you until 14:30", "owner")
    assert status.pause == hold
    assert status.trainer.last_failure == one.supervisor.last_failure


def test_a_card_that_cools_is_a_reason_until_it_has_cooled():
    one = view()
    one.board.enter("training", None)
    training: Any = Training(one, *[None] * 3)  # type: ignore[arg-type]
    training.hear(Cooling(why="the GPU has 90 °C"))
    status = report(one)
    assert (status.waiting, status.waiting_code) == ("the GPU has 90 °C", "gpu-hot")
    training.hear(Cooling(why=""))
    assert report(one).waiting is None


def test_a_duty_is_shown_beside_the_speed():
    for duty, limit in ((0.6, " at 60% duty"), (1.0, "")):
        one = view(ready=SimpleNamespace(device="cuda:0", parameters=9, duty=duty))
        assert speed_in_words(report(one).trainer) == f"– tokens/s{limit}"


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_no_number_is_null(loss: float):
    one = view()
    one.board.advance(loss=loss, val_loss_last=loss, val_loss_first=5.5, steps=7)
    trainer = json.loads(json.dumps(to_json(report(one)), allow_nan=False))["trainer"]
    told = tuple(trainer[name] for name in ("loss", "val_loss_last", "val_loss_first", "steps"))
    assert told == (None, None, 5.5, 7)


@pytest.mark.parametrize(
    ("outcomes", "waits"),
    [
        ([Outcome.NO_PARTNER] * 9, False),
        ([Outcome.FAILED] * 2, False),
        ([Outcome.FAILED] * 3, True),
        ([Outcome.FAILED, Outcome.APPLIED, Outcome.FAILED, Outcome.FAILED], False),
    ],
)
def test_only_several_failures_in_a_row_are_a_reason(outcomes: list[Outcome], waits: bool) -> None:
    history = History()
    for outcome in outcomes:
        history.exchanges.append(make_exchange(outcome=outcome, reason="the line broke"))
    own_line = SimpleNamespace(trouble=None)
    exchanger = SimpleNamespace(
        history=history, hindrance=None, resting=None, kept_waiting=None, interval=None,
        running={}, peer=SimpleNamespace(own_line=own_line),
    )  # fmt: skip
    waiting = why_no_exchange(exchanger)  # type: ignore[arg-type]
    assert (waiting is not None) == waits
    assert waiting is None or "the last 3 exchanges failed: the line broke" in waiting.text
