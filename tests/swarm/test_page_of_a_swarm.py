"""What must hold for the swarm's page in a browser: a stranger sees what is trained, by how many,
how long it takes and how to take part. ``SCREENSHOTS=docs`` writes its picture."""

import asyncio
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from time import time

import pytest
from playwright.sync_api import Browser

from helpers.browser import PHONE, visiting
from lowcomm_bootstrap.web import FIGURES, Series, SwarmPage
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers.records import PeerInfo, Phase, SelfReport, write_record
from lowcomm_protocol.spec.run import parse_toml, sign_run

pytestmark = [pytest.mark.page, pytest.mark.timeout(400)]

SCREENSHOTS = os.environ.get("SCREENSHOTS", "")
ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW"
RUN = sign_run(
    parse_toml(
        '[run]\nname = "tea-stories"\ndescription = "Short tales for children"\nsteps = 2000'
    ),
    Identity(b"c" * 32),
)
FOX = "brown" if SCREENSHOTS else "<i>brown</i>"
SAMPLE = f"Once there was a {FOX} fox. It liked to sing, and it lived beside the old mill."
NAMES = ("ada", "grace", "lin" if SCREENSHOTS else "<b>mallory</b>")


def records(exchanges: int) -> dict[str, bytes]:
    made: dict[str, bytes] = {}
    for number, name in enumerate(NAMES, 1):
        identity = Identity(bytes([number]) * 32)
        report = SelfReport(
            name=name, tokens=number * 9_000_000, held_out_loss=2.4 + number / 100,
            release="0.2.0", exchanges=exchanges * number,
            sample=SAMPLE if name == "ada" else "", sample_step=1204,
        )  # fmt: skip
        info = PeerInfo(
            peer_id=identity.peer_id, run_id=RUN.run_id, phase=Phase.TRAINING, issued=time(),
            expires=time() + 300, swarm_step=1240, tokens_per_second=3000.0, report=report,
        )  # fmt: skip
        made[identity.peer_id] = write_record(info, identity)
    return made


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Address of the page of a server that has seen three peers for some hours."""
    ready, stop = threading.Event(), asyncio.Event()
    found: list[SwarmPage] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        page = SwarmPage(tmp_path / "history.json", lambda: ADDRESS, "127.0.0.1", 0)
        points = [
            [time() - 60 * (400 - k), 3, 3e6 + k, 9000.0 + k % 7, 2.4 + 6 * math.exp(-k / 80), 4.0]
            for k in range(400)
        ]
        assert len(points[0]) == len(FIGURES)
        page._series[RUN.run_id] = Series(points=points)
        known = records(9)
        page.saw(RUN, known, {next(iter(known))})
        page.looked({RUN.run_id})
        page.open()
        found.append(page)
        loops.append(asyncio.get_running_loop())
        ready.set()
        await stop.wait()
        await page.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(20)
    yield f"http://127.0.0.1:{found[0].port}/"
    loops[0].call_soon_threadsafe(stop.set)
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("size", ["wide", "phone"])
def test_a_stranger_sees_what_is_trained_and_how_to_take_part(
    size: str, address: str, browser: Browser
) -> None:
    options = {"viewport": {"width": 1280, "height": 800}}
    if size == "phone":
        options = {"viewport": dict(PHONE)}
    with visiting(browser, **options) as visit:
        visit.page.goto(address)
        visit.wait("document.querySelectorAll('.wide tbody tr').length === 3")
        visit.wait("document.querySelectorAll('.loss canvas').length === 1")
        assert visit.text(".lead").startswith("3 people train a 234.2k-parameter model now")
        assert "about 2 min left" in visit.text(".bar-text")
        assert all(name in visit.text(".wide tbody") for name in NAMES)
        assert visit.text(".samples blockquote") == SAMPLE
        said = "written by ada's node at step 1,204, unverified"
        assert visit.text(".samples figcaption") == said
        assert visit.text(".join code").startswith("lowcomm-node join --peers /ip4/203.0.113.7")
        assert visit.page.locator(".around circle.peer").count() == 3
        assert visit.faults() == [] and visit.overflowing() == []
        assert not visit.complaints
        assert all(one.startswith((address, "data:")) for one in visit.requests)
        if SCREENSHOTS and size == "wide":
            visit.page.screenshot(path=Path(SCREENSHOTS) / "swarm.png", full_page=True)
