"""What the first screen of a node's page must show in each state: whether all is well, how long it
takes, whether it learns, and what the owner gives. ``SCREENSHOTS=docs`` writes the pictures."""

import math
import os
import random
from pathlib import Path
from time import time
from typing import Any

import pytest
from playwright.sync_api import Browser, ViewportSize

from helpers.browser import PHONE, Visit, visiting
from helpers.stand_in import BEFORE, WRITTEN, StandIn, link, serving
from helpers.statuses import make_exchange, make_peer, make_status
from lowcomm_node.status.figures import Sample
from lowcomm_node.status.model import Status

pytestmark = [pytest.mark.page, pytest.mark.timeout(400)]

SCREENSHOTS = os.environ.get("SCREENSHOTS", "")
SCREEN: ViewportSize = {"width": 1280, "height": 800}
NAMES = {"ada": "9sF5Q8P3vjgRwaLNwpd81opxLNkppxzGR8dZatPiqkwy", "grace": "HTYSuybeEreFnB4P33X5AHNB"}
STEPS, DONE = 2000, 1240
RUN = {
    "name": "tea-stories", "description": "Short tales for children", "steps": STEPS,
    "method": "lowcomm",
}  # fmt: skip
TRAINER: dict[str, Any] = {
    "state": "training", "device": "cuda:0", "parameters": 134_000_000, "total_steps": STEPS,
    "steps": DONE, "swarm_step": DONE, "tokens": 20_316_160, "tokens_per_second": 11_230.0,
    "loss": 2.6123, "val_loss_first": 9.4213, "val_loss_last": 2.7012, "learning_rate": 2.8e-3,
    "remaining": 1105.0, "computing": 900.0, "waited": {"capture": 3.0, "merge": 1.2, "save": 9.0},
}  # fmt: skip
TEXT: dict[str, Any] = {
    "name": "wiki", "share": 1.0, "tokens": 3_000_000, "pieces": 300, "epoch": 1,
    "pieces_read": 150, "own_pieces": 30, "held": 40, "bytes_fetched": 640_000,
    "waiting": "waits for <b>piece 7</b>",
}  # fmt: skip


def training(**more: Any) -> Status:
    counts = {"completed": 212, "no_partner": 37, "failed": 2, "since_applied": 4.2}
    told: dict[str, Any] = {
        "run": RUN, "trainer": TRAINER, "exchanges": counts, "peers": 2, "uptime": 2106.0,
        "bytes_sent": 48_200_000, "bytes_received": 51_000_000, "dht_peers": 4,
        "claims": {"val_loss": 2.7123, "told_by": 2},
        "text": [TEXT],
        "limits": {"max_up": 2.5e6, "up": 190_000.0, "down": 205_000.0, "max_peers": 64},
    }  # fmt: skip
    return make_status(**told | more)


STATES: dict[str, tuple[Status, str]] = {
    "training": (training(), "Training"),
    "waiting": (
        training(
            phase="joining", waiting="tokenizing the text: 29 %, 1.2 GB of 4.1 GB, 31 MB/s",
            waiting_code="tokenizing", uptime=41.0,
            trainer={
                "state": "joining", "device": None, "total_steps": STEPS, "parameters": None,
                "tokenizing": {
                    "done": 29, "total": 100, "tokens": 1, "rate": 1.0, "remaining": 9.0
                },
            },
        ),
        "Waiting",
    ),
    "paused": (
        training(
            phase="paused", waiting="paused by you until 20:59", waiting_code="owner",
            pause={"rule": "owner", "reason": "paused by you", "until": time() + 1800},
        ),
        "Paused until",
    ),
    "finished": (
        training(
            phase="finished", waiting="the run is over: serving its state to others",
            waiting_code="run-over", trainer=TRAINER | {"swarm_step": STEPS, "remaining": 0.0},
        ),
        "Finished",
    ),
}  # fmt: skip


def samples() -> list[Sample]:
    chance, now = random.Random(0), time()
    made: list[Sample] = []
    for place in range(200):
        step = round(DONE * place / 199)
        loss = 2.4 + 7 * math.exp(-step / 260)
        held_out = 2.5 + 7 * math.exp(-(step - step % 100) / 260)
        made.append(
            Sample(
                time=now - 10 * (200 - place), phase="training", waiting=None, swarm_step=step,
                steps=step, tokens=16_384 * step, loss=loss + chance.gauss(0, 0.05),
                val_loss=held_out, claimed_loss=held_out + 0.02 if place % 20 == 0 else None,
                tokens_per_second=11_000 + chance.gauss(0, 250), peers=2 if place > 40 else 1,
                completed=place, failed=0, bytes_sent=240_000 * place, bytes_received=0,
            )
        )  # fmt: skip
    return made


@pytest.fixture
def node() -> StandIn:
    node = StandIn(training())
    node.drawn = samples()
    node.known = [
        make_peer(
            peer_id=f"12D3KooW{rest}", name=name, tokens=tokens, route=route, round_trip=0.02,
            swarm_step=DONE, completed=100,
        )
        for (name, rest), tokens, route in zip(
            NAMES.items(), (31_000_000, 9_000_000), ("direct 203.0.113.7:4001", "punched"),
            strict=True,
        )
    ]  # fmt: skip
    outcomes = ["applied", "no-partner", "no-partner", "applied", "failed", "applied"] * 6
    node.past = [
        make_exchange(
            time=time() - 12 * (len(outcomes) - place), round=place, fragment=place % 4,
            outcome=outcome, reason="" if outcome == "applied" else "the line broke",
            partners=[node.known[0].peer_id] if outcome == "applied" else [],
            moments={"captured": 0.05, "sent": 0.2, "received": 0.3},
        )
        for place, outcome in enumerate(outcomes)
    ]  # fmt: skip
    return node


def picture(visit: Visit, name: str) -> None:
    if SCREENSHOTS:
        visit.page.screenshot(path=Path(SCREENSHOTS) / f"page-{name}.png")


@pytest.mark.parametrize("state", STATES)
def test_the_first_screen_says_in_a_word_how_the_node_is(
    state: str, node: StandIn, browser: Browser, tmp_path: Path
) -> None:
    node.now, word = STATES[state]
    with serving(node, tmp_path), visiting(browser, viewport=SCREEN) as visit:
        visit.open(link(tmp_path))
        visit.wait(f"document.getElementById('phase').textContent.startsWith('{word}')")
        visit.wait("document.getElementById('gave').textContent.includes('MB')")
        bottom = visit.page.evaluate(
            "document.querySelector('.stage').getBoundingClientRect().bottom"
        )
        if state != "finished":
            assert bottom <= SCREEN["height"], "all that matters is seen without scrolling"
        assert visit.faults() == [] and visit.overflowing() == []
        picture(visit, state)
        if state == "finished":
            visit.page.locator("#sample").wait_for(state="visible")
            visit.wait("document.getElementById('learned').textContent.includes('33 min')")
            assert "fell from 9.5000 to 2.7012" in visit.text("#learned")
            picture(visit, state)
        if state == "training":
            assert visit.text("#left") == "18 min left"
            assert visit.text("#read") == "1.50 epochs read by all"
            visit.unfold()
            told = visit.text("#parts")
            assert "50.0 %" in told and "10.0 %" in told and TEXT["waiting"] in told
            assert visit.text("#gave") == "33 min, 47.8 MB sent"
        if state == "waiting":
            assert "the text: 29.0 %" in visit.text("#checklist .doing")


@pytest.mark.parametrize(("name", "scheme"), [("phone", "light"), ("dark", "dark")])
def test_it_reads_as_well_on_a_phone_and_in_the_dark(
    name: str, scheme: Any, node: StandIn, browser: Browser, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"color_scheme": scheme, "viewport": SCREEN}
    if name == "phone":
        options |= {"viewport": PHONE, "device_scale_factor": 2, "is_mobile": True}
    with serving(node, tmp_path), visiting(browser, **options) as visit:
        visit.open(link(tmp_path))
        visit.wait("Number(document.getElementById('loss').dataset.points) > 0")
        assert visit.faults() == [] and visit.overflowing() == []
        controls = visit.page.locator("#controls summary")
        assert controls.is_visible()
        ground = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground[4:-1].split(","))) < 200) == (scheme == "dark")
        picture(visit, name)
        for fold in visit.page.locator("details.fold:not([hidden]) > summary").all():
            fold.click()
        assert visit.faults() == [] and visit.overflowing() == []


def test_a_run_with_a_chat_template_is_talked_with(
    node: StandIn, browser: Browser, tmp_path: Path
) -> None:
    node.now = training(run=RUN | {"chat": True})
    messages = "hi", "and <b>now</b>?"
    with serving(node, tmp_path), visiting(browser, viewport=SCREEN) as visit:
        visit.open(link(tmp_path))
        visit.unfold()
        visit.wait("document.getElementById('asks').textContent === 'Message'")
        for count, message in enumerate(messages, start=1):
            visit.page.get_by_label("Message").fill(message)
            visit.page.get_by_role("button", name="Send").click()
            visit.wait(f"document.querySelectorAll('#talk p').length === {2 * count}")
        asked = [call for call in node.calls if call[0] == "generate"]
        talk = [messages[0], WRITTEN, messages[1]]
        assert asked == [("generate", messages[0], talk[:1]), ("generate", messages[1], talk)]
        said = [entry.inner_text() for entry in visit.page.locator("#talk p").all()]
        both = zip(("You", "Model") * 2, [*talk, WRITTEN], strict=True)
        assert said == [f"{who} {text}" for who, text in both]
        assert visit.text("#written") == visit.page.get_by_label("Message").input_value() == ""
        assert visit.faults() == [] and visit.overflowing() == []


def test_an_adapter_answers_beside_what_it_was_before(
    node: StandIn, browser: Browser, tmp_path: Path
) -> None:
    node.now = training(run=RUN | {"chat": True, "adapts": True})
    with serving(node, tmp_path), visiting(browser, viewport=SCREEN) as visit:
        visit.open(link(tmp_path))
        visit.unfold()
        visit.page.get_by_label("Beside what it was before").check()
        for message in ("hi", "and now?"):
            visit.page.get_by_label("Message").fill(message)
            visit.page.get_by_role("button", name="Send").click()
            visit.wait(f"document.getElementById('talk').innerText.includes('You {message}')")
        said = [entry.inner_text() for entry in visit.page.locator("#talk p").all()]
        assert said[:3] == ["You hi", f"Before {BEFORE}", f"Model {WRITTEN}"]
        assert node.calls[-1] == ("generate", "and now?", ["hi", WRITTEN, "and now?"])
        assert visit.faults() == [] and visit.overflowing() == []


def test_the_reason_never_moves_what_stands_below(
    node: StandIn, browser: Browser, tmp_path: Path
) -> None:
    with serving(node, tmp_path), visiting(browser, viewport=SCREEN) as visit:
        visit.open(link(tmp_path))
        visit.wait("document.getElementById('gave').textContent.includes('MB')")
        visit.page.evaluate(
            "window.moved = 0; new PerformanceObserver(list => list.getEntries().forEach(one => "
            "{ window.moved += one.value })).observe({ type: 'layout-shift', buffered: false })"
        )
        top = "document.getElementById('progress').getBoundingClientRect().top"
        before = visit.page.evaluate(top)
        node.now = training(waiting="training alone: " + "no other peer is alive " * 20)
        visit.wait("document.getElementById('reason').textContent.startsWith('Training alone')")
        assert visit.page.evaluate(top) == before
        seen = visit.page.evaluate("Number(document.body.dataset.states)")
        for waiting in (None, "a reason", None):
            node.now = training(waiting=waiting, peers=seen)
            seen += 1
            visit.wait(f"Number(document.body.dataset.states) > {seen}")
        assert visit.page.evaluate("window.moved") < 0.02


def test_the_keyboard_alone_pauses_the_node(
    node: StandIn, browser: Browser, tmp_path: Path
) -> None:
    with serving(node, tmp_path), visiting(browser, viewport=SCREEN) as visit:
        visit.open(link(tmp_path))
        visit.wait("document.getElementById('phase').textContent === 'Training'")
        for key in ("Tab", "Enter", "Tab", "Tab", "Enter"):
            visit.page.keyboard.press(key)
        visit.wait("!document.getElementById('controls').open")
        assert node.calls == [("pause", 7200)]
