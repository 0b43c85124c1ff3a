"""Access to the control API: commands read the owner's token, browsers redeem a link.

A link has a key that works once. Tokens live in memory and end with the node, so a program that
takes over its port learns nothing of use. Any page on the web can send requests to loopback:
a request must therefore name this server as its host, which a rebound name does not, and as its
origin if it names one.
"""

import secrets
from collections import deque
from collections.abc import Callable
from secrets import compare_digest
from time import monotonic

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

LINK_SECONDS = 600.0
"""How long a link can be opened."""
MAX_LINKS = 16
"""The oldest goes first."""
MAX_BROWSERS = 32
"""The oldest goes first."""
_NOT_OURS = JSONResponse({"error": "This is the API of a node, for this machine only."}, 403)
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class Access:
    """The tokens of one node."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.token = secrets.token_urlsafe(32)
        """The owner's, in the control file."""
        self._clock = clock
        self._links: deque[tuple[str, float]] = deque(maxlen=MAX_LINKS)
        self._browsers: deque[str] = deque(maxlen=MAX_BROWSERS)

    def issue_link(self) -> str:
        """Make a key that lets one browser in."""
        key = secrets.token_urlsafe(16)
        self._links.append((key, self._clock() + LINK_SECONDS))
        return key

    def redeem(self, key: str) -> str | None:
        """Make a token for the browser that brings a key; None if that is used, late or unknown."""
        equal = (one for one in self._links if compare_digest(one[0].encode(), key.encode()))
        link = next(equal, None)
        if link is None:
            return None
        self._links.remove(link)
        if link[1] < self._clock():
            return None
        self._browsers.append(secrets.token_urlsafe(32))
        return self._browsers[-1]

    def admits(self, authorization: str) -> bool:
        """Whether a header ``Authorization`` brings a token."""
        given = authorization.removeprefix("Bearer ").encode()
        tokens = (self.token, *self._browsers)
        return any(compare_digest(token.encode(), given) for token in tokens)


class OwnRequests:
    """Middleware: passes on requests meant for this server and not sent by another page."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        self._hosts = [f"{name}:{port}" for name in _LOOPBACK]
        self._origins = [None, *(f"http://{host}" for host in self._hosts)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        headers = Headers(scope=scope)
        ours = headers.get("host") in self._hosts and headers.get("origin") in self._origins
        await (self._app if ours else _NOT_OURS)(scope, receive, send)
