"""The daemon handles bytes: it starts without what computes with tensors, which takes seconds and
memory."""

import subprocess
import sys


def test_a_daemon_is_imported_without_torch() -> None:
    code = "import sys, lowcomm_node.daemon.daemon; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
