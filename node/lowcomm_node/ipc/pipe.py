"""The trainer's end of the socket to its daemon: one message a line."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lowcomm_node.errors import TrainerError
from lowcomm_node.ipc.lines import MAX_LINE, Answer, Event, Request, decode, encode
from lowcomm_node.ipc.messages import Failed

END_DEADLINE = 10.0
"""Seconds for the reader to end once nothing comes any more."""


class Pipe:
    """Sends answers and events from any thread; hands requests to one consumer."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None

    def answer(self, number: int, answer: Answer) -> None:
        """Answer the request of this number."""
        self._send(encode(answer, number))

    def tell(self, event: Event) -> None:
        """Report an event."""
        self._send(encode(event))

    def _send(self, line: bytes) -> None:
        # The reader notices a daemon that is gone, so that is no error here.
        with self._lock, suppress(OSError):
            self._sock.sendall(line)

    def start_reading(
        self, consume: Callable[[Request[Any], int], None], gone: Callable[[], None]
    ) -> None:
        """Read on a thread of its own until the daemon closes; then call ``gone``."""
        self._reader = threading.Thread(
            target=self._read, args=(consume, gone), name="pipe", daemon=True
        )
        self._reader.start()

    def close(self) -> None:
        """Hang up, and wait for the reader to let go of its consumer.

        The reader must not be the last to hold tensors when Python ends: torch would free them on
        another thread, which aborts the process.
        """
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._reader is not None:
            self._reader.join(END_DEADLINE)
        self._sock.close()

    def _read(self, consume: Callable[[Request[Any], int], None], gone: Callable[[], None]) -> None:
        try:
            with self._sock.makefile("rb") as lines:
                while line := lines.readline(MAX_LINE):
                    consume(*read_request(line))
        except OSError:
            pass
        except TrainerError as error:
            self.tell(Failed(reason=f"The daemon can't be understood: {error}"))
        finally:
            gone()


def read_request(line: bytes) -> tuple[Request[Any], int]:
    """The request in a line, and its number. Raises TrainerError for any other line."""
    message, number = decode(line)
    if not isinstance(message, Request) or number is None:
        raise TrainerError(f"{message.wire_name} is no request with a number.")
    return message, number
