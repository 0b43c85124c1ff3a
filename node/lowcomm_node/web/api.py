"""The calls of the control API: one table that server, client and OpenAPI document read.

A call ``name`` is the route ``/api/v1/name``. The server answers it by the method of that name of
``node.controls``, or by the method that ``by`` names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Generic, Literal, Optional, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model

from lowcomm_node.catalogue import Explanation
from lowcomm_node.fetch.records import Gathered
from lowcomm_node.status.figures import Sample
from lowcomm_node.status.model import ExportedModel, Hours, Limits, PeerStatus, Ping, Status
from lowcomm_node.status.words import Health
from lowcomm_node.sync.history import ExchangeEnded

ROOT = "/api/v1"
"""Of all routes but those of the page."""
TIMEOUT = 10.0
EXAMINING = 180.0
"""Seconds for calls that wait for peers: each of their steps has a deadline of its own."""
GATHERING = 900.0
"""Seconds for states of peers, which may have gigabytes."""
EXPORTING = 900.0
"""Seconds for the largest models."""
LONGEST_PAUSE = 10 * 366 * 86400.0
"""Seconds; a longer pause has no end."""
T = TypeVar("T")


class _Parameters(BaseModel):
    model_config = ConfigDict(strict=True)


@dataclass(frozen=True, kw_only=True)
class Query(Generic[T]):
    """A call, and the type of its answer."""

    name: str
    text: str
    """What it does, in a sentence."""
    answer: type[T]
    parameters: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Type and default by name."""
    method: Literal["GET", "POST"] = "GET"
    by: str = ""
    """The node's method, where its name is another one."""
    timeout: float = TIMEOUT
    """Seconds that a client waits."""

    @cached_property
    def model(self) -> type[BaseModel]:
        """The parameters, as pydantic checks them."""
        parameters: dict[str, Any] = dict(self.parameters)
        return create_model(self.name, __base__=_Parameters, **parameters)

    def read(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Check parameters; texts of a query string count as numbers. Raises ValidationError."""
        strict = self.method == "POST"
        checked = self.model.model_validate(given, strict=strict)
        return {name: getattr(checked, name) for name in self.parameters}


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
    parameters={"limit": (int, 20)},
)
SAMPLES = Query(
    name="samples",
    text="Past figures from the journal since a Unix time, evenly thinned to at most `most`.",
    answer=list[Sample],
    parameters={"since": (int, 0), "most": (int, 500)},
)
EXCHANGES = Query(
    name="exchanges",
    text="The last exchanges in the journal since a Unix time, newest last.",
    answer=list[ExchangeEnded],
    parameters={"limit": (int, 200), "since": (int, 0)},
)
STORY = Query(
    name="story",
    text="How the n-th last exchange went.",
    answer=dict[str, Any],
    parameters={"last": (int, 1)},
)
MESSAGES = Query(
    name="messages",
    text="What each code means, and what to do, by its kind, such as `waits` and `warnings`.",
    answer=dict[str, dict[str, Explanation]],
)
LIMITS = Query(name="limits", text="The owner's limits on traffic.", answer=Limits)
CHANGE_LIMITS = Query(
    name="limits",
    text="Change limits, such as `5Mbit` or `none`; those left out stay.",
    answer=Limits,
    parameters={"changes": (dict[str, Any], {})},
    method="POST",
    by="change_limits",
)
DOCTOR = Query(
    name="doctor",
    text="What is wrong with this machine or its network. It takes a minute.",
    answer=list[Any],
    parameters={"peers": (list[str], [])},
    method="POST",
    timeout=EXAMINING,
)
PING = Query(
    name="ping",
    text="Latency and rate on each route to a peer.",
    answer=Ping,
    parameters={"peer": (str, "")},
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
    parameters={"hours": (str, "")},
    method="POST",
)
EXPORT = Query(
    name="export",
    text="Write the newest model into a folder of the home: hf or gguf.",
    answer=ExportedModel,
    parameters={"to": (str, "hf")},
    method="POST",
    timeout=EXPORTING,
)
PAUSE = Query(
    name="pause",
    text="Save, and free the trainer's memory, for these seconds or until resumed (null).",
    answer=type(None),
    parameters={"seconds": (Optional[Annotated[float, Field(gt=0, le=LONGEST_PAUSE)]], None)},  # noqa: UP045
    method="POST",
)
RESUME = Query(
    name="resume",
    text="Resume training, overriding any pause.",
    answer=type(None),
    method="POST",
)
FINISH = Query(
    name="finish",
    text="End the exchanges under way, save, say goodbye, leave.",
    answer=type(None),
    method="POST",
    by="request_finish",
)
STOP = Query(
    name="stop",
    text="Save and leave; now: without saving.",
    answer=type(None),
    parameters={"now": (bool, False)},
    method="POST",
    by="request_stop",
)
GENERATE = Query(
    name="generate",
    text="Text by the model as it is now.",
    answer=str,
    parameters={
        "prompt": (str, ""),
        "tokens": (int, 200),
        "temperature": (float, 0.8),
        "seed": (int, 0),
    },
    method="POST",
    timeout=600.0,
)
QUERIES: list[Query[Any]] = [
    STATUS, HEALTH, PEERS, ROUNDS, SAMPLES, EXCHANGES, STORY, MESSAGES, LIMITS, CHANGE_LIMITS,
    DOCTOR, PING, GATHER, SCHEDULE, EXPORT, PAUSE, RESUME, FINISH, STOP, GENERATE,
]  # fmt: skip


def describe(release: str) -> dict[str, Any]:
    """Make the OpenAPI 3.1 document of all calls."""
    answers = [
        (f"{query.method} {query.name}", "serialization", TypeAdapter(query.answer))
        for query in QUERIES
    ]
    schemas, common = TypeAdapter.json_schemas(
        answers,  # type: ignore[arg-type]
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {}
    for query in QUERIES:
        answer = {"schema": schemas[f"{query.method} {query.name}", "serialization"]}
        taken = query.model.model_json_schema()
        operation: dict[str, Any] = {
            "summary": query.text,
            "responses": {
                "200": {"description": "Done.", "content": {"application/json": answer}},
                "400": {"description": "Refused; `error` has the reason."},
                "401": {"description": "The token is missing or wrong."},
            },
        }
        if query.method == "POST":
            operation["requestBody"] = {"content": {"application/json": {"schema": taken}}}
        else:
            operation["parameters"] = [
                {"name": name, "in": "query", "schema": schema}
                for name, schema in taken.get("properties", {}).items()
            ]
        paths.setdefault(f"{ROOT}/{query.name}", {})[query.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "lowcomm-node", "version": release},
        "paths": paths,
        "components": {
            "schemas": common.get("$defs", {}),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }
