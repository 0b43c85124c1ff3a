"""``exchanges`` and ``logs``: what a home did is told where no node runs, and in words."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from helpers.statuses import make_exchange
from helpers.waiting import until
from lowcomm_node.cli import app
from lowcomm_node.status.events import Notice, Warned
from lowcomm_node.status.journal import JournalFile
from lowcomm_node.storage.paths import Paths
from lowcomm_node.system.logs import Event

RUN = "e1f145ac155e"


def tell(home: Path, *events: Event, at: float = 1.7e9) -> None:
    file = JournalFile(Paths(home).journal(RUN))
    file.add([Notice(at, event) for event in events], [])
    file.close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    tell(
        tmp_path,
        make_exchange(round=1),
        Warned(text="the disk is\x1b[2J nearly full"),
        make_exchange(round=2, outcome="failed", reason="the line was lost"),
        make_exchange(round=3, outcome="no-partner", reason="all are busy"),
    )
    return tmp_path


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def test_exchanges_of_a_home_are_listed_where_no_node_runs(home: Path):
    told = call("exchanges", "--home", home).output.splitlines()
    assert [line.split()[3] for line in told if line[:1].isdigit()] == [
        "applied",
        "failed",
        "no-partner",
    ]
    assert "  the line was lost" in told
    found = json.loads(call("exchanges", "--home", home, "--json", "--outcome", "failed").output)
    assert [one["round"] for one in found] == [2]
    assert call("exchanges", "--home", home, "--since", "1h").output == "no such exchange\n"
    assert call("exchanges", "--home", home, "--peer", "nobody").output == "no such exchange\n"


def test_logs_tell_what_happened_in_words_without_control_characters(home: Path):
    told = [line[16:] for line in call("logs", "--home", home).output.splitlines()]
    assert told[0] == "exchange of fragment 0 applied"
    assert told[1].startswith("warning: the disk is")
    assert "\x1b" not in told[1]
    assert told[2].endswith("failed: the line was lost")
    assert told[3] == "exchange of fragment 0 no-partner: all are busy"
    assert len(call("logs", "--home", home, "-n", "2").output.splitlines()) == 2
    last = call("logs", "--home", home, "-n", "1", "--json").output
    assert json.loads(last)["event"] == "exchange.no-partner"


def test_logs_that_follow_tell_what_a_node_writes_meanwhile(home: Path):
    command = (sys.executable, "-m", "lowcomm_node", "logs", "-f", "-n", "0", "--home", str(home))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout
            os.set_blocking(child.stdout.fileno(), False)

            def told_of_a_notice() -> bool:
                # Whether it has begun to look is not told, so notices come until it shows one.
                tell(home, Warned(text="not full any more"))
                assert child.stdout
                return "not full any more" in child.stdout.readline()

            until(told_of_a_notice, 60, "a line of logs -f")
        finally:
            child.kill()
