"""When a node or a bootstrap server is well: what its status or its sign of life says, and nothing
else."""

import json
import os
import socket
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from helpers.statuses import make_status
from lowcomm_bootstrap.health import PATIENCE, begin_sign, check_health
from lowcomm_node.cli import app, common
from lowcomm_node.errors import Unhealthy
from lowcomm_node.net.p2pd import find_p2pd
from lowcomm_node.status.model import Status
from lowcomm_node.status.words import PHASE_PATIENCE, SWARM_PATIENCE, judge_health
from lowcomm_node.system.app import run_app
from lowcomm_node.web.client import ControlClient

LONG = 10 * max(PHASE_PATIENCE.values())


def status(phase: str = "training", **changes: Any) -> Status:
    """A status, as far as health goes by it."""
    swarm = {"seconds": LONG} | changes.pop("swarm", {})
    trainer = {"swarm_step": 7} | changes.pop("trainer", {})
    return make_status(phase=phase, peers=3, swarm=swarm, trainer=trainer, **changes)


def test_a_node_that_trains_is_well_however_long_its_phase_lasts() -> None:
    health = judge_health(status(unchanged=LONG))
    assert (health.healthy, health.reason) == (
        True,
        "training · step 7 of 400, loss –, – tokens/s, 0 exchanges, 0 B sent, 3 other peers",
    )


def test_a_node_that_leaves_is_well_as_long_as_it_has_said() -> None:
    assert judge_health(status("finishing", unchanged=LONG, leaving=10.0)).healthy
    assert not judge_health(status("finishing", unchanged=1.0, leaving=-10.0)).healthy


@pytest.mark.parametrize("state", ["lost", "looking", "unlisted"])
def test_who_is_not_in_the_swarm_for_long_is_not_well_and_says_why(state: str) -> None:
    swarm = {
        "state": state,
        "seconds": SWARM_PATIENCE - 1,
        "reason": "no peer answers: the door is shut",
    }
    assert judge_health(status(swarm=swarm)).healthy, "an outage may pass"
    found = judge_health(status(swarm=swarm | {"seconds": SWARM_PATIENCE + 1}))
    assert not found.healthy and "no peer answers: the door is shut" in found.reason


def test_a_node_that_does_not_run_or_does_not_answer_is_not_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(
            sys, "argv", ["lowcomm-node", "status", "--check", "--home", str(tmp_path), *arguments]
        )
        return run_app(app, find_p2pd), capsys.readouterr().out

    code, told = ask()
    assert (code, told.startswith(f"No node runs in {tmp_path}"), told.count("\n")) == (4, True, 1)
    monkeypatch.setattr(common, "ControlClient", partial(ControlClient, timeout=0.2))
    with closing(socket.create_server(("127.0.0.1", 0))) as deaf:
        content = {"port": deaf.getsockname()[1], "token": "t", "pid": os.getpid(), "peer_id": "p"}
        (tmp_path / "control.json").write_text(json.dumps(content))
        code, told = ask("--json")
    found = json.loads(told)
    assert (code, found["healthy"]) == (4, False) and "does not answer" in found["reason"]


# the bootstrap server


def test_a_server_that_looks_around_is_well(tmp_path: Path) -> None:
    begin_sign(tmp_path)
    assert "p2pd answers" in check_health(tmp_path)
    then = (tmp_path / "serving.json").stat().st_mtime
    with pytest.raises(Unhealthy, match="has not looked around for 61 s"):
        check_health(tmp_path, then + PATIENCE + 1)
    (tmp_path / "serving.json").unlink()
    with pytest.raises(Unhealthy, match="No server runs in"):
        check_health(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"pid": "x"}'])
def test_a_damaged_sign_of_life_is_not_well(content: str, tmp_path: Path) -> None:
    (tmp_path / "serving.json").write_text(content)
    with pytest.raises(Unhealthy, match="can't be read"):
        check_health(tmp_path)


def test_a_server_that_was_killed_is_not_well(tmp_path: Path) -> None:
    (tmp_path / "serving.json").write_text(json.dumps({"pid": 2**22 + 1}))
    with pytest.raises(Unhealthy, match="ended without a goodbye"):
        check_health(tmp_path)
