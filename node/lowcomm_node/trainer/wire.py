"""What a trainer and the worker of a lender say to each other: lines of JSON, and tensors whose
shapes both ends know."""

import json
import socket
import threading
from collections.abc import Iterable, Mapping
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from lowcomm_node.errors import LinkLost

MAX_LINE = 1 << 20
"""Bytes of a line: the specification is one."""
PATIENCE = 600.0
"""Seconds without a byte after which the other end counts as gone: a first answer may take long."""
PIECE_BYTES = 1 << 20
"""Bytes that are sent at once: each such piece may take ``PATIENCE``."""


def connect(path: str) -> socket.socket:
    """A socket to a new worker; ``path``: of the daemon's socket for its machine. Raises LinkLost,
    OSError."""
    with socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(PATIENCE)
        asked.connect(path if path.startswith("/") else f"\0{path}")
        reason, descriptors, _, _ = socket.recv_fds(asked, MAX_LINE, 1)
    if not descriptors:
        raise LinkLost(reason.decode(errors="replace") or "the daemon has no link to it")
    return socket.socket(fileno=descriptors[0])


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of host memory, as they lie there."""
    whole: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(whole)


class Wire:
    """One end of a socket. Any thread may send; one reads."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._read = bytearray()
        self._sending = threading.Lock()
        self.heard = monotonic()
        """When the last byte came."""

    def send(self, line: Mapping[str, Any], tensors: Iterable[Tensor] = ()) -> None:
        """Raises OSError."""
        with self._sending:
            self._sock.sendall(json.dumps(line).encode() + b"\n")
            for one in tensors:
                if one.numel():
                    data = _bytes_of(one.detach().cpu().contiguous())
                    for start in range(0, len(data), PIECE_BYTES):
                        self._sock.sendall(data[start : start + PIECE_BYTES])

    def read(self) -> Any:
        """The next line; None at the end. Raises OSError, ValueError."""
        while (end := self._read.find(b"\n")) < 0:
            data = self._sock.recv(1 << 16)
            self.heard = monotonic()
            self._read += data
            if not data or len(self._read) > MAX_LINE + (1 << 16):
                return None
        line = self._read[:end]
        del self._read[: end + 1]
        return json.loads(line)

    def read_exactly(self, tensors: Iterable[Tensor]) -> None:
        """Fill contiguous tensors of host memory. Raises OSError, LinkLost."""
        for one in tensors:
            if not one.numel():
                continue
            left = _bytes_of(one)
            here = min(len(left), len(self._read))
            left[:here] = self._read[:here]
            del self._read[:here]
            left = left[here:]
            while left:
                count = self._sock.recv_into(left)
                self.heard = monotonic()
                if not count:
                    raise LinkLost("the connection ended in the middle of a step")
                left = left[count:]
