"""What must hold for the page of a node while others do their worst: peers that choose their texts,
pages of other hosts, names that are rebound, and programs that take the port of the node."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from time import time

import pytest
from playwright.sync_api import Browser

from helpers.browser import PHONE, REBOUND, Visit, visiting
from helpers.stand_in import FAREWELL, StandIn, link, port_of, serving
from helpers.statuses import make_exchange, make_peer, make_status
from lowcomm_node.status.figures import sample
from lowcomm_node.web.api import ROOT

pytestmark = [pytest.mark.page, pytest.mark.timeout(400)]

SCRIPT = "<script>document.title = 'stolen'</script><img src=x onerror=\"document.title='stolen'\">"
BIDIRECTIONAL = "safe\u202e\u2066txt.exe\u2069\u200b\u0007\u2028"
LONG = "x" * 1_000_000
OURS = "12D3KooW" + "x" * 44


@pytest.fixture
def node() -> StandIn:
    return StandIn(make_status(peer_id=OURS))


def away(visit: Visit, words: str) -> None:
    visit.wait(f"document.getElementById('line').textContent.includes('{words}')")
    assert visit.page.locator("#line").is_visible()


def ended(visit: Visit) -> None:
    """The page has heard that the node ends, and is not alarmed."""
    visit.page.locator("#end").wait_for(state="visible")
    assert visit.text("#farewell") == FAREWELL
    assert not visit.page.locator("#line").is_visible()
    assert not visit.page.locator("#controls").is_visible()


@pytest.mark.parametrize("text", [SCRIPT, BIDIRECTIONAL, LONG], ids=["script", "bidi", "1 MB"])
def test_what_others_wrote_is_shown_as_text_and_breaks_nothing(
    text: str, node: StandIn, browser: Browser, tmp_path: Path
):
    run = {"name": text, "description": text, "method": text}
    node.now = make_status(run=run, waiting=text, warnings=[text], peers=1)
    peer = {"phase": text, "route": text, "address": text, "release": text}
    node.known = [
        make_peer(**peer),
        make_peer(peer_id=text, route_reason=text, left_out=True, held_against=text),
    ]
    exchange = make_exchange(time=time(), reason=text, partners=[text], left_out={text: text})
    node.past = [exchange]
    node.drawn = [sample(time(), node.now)]
    with serving(node, tmp_path), visiting(browser, viewport=PHONE) as visit:
        visit.open(link(tmp_path))
        visit.unfold()
        visit.wait("document.querySelectorAll('#timeline rect').length > 0")
        visit.wait("document.querySelectorAll('#peers tr').length > 1")
        assert visit.page.title() != "stolen"
        assert visit.page.locator("main img, main script, header img").count() == 0
        assert visit.overflowing() == []
        shown = visit.page.evaluate("document.body.textContent + document.title")
        assert len(shown) < 40_000, "what is long is cut"
        assert not set(shown) & set("\u202e\u2066\u2069\u200b\u0007\u2028")
        if text == SCRIPT:
            assert visit.text("#run") == SCRIPT
        assert not visit.complaints
        assert all(one.startswith((visit.page.url, "data:")) for one in visit.requests)


def test_a_page_of_another_host_can_do_nothing(node: StandIn, browser: Browser, tmp_path: Path):
    with serving(node, tmp_path), stranger() as (elsewhere, _), visiting(browser) as visit:
        port = port_of(tmp_path)
        visit.page.goto(f"http://127.0.0.1:{elsewhere}/")
        for host in ("127.0.0.1", "localhost", REBOUND):
            for more in ("", ", mode: 'no-cors'", ", headers: {Authorization: 'Bearer x'}"):
                told = visit.page.evaluate(
                    f"fetch('http://{host}:{port}{ROOT}/pause', {{method: 'POST', body: '{{}}'"
                    f"{more}}}).then(one => one.type + one.status, () => 'refused')"
                )
                assert told in ("refused", "opaque0"), (host, more)
        visit.page.goto(f"http://{REBOUND}:{port}/")
        assert "for this machine only" in visit.text("body")
        assert (
            visit.page.evaluate(
                f"fetch('{ROOT}/session', {{method: 'POST', body: '{{}}'}}).then(one => one.status)"
            )
            == 403
        )
        assert node.calls == []


def test_a_page_outlives_a_broken_stream_but_not_its_node(
    node: StandIn, browser: Browser, tmp_path: Path
):
    with visiting(browser) as visit:
        with serving(node, tmp_path):
            visit.open(link(tmp_path))
            port = port_of(tmp_path)
        ended(visit)
        with serving(node, tmp_path, port):
            away(visit, "the node was started again")
            assert not visit.page.locator("#controls").is_visible()


@contextmanager
def stranger(port: int = 0) -> Iterator[tuple[int, list[str]]]:
    """Another program, which answers whatever is asked; its port, and all that it was told."""
    seen: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("content-length", 0))
            seen.append(f"{self.path} {self.headers} {self.rfile.read(length)!r}")
            self._say(b'{"token": "x"}')

        def do_GET(self) -> None:
            seen.append(f"{self.path} {self.headers}")
            self._say(b"<!doctype html><title>stranger</title>")

        def _say(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = HTTPServer(("127.0.0.1", port), Answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_address[1], seen
    finally:
        server.shutdown()
        thread.join(20)
        server.server_close()
