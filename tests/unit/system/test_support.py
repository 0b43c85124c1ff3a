"""What must hold where lowcomm can't take part in a swarm: one line that says why and what to do,
before anything is loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowcomm_node.cli import app
from lowcomm_node.errors import Incompatible
from lowcomm_node.net.p2pd import find_p2pd
from lowcomm_node.system.app import run_app
from lowcomm_node.system.command import WINDOWS, check_system

NOWHERE = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWL7ptdy7K5PReDZEH2UfJZ4rog4terkXZSMpUEFtSQY1c"
LIKE_WINDOWS = """
import asyncio, sys, subprocess, tempfile, zoneinfo, httpx, structlog, typer, typer.rich_utils
import cryptography, psutil
from pydantic import BaseModel
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "uvloop", "hivemind"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
sys.modules.pop("fcntl", None)
sys.platform = "win32"
from lowcomm_{package}.cli import main
main()
"""


def like_windows(package: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command line where it is as if this were Windows."""
    code = [sys.executable, "-c", LIKE_WINDOWS.replace("{package}", package), *arguments]
    return subprocess.run(code, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("command", [["join", "--peers", NOWHERE], ["demo"]])
def test_commands_that_need_a_swarm_say_so_at_once(
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("LOWCOMM_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["lowcomm-node", *command])
    monkeypatch.setattr(sys, "platform", "win32")
    assert run_app(app, find_p2pd) == Incompatible.exit_code
    assert capsys.readouterr().err == f"error: {WINDOWS}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("package", "arguments"), [("bootstrap", ["serve"]), ("node", ["id"])])
def test_no_command_ends_with_a_traceback_where_modules_are_missing(
    package: str, arguments: list[str], tmp_path: Path
) -> None:
    done = like_windows(package, *arguments, "--home", str(tmp_path))
    assert (done.returncode, done.stderr) == (Incompatible.exit_code, f"error: {WINDOWS}\n")


def test_a_hivemind_without_p2pd_or_with_one_that_may_not_run_is_named(tmp_path: Path) -> None:
    program = tmp_path / "p2pd"
    with pytest.raises(Incompatible, match="hivemind has no p2pd for Linux on "):
        check_system(lambda: program)
    program.write_bytes(find_p2pd().read_bytes()[:64])
    program.chmod(0o644)
    if os.access(program, os.X_OK):
        pytest.skip("this user may execute everything")
    with pytest.raises(Incompatible, match=r"p2pd can't be executed: .* noexec"):
        check_system(lambda: program)


def test_the_soft_limit_of_descriptors_is_raised_as_far_as_the_hard_one_allows() -> None:
    code = (
        "import resource as r; from lowcomm_node.system.command import raise_descriptors as up;"
        "r.setrlimit(r.RLIMIT_NOFILE, (256, 700));print(up(512), up(9000), up(100), "
        "*r.getrlimit(r.RLIMIT_NOFILE))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["512", "700", "700", "700", "700"]
