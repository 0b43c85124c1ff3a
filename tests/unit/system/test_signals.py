"""What must hold when a terminal closes: SIGHUP ends a process as SIGTERM does, but for nohup."""

import os
import signal
import subprocess
import sys

import pytest

from lowcomm_node.system.command import unwinding_signals

TELL = (
    "from lowcomm_node.system.command import ending_signals; print([*map(int, ending_signals())])"
)


@pytest.mark.parametrize("handler", ["default", "ignore"])
def test_a_closed_terminal_ends_it_unless_that_was_ignored_before(handler: str):
    # Not by `preexec_fn`: threads of libraries that a test before this one started may end it.
    done = subprocess.run(
        ["env", f"--{handler}-signal=HUP", sys.executable, "-c", TELL],
        capture_output=True,
        text=True,
        check=True,
    )
    expected = [signal.SIGTERM, signal.SIGHUP][: 1 if handler == "ignore" else 2]
    assert done.stdout == f"{[*map(int, expected)]}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_demo_unwinds_so_that_it_leaves_no_child(number: signal.Signals):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt), unwinding_signals():
            os.kill(os.getpid(), number)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
