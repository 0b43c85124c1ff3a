"""The peers that a transfer asks: a few at once, and others in place of those that bring little.

A peer may keep us in its queue for as long as it likes. So a session that brings next to nothing
gives way as soon as another peer can be asked, the one that was asked least recently first. Each
time, it may take twice as long as before: a long queue of an honest peer ends, too.
"""

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Generic, Protocol, TypeVar

from lowcomm_node.errors import DiskFull, LinkLost, RetryLater
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.peers.records import PeerInfo

PATIENCE = 20.0
"""Seconds until a session gives way for the first time."""
PREPARING = 6
"""Times as long for a peer that is making a snapshot for us."""
LEAST_RATE = 16_000.0
"""Bytes a second that a session brings, or gives way; fewer where our owner allows less."""


class Session(Protocol):
    """A session with one peer."""

    served: float | None
    """When our turn began, by the monotonic clock; None while we wait for it."""
    bytes_received: int

    @property
    def preparing(self) -> bool:
        """Whether the peer makes what we have asked for."""
        ...

    async def run(self) -> None:
        """Take what it gives. Raises LowcommError with the reason of its end."""
        ...


S = TypeVar("S", bound=Session)


class Sessions(Generic[S]):
    """The sessions of one transfer."""

    def __init__(
        self,
        later: float,
        refused: Callable[[str, LowcommError], None],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """``later``: seconds before a peer is asked again; ``refused``: hears of a peer that is not
        asked again, and why."""
        self.reasons: dict[str, str] = {}
        """The reasons why peers gave nothing more."""
        self._later_seconds = later
        self._refused = refused
        self._ended = ended
        self._running: dict[str, tuple[S, asyncio.Task[None]]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._later: dict[str, float] = {}
        """When a peer may be asked again; infinity: never."""
        self._patience: dict[str, float] = {}
        self._windows: dict[str, tuple[float, int, bool]] = {}
        """Since when the bytes of a session are counted, how many there were before, and whether
        our turn had come."""

    def __len__(self) -> int:
        return len(self._running)

    @property
    def running(self) -> dict[str, S]:
        """By peer id."""
        return {name: session for name, (session, _) in self._running.items()}

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """They end with the sessions."""
        return [task for _, task in self._running.values()]

    def begin(
        self,
        peers: Sequence[PeerInfo],
        most: int,
        new: Callable[[PeerInfo], S],
        rate: float | None,
    ) -> None:
        """Ask ``peers`` until ``most`` sessions run; ``rate``: bytes a second that our owner
        allows."""
        now, known = monotonic(), self._later
        least = LEAST_RATE if rate is None else min(LEAST_RATE, rate / (2 * most))
        due = [one for one in peers if one.peer_id not in self._running]
        for peer in sorted(due, key=lambda one: known.get(one.peer_id, 0.0)):
            name = peer.peer_id
            if known.get(name, 0.0) > now:
                return
            if len(self._running) >= most and not self._make_room(now, least):
                return
            session = new(peer)
            task = asyncio.create_task(session.run())
            task.add_done_callback(lambda _: self._ended())
            self._running[name] = session, task
            self._windows[name] = now, 0, False

    def take_in(self) -> None:
        """Take in which sessions have ended, and why. Raises DiskFull."""
        for name, (_, task) in list(self._running.items()):
            if not task.done():
                continue
            del self._running[name]
            self._later[name] = monotonic() + self._later_seconds
            if task.cancelled():
                continue
            try:
                task.result()
            except DiskFull:
                raise
            except (RetryLater, LinkLost) as error:
                self.reasons[name] = str(error)
            except LowcommError as error:
                self.reasons[name] = str(error)
                self._later[name] = float("inf")
                self._refused(name, error)

    def may_be_asked(self, peer: PeerInfo) -> bool:
        """Whether a peer may be asked again, sooner or later."""
        return self._later.get(peer.peer_id, 0.0) < float("inf")

    def cancel(self, name: str, reason: str = "") -> None:
        """End a session; its peer may be asked later."""
        _, task = self._running.pop(name)
        self._later[name] = monotonic() + self._later_seconds
        if reason:
            self.reasons[name] = reason
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        task.cancel()

    async def close(self) -> None:
        """End all sessions."""
        for name in list(self._running):
            self.cancel(name)
        await asyncio.gather(*self._leaving, return_exceptions=True)

    def _make_room(self, now: float, least: float) -> bool:
        """End the session that has brought next to nothing for longest, if there is one."""
        idle: dict[str, float] = {}
        for name, (session, _) in self._running.items():
            start, before, had_turn = self._windows[name]
            if session.served is not None and not had_turn:  # once: turns may be short
                self._windows[name] = now, session.bytes_received, True
                continue
            seconds, count = now - start, session.bytes_received - before
            patience = self._patience.get(name, PATIENCE)
            if seconds < (patience * PREPARING if session.preparing else patience):
                continue
            if count < least * seconds:
                idle[name] = seconds
            else:
                self._windows[name] = now, session.bytes_received, had_turn
        if not idle:
            return False
        name = max(idle, key=lambda one: idle[one])
        self._patience[name] = 2 * self._patience.get(name, PATIENCE)
        self.cancel(name, f"has brought next to nothing in {idle[name]:.0f} s")
        return True
