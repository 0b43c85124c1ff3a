"""The trainer's loop on a thread of the tests' process, in place of a process of its own."""

import asyncio
import os
import socket
import threading

from lowcomm_node.node.host import serve
from lowcomm_node.node.process import Trainer


class TrainerThread(Trainer):
    """The same loop on a thread of this process, for tests."""

    _thread: threading.Thread | None = None

    def kill(self) -> None:
        """Hang up: a thread can't be killed, and ends with the step that it takes."""
        if self._writer is not None:
            self._writer.close()
        elif self._ours is not None:
            self._ours.close()

    async def _fate(self) -> str:
        return "The trainer ended."

    def _launch(self, theirs: socket.socket, memory: int) -> None:
        copy = theirs.dup()
        self._thread = threading.Thread(
            target=serve, args=(copy, os.dup(memory)), name="trainer", daemon=True
        )
        self._thread.start()

    async def _join(self, seconds: float) -> None:
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, seconds)
