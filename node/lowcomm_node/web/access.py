"""Who may use the control API: programs that read the owner's token, and browsers that were let in.

A browser is let in by a link with a key that works once. Any page on the web can send requests to
loopback, so a request must name this server as its host, which a rebound name does not, and as its
origin where it tells one."""

import hashlib
import hmac
import json
import os
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, time

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from lowcomm_node.storage.files import write_atomic

MAX_BROWSERS = 32
"""The oldest goes first."""
COMES_BACK = 600.0
"""Seconds that a node may be away."""
TOUCH_EVERY = 60.0
"""Seconds between two notes that it is there: it may be killed without a word."""
MAX_NONCE = 64
MAX_FILE = 64 * 1024


@dataclass(frozen=True)
class Browser:
    """One that was let in. Only it keeps the token."""

    name: str
    """Public."""
    token: str

    def __repr__(self) -> str:
        return f"Browser({self.name!r})"


class Browsers:
    """Those of one home."""

    def __init__(self, file: Path | None = None, clock: Callable[[], float] = time) -> None:
        self._file = file
        self._clock = clock
        self._hashes = OrderedDict[str, bytes]()
        """SHA-256 of tokens, by name."""
        self._port = 0
        self._touched = 0.0

    def remember(self) -> int:
        """Know those again that were let in before a restart; the port that they look at, or 0."""
        if self._file is None:
            return 0
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            if self._clock() - self._file.stat().st_mtime > COMES_BACK:
                return 0
            if self._file.stat().st_size > MAX_FILE:
                return 0
            told = json.loads(self._file.read_bytes())
            found = [(str(name), bytes.fromhex(one)) for name, one in told["browsers"].items()]
            self._hashes = OrderedDict(found[-MAX_BROWSERS:])
            self._port = int(told["port"])
        return self._port

    def serve_at(self, port: int) -> None:
        """The node listens here. At another port than before nobody is known again."""
        if port != self._port:
            self._hashes.clear()
        self._port = port

    def let_in(self) -> Browser:
        """Another one."""
        browser = Browser(secrets.token_hex(8), secrets.token_urlsafe(32))
        self._hashes[browser.name] = _hash(browser.token)
        while len(self._hashes) > MAX_BROWSERS:
            self._hashes.popitem(last=False)
        self._keep()
        return browser

    def admits(self, token: str) -> bool:
        """Whether one of them has this token."""
        given = _hash(token)
        return any(secrets.compare_digest(one, given) for one in self._hashes.values())

    def prove(self, name: str, nonce: str) -> str | None:
        """That we know this browser, for who asks with a nonce; None if we do not."""
        known = self._hashes.get(name)
        if known is None or not 0 < len(nonce) <= MAX_NONCE:
            return None
        return hmac.new(known, f"{nonce}:{self._port}".encode(), "sha256").hexdigest()

    def touch(self) -> None:
        """Note now and then that the node is there."""
        if self._file is not None and self._clock() - self._touched >= TOUCH_EVERY:
            self._touched = self._clock()
            with suppress(OSError):
                os.utime(self._file)

    def _keep(self) -> None:
        if self._file is None:
            return
        hashes = {name: one.hex() for name, one in self._hashes.items()}
        content = {"port": self._port, "browsers": hashes}
        with suppress(OSError):  # they are let in all the same
            write_atomic(self._file, json.dumps(content).encode(), 0o600)


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


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
