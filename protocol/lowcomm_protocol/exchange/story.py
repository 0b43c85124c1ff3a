"""The story of an exchange as JSON: how it began, and every event that its machine was told. It can
be replayed.

A story is read only by whoever looks into a defect, never from the network.
"""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, get_args

from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange import base
from lowcomm_protocol.exchange.base import Cause, Effect
from lowcomm_protocol.exchange.kinds import Kind, kind_named
from lowcomm_protocol.matching import Offer, Refusal

VERSION = 1
LONGEST = 512
"""Events of an exchange that are remembered; one that goes well takes fewer than a hundred."""


def to_json(event: Any) -> Any:
    """An event, effect or offer as JSON: dataclasses as their name and fields, bytes as hexadecimal
    digits."""
    if is_dataclass(event):
        named = {one.name: to_json(getattr(event, one.name)) for one in fields(event)}
        return {"is": type(event).__name__} | named
    if isinstance(event, bytes):
        return {"hex": event.hex()}
    if isinstance(event, tuple | list):
        return [to_json(one) for one in event]  # pyright: ignore[reportUnknownVariableType]
    return event


def from_json(told: Any, kind: Kind) -> Any:
    """An event of a kind, from what ``to_json`` made of it. Raises KeyError for a name that it
    lacks."""
    if isinstance(told, list):
        return tuple(from_json(one, kind) for one in told)  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(told, dict):
        return told
    if "hex" in told:
        return bytes.fromhex(told["hex"])  # pyright: ignore[reportUnknownArgumentType]
    values = {name: from_json(value, kind) for name, value in told.items() if name != "is"}  # pyright: ignore[reportUnknownVariableType]
    if "reason" in values and told["is"] == "Refused":
        values["reason"] = Refusal(values["reason"])
    if "cause" in values:
        values["cause"] = _cause(values["cause"])
    named = {one.__name__: one for one in (*get_args(base.Event), Offer, *kind.events)}
    return named[told["is"]](**values)


def _cause(told: str) -> Cause | Refusal:
    return Refusal(told) if told in list(Refusal) else Cause(told)


@dataclass
class Story:
    """How an exchange began, and what its machine was told."""

    kind: str
    me: str
    group: int
    expected: tuple[str, ...]
    """Peers that had called before it began."""
    called: list[str] = field(default_factory=list[str])
    """Peers that it called, in this order."""
    told: list[tuple[float, Any]] = field(default_factory=list[tuple[float, Any]])
    """Seconds since it began, and events."""

    def add(self, seconds: float, event: Any) -> None:
        """Its machine is told an event."""
        if len(self.told) < LONGEST:
            self.told.append((seconds, event))

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        told = [[round(seconds, 6), to_json(event)] for seconds, event in self.told]
        return {"version": VERSION} | vars(self) | {"told": told}


def replay(story: dict[str, Any]) -> list[tuple[float, list[Effect]]]:
    """What a machine decides that is told the same: seconds and effects of each event, those of its
    start first."""
    kind = kind_named(story["kind"])
    machine = kind.machine(story["me"], story["called"], story["group"])
    for peer in story["expected"]:
        machine.expect(peer)
    effects = [(0.0, machine.start())] if not story["expected"] or kind.all_call else []
    for seconds, told in story["told"]:
        try:
            effects.append((seconds, machine.handle(from_json(told, kind))))
        except ProtocolViolation:
            effects.append((seconds, []))  # what follows was told as well
    return effects
