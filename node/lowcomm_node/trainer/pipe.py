"""The trainer's end of the socket to its daemon: JSON objects, one a line."""

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lowcomm_node.trainer.interface import MAX_LINE

END_DEADLINE = 10.0
"""Seconds for the reader to end once nothing comes any more."""


class Pipe:
    """Sends from any thread; received objects go to one consumer, None when the daemon is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None

    def send(self, message: dict[str, Any]) -> None:
        """Send one object. A daemon that is gone is noticed by the reader, so it is no error here."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            try:
                self._sock.sendall(line)
            except OSError:
                return

    def start_reading(self, consume: Callable[[dict[str, Any] | None], None]) -> None:
        """Read on a thread of its own until the daemon closes."""
        self._reader = threading.Thread(target=self._read, args=(consume,), name="pipe", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Hang up, and wait for the reader to let go of its consumer.

        It must not be the last to hold tensors when Python ends: what torch frees then, on another thread, aborts the process.
        """
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._reader is not None:
            self._reader.join(END_DEADLINE)
        self._sock.close()

    def _read(self, consume: Callable[[dict[str, Any] | None], None]) -> None:
        try:
            with self._sock.makefile("rb") as lines:
                while line := lines.readline(MAX_LINE):
                    consume(json.loads(line))
        except (OSError, ValueError):
            pass
        finally:
            consume(None)
