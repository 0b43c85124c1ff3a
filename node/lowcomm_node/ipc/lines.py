"""Messages between the daemon and its trainer as lines: what a message is, and how it travels.

Each message is one JSON object on one line:

    {"name": "capture", "number": 7, "fields": {"fragment": 0, "slot": 3, ...}}

    daemon  → trainer   a Request with a number
    trainer → daemon    the Answer with the same number: the type that the request names, or Refused
                        an Event without a number

The daemon imports this module, so it loads neither codecs nor torch.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import UnionType
from typing import (
    Any,
    ClassVar,
    Generic,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

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
