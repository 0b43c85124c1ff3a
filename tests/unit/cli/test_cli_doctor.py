"""What ``doctor`` and ``ping`` print, and how they end."""

import json
import sys
from pathlib import Path

import pytest

from lowcomm_node import cli
from lowcomm_node.cli import common
from lowcomm_node.cli.machine import _print_findings, _print_routes
from lowcomm_node.doctor.findings import Finding, Severity
from lowcomm_node.net.routes import RouteSpeed
from lowcomm_node.status.model import Ping

ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWCvyXpWoMsNuu4C53GqenGpzidepghgy3RZge3s3ARhsh"


def end_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run a command line in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["lowcomm-node", *arguments])
    return common.run(cli.app)


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


def test_what_mends_several_findings_is_told_once_and_nothing_of_it_is_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", "60")
    remedy = f"run this: lowcomm-node doctor --peers {ADDRESS}"
    bad = [Finding(name, Severity.FAULT, ADDRESS, remedy) for name in ("nat", "outside")]
    fine = Finding("disk", Severity.OK, "much\x1b[2J room")
    last = Finding("memory", Severity.WARNING, "little", "end [bold]other[/bold] programs")
    _print_findings([*bad, fine, last])
    printed = capsys.readouterr().out
    assert (
        printed.count(f"1. {remedy}\n") == 1 and "2. end [bold]other[/bold] programs\n" in printed
    )
    assert printed.count("see 1") == 2 and printed.count("see 2") == 1
    assert "…" not in printed and "\x1b" not in printed


def test_a_route_that_is_not_there_shows_why(capsys: pytest.CaptureFixture[str]):
    route = RouteSpeed(route="direct", reason="can't be reached")
    relay = RouteSpeed(route="relay abcdef", round_trip=0.02, up=2e6, down=3e6)
    _print_routes(Ping(peer_id="12D3KooWx", routes=(route, relay)))
    printed = capsys.readouterr().out
    assert "12D3KooWx" in printed and "can't be reached" in printed
    assert "relay abcdef" in printed and "20 ms" in printed and "2.0 MB/s" in printed
