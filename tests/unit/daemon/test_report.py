"""What must hold for the status of a node: numbers mean what they are called, and JSON can carry them."""

import json
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from lowcomm_node.daemon.report import report
from lowcomm_node.owner.rules import Hold, Rule
from lowcomm_node.status.board import Bulletin
from lowcomm_node.sync.history import History, Outcome
from lowcomm_node.trainer.failures import Failure, Kind
from lowcomm_protocol.plan.matching import Refusal
from lowcomm_protocol.refusals import Reason, Refusals, What


def node(history: History, **progress: Any) -> Any:
    """A node of which only its exchanges and its progress are known."""
    known: defaultdict[str, Any] = defaultdict(lambda: None)
    known |= {
        "peer_id": "me", "began": 0.0, "bulletin": Bulletin(),
        "exchanger": SimpleNamespace(history=history, running={}), "refusals": Refusals(),
        "limits": lambda: {"max_up": None}, "availability": SimpleNamespace(hold=None),
        "supervisor": SimpleNamespace(pid=None, restarts=0, last_failure=None, overdue=lambda now: None),
    }  # fmt: skip
    known["bulletin"].phase, known["bulletin"].progress = "training", progress
    names = ("run_", "membership", "channels", "rejoin", "training", "leaving")
    return SimpleNamespace(**known, **dict.fromkeys(names))


def test_refusals_are_counted_one_by_one_whatever_became_of_their_exchanges():
    history = History()
    history.outcomes[Outcome.NO_PARTNER] = 5
    for refusal in (Refusal.BUSY, Refusal.FULL):
        history.they_refused("a", refusal)
    history.we_refused("b", Refusal.TOO_SOON)
    exchanges = report(node(history))["exchanges"]
    assert (exchanges["refused"], exchanges["no_partner"], exchanges["completed"]) == (3, 5, 0)


def test_what_strangers_sent_and_was_not_taken_is_told_by_its_reason():
    one = node(History())
    assert report(one)["refusals"] == {}
    one.refusals.count(What.CALL, Reason.REPLAYED)
    assert json.loads(json.dumps(report(one)))["refusals"] == {"call.replayed": 1}


def test_a_pause_is_told_with_its_reason_and_a_failure_with_its_own():
    one = node(History())
    assert (report(one)["pause"], report(one)["trainer"]["last_failure"]) == (None, None)
    one.bulletin.phase, one.availability.hold = "paused", Hold(Rule.OWNER, "paused by its owner until 14:30", 1e9)
    one.supervisor.last_failure = Failure(kind=Kind.HUNG, reason="It hangs.", step=7)
    status = json.loads(json.dumps(report(one)))
    assert status["waiting"] == "paused by its owner until 14:30"
    assert status["pause"] == {"rule": "owner", "reason": "paused by its owner until 14:30", "until": 1e9}
    assert status["trainer"]["last_failure"] == {"kind": "hung", "reason": "It hangs.", "step": 7}


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_no_number_is_null(loss: float):
    status = report(node(History(), loss=loss, val_loss_last=loss, val_loss_first=5.5, steps=7))
    trainer = json.loads(json.dumps(status, allow_nan=False))["trainer"]
    assert (trainer["loss"], trainer["val_loss_last"], trainer["val_loss_first"], trainer["steps"]) == (
        None,
        None,
        5.5,
        7,
    )
