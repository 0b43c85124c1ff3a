"""What can be asked of a node: the one table that server and client of the control API read.

A query ``name`` is the route ``/api/v1/name`` and the method of that name of ``node.controls``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from pydantic import TypeAdapter

from lowcomm_node.catalogue import Message
from lowcomm_node.fetch.records import Gathered
from lowcomm_node.status.journal import Sample
from lowcomm_node.status.model import Exported, Hours, Limits, PeerStatus, Ping, Status
from lowcomm_node.status.words import Health
from lowcomm_node.sync.records import ExchangeEnded

ROOT = "/api/v1"
"""Of all routes but those of the page."""
TIMEOUT = 10.0
EXAMINING = 180.0
"""Seconds for what waits for peers: each of its steps has a deadline of its own."""
GATHERING = 900.0
"""Seconds for states of peers, which may be of gigabytes."""
EXPORTING = 900.0
"""Seconds for the largest models."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Query(Generic[T]):
    """A question, and what answers it."""

    name: str
    text: str
    """What it answers, in a sentence."""
    answer: type[T]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Defaults by name; what is asked must be of their types. Those of GET are whole numbers."""
    method: Literal["GET", "POST"] = "GET"
    timeout: float = TIMEOUT
    """Seconds that a client waits."""


STATUS = Query(name="status", text="Everything about the node at this moment.", answer=Status)
HEALTH = Query(
    name="health",
    text="Whether the node is well, and why: as `lowcomm-node healthy` judges.",
    answer=Health,
)
PEERS = Query(name="peers", text="The peers that are alive.", answer=list[PeerStatus])
ROUNDS = Query(
    name="rounds",
    text="The last exchanges, newest last.",
    answer=list[ExchangeEnded],
    parameters={"limit": 20},
)
SAMPLES = Query(
    name="samples",
    text="Figures of the past from the journal, since a time in Unix seconds, at most so many.",
    answer=list[Sample],
    parameters={"since": 0, "most": 500},
)
EXCHANGES = Query(
    name="exchanges",
    text="The last exchanges in the journal, since a time in Unix seconds, newest last.",
    answer=list[ExchangeEnded],
    parameters={"limit": 200, "since": 0},
)
STORY = Query(
    name="story",
    text="How the n-th last exchange went.",
    answer=dict[str, Any],
    parameters={"last": 1},
)
MESSAGES = Query(
    name="messages",
    text="What each code means, and what to do, by its kind, such as `waits` and `warnings`.",
    answer=dict[str, dict[str, Message]],
)
DOCTOR = Query(
    name="doctor",
    text="What is wrong with this machine or its network. It takes a minute.",
    answer=list[Any],
    parameters={"peers": []},
    method="POST",
    timeout=EXAMINING,
)
PING = Query(
    name="ping",
    text="Latency and rate on each route to a peer.",
    answer=Ping,
    parameters={"peer": ""},
    method="POST",
    timeout=EXAMINING,
)
GATHER = Query(
    name="gather",
    text="Save a checkpoint now, and fetch the slow weights of up to three peers.",
    answer=Gathered,
    method="POST",
    timeout=GATHERING,
)
SCHEDULE = Query(
    name="schedule",
    text="Train in other hours, such as 22:00-07:00 or none for always, and after a restart too.",
    answer=Hours,
    parameters={"hours": ""},
    method="POST",
)
EXPORT = Query(
    name="export",
    text="Write the newest model into a folder of the home: hf or gguf.",
    answer=Exported,
    parameters={"to": "hf"},
    method="POST",
    timeout=EXPORTING,
)
QUERIES: list[Query[Any]] = [
    STATUS,
    HEALTH,
    PEERS,
    ROUNDS,
    SAMPLES,
    EXCHANGES,
    STORY,
    MESSAGES,
    DOCTOR,
    PING,
    GATHER,
    SCHEDULE,
    EXPORT,
]


_REFERENCE = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "properties": {"error": {"type": "string"}, "exit_code": {"type": "integer"}},
    "required": ["error"],
}
_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", list: "array"}
_NUMBER = {"type": ["number", "null"]}
_RATE = {"type": "string", "description": "Such as 5Mbit or none."}
WRITES: dict[str, tuple[str, dict[str, Any]]] = {
    "pause": (
        "Save, and free the trainer's memory, for so many seconds or until resumed.",
        {"seconds": _NUMBER},
    ),
    "resume": ("Train again, whatever keeps the node from that.", {}),
    "finish": ("End the exchanges under way, save, say goodbye, leave.", {}),
    "stop": ("Save and leave; now: without saving.", {"now": {"type": "boolean"}}),
    "link": ("A link to the page that lets one browser in, once.", {}),
    "generate": (
        "Text by the model as it is now.",
        {
            "prompt": {"type": "string"},
            "tokens": {"type": "integer"},
            "temperature": {"type": "number"},
            "seed": {"type": "integer"},
        },
    ),
}
"""What changes something or takes long, besides the queries: what it does, and what it takes."""


def describe(release: str) -> dict[str, Any]:
    """The whole document."""
    answers = [(one.name, TypeAdapter(one.answer)) for one in QUERIES]
    limits: TypeAdapter[Any] = TypeAdapter(Limits)
    schemas, common = TypeAdapter.json_schemas(
        [(name, "serialization", one) for name, one in (*answers, ("limits", limits))],
        ref_template=_REFERENCE,
    )
    told = {name: schema for (name, _), schema in schemas.items()}
    paths = {f"{ROOT}/{one.name}": {one.method.lower(): _query(one, told)} for one in QUERIES}
    rates = {"max_up": _RATE, "max_down": _RATE, "max_peers": {"type": "string"}}
    paths[f"{ROOT}/limits"] = {
        "get": _operation("The owner's limits on traffic.", told["limits"]),
        "post": _operation("Change them.", told["limits"], rates),
    }
    paths[f"{ROOT}/events"] = {
        "get": _operation(
            "Events as they happen, one a line, or as server-sent events with numbers.", {}
        )
    }
    paths[f"{ROOT}/metrics"] = {"get": _operation("Figures in the text form of Prometheus.", {})}
    for name, (text, taken) in WRITES.items():
        paths[f"{ROOT}/{name}"] = {"post": _operation(text, {"type": "object"}, taken)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "lowcomm-node",
            "version": release,
            "description": "The control API of a node, on loopback.",
        },
        "paths": paths,
        "components": {
            "schemas": {**common.get("$defs", {}), "Error": _ERROR},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _query(query: Query[Any], told: dict[str, Any]) -> dict[str, Any]:
    types = {name: {"type": _TYPES[type(value)]} for name, value in query.parameters.items()}
    if query.method == "POST":
        return _operation(query.text, told[query.name], types)
    given = [{"name": name, "in": "query", "schema": kind} for name, kind in types.items()]
    return _operation(query.text, told[query.name]) | {"parameters": given}


def _operation(text: str, answer: Any, taken: dict[str, Any] | None = None) -> dict[str, Any]:
    refused = {"description": "Refused, with the reason.", "content": _json("Error")}
    operation: dict[str, Any] = {
        "summary": text,
        "responses": {
            "200": {"description": "Done.", "content": {"application/json": {"schema": answer}}},
            "400": refused,
            "401": refused,
        },
    }
    if taken is not None:
        schema = {"type": "object", "properties": taken}
        operation["requestBody"] = {"content": {"application/json": {"schema": schema}}}
    return operation


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REFERENCE.format(model=name)}}}
