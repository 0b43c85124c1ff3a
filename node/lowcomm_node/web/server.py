"""The server of the control API: HTTP on loopback, with a token from a file of the owner.

GET  /                       the page; /api/v1/openapi.json describes all that follows
All below is under /api/v1:

GET  /status, /health, /peers, /limits
GET  /metrics                for Prometheus, as `--metrics` serves them without a token
GET  /rounds?limit=N         the last exchanges
GET  /samples?since=T&most=N figures of the past, from the journal
GET  /story?last=N           of the N-th last exchange
GET  /exchanges?limit=N&since=T  the last ones in the journal, also of earlier starts
GET  /messages               what each code means, and what to do
GET  /events                 one JSON object a line, as things happen; as server-sent events with
                             numbers and Last-Event-ID if asked for those (viewers.py)
POST /limits                 {"max_up", "max_down", "max_peers"}: what changes
POST /doctor                 {"peers"}
POST /ping                   {"peer"}
POST /gather                 the slow weights of up to three peers, to files of the home
POST /pause                  {"seconds"}: null for until resumed
POST /resume
POST /finish
POST /stop                   {"now": bool}
POST /generate               {"prompt", "tokens", "temperature", "seed"}
POST /link                   a key that lets one browser in
POST /session                {"key"}: a token for that browser; needs none
POST /proof                  {"name", "nonce"}: that this is its node still; needs none
"""

import asyncio
import hashlib
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from inspect import isawaitable
from pathlib import Path
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lowcomm_node.errors import NodeError, PortInUse
from lowcomm_node.net.p2pd import runtime_folder
from lowcomm_node.status.events import Notice
from lowcomm_node.status.journal import Entry, Feed
from lowcomm_node.status.model import Limits, PeerStatus, Status, to_json
from lowcomm_node.storage.files import write_atomic
from lowcomm_node.storage.paths import Paths
from lowcomm_node.system.release import release
from lowcomm_node.system.tasks import Warn
from lowcomm_node.web.access import Access, Browsers, OwnRequests
from lowcomm_node.web.api import QUERIES, ROOT, WRITES, Query, describe
from lowcomm_node.web.http import Listening, bind, bind_own
from lowcomm_node.web.page import page_routes
from lowcomm_node.web.viewers import MAX_VIEWERS, Viewers, read_last
from lowcomm_protocol.errors import LowcommError

MAX_BODY = 64 * 1024
LOOPBACK = "127.0.0.1"
LONGEST_PAUSE = 10 * 366 * 86400.0
"""Seconds: what is longer has no end."""


class Controlled(Protocol):
    """What the API steers, besides the methods that answer the queries (queries.py)."""

    def status(self) -> Status: ...
    def peers(self) -> list[PeerStatus]: ...
    async def missed(self, number: int, most: int) -> list[Entry]: ...
    def subscribe(self) -> asyncio.Queue[Notice]: ...
    def unsubscribe(self, queue: asyncio.Queue[Notice]) -> None: ...
    def request_finish(self) -> None: ...
    def request_stop(self, now: bool) -> None: ...
    def pause(self, seconds: float | None) -> None: ...
    def resume(self) -> None: ...
    def limits(self) -> Limits: ...
    async def change_limits(self, changes: Mapping[str, Any]) -> Limits: ...
    async def generate(self, prompt: str, tokens: int, temperature: float, seed: int) -> str: ...


class ControlServer:
    """Runs in the daemon's own event loop."""

    def __init__(
        self,
        node: Controlled,
        paths: Paths,
        feed: Feed | None = None,
        warn: Warn = lambda text: None,
    ) -> None:
        """``feed``: of what the journal writes down."""
        self._node = node
        self._paths = paths
        self._files = [paths.control, paths.page_link]
        """Those that go with the node."""
        self._access = Access(browsers=Browsers(paths.browsers))
        self._viewers = Viewers(
            feed or Feed(), self._state, lambda number, most: node.missed(number, most), warn
        )
        self._readers: set[asyncio.Queue[Any]] = set()
        """Queues of clients that follow events line by line; None ends one."""
        self.on_link: Callable[[str], None] | None = None
        """Told a link to the page once it is served, if somebody wants one."""
        self._port = 0
        self._listening: Listening | None = None

    async def start(self, port: int, peer_id: str) -> None:
        """Listen, and tell socket, port and token in the control file (0600). Raises PortInUse."""
        sock = self._bind(port)  # before the control file tells of it
        self._port = sock.getsockname()[1]
        self._access.browsers.serve_at(self._port)
        own = self._bind_own()
        self._listening = Listening(self._app(), *own, sock)
        self._files += [Path(one.getsockname()) for one in own]
        content = {
            "socket": own[0].getsockname() if own else "",
            "port": self._port,
            "token": self._access.token,
            "pid": os.getpid(),
            "peer_id": peer_id,
        }
        write_atomic(self._paths.control, json.dumps(content).encode(), 0o600)
        if self.on_link is not None:
            self.on_link(f"http://{LOOPBACK}:{self._port}/#{self._access.issue_link()}")

    def _bind(self, port: int) -> socket.socket:
        """Where no port is chosen, that of pages which are still open."""
        known = self._access.browsers.remember()
        if port == 0 and known:
            with suppress(PortInUse):
                return bind(LOOPBACK, known, "--control-port")
        return bind(LOOPBACK, port, "--control-port")

    def _bind_own(self) -> list[socket.socket]:
        """A socket file for commands, which other users can't fill with connections.

        None where neither home nor runtime folder takes one: the port serves commands then.
        """
        in_home = self._paths.control_socket
        with suppress(OSError):  # such as a path longer than the address of a socket may be
            return [bind_own(in_home)]
        with suppress(OSError, NodeError):
            digest = hashlib.sha256(os.fsencode(in_home)).hexdigest()[:16]
            return [bind_own(runtime_folder() / f"control-{digest}.sock")]
        return []

    async def close(self, farewell: str = "") -> None:
        """Tell those who watch the end, stop listening, and remove the control file.

        ``farewell``: words on the end, in lines.
        """
        for file in self._files:
            file.unlink(missing_ok=True)
        if len(self._viewers):
            self._viewers.end({**self._state(), "text": farewell})
        for queue in self._readers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)
        if self._listening is not None:
            await self._listening.close()

    def _app(self) -> OwnRequests:
        queries = [(one.name, self._answer(one), one.method) for one in QUERIES]
        others = [
            ("events", self._events, "GET"),
            ("openapi.json", self._openapi, "GET"),
            ("metrics", self._metrics, "GET"),
            ("limits", self._limits, "GET"),
            ("limits", self._limits, "POST"),
            *((name, getattr(self, f"_{name}"), "POST") for name in WRITES),
        ]
        routes = [
            Route(f"{ROOT}/{name}", self._guarded(handler), methods=[method])
            for name, handler, method in (*queries, *others)
        ]
        session = Route(f"{ROOT}/session", self._session, methods=["POST"])
        proof = Route(f"{ROOT}/proof", self._proof, methods=["POST"])
        return OwnRequests(Starlette(routes=[*routes, session, proof, *page_routes()]), self._port)

    def _guarded(self, handler: Any) -> Any:
        async def guarded(request: Request) -> Response:
            if not self._access.admits(request.headers.get("authorization", "")):
                return JSONResponse(
                    {"error": "Wrong token: read it from control.json in the node's home."}, 401
                )
            return await _refusals_in_words(handler, request)

        return guarded

    def _answer(self, query: Query[Any]) -> Any:
        """What answers a query: the node's method of its name."""

        async def answer(request: Request) -> Response:
            if query.method == "POST":
                body = await _body(request)
                asked = {
                    name: _take(body, name, type(default), default)
                    for name, default in query.parameters.items()
                }
            else:
                told = request.query_params
                asked = {
                    name: int(told.get(name, default)) for name, default in query.parameters.items()
                }
            found = getattr(self._node, query.name)(**asked)
            return _told(await found if isawaitable(found) else found)

        return answer

    async def _events(self, request: Request) -> Response:
        if len(self._viewers) + len(self._readers) >= MAX_VIEWERS:
            told = f"{MAX_VIEWERS} others follow the events: close some pages, or try again."
            return JSONResponse({"error": told}, 503, {"Retry-After": "10", "Connection": "close"})
        if "text/event-stream" not in request.headers.get("accept", ""):
            return StreamingResponse(self._lines(), media_type="application/x-ndjson")
        last = read_last(request.headers.get("last-event-id"))
        return StreamingResponse(
            self._viewers.watch(last),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store"},
        )

    async def _lines(self) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[Any] = self._node.subscribe()
        self._readers.add(queue)
        try:
            while (notice := await queue.get()) is not None:
                yield json.dumps(notice.to_json()).encode() + b"\n"
        finally:
            self._readers.discard(queue)
            self._node.unsubscribe(queue)

    def _state(self) -> dict[str, Any]:
        self._access.browsers.touch()
        return {"status": to_json(self._node.status()), "peers": to_json(self._node.peers())}

    async def _limits(self, request: Request) -> Response:
        if request.method == "POST":
            return _told(await self._node.change_limits(await _body(request)))
        return _told(self._node.limits())

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(describe(release()))

    async def _metrics(self, request: Request) -> Response:
        from lowcomm_node.status.metrics import tell_metrics  # few nodes need it

        return tell_metrics(self._node.status)

    async def _link(self, request: Request) -> Response:
        return JSONResponse({"key": self._access.issue_link()})

    async def _session(self, request: Request) -> Response:
        return await _refusals_in_words(self._let_in, request)

    async def _let_in(self, request: Request) -> Response:
        browser = self._access.redeem(_take(await _body(request), "key", str, ""))
        if browser is None:
            return JSONResponse(
                {"error": "This link was used or is too old: `lowcomm-node web` prints another."},
                401,
            )
        return JSONResponse({"token": browser.token, "name": browser.name})

    async def _proof(self, request: Request) -> Response:
        return await _refusals_in_words(self._prove, request)

    async def _prove(self, request: Request) -> Response:
        body = await _body(request)
        name, nonce = _take(body, "name", str, ""), _take(body, "nonce", str, "")
        return JSONResponse({"proof": self._access.browsers.prove(name, nonce)})

    async def _finish(self, request: Request) -> Response:
        self._node.request_finish()
        return JSONResponse({})

    async def _stop(self, request: Request) -> Response:
        self._node.request_stop(_take(await _body(request), "now", bool, False))
        return JSONResponse({})

    async def _pause(self, request: Request) -> Response:
        seconds = _take(await _body(request), "seconds", int | float | None, None)
        if seconds is not None and not 0 < seconds <= LONGEST_PAUSE:
            raise ValueError(
                f"'seconds' can't be {seconds}: more than 0, at most {LONGEST_PAUSE:.0f}, or null."
            )
        self._node.pause(seconds)
        return JSONResponse({})

    async def _resume(self, request: Request) -> Response:
        self._node.resume()
        return JSONResponse({})

    async def _generate(self, request: Request) -> Response:
        body = await _body(request)
        text = await self._node.generate(
            _take(body, "prompt", str, ""),
            int(_take(body, "tokens", int, 200)),
            float(_take(body, "temperature", int | float, 0.8)),
            int(_take(body, "seed", int, 0)),
        )
        return JSONResponse({"text": text})


async def _refusals_in_words(handler: Any, request: Request) -> Response:
    try:
        return await handler(request)
    except (LowcommError, ValueError, KeyError) as error:
        return JSONResponse({"error": str(error), "exit_code": getattr(error, "exit_code", 1)}, 400)


def _told(record: object) -> Response:
    return JSONResponse(to_json(record))


async def _body(request: Request) -> dict[str, Any]:
    data = b""
    async for part in request.stream():  # its length need not be told beforehand
        data += part
        if len(data) > MAX_BODY:
            raise ValueError(f"A request of more than {MAX_BODY} bytes is refused.")
    try:
        content = json.loads(data) if data else {}
    except RecursionError:
        content = None
    if not isinstance(content, dict):
        raise ValueError("Expected a JSON object.")
    return content


def _take(body: dict[str, Any], name: str, kind: Any, default: Any) -> Any:
    """A field of a request. Raises ValueError if it is of another kind."""
    value = body.get(name, default)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(
            f"{name!r} can't be {json.dumps(value)[:80]}: expected such as {json.dumps(default)}."
        )
    return value
