"""Messages between the daemon and its trainer as lines: what a message is, and how it travels.

Each message is one JSON object on one line:

    {"name": "capture", "number": 7, "fields": {"fragment": 0, "slot": 3, ...}}

    daemon  → trainer   a Request with a number
    trainer → daemon    the Answer with the same number: the type that the request names, or Refused
                        an Event without a number

The daemon imports this module, so it loads neither codecs nor torch.
"""

import json
import mmap
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from hashlib import sha256
from types import UnionType
from typing import (
    Any,
    ClassVar,
    Generic,
    Protocol,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from blake3 import blake3

from lowcomm_node.errors import TrainerError
from lowcomm_node.system import events

MAX_LINE = 4 * 1024 * 1024
SHOWN = 60
"""Characters of a wrong value that an error quotes."""
TABLE: "dict[str, type[Message]]" = {}
"""Every message by its name on the wire."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Message:
    """The base of all messages. A subclass with a name becomes a frozen dataclass of the table."""

    wire_name: ClassVar[str]

    def __init_subclass__(cls, name: str | None = None) -> None:
        super().__init_subclass__()
        if name is not None:
            assert name not in TABLE, f"two messages are named {name}"
            TABLE[name] = dataclass(frozen=True, kw_only=True)(cls)
            cls.wire_name = name


class Answer(Message):
    """What the trainer answers to a request."""


class Event(Message, events.Event):
    """What the trainer reports without being asked."""


A = TypeVar("A", bound=Answer)


class Request(Message, Generic[A]):
    """What the daemon asks of the trainer; ``A`` is the type of the answer."""

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


def encode(message: Message, number: int | None = None) -> bytes:
    """A message as one line."""
    line = {"name": message.wire_name, "number": number, "fields": _plain(message)}
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> tuple[Message, int | None]:
    """The message in a line, and its number. Raises TrainerError for a line that holds none."""
    try:
        told = json.loads(line)
        name, number, values = told["name"], told["number"], told["fields"]
    except (ValueError, KeyError, TypeError):
        raise TrainerError(f"{_quoted(line)} is not a line of a message.") from None
    kind = TABLE.get(name) if isinstance(name, str) else None
    if kind is None:
        raise TrainerError(f"{_quoted(name)} is not the name of a message.")
    return _read(kind, values, name), _read(int | None, number, f"the number of {name}")


def _plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _read(kind: Any, value: Any, where: str) -> Any:
    """A value of JSON as ``kind``. Raises TrainerError, which says where it was."""
    origin: Any = get_origin(kind) or kind
    arguments = get_args(kind)
    if origin is UnionType:  # of a type and None
        return None if value is None else _read(arguments[0], value, where)
    if is_dataclass(origin) and isinstance(value, dict):
        return _read_fields(origin, value, where)
    if origin is tuple and isinstance(value, list):
        kinds = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        if len(kinds) == len(value):
            return tuple(_read(*one, where) for one in zip(kinds, value, strict=True))
    if origin is Mapping and isinstance(value, dict):
        return {key: _read(arguments[1], one, f"{where}.{key}") for key, one in value.items()}
    if origin is float and type(value) is int:
        return float(value)
    if origin in (str, int, float, bool) and type(value) is origin:
        return value
    try:
        if origin is bytes and isinstance(value, str):
            return bytes.fromhex(value)
        if isinstance(origin, type) and issubclass(origin, StrEnum):
            return origin(value)
    except ValueError:
        pass
    raise TrainerError(f"{where} is {_quoted(value)}, not {kind}.")


def _read_fields(kind: Any, values: dict[str, Any], where: str) -> Any:
    hints, required = _fields_of(kind)
    for name in values.keys() - hints.keys():
        raise TrainerError(f"{where}.{name} is not a field.")
    for name in required - values.keys():
        raise TrainerError(f"{where}.{name} is missing.")
    read = {name: _read(hints[name], value, f"{where}.{name}") for name, value in values.items()}
    return kind(**read)


@cache
def _fields_of(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """The types of a dataclass's fields, and those fields that have no default."""
    hints = get_type_hints(kind)
    all_fields = fields(kind)
    required = (f.name for f in all_fields if f.default is MISSING and f.default_factory is MISSING)
    return {f.name: hints[f.name] for f in all_fields}, frozenset(required)


def _quoted(value: object) -> str:
    return repr(value)[:SHOWN]


# the trainer's end


class Kind(StrEnum):
    """What went wrong with a trainer."""

    DIED = "died"
    HUNG = "hung"
    MEMORY = "memory"
    DIVERGED = "diverged"
    UNFIT = "unfit"
    ERROR = "error"


class Failed(Event, name="failed"):
    """Why the trainer ends by itself."""

    reason: str
    kind: Kind = Kind.ERROR
    exit_code: int = 1


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
        try:
            self._map.close()
        except BufferError:
            return


# digests of contents


class Hash(Protocol):
    """What is fed with a content, piece by piece."""

    def update(self, data: memoryview | bytes, /) -> object:
        """Take in a piece."""
        ...

    def digest(self) -> bytes:
        """The 32 bytes."""
        ...


def content_hash(is_blake3: bool) -> Hash:
    """An empty hash."""
    return blake3() if is_blake3 else sha256()
