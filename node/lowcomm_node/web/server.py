"""The server of the control API: HTTP on loopback, with a token from a file of the owner.

GET  /                       the page
All below is under /api/v1, beside the calls of api.py:

GET  /metrics                for Prometheus, as `--metrics` serves them without a token
GET  /events                 one JSON object a line, as things happen; as server-sent events with
                             the state of the node if asked for those (viewers.py)
POST /link                   a key that lets one browser in
POST /session                {"key"}: a token for that browser; needs none
"""

import hashlib
import json
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from inspect import isawaitable
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lowcomm_node.errors import NodeError
from lowcomm_node.net.p2pd import runtime_folder
from lowcomm_node.status.events import Board
from lowcomm_node.status.figures import answer_metrics
from lowcomm_node.status.model import PeerStatus, Status, to_json
from lowcomm_node.storage.files import write_atomic
from lowcomm_node.storage.paths import Paths
from lowcomm_node.web.access import Access, OwnRequests
from lowcomm_node.web.api import CHANGE_LIMITS, QUERIES, ROOT, Query
from lowcomm_node.web.http import PAGE, Listening, bind, bind_own
from lowcomm_node.web.viewers import MAX_VIEWERS, Viewers
from lowcomm_protocol.errors import LowcommError

MAX_BODY = 64 * 1024
LOOPBACK = "127.0.0.1"
Handler = Callable[[Request], Response | Awaitable[Response]]
AsyncHandler = Callable[[Request], Awaitable[Response]]


class Controlled(Protocol):
    """The node behind the API, which has a method for each call of ``api.py`` too."""

    def status(self) -> Status: ...
    def peers(self) -> list[PeerStatus]: ...


class ControlServer:
    """Runs in the daemon's own event loop."""

    def __init__(self, node: Controlled, board: Board, paths: Paths) -> None:
        self._node = node
        self._paths = paths
        self._files = [paths.control, paths.page_link]
        """Removed with the node."""
        self._access = Access()
        self._viewers = Viewers(board, node.status, node.peers)
        self.on_link: Callable[[str], None] | None = None
        """Takes a link to the page once it is served."""
        self._listening: Listening | None = None

    async def start(self, port: int, peer_id: str) -> None:
        """Listen; write socket, port and token to the control file (0600). Raises PortInUse."""
        sock = bind(LOOPBACK, port, "--control-port")  # before the control file names it
        port = sock.getsockname()[1]
        own = self._bind_own()
        self._listening = Listening(OwnRequests(self._app(), port), *own, sock)
        self._files += [Path(one.getsockname()) for one in own]
        content = {
            "socket": own[0].getsockname() if own else "",
            "port": port,
            "token": self._access.token,
            "pid": os.getpid(),
            "peer_id": peer_id,
        }
        write_atomic(self._paths.control, json.dumps(content).encode(), 0o600)
        if self.on_link is not None:
            self.on_link(f"http://{LOOPBACK}:{port}/#{self._access.issue_link()}")

    def _bind_own(self) -> list[socket.socket]:
        """A socket file for commands, which other users can't fill with connections.

        Empty where neither home nor runtime folder takes one: the port serves commands then.
        """
        in_home = self._paths.control_socket
        with suppress(OSError):  # such as a path longer than the address of a socket may be
            return [bind_own(in_home)]
        with suppress(OSError, NodeError):
            digest = hashlib.sha256(os.fsencode(in_home)).hexdigest()[:16]
            return [bind_own(runtime_folder() / f"control-{digest}.sock")]
        return []

    async def close(self, farewell: str = "") -> None:
        """Send the end to all who watch, stop listening, and remove the control file.

        ``farewell``: words on the end, in lines.
        """
        for file in self._files:
            file.unlink(missing_ok=True)
        self._viewers.end(farewell)
        if self._listening is not None:
            await self._listening.close()

    def _app(self) -> Starlette:
        calls: list[tuple[str, str, Handler]] = [
            ("events", "GET", self._events),
            ("metrics", "GET", lambda request: answer_metrics(self._node.status())),
            ("link", "POST", lambda request: JSONResponse({"key": self._access.issue_link()})),
            *((query.name, query.method, self._answer(query)) for query in QUERIES),
        ]
        routes = [
            Route(f"{ROOT}/{name}", self._guarded(handler), methods=[method])
            for name, method, handler in calls
        ]
        session = Route(f"{ROOT}/session", _in_words(self._session), methods=["POST"])
        return Starlette(routes=[*routes, session, PAGE])

    def _guarded(self, handler: Handler) -> AsyncHandler:
        answer = _in_words(handler)

        async def guarded(request: Request) -> Response:
            if not self._access.admits(request.headers.get("authorization", "")):
                return JSONResponse(
                    {"error": "Wrong token: read it from control.json in the node's home."}, 401
                )
            return await answer(request)

        return guarded

    def _answer(self, query: Query[Any]) -> AsyncHandler:
        """Answer a call by the node's method of its name."""

        async def answer(request: Request) -> Response:
            given = await _body(request) if query.method == "POST" else request.query_params
            asked = query.read({"changes": given} if query is CHANGE_LIMITS else given)
            result = getattr(self._node, query.by or query.name)(**asked)
            return JSONResponse(to_json(await result if isawaitable(result) else result))

        return answer

    def _events(self, request: Request) -> Response:
        if len(self._viewers.queues) >= MAX_VIEWERS:
            error = f"{MAX_VIEWERS} others follow the events: close some pages, or try again."
            return JSONResponse({"error": error}, 503, {"Retry-After": "10", "Connection": "close"})
        if "text/event-stream" not in request.headers.get("accept", ""):
            return StreamingResponse(self._viewers.lines(), media_type="application/x-ndjson")
        return StreamingResponse(
            self._viewers.watch(),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store"},
        )

    async def _session(self, request: Request) -> Response:
        token = self._access.redeem(str((await _body(request)).get("key", "")))
        if token is None:
            error = "This link was used or is too old: `lowcomm-node web` prints another."
            return JSONResponse({"error": error}, 401)
        return JSONResponse({"token": token})


def _in_words(handler: Handler) -> AsyncHandler:
    """Answer with the reason where a call is refused."""

    async def answer(request: Request) -> Response:
        try:
            response = handler(request)
            return await response if isawaitable(response) else response
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(map(str, first["loc"]))
            text = f"{name!r} can't be {json.dumps(first['input'])[:80]}: {first['msg']}."
            return JSONResponse({"error": text, "exit_code": 1}, 400)
        except (LowcommError, ValueError, KeyError) as error:
            code = getattr(error, "exit_code", 1)
            return JSONResponse({"error": str(error), "exit_code": code}, 400)

    return answer


async def _body(request: Request) -> dict[str, Any]:
    data = b""
    async for part in request.stream():  # its length need not be announced
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
