"""What ``doctor`` and ``ping`` print, and how they end."""

import json
import sys
from pathlib import Path

import pytest

from lowcomm_node import cli
from lowcomm_node.net.p2pd import find_p2pd
from lowcomm_node.system.app import run_app


def end_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run a command line in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["lowcomm-node", *arguments])
    return run_app(cli.app, find_p2pd)


def test_doctor_looks_at_the_machine_where_there_is_no_network(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    home = tmp_path / "home"
    assert end_of(monkeypatch, "doctor", "--json", "--home", str(home)) == 0
    told = json.loads(capsys.readouterr().out)
    found = {finding["name"]: finding for finding in told["findings"]}
    assert (
        told["exit_code"] == 0
        and found["dht"]["state"] == "unknown"
        and found["disk"]["figures"]["free"] > 0
    )
    assert "--peers ADDR" in found["dht"]["remedy"] and str(home) in found["node"]["value"]
    assert not home.exists(), "to look at a home does not make one"
