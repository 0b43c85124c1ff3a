"""Server-sent events for open pages: events of the node as they happen, and its state.

    event: reset    begins a stream, and follows where a slow viewer missed events: read history
                    with /samples and /exchanges
    event: notice   an event, as in `lowcomm-node logs --json`
    event: sample   figures of this moment, as /samples has them
    event: state    {"status", "peers"}, every two seconds
    event: end      the last: {"status", "peers", "text"}, where the text is a farewell

The state is read and coded once for all viewers, and only while there are any. Each viewer has a
bounded queue, so the node never waits for one.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from time import time
from typing import Any

from lowcomm_node.status.events import Board, Notice
from lowcomm_node.status.figures import sample
from lowcomm_node.status.journal import SAMPLE_EVERY
from lowcomm_node.status.model import PeerStatus, Status, to_json
from lowcomm_node.system.tasks import Warn, endure

MAX_VIEWERS = 100
"""At once; more are asked to come back later."""
MAX_WAITING = 200
"""Messages that wait for one viewer; a slower one starts again with `reset`."""
STATE_EVERY = 2.0
"""Seconds."""
QUIET = 15.0
"""Seconds without news, after which a comment shows that the node is there."""
_RESET = b"event: reset\ndata: {}\n\n"


class Viewers:
    """Everybody who watches one node."""

    def __init__(
        self,
        board: Board,
        status: Callable[[], Status],
        peers: Callable[[], list[PeerStatus]],
        warn: Warn = lambda text: None,
    ) -> None:
        self._board = board
        self._status = status
        self._peers = peers
        self._warn = warn
        self._queues: dict[asyncio.Queue[bytes | None], None] = {}
        self._notices: asyncio.Queue[Notice] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._sampled = 0.0

    def __len__(self) -> int:
        return len(self._queues)

    async def watch(self) -> AsyncIterator[bytes]:
        """Yield what one viewer is sent, until the node ends."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_WAITING)
        self._queues[queue] = None
        if self._watching is None:
            self._notices = self._board.subscribe(every_step=False)
            work = endure("open pages show old figures", self._watch, self._warn)
            self._watching = asyncio.create_task(work)
        try:
            yield _RESET + _coded("state", self._look())
            while True:
                try:
                    async with asyncio.timeout(QUIET):
                        message = await queue.get()
                except TimeoutError:
                    message = b": still here\n\n"
                if message is None:
                    return
                yield message
        finally:
            del self._queues[queue]
            if not self._queues:
                self._rest()

    def end(self, farewell: str) -> None:
        """Send all events so far, the last state and a farewell; then end every stream."""
        self._pass_on()
        self._send(_coded("end", {**self._look(), "text": farewell}))
        for queue in self._queues:
            queue.put_nowait(None)

    def _rest(self) -> None:
        """Look no more until somebody watches again."""
        if self._watching is not None and self._notices is not None:
            self._watching.cancel()
            self._board.unsubscribe(self._notices)
            self._watching = self._notices = None

    async def _watch(self) -> None:
        assert self._notices is not None
        loop = asyncio.get_running_loop()
        while True:
            until = loop.time() + STATE_EVERY
            self._send(self._state())
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    while True:
                        self._send(_notice(await self._notices.get()))
                        self._pass_on()

    def _pass_on(self) -> None:
        while self._notices is not None and not self._notices.empty():
            self._send(_notice(self._notices.get_nowait()))

    def _state(self) -> bytes:
        message = _coded("state", self._look())
        if time() - self._sampled >= SAMPLE_EVERY:
            self._sampled = time()
            message += _coded("sample", to_json(sample(self._sampled, self._status())))
        return message

    def _look(self) -> dict[str, Any]:
        return {"status": to_json(self._status()), "peers": to_json(self._peers())}

    def _send(self, message: bytes) -> None:
        for queue in self._queues:
            if queue.qsize() >= MAX_WAITING - 1:  # one place is kept for the end
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(_RESET)
            queue.put_nowait(message)


def _notice(notice: Notice) -> bytes:
    return _coded("notice", notice.to_json())


def _coded(kind: str, content: Any) -> bytes:
    # JSON has no line ends, so one line of data is always enough.
    return f"event: {kind}\ndata: {json.dumps(content)}\n\n".encode()
