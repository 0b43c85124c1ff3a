"""What can be asked of a node: the one table that server and client of the control API read.

A query ``name`` is the route ``/api/v1/name`` and the method of that name of ``daemon.controls``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from lowcomm_node.catalogue.message import Message
from lowcomm_node.fetch.records import Gathered
from lowcomm_node.journal.sample import Sample
from lowcomm_node.status.health import Health
from lowcomm_node.status.model import Exported, Hours, PeerStatus, Ping, Status
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
