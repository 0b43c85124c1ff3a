"""The calls of the control API: one table that server and client read.

A call ``name`` is the route ``/api/v1/name``. The server answers it by the method of that name of
``node.controls``, or by the method that ``by`` names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Generic, Optional, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model

from lowcomm_node.catalogue import Explanation
from lowcomm_node.fetch import Gathered
from lowcomm_node.status.figures import Sample
from lowcomm_node.status.model import Hours, Limits, PeerStatus, Ping, Status
from lowcomm_node.status.words import Health
from lowcomm_node.sync.history import ExchangeEnded

ROOT = "/api/v1"
"""Of all routes but those of the page."""
TIMEOUT = 10.0
EXAMINING = 180.0
"""Seconds for calls that wait for peers: each of their steps has a deadline of its own."""
LONGEST = 900.0
"""Seconds for states of peers, which may have gigabytes."""
LONGEST_PAUSE = 10 * 366 * 86400.0
"""Seconds; a longer pause has no end."""
T = TypeVar("T")


class _Parameters(BaseModel):
    model_config = ConfigDict(strict=True)


@dataclass(frozen=True)
class Query(Generic[T]):
    """A call, and the type of its answer."""

    method: ClassVar[str] = "GET"
    name: str
    text: str
    """What it does, in a sentence."""
    answer: type[T]
    parameters: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Type and default by name."""
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


class Order(Query[T]):
    """A call that changes something, or takes long."""

    method = "POST"


STATUS = Query("status", "Everything about the node at this moment.", Status)
HEALTH = Query(
    "health", "Whether the node is well, and why: as `lowcomm-node status --check` judges.", Health
)
PEERS = Query("peers", "The peers that are alive.", list[PeerStatus])
SAMPLES = Query(
    "samples",
    "Past figures from the journal since a Unix time, evenly thinned to at most `most`.",
    list[Sample],
    {"since": (int, 0), "most": (int, 500)},
)
EXCHANGES = Query(
    "exchanges",
    "The last exchanges in the journal since a Unix time, newest last.",
    list[ExchangeEnded],
    {"limit": (int, 200), "since": (int, 0)},
)
MESSAGES = Query(
    "messages",
    "What each code means, and what to do, by its kind, such as `waits` and `warnings`.",
    dict[str, dict[str, Explanation]],
)
LIMITS = Query("limits", "The owner's limits on traffic.", Limits)
CHANGE_LIMITS = Order(
    "limits",
    "Change limits, such as `5Mbit` or `none`; those left out stay.",
    Limits,
    {"changes": (dict[str, Any], {})},
    by="change_limits",
)
DOCTOR = Order(
    "doctor",
    "What is wrong with this machine or its network. It takes a minute.",
    list[Any],
    {"peers": (list[str], [])},
    timeout=EXAMINING,
)
PING = Order(
    "ping",
    "Latency and rate on each route to a peer.",
    Ping,
    {"peer": (str, "")},
    timeout=EXAMINING,
)
GATHER = Order(
    "gather",
    "Save a checkpoint now, and fetch the slow weights of up to three peers.",
    Gathered,
    timeout=LONGEST,
)
SCHEDULE = Order(
    "schedule",
    "Train in other hours, such as 22:00-07:00 or none for always, and after a restart too.",
    Hours,
    {"hours": (str, "")},
)
PAUSE = Order(
    "pause",
    "Save, and free the trainer's memory, for these seconds or until resumed (null).",
    type(None),
    {"seconds": (Optional[Annotated[float, Field(gt=0, le=LONGEST_PAUSE)]], None)},  # noqa: UP045
)
RESUME = Order("resume", "Resume training, overriding any pause.", type(None))
FINISH = Order(
    "finish",
    "End the exchanges under way, save, say goodbye, leave.",
    type(None),
    by="request_finish",
)
STOP = Order(
    "stop",
    "Save and leave; now: without saving.",
    type(None),
    {"now": (bool, False)},
    "request_stop",
)
GENERATE = Order(
    "generate",
    "Text by the model as it is now, or in `chat` its answer to texts, yours and its own in turn; "
    "`before`: without the adapter of the run.",
    str,
    {
        "prompt": (str, ""),
        "tokens": (int, 200),
        "temperature": (float, 0.8),
        "seed": (int, 0),
        "chat": (list[str], []),
        "before": (bool, False),
    },
    timeout=600.0,
)
QUERIES: list[Query[Any]] = [
    STATUS, HEALTH, PEERS, SAMPLES, EXCHANGES, MESSAGES, LIMITS, CHANGE_LIMITS,
    DOCTOR, PING, GATHER, SCHEDULE, PAUSE, RESUME, FINISH, STOP, GENERATE,
]  # fmt: skip
