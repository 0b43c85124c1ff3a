"""What must hold for events: names and keys stay, all are in one table, and they travel as they
are."""

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, get_args, get_type_hints

import pytest

from helpers.statuses import make_exchange
from lowcomm_node.errors import Unhealthy
from lowcomm_node.node import ipc, messages
from lowcomm_node.status.events import EVENTS, KINDS, Notice, OtherEvent, PhaseEntered, read_notice
from lowcomm_node.system.logs import Event

EXCHANGE = """
    fragment round outcome reason code partners in_doubt left_out left_out_codes swarm_step
    bytes_sent bytes_received
    seconds worst_block stages moments id"""
KEYS = {
    "phase": "phase",
    "warning": "text code",
    "limits": "max_up max_down max_peers up down peers turned_away",
    "amended": "text number at settings",
    "piece-skipped": "text epoch piece",
    "paused": "rule reason until",
    "resumed": "",
    "saving-again": "",
    "contributed": "steps tokens exchanges bytes_sent checkpoint",
    "swarm.connected": "reason",
    "swarm.lost": "reason",
    "swarm.unlisted": "reason",
    "door.open": "peer_id address",
    "door.closed": "peer_id address reason",
    "addresses.changed": "addresses",
    "state.adopted": "donors swarm_step bytes",
    "exchange.applied": EXCHANGE,
    "exchange.no-partner": EXCHANGE,
    "exchange.failed": EXCHANGE,
    "micro-batch": "micro_batch activation_checkpointing why",
    "skipped": "steps skipped_steps",
    "evaluated": "loss tokens swarm_step steps epochs",
    "saved": "swarm_step path seconds after_trouble",
    "not-saved": "reason",
    "failed": "reason kind exit_code",
    "finished": "swarm_step steps",
}
"""The keys of release 0.2.0, beside `time` and `event`: programs read them."""
UNTOLD = (
    *(messages.Evaluating, messages.Held, messages.Tokenizing, messages.Ended),
    *(messages.PieceRead, messages.TextAwaited, messages.InnerStepTaken, messages.Cooling),
    messages.LenderAwaited,
)
"""What only the daemon hears of its trainer; status shows it otherwise."""
SAMPLES: dict[Any, Any] = {int: 7, float: 0.5, str: "x", bool: True}


def kinds_below(kind: type) -> Iterator[type]:
    for one in kind.__subclasses__():
        if one.__module__.startswith("lowcomm_"):
            yield from (one, *kinds_below(one))


def sample(kind: type[Any]) -> Event:
    """An event of a kind, with some value in each field."""
    values: dict[str, Any] = {}
    for field in fields(kind):
        hint = get_type_hints(kind)[field.name]
        first = next(iter(get_args(hint)), hint) if hint not in SAMPLES else hint
        values[field.name] = SAMPLES.get(first)
        if str(hint).startswith("tuple"):
            values[field.name] = ("a", "b")
        elif isinstance(hint, type) and issubclass(hint, StrEnum):
            values[field.name] = next(iter(hint))
        elif "Mapping" in str(hint):
            values[field.name] = {"run.steps": 500}
    return kind(**values)


def test_programs_find_the_names_and_keys_that_they_know() -> None:
    found = {
        name: {field.name for field in fields(kind)} - {"time"} for name, kind in EVENTS.items()
    }  # type: ignore[arg-type]
    assert found == {name: set(keys.split()) for name, keys in KEYS.items()}


def test_every_event_that_a_node_tells_is_in_the_table() -> None:
    declared = {kind for kind in kinds_below(Event) if is_dataclass(kind)} - {
        OtherEvent,
        ipc.TrainerEvent,
        *UNTOLD,
    }
    assert declared == set(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.wire_name)
def test_an_event_is_the_same_after_its_way_through_json(kind: type[Event]) -> None:
    event = make_exchange() if kind.wire_name == "exchange" else sample(kind)
    notice = Notice(event.time if kind.wire_name == "exchange" else 2.5, event)  # type: ignore[attr-defined]
    told = json.loads(json.dumps(notice.to_json()))
    assert told["event"] == event.name
    assert read_notice(told) == notice


def test_an_event_of_a_newer_node_is_kept_as_it_is() -> None:
    told = {"time": 1.0, "event": "new.kind", "peer": "x"}
    assert read_notice(told).to_json() == told
    known = {"time": 1.0, "event": "phase", "phase": "training", "since": 3}
    assert read_notice(known) == Notice(1.0, PhaseEntered(phase="training"))


@pytest.mark.parametrize(
    "told", [{}, {"time": 1.0}, {"time": "x", "event": "phase"}, {"time": 1.0, "event": "phase"}]
)
def test_what_is_no_event_names_the_remedy(told: dict[str, Any]) -> None:
    with pytest.raises(Unhealthy, match="Start the node again"):
        read_notice(told)
