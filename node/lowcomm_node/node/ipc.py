"""Messages over a socket, and slots of shared memory, between daemon and trainer.

Each message is one line: its name, its number or ``-``, and its fields as a JSON object.

    capture 7 {"fragment": 0, "slot": 3, ...}

A request has a number, and its answer the same: the type that the request names, or RequestFailed.
An event of the trainer has none. The daemon imports this module, so it loads no torch.
"""

import mmap
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar, dataclass_transform, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from lowcomm_node.errors import TrainerError
from lowcomm_node.system.logs import Event

MAX_LINE = 4 * 1024 * 1024
SHOWN = 60
"""Characters of a wrong value that an error quotes."""
TABLE: "dict[str, type[TrainerMessage]]" = {}
"""Every message by its name on the wire."""
AS_JSON = ConfigDict(
    extra="forbid",
    strict=True,
    ser_json_bytes="hex",
    val_json_bytes="hex",
    ser_json_inf_nan="constants",
)
"""How fields travel: bytes in hexadecimal, and nothing is converted."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
class TrainerMessage:
    """The base of all messages. A subclass with a name becomes a frozen dataclass of the table."""

    __pydantic_config__ = AS_JSON
    wire_name: ClassVar[str]

    def __init_subclass__(cls, name: str | None = None) -> None:
        super().__init_subclass__()
        if name is not None:
            assert name not in TABLE, f"two messages are named {name}"
            TABLE[name] = dataclass(frozen=True, kw_only=True)(cls)
            cls.wire_name = name


class Answer(TrainerMessage):
    """The trainer's answer to a request."""


class TrainerEvent(TrainerMessage, Event):
    """A report of the trainer that nothing asked for."""


A = TypeVar("A", bound=Answer)


class Request(TrainerMessage, Generic[A]):
    """A request of the daemon to the trainer; ``A`` is the type of the answer."""

    answer: ClassVar[type[Answer]]
    at_boundary: ClassVar[bool]
    """Whether it begins between two inner steps; otherwise the trainer begins it at once."""
    holds_steps: ClassVar[bool]
    """Whether no inner step is taken until it is done."""

    def __init_subclass__(
        cls, name: str | None = None, at_boundary: bool = True, holds_steps: bool = False
    ) -> None:
        super().__init_subclass__(name)
        cls.answer = get_args(cls.__dict__["__orig_bases__"][0])[0]
        cls.at_boundary = at_boundary
        cls.holds_steps = holds_steps


@cache
def _adapter(kind: type[TrainerMessage]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def encode(message: TrainerMessage, number: int | None = None) -> bytes:
    """Encode a message as one line."""
    fields = _adapter(type(message)).dump_json(message)
    mark = "-" if number is None else number
    return f"{message.wire_name} {mark} ".encode() + fields + b"\n"


def decode(line: bytes) -> tuple[TrainerMessage, int | None]:
    """Decode the message in a line, and its number. Raises TrainerError for any other line."""
    name, _, rest = line.partition(b" ")
    mark, _, fields = rest.partition(b" ")
    kind = TABLE.get(name.decode(errors="replace"))
    if kind is None or not (mark == b"-" or mark.isdigit()):
        raise TrainerError(f"{line[:SHOWN]!r} is not a line of a message.")
    try:
        return _adapter(kind).validate_json(fields), None if mark == b"-" else int(mark)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join((kind.wire_name, *map(str, first["loc"])))
        raise TrainerError(
            f"{where} can't be {str(first['input'])[:SHOWN]!r}: {first['msg']}."
        ) from None


# the trainer's end


class FailureKind(StrEnum):
    """Kinds of trainer failures."""

    DIED = "died"
    HUNG = "hung"
    MEMORY = "memory"
    DIVERGED = "diverged"
    UNFIT = "unfit"
    LENDER = "lender"
    ERROR = "error"


class TrainerFailed(TrainerEvent, name="failed"):
    """Why the trainer ends by itself."""

    reason: str
    kind: FailureKind = FailureKind.ERROR
    exit_code: int = 1


END_DEADLINE = 10.0
"""Seconds for the reader to end once nothing comes any more."""


class TrainerPipe:
    """The trainer's end: sends from any thread, and hands requests to a single consumer."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None

    def tell(self, message: Answer | TrainerEvent, number: int | None = None) -> None:
        """Report an event, or answer the request of this number."""
        # The reader notices a daemon that is gone, so that is no error here.
        with self._lock, suppress(OSError):
            self._sock.sendall(encode(message, number))

    def start_reading(
        self, consume: Callable[[Request[Any], int], None], gone: Callable[[], None]
    ) -> None:
        """Read on a thread of its own until the daemon closes; then call ``gone``."""
        arguments = (consume, gone)
        self._reader = threading.Thread(target=self._read, args=arguments, daemon=True)
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
            with suppress(OSError), self._sock.makefile("rb") as lines:
                while line := lines.readline(MAX_LINE):
                    consume(*read_request(line))
        except TrainerError as error:
            self.tell(TrainerFailed(reason=f"The daemon can't be understood: {error}"))
        finally:
            gone()


def read_request(line: bytes) -> tuple[Request[Any], int]:
    """The request in a line, and its number. Raises TrainerError for any other line."""
    message, number = decode(line)
    if not isinstance(message, Request) or number is None:
        raise TrainerError(f"{message.wire_name} is no request with a number.")
    return message, number


# shared memory


def create_file() -> int:
    """An anonymous memory file of size 0; the descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("lowcomm-fragments", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # without memfd: a file whose name is gone
        return os.dup(file.fileno())


class Arena:
    """``slots`` pieces of ``slot_bytes`` bytes; only the daemon takes them and gives them back."""

    def __init__(self, descriptor: int, slots: int, slot_bytes: int) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        size = max(1, slots * slot_bytes)
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        self._map = mmap.mmap(descriptor, size)
        self._view = memoryview(self._map)
        self._free = list(range(slots))

    @property
    def free(self) -> int:
        """How many slots can be taken."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many free slots; none where there are fewer."""
        return [self._free.pop() for _ in range(count)] if count <= self.free else []

    def give_back(self, slot: int) -> None:
        """Return a slot. Its bytes may be overwritten from now on."""
        if slot in self._free:
            raise ValueError(f"Slot {slot} was given back twice.")
        self._free.append(slot)

    def view(self, slot: int, size: int) -> memoryview:
        """The first ``size`` bytes of a slot, writable, not copied."""
        if size > self.slot_bytes:
            raise ValueError(f"{size} bytes do not fit into a slot of {self.slot_bytes}.")
        return self._view[slot * self.slot_bytes : slot * self.slot_bytes + size]

    def close(self) -> None:
        """Unmap. Views that are still held keep the mapping until they are gone."""
        self._view.release()
        with suppress(BufferError):
            self._map.close()
