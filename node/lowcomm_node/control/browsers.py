"""Browsers that were let in, and how a page knows its node again after a restart.

An open page outlives its node. When the node is back within ten minutes and at the same port, it
knows its browsers again: a file of the home keeps hashes of their tokens. Meanwhile any program of
the machine may listen at that port, so a page sends its token only once the other end has proved
that it knows the hash, for this port: whoever only passes questions on has another.
"""

import hashlib
import hmac
import json
import os
import secrets
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import time

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
