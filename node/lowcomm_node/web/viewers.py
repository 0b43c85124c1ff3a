"""Server-sent events for those who watch a node: what the journal wrote down, with its numbers, and
the state of the node every two seconds.

    event: reset    id: N   {"newest": N}: look at history anew; the first of a new viewer
    event: notice   id: N   an event, as in `lowcomm-node logs --json`
    event: sample           figures of this moment, as /samples has them
    event: state            {"status", "peers"}
    event: end              the last: {"status", "peers", "text"}, where the text is a farewell

Whoever comes back with Last-Event-ID gets each notice behind it once. Nothing waits for a viewer:
each has a place in the journal, no queue, and what all see is coded once.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from lowcomm_node.status.journal import Entry, Feed, Sample
from lowcomm_node.status.model import to_json
from lowcomm_node.system.tasks import Warn, endure

MAX_VIEWERS = 100
"""At once; more are told to come back later."""
MISSED = 1000
"""Notices that a viewer who comes back is told; who missed more begins anew."""
STATE_EVERY = 2.0
"""Seconds."""
QUIET = 15.0
"""Seconds without news, after which a comment tells that the node is there."""


class Viewers:
    """Everybody who watches one node."""

    def __init__(
        self,
        feed: Feed,
        state: Callable[[], dict[str, Any]],
        missed: Callable[[int, int], Awaitable[list[Entry]]],
        warn: Warn = lambda text: None,
    ) -> None:
        """``missed``: so many entries of the journal behind a number."""
        self._warn = warn
        self._feed = feed
        self._look = state
        self._missed = missed
        self._watching: dict[asyncio.Event, None] = {}
        self._state = self._end = b""
        self._sample: tuple[Sample | None, bytes] = (None, b"")
        self._looking: asyncio.Task[None] | None = None
        self._deafen: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._watching)

    @property
    def full(self) -> bool:
        """Whether there is no place for another one."""
        return len(self) >= MAX_VIEWERS

    def end(self, told: dict[str, Any]) -> None:
        """Tell all that the node ends, after all notices, and end their streams."""
        self._end = _coded("end", told)
        self._wake()

    async def watch(self, last: int | None) -> AsyncIterator[bytes]:
        """What one viewer is sent, until the node ends. ``last``: the last number that it knows."""
        news = asyncio.Event()
        self._enter(news)
        state = sample = b""
        try:
            while True:
                news.clear()
                told, last = await self._notices(last)
                if self._sample[1] is not sample and last is not None:
                    sample = self._sample[1]
                    told += sample
                if self._state is not state:
                    state = self._state
                    told += state
                end = self._end
                if told or end:
                    yield told + end
                if end:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(QUIET):
                        await news.wait()
                        continue
                yield b": still here\n\n"
        finally:
            self._leave(news)

    async def _notices(self, last: int | None) -> tuple[bytes, int | None]:
        """What is new behind a number, and the newest number told."""
        newest = self._feed.newest
        if newest is None:  # the journal is not open yet
            return b"", last
        if last is None or last > newest or newest - last > MISSED:
            return _coded("reset", {"newest": newest}, newest), newest
        entries = self._feed.after(last)
        if entries is None:
            entries = await self._missed(last, MISSED)
        told = [_coded("notice", one.notice.to_json(), one.number) for one in entries]
        return b"".join(told), entries[-1].number if entries else last

    def _enter(self, news: asyncio.Event) -> None:
        self._watching[news] = None
        if self._looking is None:
            self._deafen = self._feed.listen(self._wake)
            look = endure("open pages show old figures", self._keep_looking, self._warn)
            self._looking = asyncio.create_task(look)

    def _leave(self, news: asyncio.Event) -> None:
        self._watching.pop(news, None)
        if self._watching or self._looking is None:
            return
        self._looking.cancel()
        self._looking = None
        if self._deafen is not None:
            self._deafen()
        self._state = b""

    def _wake(self) -> None:
        sample = self._feed.sample
        if sample is not None and sample is not self._sample[0]:
            self._sample = (sample, _coded("sample", to_json(sample)))
        for news in self._watching:
            news.set()

    async def _keep_looking(self) -> None:
        while True:
            self._state = _coded("state", self._look())
            self._wake()
            await asyncio.sleep(STATE_EVERY)


def read_last(told: str | None) -> int | None:
    """A header ``Last-Event-ID``; None for anything that no stream of ours has told."""
    digits = (told or "").strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 19 else None


def _coded(kind: str, told: Any, number: int | None = None) -> bytes:
    # JSON has no line ends, so one line of data is always enough.
    id_ = "" if number is None else f"id: {number}\n"
    return f"{id_}event: {kind}\ndata: {json.dumps(told)}\n\n".encode()
