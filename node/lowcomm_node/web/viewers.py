"""Streams of events for those who follow a node.

A page gets server-sent events:

    event: reset    begins a stream, and follows where a slow viewer missed events: read history
                    with /samples and /exchanges
    event: notice   an event, as in `lowcomm-node logs --json`
    event: sample   figures of this moment, as /samples has them
    event: state    {"status", "peers"}, every two seconds
    event: end      the last: {"status", "peers", "text"}, where the text is a farewell

Others get all events as lines of JSON. The state is read and coded once for all
pages, and only while there are any. Each queue is bounded, so the node never waits for a viewer.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from time import monotonic, time
from typing import Any

from lowcomm_node.status.events import Board
from lowcomm_node.status.figures import sample
from lowcomm_node.status.journal import SAMPLE_EVERY
from lowcomm_node.status.model import PeerStatus, Status, to_json

MAX_VIEWERS = 100
"""At once; more are asked to come back later."""
MAX_WAITING = 200
"""Events that wait for one page; a slower one starts again with `reset`."""
STATE_EVERY = 2.0
"""Seconds."""
_RESET = b"event: reset\ndata: {}\n\n"


class Viewers:
    """All that follow one node."""

    def __init__(
        self, board: Board, status: Callable[[], Status], peers: Callable[[], list[PeerStatus]]
    ) -> None:
        self._board = board
        self._status = status
        self._peers = peers
        self.queues: set[asyncio.Queue[Any]] = set()
        """Notices; None ends a stream."""
        self._state = b""
        self._looked = float("-inf")
        self._end = b""

    async def watch(self) -> AsyncIterator[bytes]:
        """Yield the server-sent events of one page, until the node ends."""
        with self._subscribed(MAX_WAITING) as queue:
            yield _RESET + self._look()
            sampled = looked = monotonic()
            while True:
                if queue.full():  # the board has dropped some
                    while queue.qsize() > 1:
                        queue.get_nowait()
                    yield _RESET
                try:
                    async with asyncio.timeout(looked + STATE_EVERY - monotonic()):
                        notice = await queue.get()
                except TimeoutError:
                    looked = monotonic()
                    yield self._look()
                    if looked - sampled >= SAMPLE_EVERY:
                        sampled = looked
                        yield _coded("sample", to_json(sample(time(), self._status())))
                    continue
                if notice is None:
                    yield self._end
                    return
                yield _coded("notice", notice.to_json())

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield all events as lines of JSON, until the node ends."""
        with self._subscribed() as queue:
            while (notice := await queue.get()) is not None:
                yield json.dumps(notice.to_json()).encode() + b"\n"

    def end(self, farewell: str) -> None:
        """End every stream after all events so far; a page gets the last state and a farewell."""
        if self.queues:
            content = {"status": self._status(), "peers": self._peers(), "text": farewell}
            self._end = _coded("end", to_json(content))
        for queue in self.queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    @contextmanager
    def _subscribed(self, *most: int) -> Iterator[asyncio.Queue[Any]]:
        queue = self._board.subscribe(*most)
        self.queues.add(queue)
        try:
            yield queue
        finally:
            self.queues.discard(queue)
            self._board.queues.discard(queue)

    def _look(self) -> bytes:
        if monotonic() - self._looked >= 0.9 * STATE_EVERY:
            self._looked = monotonic()
            content = {"status": self._status(), "peers": self._peers()}
            self._state = _coded("state", to_json(content))
        return self._state


def _coded(kind: str, content: Any) -> bytes:
    # JSON has no line ends, so one line of data is always enough.
    return f"event: {kind}\ndata: {json.dumps(content)}\n\n".encode()
