"""What the API offers, as OpenAPI 3.1: made from the records that it answers with."""

from typing import Any

from pydantic import TypeAdapter

from lowcomm_node.control.queries import QUERIES, ROOT, Query
from lowcomm_node.status.model import Limits

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
