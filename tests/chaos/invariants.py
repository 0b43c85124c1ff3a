"""What must hold between nodes, read from what they print."""

from collections import Counter
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

Events = list[dict[str, Any]]
MAX_FAR_APART = 2
"""Exchanges of two peers that only one has in its list yet, since the other is about to print
it."""


def violations(events: Mapping[str, Events], disturbed: Iterable[str] = ()) -> list[str]:
    """What does not hold; nothing if all is well.

    ``events``: of each peer id, in their order. ``disturbed``: peers whose processes were killed,
    or whose trainers failed, once for each time: an exchange that they were about to write down may
    be missing."""
    lives = Counter(disturbed)
    return [
        *(f"{peer[-6:]}: {text}" for peer, told in events.items() for text in _alone(told)),
        *_between_two(events, lives),
    ]


def _alone(told: Events) -> list[str]:
    found: list[str] = []
    for event in told:
        if event["event"] == "evaluated" and not isfinite(event["loss"]):
            found.append(f"the loss on held-out text is {event['loss']}")
        if (
            event["event"].startswith("exchange.")
            and event["outcome"] != "applied"
            and not event["reason"]
        ):
            found.append(f"an exchange ended without a reason: {event}")
        if event["event"] == "exchange.applied" and not event["partners"]:
            found.append(f"an exchange with nobody was applied: {event}")
    return found


def _between_two(events: Mapping[str, Events], lives: Counter[str]) -> list[str]:
    """In pairs: what one has applied with another, the other has applied with it, but for what is
    in doubt."""
    applied = {
        peer: _with_whom(told, lambda one: one["outcome"] == "applied")
        for peer, told in events.items()
    }
    doubts = {peer: _with_whom(told, lambda one: one["in_doubt"]) for peer, told in events.items()}
    found: list[str] = []
    for one in events:
        for other in events:
            allowed = doubts[other][one] + lives[other] + MAX_FAR_APART
            ours, theirs = applied[one][other], applied[other][one]
            if ours > theirs + allowed:
                found.append(
                    f"{one[-6:]} applied {ours} with {other[-6:]}, which applied {theirs} and "
                    f"doubts {allowed}"
                )
    return found


def _with_whom(told: Events, wanted: Any) -> Counter[str]:
    exchanges = [
        event for event in told if event["event"].startswith("exchange.") and wanted(event)
    ]
    return Counter(partner for event in exchanges for partner in event["partners"])
