"""What must hold for training that steps back."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


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
