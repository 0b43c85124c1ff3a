"""What can be asked of a node: the one table that server and client of the control API read.

A query ``name`` is the route ``/v1/name`` and the method of that name of ``daemon.controls``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from lowcomm_node.state_transfer.records import Gathered
from lowcomm_node.status.model import PeerStatus, Ping, Status
from lowcomm_node.sync.records import ExchangeEnded

TIMEOUT = 10.0
EXAMINING = 180.0
"""Seconds for what waits for peers: each of its steps has a deadline of its own."""
GATHERING = 900.0
"""Seconds for states of peers, which may be of gigabytes."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Query(Generic[T]):
    """A question, and what answers it."""

    name: str
    answer: type[T]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Defaults by name; what is asked must be of their types. Those of GET are whole numbers."""
    method: Literal["GET", "POST"] = "GET"
    timeout: float = TIMEOUT
    """Seconds that a client waits."""


STATUS = Query(name="status", answer=Status)
PEERS = Query(name="peers", answer=list[PeerStatus])
ROUNDS = Query(name="rounds", answer=list[ExchangeEnded], parameters={"limit": 20})
STORY = Query(name="story", answer=dict[str, Any], parameters={"last": 1})
DOCTOR = Query(
    name="doctor", answer=list[Any], parameters={"peers": []}, method="POST", timeout=EXAMINING
)
PING = Query(name="ping", answer=Ping, parameters={"peer": ""}, method="POST", timeout=EXAMINING)
GATHER = Query(name="gather", answer=Gathered, method="POST", timeout=GATHERING)
QUERIES: list[Query[Any]] = [STATUS, PEERS, ROUNDS, STORY, DOCTOR, PING, GATHER]
