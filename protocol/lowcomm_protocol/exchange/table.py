"""Transition tables: the lookup of an entry, and the diagram that ``docs/states.md`` shows."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TypeVar

from lowcomm_protocol.errors import ProtocolViolation

S = TypeVar("S", bound=StrEnum)
I = TypeVar("I", bound=StrEnum)  # noqa: E741
R = TypeVar("R")


def look_up(table: Mapping[tuple[S, I], R], state: S, event: I) -> R:
    """What a table of transitions has for an input. Raises ProtocolViolation where it has no
    entry."""
    try:
        return table[state, event]
    except KeyError:
        told = f"{event.value!r} is not allowed in state {state.value!r}: the stream is closed."
        raise ProtocolViolation(told) from None


def draw(
    first: StrEnum, arrows: Iterable[tuple[StrEnum, str, StrEnum]], terminal: Iterable[StrEnum]
) -> str:
    """A Mermaid state diagram of arrows from state to state."""
    lines = ["stateDiagram-v2", f"    [*] --> {first.value}"]
    lines += [f"    {state.value} --> {after.value}: {label}" for state, label, after in arrows]
    lines += [f"    {state.value} --> [*]" for state in terminal]
    return "\n".join(lines) + "\n"
