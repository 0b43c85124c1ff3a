"""What must hold for the systemd units: systemd takes them, and they fit how node and bootstrap
server start, fail and leave."""

import os
import re
import shutil
import subprocess
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from lowcomm_bootstrap.server import LOOK_DEADLINE
from lowcomm_node.errors import ConfigError, Incompatible, NodeError, NotAdmitted
from lowcomm_node.node.entry import END_DEADLINE, GOODBYE_DEADLINE, LEAVE_DEADLINE
from lowcomm_node.node.process import REAP_DEADLINE, STOP_DEADLINE
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.swarm.find_run import FIND_DEADLINE
from lowcomm_node.system.systemd import EXTENSION

ROOT = Path(__file__).parents[3]
NODE, USERS = (
    ROOT / "docker/systemd/lowcomm-node.service",
    ROOT / "docker/systemd/user/lowcomm-node.service",
)
BOOTSTRAP = ROOT / "docker/bootstrap/lowcomm-bootstrap.service"
UNITS = [pytest.param(path, id=str(path.relative_to(ROOT))) for path in (NODE, USERS, BOOTSTRAP)]
USAGE = 2
"""Exit code of a command line that can't be read."""


def read(path: Path) -> dict[str, list[str]]:
    """The settings of a unit; a name may come more than once."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        if (match := re.fullmatch(r"(\w+)=(.*)", line)) is not None:
            found[match[1]].append(match[2])
    return found


@pytest.mark.parametrize("path", UNITS)
def test_systemd_takes_it_without_a_word(path: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    program = read(path)["ExecStart"][0].split()[0]
    unit = tmp_path / path.name
    unit.write_text(
        path.read_text().replace(program, "/bin/true")
    )  # what is not installed here it would complain of
    scope = "--user" if path == USERS else "--system"
    verify = ["systemd-analyze", scope, "--man=no", "--generators=no", "verify", str(unit)]
    done = subprocess.run(
        verify,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("path", UNITS)
def test_it_starts_a_program_that_we_install_and_is_told_by_it(path: Path) -> None:
    unit = read(path)
    program = Path(unit["ExecStart"][0].split()[0]).name
    assert program in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert unit["Type"] == ["notify"]
    # The main process alone: the goodbye needs p2pd, which SIGTERM would end, and the trainer
    # saves.
    assert unit["KillMode"] == ["mixed"]


@pytest.mark.parametrize("path", UNITS)
def test_it_is_not_started_again_where_another_try_would_meet_the_same(path: Path) -> None:
    unit = read(path)
    never = {int(code) for code in unit["RestartPreventExitStatus"][0].split()}
    assert {USAGE, ConfigError.exit_code, Incompatible.exit_code} <= never
    assert NodeError.exit_code not in never
    if path != BOOTSTRAP:
        assert NotAdmitted.exit_code in never
        assert unit["OOMPolicy"] == ["continue"], (
            "a trainer that memory ran out for takes nobody along"
        )


@pytest.mark.parametrize("path", UNITS)
def test_its_deadlines_leave_time_for_ours(path: Path) -> None:
    unit = read(path)
    stop, start, watchdog = (
        int(unit[name][0]) for name in ("TimeoutStopSec", "TimeoutStartSec", "WatchdogSec")
    )
    assert start > EXTENSION
    if path == BOOTSTRAP:
        assert watchdog < LOOK_DEADLINE
        return
    assert stop >= LEAVE_DEADLINE + GOODBYE_DEADLINE + STOP_DEADLINE + REAP_DEADLINE + END_DEADLINE
    assert stop > EXTENSION, "who needs longer says so, again and again"
    assert start >= FIND_DEADLINE + NodeSettings(home=Path("/")).join_deadline


def test_nothing_of_a_nodes_unit_breaks_what_it_needs() -> None:
    for unit in (read(NODE), read(USERS)):
        # Kernels are compiled at run time; memory and load are read in /proc; the GPU is a device,
        # which ProtectClock closes as well (it implies DeviceAllow).
        assert not {
            "MemoryDenyWriteExecute",
            "ProcSubset",
            "PrivateDevices",
            "ProtectClock",
            "PrivateNetwork",
        } & set(unit)
        assert "AF_NETLINK" in unit["RestrictAddressFamilies"][0], "p2pd learns its addresses there"


@pytest.mark.parametrize("path", UNITS[:2])
def test_a_node_as_a_service_makes_way_for_all_other_programs(path: Path) -> None:
    unit = read(path)
    assert unit["Slice"] == ["-.slice"] and int(unit["CPUWeight"][0]) <= 5
