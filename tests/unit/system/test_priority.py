"""What must hold for training that steps back: it does, and what is told of it is so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowcomm_node.system import machine as machine_module
from lowcomm_node.system.machine import Priority, priority_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
ME = os.getpid()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on whose files this process finds itself: nice 19, in no group, no sessions."""
    for name in ("_PROC", "_GROUPS"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(machine_module, "PROC", tmp_path / "_PROC")
    monkeypatch.setattr(machine_module, "GROUPS", tmp_path / "_GROUPS")
    monkeypatch.setattr(machine_module.os, "getpriority", lambda *_: 19)
    monkeypatch.setattr(machine_module.os, "sched_getscheduler", lambda _: os.SCHED_IDLE)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def sessions(machine: Path, on: bool, level: int = 0) -> None:
    write(machine / "_PROC/sys/kernel/sched_autogroup_enabled", str(int(on)))
    write(machine / f"_PROC/{ME}/autogroup", f"/autogroup-75 nice {level}")


def groups(machine: Path, **weights: int) -> None:
    """The control groups around this process, outermost first."""
    path = machine / "_GROUPS"
    for name, weight in weights.items():
        path /= name
        write(path / "cpu.weight", str(weight))
    write(machine / f"_PROC/{ME}/cgroup", f"0::/{path.relative_to(machine / '_GROUPS')}")


def test_the_process_that_steps_back_shows_it_to_others() -> None:
    told = "import os; from lowcomm_node.system.machine import *; step_back(19);"
    told += " print(priority_of(os.getpid()))"
    done = subprocess.run(
        [sys.executable, "-c", told], capture_output=True, text=True, timeout=60, check=True
    )
    assert "level=19, by='session', behind='all'" in done.stdout or (
        "level=19, by='idle'" in done.stdout
    ), done.stdout


def test_threads_that_libraries_have_started_step_back_too() -> None:
    told = """
import os, threading
from lowcomm_node.system.machine import step_back
begun, end = threading.Event(), threading.Event()
thread = threading.Thread(target=lambda: begun.set() or end.wait())
thread.start(); begun.wait()
step_back(19)
print(os.sched_getscheduler(thread.native_id) == os.SCHED_IDLE)
end.set()
"""
    done = subprocess.run(
        [sys.executable, "-c", told], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "True\n"


def test_a_light_control_group_makes_way_for_all_around_it(machine: Path) -> None:
    sessions(machine, True, 19)
    groups(machine, node=4)
    assert priority_of(ME) == Priority(level=19, by="group", behind="all")
    groups(machine, system=100, node=4)
    assert priority_of(ME) == Priority(level=19, by="group", behind="/system")
    groups(machine, system=100, node=100)
    assert priority_of(ME) == Priority(level=19, by="idle", behind="/system/node"), (
        "no session counts"
    )
