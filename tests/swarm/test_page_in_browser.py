"""The page of a node in a browser, beside a real swarm: what it shows, steers and never does."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from helpers.browser import Visit, visiting
from helpers.processes import Node, Swarm, lonely_swarm, run
from helpers.waiting import until
from lowcomm_node.system import units
from lowcomm_node.web.client import ControlClient, read_endpoint

pytestmark = [pytest.mark.swarm, pytest.mark.page, pytest.mark.timeout(400)]

NODES = "ab"
GROWING = (
    "trainer.swarm_step", "trainer.steps", "trainer.tokens", "exchanges.completed", "bytes_sent",
    "bytes_received", "uptime",
)  # fmt: skip
"""Figures that only grow."""
SAVES_ARGUMENTS = Path(__file__).parents[1] / "helpers" / "saves_arguments.py"
MOVING = ("uptime", "limits.up", "limits.down", "trainer.accelerators.0")
"""Those of a node that rests, too."""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    with lonely_swarm(tmp_path_factory.mktemp("swarm")) as swarm:
        swarm.bootstrap("--run", str(swarm.spec(evaluate_every=20)))
        for name in NODES:
            swarm.node(name)
        yield swarm


@pytest.fixture(scope="module")
def node(swarm: Swarm) -> Node:
    """One of those that train."""
    first = swarm.processes[1]
    assert isinstance(first, Node)
    first.until(lambda s: s["peers"] == len(NODES) - 1, "all know one another")
    first.until_completed(2)
    for other in swarm.processes[3:]:  # two that train are enough to look at, and leave some time
        assert isinstance(other, Node)
        other.ask(lambda client: client.pause(None))
    return first


@pytest.fixture
def visit(browser: Browser, node: Node) -> Iterator[Visit]:
    with visiting(browser) as visit:
        visit.open(node.ask(ControlClient.link))
        visit.unfold()
        yield visit
        assert not visit.complaints
        own = visit.page.url
        assert [one for one in visit.requests if not one.startswith((own, "data:"))] == []


def value_at(told: Any, path: str) -> Any:
    for name in path.split("."):
        told = told.get(name) if isinstance(told, dict) else None
    return told


def expected_text(kind: str, value: Any) -> str | None:
    """What the command line would write; None where it writes nothing like that."""
    if value is None:
        return units.MISSING
    if kind in ("count", "clean"):
        return units.clean(value)
    written = getattr(units, kind, None)
    return written(value) if written else None


def test_the_first_look_takes_few_requests_and_few_bytes(visit: Visit):
    visit.wait("Number(document.getElementById('loss').dataset.points) > 0")
    assert len(visit.requests) <= 20, visit.requests
    assert visit.bytes < 300_000
    assert visit.text("#run") == "test"


def test_figures_of_a_node_that_trains_are_those_of_status_at_that_moment(visit: Visit, node: Node):
    before = node.status()
    states = visit.page.evaluate("Number(document.body.dataset.states)")
    visit.wait(f"Number(document.body.dataset.states) >= {states + 2}")
    figures = visit.figures()
    after = node.status()
    for path in GROWING:
        value = figures[path][0]
        assert value_at(before, path) <= value <= value_at(after, path), path
    assert figures["trainer.steps"][0] > 0
    value, text, _ = figures["trainer.accelerators.0"]
    assert value["device"] == "cpu" and value["name"] in text


def test_it_lives_without_being_loaded_again(visit: Visit):
    step = visit.figures()["trainer.steps"][0]
    count = "[...document.querySelectorAll('#exchanges tr')].length"
    visit.wait(
        f"JSON.parse(document.querySelector('[data-figure=\"trainer.steps\"]').dataset.value) "
        f"> {step}"
    )
    visit.wait(f"{count} > 3 && Number(document.getElementById('timeline').dataset.shown) > 1")
    visit.wait("document.querySelectorAll('#timeline .merging').length > 0")
    visit.wait("document.querySelectorAll('#fragments tr').length > 0")
    assert "inner steps" in visit.text("#shares")


def test_the_owner_pauses_resumes_and_limits_from_the_page(visit: Visit, node: Node):
    page = visit.page
    page.click("#controls summary")
    page.fill("[name=max_up]", "40Mbit")
    page.fill("[name=max_peers]", "9")
    page.click("#limits button")
    limits = node.until(lambda s: s["limits"]["max_peers"] == 9, "the limit holds")["limits"]
    assert limits["max_up"] == 5e6
    page.fill("[name=max_up]", "40Mb")
    page.click("#limits button")
    visit.wait("document.getElementById('limits-said').textContent.includes('40Mbit or 40MB')")
    page.fill("[name=hours]", "sometimes")
    page.click("#hours button")
    visit.wait("document.getElementById('hours-said').dataset.error")
    page.fill("[name=hours]", "Mon-Sun 00:00-24:00")
    page.click("#hours button")
    node.until(lambda s: s["schedule"] is not None, "the hours hold")
    visit.complaints = [one for one in visit.complaints if "400" not in one]  # of the two refusals

    page.click("[data-pause='1800']")
    paused = node.until(lambda s: s["phase"] == "paused", "it pauses")
    assert paused["pause"]["until"] is not None
    visit.wait("document.getElementById('phase').textContent.startsWith('Paused until')")
    until(lambda: visit.text("#remedy") == "What to do: lowcomm-node resume", 30, "the remedy")

    def all_equal() -> bool:
        status, peers = node.status(), {one["peer_id"]: one for one in node.peers()}
        figures = visit.figures()
        of_status = {path: told for path, told in figures.items() if "12D3" not in path}
        of_peers = {path: told for path, told in figures.items() if "12D3" in path}
        assert len(of_status) > 20 and len(of_peers) == 13 * len(peers)
        same = all(
            told[0] == value_at(status, path)
            for path, told in of_status.items()
            if path not in MOVING
        )
        return same and all(told[0] == value_at(peers, path) for path, told in of_peers.items())

    until(all_equal, 60, "every figure is that of `status --json` and of `peers --json`")
    for path, (value, text, kind) in visit.figures().items():
        assert expected_text(kind, value) in (None, text), path
    page.click("#controls summary")
    page.click("#resume")
    node.until(lambda s: s["phase"] == "training", "it trains again")
    visit.wait("document.getElementById('phase').textContent === 'Training'")


def test_an_open_page_hears_how_its_node_ends_and_a_new_link_opens_it_again(
    browser: Browser, swarm: Swarm, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    opened = tmp_path / "opened"
    monkeypatch.setenv("BROWSER", f"{sys.executable} {SAVES_ARGUMENTS} {opened} %s &")
    done = run("lowcomm_node", "web", "--home", str(node.home))
    link = done.stdout.strip()
    until(opened.exists, 30, "the browser is started")
    assert link.partition("#")[2] not in opened.read_text(), "all users may read this"
    with visiting(browser) as visit:
        visit.page.goto(opened.read_text().split()[-1])
        visit.page.wait_for_url("http://127.0.0.1:*/")
        visit.wait("document.querySelector('[data-figure=uptime]').dataset.value")
        seen = visit.page.evaluate("document.querySelectorAll('#exchanges tr').length")
        assert visit.page.locator("#controls").is_visible()
        node.end(signal.SIGKILL)
        visit.page.locator("#line").wait_for(state="visible")
        visit.wait("document.getElementById('line').textContent.includes('does not answer')")
        for steering in ("#controls", "#model"):
            assert not visit.page.locator(steering).is_visible()
        again = swarm.node("a")
        again.until(lambda s: s["phase"] == "training", "it trains again")
        with ControlClient(node.home) as client:
            visit.open(client.link())
        visit.wait("document.getElementById('phase').textContent === 'Training'")
        rows = "document.querySelectorAll('#exchanges tr').length"
        visit.wait(f"{rows} >= {min(seen, 50)}")
        assert visit.figures()["uptime"][0] < 150
        known = [one for one in visit.complaints if "Failed to load" not in one]
        assert [one for one in known if "ERR_" not in one] == []

        tokens = [
            read_endpoint(node.home).token,
            visit.page.evaluate("sessionStorage.getItem('lowcomm-browser')"),
        ]
        visit.page.click("#controls summary")
        visit.page.click("#finish")
        visit.page.click("#sure [value=finish]")
        visit.page.locator("#end").wait_for(state="visible", timeout=90_000)
        assert again.child.wait(60) == 0
        farewell = visit.text("#farewell")
        assert farewell.startswith("The node has left") and "contributed: " in farewell
        (model,) = again.events("contributed")
        assert (
            f"the model:   {model['checkpoint']}\n" in farewell and "checkpoint export" in farewell
        )
        tried = len(visit.requests)
        until(
            lambda: visit.page.evaluate("true") and len(visit.requests) > tried + 1,
            30,
            "the page looks whether it is back",
        )
        assert not visit.page.locator("#line").is_visible() and visit.text("#farewell") == farewell
        assert not visit.page.locator("#controls").is_visible()
    assert "Traceback" not in again.output
    assert not [one for one in tokens if one in again.output]
