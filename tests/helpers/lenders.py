"""Workers of lenders without the machines: a socket for each, as the daemon has one."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from helpers.driven_trainer import Driven
from lowcomm_node.node.messages import InnerStepTaken


class Daemon:
    """A socket as the daemon has one for a lender: each connection is a new worker's."""

    def __init__(self, path: Path, **own: Any) -> None:
        self.path, self._own = str(path), own
        self.workers: list[subprocess.Popen[bytes]] = []
        self.refuses = ""
        """Why it gives no worker; empty to give one."""
        self.refused = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                asked, _ = self._listener.accept()
                if self.refuses:
                    self.refused += 1
                    with asked:
                        asked.send(self.refuses.encode())
                    continue
                ours, sock = socket.socketpair()
                own, end = json.dumps({"device": "cpu", **self._own}), sock.fileno()
                with asked, ours, sock:
                    socket.send_fds(asked, [b"+"], [ours.fileno()])
                    worker = subprocess.Popen(
                        [sys.executable, "-m", "lowcomm_node.trainer.worker", own, str(end)],
                        pass_fds=(end,),
                    )
                self.workers.append(worker)

    def close(self) -> None:
        self._listener.close()
        for one in self.workers:
            one.kill()
            one.wait()


@contextmanager
def lenders(folder: Path, count: int, **own: Any) -> Iterator[list[Daemon]]:
    made = [Daemon(folder / f"lender-{number}", **own) for number in range(count)]
    try:
        yield made
    finally:
        for one in made:
            one.close()


def losses(one: Driven) -> list[float]:
    return [step.loss for step in one.events(InnerStepTaken) if step.loss is not None]


def weights(one: Driven) -> dict[str, Tensor]:
    return one.replica.all_weights()
