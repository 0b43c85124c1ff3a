"""The trainer's process: ``python -m lowcomm_node.node.host NICENESS SOCKET MEMORY``."""

import contextlib
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from lowcomm_node.node.messages import failure_of, is_foreseen
from lowcomm_node.system.command import die_with_parent, end, importing
from lowcomm_node.system.machine import step_back


def load() -> None:
    """Import what training needs: torch is imported only where it is used."""
    with importing():
        import lowcomm_node.trainer.loop  # noqa: F401


def serve(sock: socket.socket, memory: int) -> int:
    """Run the training loop over a socket; the exit code."""
    from lowcomm_node.node.ipc import TrainerPipe
    from lowcomm_node.trainer.loop import TrainerLoop

    pipe = TrainerPipe(sock)
    try:
        TrainerLoop(pipe, memory).run()
    except Exception as error:
        if not is_foreseen(error):
            traceback.print_exc()  # into the log of the daemon
        pipe.tell(failure_of(error))
        return 1
    finally:
        pipe.close()
        os.close(memory)
    return 0


def main() -> NoReturn:
    """Entry of the child process."""
    die_with_parent()
    # The daemon decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Two seconds that the owner waits for: behind ten busy programs they would take a minute.
    load()
    # Training takes every core that it gets; the daemon and other programs come first.
    step_back(int(sys.argv[1]))
    with contextlib.suppress(OSError):
        # If memory runs out, Linux kills this process before others: the daemon restarts it.
        Path("/proc/self/oom_score_adj").write_text("800", encoding="utf-8")
    # Coding threads wait for the interpreter's lock: with 5 ms, the default, for several steps.
    sys.setswitchinterval(0.0005)
    end(serve(socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])))


if __name__ == "__main__":
    main()
