"""The spans of an exchange, from what the journal keeps of it.

All members of an exchange make the same trace id, so their spans come together at the collector and
nothing of it travels between them. The ids of spans follow from what they tell: one that comes
twice is the same span.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256

from lowcomm_node.sync.records import ExchangeEnded

Attribute = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that took time."""

    name: str
    trace: int
    """128 bits."""
    id: int
    """64 bits."""
    parent: int | None
    start: float
    """Unix seconds."""
    end: float
    attributes: Mapping[str, Attribute]
    error: str | None = None
    """Why it failed; None where it did not."""


def spans_of(event: ExchangeEnded, peer_id: str) -> list[Span]:
    """The exchange itself, and its stages below it, of one member."""
    began = event.time - event.seconds
    trace = event.id or _digest(32, peer_id, event.time, event.fragment, event.round)

    def number(name: str) -> int:
        return int(_digest(16, trace, peer_id, event.time, name), 16)

    whole = Span(
        name="exchange",
        trace=int(trace, 16),
        id=number("exchange"),
        parent=None,
        start=began,
        end=event.time,
        attributes=dict(_attributes(event)),
        error=_error(event),
    )
    stages = [
        Span(
            name=name,
            trace=whole.trace,
            id=number(name),
            parent=whole.id,
            start=began + start,
            end=began + end,
            attributes={"lowcomm.fragment": event.fragment},
        )
        for name, start, end in _stages(event)
    ]
    return [whole, *stages]


def _stages(event: ExchangeEnded) -> Iterator[tuple[str, float, float]]:
    """Name, beginning and end of each, in seconds since the exchange began, as far as it came."""
    at, took = event.moments, event.stages
    met = at.get("met", 0.0)
    if "met" in at:
        yield "gather", 0.0, met
    if "captured" in at:
        # What the trainer took is known where the exchange was applied.
        coding = at["captured"] - took.get("encode", 0.0) - took.get("hash", 0.0)
        if "encode" in took:
            yield "capture", met, max(met, coding)
            yield "encode", max(met, coding), at["captured"]
        else:
            yield "capture", met, at["captured"]
    for moment, stage in (("sent", "send"), ("received", "receive")):
        if moment in at:
            yield stage, max(met, at[moment] - took.get(stage, 0.0)), at[moment]
    if "decoded" in at:
        ready = max(at.get("received", 0.0), at.get("captured", 0.0))
        yield "decode", min(ready, at["decoded"]), at["decoded"]
    if "decided" in at:
        known = (at[name] for name in ("sent", "decoded") if name in at)
        yield "confirm", min(max(known, default=met), at["decided"]), at["decided"]
        yield "merge", min(at["decided"], event.seconds), event.seconds


def _attributes(event: ExchangeEnded) -> Iterator[tuple[str, Attribute]]:
    told = event.to_json()
    for name in (
        "id",
        "fragment",
        "round",
        "outcome",
        "reason",
        "swarm_step",
        "bytes_sent",
        "bytes_received",
        "worst_block",
        "in_doubt",
        "code",
    ):
        value = told.get(name)
        if value is not None and value != "":
            yield f"lowcomm.{name}", str(value) if isinstance(value, str) else value
    yield "lowcomm.partners", ",".join(event.partners)
    for peer, code in event.left_out_codes.items():
        yield f"lowcomm.left_out.{peer}", code
    for stage, seconds in event.stages.items():
        yield f"lowcomm.stage.{stage}.seconds", seconds


def _error(event: ExchangeEnded) -> str | None:
    if event.outcome == "applied":
        return None
    return f"{event.code or event.outcome.value}: {event.reason}"


def _digest(digits: int, *parts: object) -> str:
    told = "\n".join(str(part) for part in parts)
    return sha256(told.encode()).hexdigest()[:digits]
