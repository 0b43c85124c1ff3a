"""Who may use the control API: programs that read the owner's token, and browsers that were let in.

A browser is let in by a link with a key that works once. Any page on the web can send requests to
loopback, so a request must name this server as its host, which a rebound name does not, and as its
origin where it tells one."""

import secrets
from collections import deque
from collections.abc import Callable
from time import monotonic

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from lowcomm_node.control.browsers import Browser, Browsers

LINK_LASTS = 600.0
"""Seconds in which a link must be opened."""
MAX_LINKS = 16
"""The oldest goes first."""
_NOT_OURS = JSONResponse({"error": "This is the API of a node, for this machine only."}, 403)
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class Access:
    """The tokens of one daemon. What its browsers have may outlive it for a while."""

    def __init__(
        self, clock: Callable[[], float] = monotonic, browsers: Browsers | None = None
    ) -> None:
        self.token = secrets.token_urlsafe(32)
        """The owner's, in the control file."""
        self._clock = clock
        self._links: deque[tuple[str, float]] = deque(maxlen=MAX_LINKS)
        self.browsers = browsers or Browsers()

    def issue_link(self) -> str:
        """A key that lets one browser in."""
        key = secrets.token_urlsafe(16)
        self._links.append((key, self._clock() + LINK_LASTS))
        return key

    def redeem(self, key: str) -> Browser | None:
        """Let in the browser that brings a key; None if that is used, too old or made up."""
        found = [one for one in self._links if _equal(one[0], key)]
        for one in found:
            self._links.remove(one)
        if not found or found[0][1] < self._clock():
            return None
        return self.browsers.let_in()

    def admits(self, authorization: str) -> bool:
        """Whether a header ``Authorization`` brings a token."""
        given = authorization.removeprefix("Bearer ")
        return _equal(self.token, given) or self.browsers.admits(given)


class OwnRequests:
    """Passes on what was meant for this server and comes from no other page; refuses the rest."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        self._hosts = [f"{name}:{port}" for name in _LOOPBACK]
        self._origins = [None, *(f"http://{host}" for host in self._hosts)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request (ASGI)."""
        told = Headers(scope=scope)
        ours = told.get("host") in self._hosts and told.get("origin") in self._origins
        answer = self._app if ours else _NOT_OURS
        await answer(scope, receive, send)


def _equal(one: str, other: str) -> bool:
    return secrets.compare_digest(one.encode(), other.encode())
