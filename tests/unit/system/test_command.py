"""What must hold from the first to the last moment of a command: the garbage collector rests during
imports, Ctrl-C prints nothing, and streams that are closed, full or in another encoding end
nothing."""

import os
import signal
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest

from lowcomm_node.system.command import say

SLOW = """
import time
def wait():
    print("there", flush=True)
    time.sleep(60)
{0}
def main():
    {1}
"""
INTERRUPTED = {
    "during imports": ("wait()", "pass", -signal.SIGINT),
    "at work": ("", "wait()", 130),
    "where an import turns it into another error": (
        "",
        "\n    ".join(
            ["try:", "    wait()", "except KeyboardInterrupt:", "    raise ImportError('broken')"]
        ),
        130,
    ),
}


@pytest.mark.parametrize("when", INTERRUPTED)
def test_ctrl_c_ends_a_command_without_a_word(tmp_path: Path, when: str) -> None:
    *parts, code = INTERRUPTED[when]
    (tmp_path / "slow_command.py").write_text(SLOW.format(*parts), encoding="utf-8")
    # As where nobody has ignored it; set between fork and exec, libraries of ours might abort.
    run = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from lowcomm_node.system.command import run_command; run_command('slow_command')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", run],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    ) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == b"there\n"
        command.send_signal(signal.SIGINT)
        assert command.communicate(timeout=60)[1] == b""
        assert command.returncode == code


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_standard_streams_are_no_files_of_ours(closed: tuple[int, ...]) -> None:
    run = (
        "import os, sys; from lowcomm_node.system.command import open_streams; open_streams(); "
        "print('heard'); print('heard', file=sys.stderr); sys.stdout.flush(); "
        "os._exit(os.open('/dev/null', 0))"
    )
    # By a shell: a fork of this process runs handlers of its libraries, which may abort.
    closing = " ".join(f"{one}>&-" for one in closed)
    command = ["sh", "-c", f'exec "$0" "$@" {closing}', sys.executable, "-c", run]
    done = subprocess.run(command, timeout=60, check=False)
    assert done.returncode > 2


def test_text_that_a_terminal_can_not_show_is_no_error() -> None:
    run = (
        "from lowcomm_node.system.command import open_streams; open_streams(); "
        "print('\u6570 \\udce9')"
    )
    done = subprocess.run(
        [sys.executable, "-c", run],
        env=os.environ | {"PYTHONIOENCODING": "latin-1:strict"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"? ?\n", b"")


def test_a_full_disk_behind_the_output_ends_nothing() -> None:
    full = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115 - closing it tries again
    with redirect_stdout(full):
        say("lost")
    with suppress(OSError):
        full.close()
