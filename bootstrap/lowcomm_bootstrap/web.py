"""The swarm's page: public, read only.

Everything is made once after each look at the swarm, and kept as the bytes that are sent. A viewer
costs no lookup, no rendering and no compression, so there may be as many as the line carries.
"""

import gzip
import hashlib
import json
import socket
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any

from lowcomm_bootstrap.badges import badge
from lowcomm_bootstrap.history import FIGURES, History
from lowcomm_bootstrap.swarms import Swarm
from lowcomm_node.errors import NodeError
from lowcomm_node.system.logs import log
from lowcomm_node.web.http import Listening, bind
from lowcomm_node.web.page import FOLDER as NODE_PAGE
from lowcomm_node.web.page import HEADERS
from lowcomm_protocol.spec.run import SignedRun

PAGE = Path(__file__).parent / "page"
FILES = {
    "/": (PAGE / "index.html", "text/html; charset=utf-8"),
    "/swarm.css": (PAGE / "swarm.css", "text/css"),
    "/swarm.js": (PAGE / "swarm.js", "text/javascript"),
    "/page.css": (NODE_PAGE / "page.css", "text/css"),
    "/uplot.css": (NODE_PAGE / "uplot" / "uplot.css", "text/css"),
    "/uplot.js": (NODE_PAGE / "uplot" / "uplot.js", "text/javascript"),
}
JSON = "/api/v1/swarms.json"
SAVE_EVERY = 300.0
"""Seconds between two writings of the history."""

Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(frozen=True)
class Answer:
    """The bytes of one address, as they are sent."""

    body: bytes
    packed: bytes
    """The same, gzipped."""
    kind: str
    tag: str
    seconds: int
    """For which anybody may keep it."""

    @staticmethod
    def of(body: bytes, kind: str, seconds: int) -> "Answer":
        """An answer to be sent again and again."""
        tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
        return Answer(body, gzip.compress(body, 6, mtime=0), kind, tag, seconds)


class SwarmPage:
    """The page of one server."""

    def __init__(self, history: History, address: Callable[[], str]) -> None:
        """``address``: where nodes enter."""
        self._history = history
        self._address = address
        self._swarms: dict[str, Swarm] = {}
        self._saved = 0.0
        self._files = {
            path: Answer.of(file.read_bytes(), kind, 3600) for path, (file, kind) in FILES.items()
        }
        self._answers: dict[str, Answer] = dict(self._files)
        self.made = 0
        """How often it was made anew."""
        self.show(time())

    def saw(self, run: SignedRun, records: Mapping[str, bytes], proved: Set[str]) -> None:
        """Take in what a look has found of a run."""
        swarm = self._swarms.setdefault(run.run_id, Swarm(run))
        swarm.saw(records, proved, time())

    def looked(self, run_ids: Set[str]) -> None:
        """A look is over; these runs are kept."""
        self._swarms = {run: one for run, one in self._swarms.items() if run in run_ids}
        now = time()
        self.show(now)
        if now - self._saved >= SAVE_EVERY:
            self._saved = now
            self.save()

    def show(self, now: float) -> None:
        """Make all answers anew."""
        self.made += 1
        answers, told = dict(self._files), []
        for run_id, swarm in self._swarms.items():
            view = swarm.view(now, self._address())
            series = self._history.of(run_id)
            series.add(view, now)
            told.append(view | {"history": series.points})
            svg = badge(view).encode()
            answers[f"/badge/{swarm.run.fingerprint}.svg"] = Answer.of(svg, "image/svg+xml", 60)
        told.sort(key=lambda view: (-view["training"], -view["peers"], view["run"]))
        document = {"made": round(now), "figures": FIGURES, "runs": told}
        answers[JSON] = Answer.of(json.dumps(document).encode(), "application/json", 5)
        self._answers = answers

    def save(self) -> None:
        """Write the history; a disk that can't take it costs no page."""
        self._history.keep_only(set(self._swarms))
        try:
            self._history.save()
        except (NodeError, OSError) as error:
            log.warning("web.history", reason=str(error))

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Send) -> None:
        """Answer a request (ASGI)."""
        headers = dict(scope["headers"])
        if scope["method"] not in ("GET", "HEAD"):
            return await _say(send, 405, b"only GET and HEAD\n")
        answer = self._answers.get(scope["path"])
        if answer is None:
            return await _say(send, 404, b"nothing is here\n")
        if headers.get(b"if-none-match") == answer.tag.encode():
            return await _start(send, 304, answer, {}, b"")
        packed = b"gzip" in headers.get(b"accept-encoding", b"")
        body = answer.packed if packed else answer.body
        more = {"content-length": str(len(body))} | ({"content-encoding": "gzip"} if packed else {})
        return await _start(send, 200, answer, more, b"" if scope["method"] == "HEAD" else body)


class SwarmDoor:
    """The socket at which the page is served."""

    def __init__(self, page: SwarmPage, host: str, port: int) -> None:
        """Raises PortInUse."""
        self.page = page
        self._socket: socket.socket = bind(host, port, "--web")
        self._listening: Listening | None = None

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._socket.getsockname()[1]

    def open(self) -> None:
        """Answer from now on."""
        self._listening = Listening(self.page, self._socket)

    async def close(self) -> None:
        """Answer no more, and keep the history."""
        if self._listening is not None:
            await self._listening.close()
        self._socket.close()
        self.page.save()


async def _start(
    send: Send, status: int, answer: Answer, more: dict[str, str], body: bytes
) -> None:
    headers = {
        **HEADERS,
        # Anybody may show the figures and badges of a public page elsewhere.
        "Cross-Origin-Resource-Policy": "cross-origin",
        "Access-Control-Allow-Origin": "*",
        "Cache-Control": f"public, max-age={answer.seconds}",
        "Vary": "Accept-Encoding",
        "Content-Type": answer.kind,
        "ETag": answer.tag,
        **more,
    }
    await _send(send, status, headers, body)


async def _say(send: Send, status: int, text: bytes) -> None:
    kind = {"Content-Type": "text/plain", "Content-Length": str(len(text))}
    await _send(send, status, HEADERS | kind, text)


async def _send(send: Send, status: int, headers: Mapping[str, str], body: bytes) -> None:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
