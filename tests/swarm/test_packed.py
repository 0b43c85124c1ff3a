"""Packed text: nodes train on a pack that only one of them had, each on pieces of its own, and go
on with what they have while that one is gone."""

import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import Node, Swarm, command, environment, lonely_swarm
from helpers.waiting import until

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
SMALL = {"layers": 1, "width": 32, "heads": 2, "feed_forward": 64, "context": 64, "batch": 32}
BLOCKS = {"shuffle_bytes": 65536}
"""Of four pieces, so that a node trains long before it has the whole text."""


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    """A server with a run of packed text, which lies in the folder."""
    (tmp_path / "texts").mkdir()
    for number in range(200):
        words = " ".join(f"{number * place % 977}" for place in range(1500))
        (tmp_path / "texts" / f"{number}.txt").write_text(f"Tea {number}: {words}. ")
    with lonely_swarm(tmp_path) as swarm:
        for line in (
            "data pack texts tea.pack --home creator",
            "init --data tea.pack --name tea --steps 1000000 run.toml",
        ):
            subprocess.run(
                command("lowcomm_node", *line.split()),
                cwd=tmp_path, env=environment(), check=True, timeout=60,
            )  # fmt: skip
        swarm.bootstrap("--run", str(shrunk(tmp_path / "run.toml")))
        yield swarm


def shrunk(path: Path) -> Path:
    """The same run with the smallest model, and blocks of four pieces."""
    lines = path.read_text().splitlines()
    for place, line in enumerate(lines):
        name = line.partition(" = ")[0]
        if name in SMALL | BLOCKS:
            lines[place] = f"{name} = {(SMALL | BLOCKS)[name]}"
    path.write_text("\n".join(lines))
    return path


def text_of(status: dict[str, Any]) -> dict[str, Any]:
    """The only part of a node's text."""
    return status["text"][0]


def until_read(node: Node, pieces: int) -> dict[str, Any]:
    """Wait until a node has read so many pieces itself."""
    return text_of(node.until(lambda s: text_of(s)["own_pieces"] >= pieces, f"{pieces} are read"))


def test_nodes_share_a_text_that_one_of_them_had_and_go_on_without_it(swarm: Swarm) -> None:
    holding = ("--data", str(swarm.folder / "tea.pack"))
    a, b = swarm.node("a", *holding), swarm.node("b")
    b.until(lambda s: s["phase"] == "training", "b trains")
    until_read(b, 4)
    text = text_of(a.until(lambda s: text_of(s)["pieces_read"] > text_of(s)["own_pieces"], "heard"))
    assert text["bytes_fetched"] == 0 < text["bytes_given"]
    first = [
        until(partial(node.events, "evaluated"), 60, "it has evaluated")[0]["tokens"]
        for node in (a, b)
    ]
    assert first[0] == first[1], "both are measured on the same held-out text"

    a.end(signal.SIGKILL)
    status = b.until(lambda s: "text-missing" in s["warning_codes"], "text is missing")
    (warning,) = [one for one in status["warnings"] if "reads it again" in one]
    assert "piece" in warning and "of tea: " in warning, warning
    steps = status["trainer"]["steps"]
    b.until(lambda s: s["trainer"]["steps"] > steps + 40, "b goes on with what it has")

    before = text_of(b.status() or {})["bytes_fetched"]
    swarm.node("a", *holding)
    status = b.until(
        lambda s: (
            "text-missing" not in s["warning_codes"]
            and text_of(s)["bytes_fetched"] > before + 4 * 16384
        ),
        "all goes on",
    )
    assert "piece-skipped" not in status["warning_codes"]
