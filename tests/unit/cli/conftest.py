"""Runs commands in the process of a test."""

import os
import sys
from pathlib import Path

import pytest

from helpers.command_line import Cli, Ended
from lowcomm_node.cli import app
from lowcomm_node.net.p2pd import find_p2pd
from lowcomm_node.system.app import run_app


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """Runs a command line in this process, exactly as ``lowcomm-node`` does."""
    for variable in [name for name in os.environ if name.startswith("LOWCOMM_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("LOWCOMM_HOME", str(tmp_path / "home"))

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["lowcomm-node", *arguments])
        code = run_app(app, find_p2pd)
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return run
