"""A question to a node is a line of the table of queries and a method that answers it: route,
client and the reading of the answer follow."""

import asyncio
import inspect
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowcomm_node.errors import NodeError, Unhealthy
from lowcomm_node.node.controls import Controls
from lowcomm_node.status.events import Board
from lowcomm_node.storage.paths import Paths
from lowcomm_node.web import server
from lowcomm_node.web.api import QUERIES, Query
from lowcomm_node.web.client import ControlClient
from lowcomm_node.web.server import ControlServer


@dataclass(frozen=True)
class Weather:
    place: str
    degrees: float


def weather(place: str) -> Weather:
    return Weather(place=place, degrees=21.5)


@pytest.mark.parametrize("query", QUERIES, ids=lambda one: f"{one.method} {one.name}")
def test_the_daemon_answers_every_query_in_a_method_of_its_name(query: Query[Any]) -> None:
    method = getattr(Controls, query.by or query.name)
    assert list(inspect.signature(method).parameters) == ["self", *query.parameters]


async def test_a_new_query_needs_its_line_and_its_method_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Query(
        name="weather",
        text="How it is.",
        answer=Weather,
        parameters={"place": (str, "here")},
        method="POST",
    )
    monkeypatch.setattr(server, "QUERIES", [*QUERIES, asked])
    node: Any = SimpleNamespace(weather=weather, status=None, peers=None)
    serving = ControlServer(node, Board(), Paths(tmp_path))
    await serving.start(0, "me")

    def ask() -> tuple[Weather, Weather]:
        with ControlClient(tmp_path) as client:
            with pytest.raises(NodeError, match="'place' can't be 7"):
                client.ask(asked, place=7)
            with pytest.raises(Unhealthy, match="different releases"):
                client.ask(Query(name="weather", text="How it is.", answer=int, method="POST"))
            return client.ask(asked), client.ask(asked, place="Ulm")

    try:
        usual, there = await asyncio.to_thread(ask)
    finally:
        await serving.close()
    assert (usual, there) == (Weather("here", 21.5), Weather("Ulm", 21.5))
