"""Fetches a file of the run from any peers that have it, from several at once.

What it holds is fixed by its digest, so every piece may come from anybody. A peer that sends a
wrong one is not asked again. There is no deadline for the whole: the run can't begin without it,
and who is asked, and why nobody gives it, is shown.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from time import monotonic

from lowcomm_node.fetch.asking import Sessions
from lowcomm_node.fetch.session import Session
from lowcomm_node.fetch.wanted import RunFile
from lowcomm_node.net.bandwidth import BandwidthLimit, Use
from lowcomm_node.net.channels import Channels
from lowcomm_node.storage.partial_file import PartialFile
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.peers.records import PeerInfo
from lowcomm_protocol.spec.sections import PIECE_BYTES

MOST_SESSIONS = 3
LATER = 5.0
"""Seconds before a peer is asked again that does not have the file, or is busy."""
TICK = 0.25
SLOW = 30.0
"""Seconds after which a piece is asked of a second peer, too, where nothing else is missing."""
SHOWN = 3
"""Peers whose reasons are shown."""


class Fetching:
    """One file on its way."""

    def __init__(
        self,
        file: RunFile,
        channels: Channels,
        peers: Callable[[], Sequence[PeerInfo]],
        down: BandwidthLimit | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``peers`` returns whom to ask, and may change each time."""
        self.file = file
        self.channels = channels
        self.down = down or BandwidthLimit()
        self._peers = peers
        self._warn = warn
        self._into: Path | None = None
        self._partial: PartialFile | None = None
        self._opening = asyncio.Lock()
        self._taken: dict[int, tuple[str, float]] = {}
        """Who was asked for a piece last, and when."""
        self._sessions: Sessions[Session] = Sessions(LATER, self._refused)
        self._use = Use()

    async def fetch(self, path: Path, show: Callable[[str], None]) -> tuple[bytes, ...]:
        """Fetch the file to ``path``; the digests of its pieces.

        ``show`` is told how far it is, and why it is no further. Raises DiskFull.
        """
        self._into = path
        try:
            while self._partial is None or self._partial.missing:
                self._begin_sessions()
                show(self.describe())
                await self._wait()
            await asyncio.to_thread(self._partial.conclude)
            return self._partial.digests
        finally:
            await self._sessions.close()
            if self._partial is not None:
                self._partial.close()

    def describe(self) -> str:
        """The progress, for people."""
        name = self.file.name
        running = self._sessions.running
        serving = sum(session.served is not None for session in running.values())
        if self._partial is not None and serving:
            done = self._partial.size - sum(
                stop - start for start, stop in map(self._partial.bounds, self._partial.missing)
            )
            told = f"{done / 1e6:.1f} of {self._partial.size / 1e6:.1f} MB"
            peers = "peer" if serving == 1 else "peers"
            rate = self._use.rate(monotonic()) / 1e6
            return f"fetching {name}: {told} from {serving} {peers}, {rate:.2f} MB/s"
        if serving:  # how large it is, nobody knows
            return f"fetching {name} from {serving} peer{'s' if serving > 1 else ''}"
        queued = [
            f"number {session.position} in the queue of {peer[-6:]}"
            for peer, session in running.items()
            if session.position
        ]
        reasons = [f"{peer[-6:]} {reason}" for peer, reason in self._sessions.reasons.items()]
        why = "; ".join((queued or reasons)[:SHOWN]) or "no peer that could give it is here yet"
        return f"waiting for {name}, which the run needs: {why}"

    # called by sessions

    async def open(self, size: int, digests: tuple[bytes, ...]) -> PartialFile:
        """The file, once its size and the digests of its pieces are known. Raises DiskFull."""
        assert self._into is not None
        async with self._opening:
            if self._partial is None:
                self._partial = await asyncio.to_thread(
                    PartialFile, self._into, size, PIECE_BYTES, digests
                )
        return self._partial

    def take(self, peer: str) -> int | None:
        """A piece that nobody was asked for, else one that another peer does not bring."""
        assert self._partial is not None
        free = [index for index in self._partial.missing if index not in self._taken]
        if not free:
            now = monotonic()
            free = [
                index
                for index, (other, since) in self._taken.items()
                if index in self._partial.missing and other != peer and now - since > SLOW
            ]
        if not free:
            return None
        index = min(free)
        self._taken[index] = (peer, monotonic())
        return index

    def give_back(self, peer: str, index: int) -> None:
        """A piece that has not come."""
        if self._taken.get(index, ("", 0.0))[0] == peer:
            del self._taken[index]

    def received(self, count: int) -> None:
        """Count bytes that have come."""
        self._use.add(count, monotonic())

    # sessions

    def _begin_sessions(self) -> None:
        known = self._peers()
        peers = Random().sample(known, len(known))  # so that not all ask the same one
        self._sessions.begin(peers, MOST_SESSIONS, lambda peer: Session(self, peer), self.down.rate)

    async def _wait(self) -> None:
        if tasks := self._sessions.tasks:
            await asyncio.wait(tasks, timeout=TICK, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(TICK)
        self._sessions.take_in()

    def _refused(self, name: str, error: LowcommError) -> None:
        self._warn(f"{self.file.name} of {name[-6:]}: {error}: it is not asked again")
