"""What must hold for the tests themselves: however they end, nothing that they have started goes
on; a skip can be forbidden."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import keeping
from helpers.processes import alive
from helpers.waiting import until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc"),
    pytest.mark.slow,  # each starts pytest
]
SOON = 60.0
TEST = """
import os, subprocess, sys, time
from pathlib import Path

def test_that_starts_a_process_and_waits():
    script = "import subprocess, sys; subprocess.Popen(['sleep', '600'],"
    script += " start_new_session=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    while not (found := Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()):
        time.sleep(0.01)
    told = Path(__file__).with_name("pids")
    told.with_suffix(".new").write_text(f"{os.getpid()} {child.pid} {found[0]}")
    told.with_suffix(".new").rename(told)
    child.wait()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with a test that does not end; what it starts is ended in any case."""
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(keeping.__file__).parents[1])!r})\nfrom helpers "
        "import keeping\n"
        "from helpers.skips import pytest_addoption, pytest_runtest_makereport\n"
        "def pytest_configure():\n    keeping.start()\n"
    )
    (tmp_path / "test_it.py").write_text(TEST)
    yield tmp_path
    for pid in pids(tmp_path):
        if alive([pid]):
            os.kill(pid, signal.SIGKILL)


def pytest_in(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start pytest there."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
        str(folder),
    ]
    return subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
    )


def pids(folder: Path) -> list[int]:
    """Who runs the test, its child, and the child of that."""
    return (
        [int(pid) for pid in (folder / "pids").read_text().split()]
        if (folder / "pids").exists()
        else []
    )


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL],
    ids=lambda one: one.name,
)
def test_nothing_goes_on_when_the_tests_are_ended_by_a_signal(folder: Path, number: int) -> None:
    tests = pytest_in(folder)
    try:
        _, child, grandchild = until(
            lambda: pids(folder), SOON, "the test has started its processes"
        )
        assert len(alive([child, grandchild])) == 2
        tests.send_signal(number)
        tests.communicate(timeout=SOON)
        until(lambda: not alive([child, grandchild]), SOON, "nothing is left")
    finally:
        tests.kill()


def test_nothing_goes_on_of_a_worker_that_is_killed(folder: Path) -> None:
    tests = pytest_in(folder, "-n", "1", "--max-worker-restart", "0")
    try:
        worker, child, grandchild = until(
            lambda: pids(folder), SOON, "the test has started its processes"
        )
        os.kill(worker, signal.SIGKILL)
        until(lambda: not alive([child, grandchild]), SOON, "nothing is left")
        assert "crashed" in tests.communicate(timeout=SOON)[0]
    finally:
        tests.kill()


@pytest.mark.parametrize(("options", "outcome"), [((), "1 skipped"), (("--no-skips",), "1 failed")])
def test_a_skip_fails_where_none_is_allowed_and_names_the_reason(
    folder: Path, options: tuple[str, ...], outcome: str
) -> None:
    reason = "apt-get install -y iptables"
    (folder / "test_it.py").write_text(
        f"import pytest\ndef test_it():\n    pytest.skip({reason!r})\n"
    )
    tests = pytest_in(folder, *options)
    told = tests.communicate(timeout=SOON)[0]
    assert outcome in told
    assert (reason in told) == bool(options)
