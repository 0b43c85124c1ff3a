"""The joiner's side of Fetch: a state in pieces, from several donors at once.

Each donor has a ``DonorSession``: it waits for its turn there, then takes missing pieces one after
the other, so fast donors give more. A broken stream is reopened, and continues at the byte that it
had reached while the donor still has its snapshot. A donor that is slow, silent or lies is dropped,
and others give its pieces.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from time import monotonic

from lowcomm_node.errors import LinkLost
from lowcomm_node.fetch.asking import Sessions
from lowcomm_node.fetch.donor_session import LATER, TICK, DonorSession, Plausible
from lowcomm_node.fetch.download import Download
from lowcomm_node.fetch.replies import QUEUE_DEADLINE
from lowcomm_node.net.bandwidth import BandwidthLimit, Use
from lowcomm_node.net.channels import Channels
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.peers.records import PeerInfo

MOST_SERVING = 3
"""Donors that serve us at once. With that many we leave the queues of others."""
SHARED_RATE = 500_000.0
"""Bytes a second of ``--max-down`` for each of them."""
MOST_SESSIONS = 6
"""Donors that serve us, or have us in their queue."""
SLOW = 10.0
"""Seconds that the last pieces may take while other donors are idle, or several times what theirs
took."""
STALL_DEADLINE = 120.0
"""Seconds in which nothing comes, while we wait in no queue."""
VERSION_PATIENCE = 5.0
"""Seconds that we wait for a donor of our version before we switch to that of the others, and fetch
anew what does not fit."""


class Fetcher:
    """Fetches one state."""

    def __init__(
        self,
        channels: Channels,
        download: Download,
        donors: Callable[[], Sequence[PeerInfo]],
        plausible: Plausible | None = None,
        down: BandwidthLimit | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``donors`` returns the donors to ask, the best first, and may change each time.

        ``plausible``: whether a donor's snapshot may be of this swarm step.
        """
        self.channels = channels
        self.download = download
        self.plausible: Plausible = plausible or _anything
        self.down = down or BandwidthLimit()
        self.bytes_received = 0
        self._donors = donors
        self._warn = warn
        self._sessions: Sessions[DonorSession] = Sessions(LATER, self._refused, self.changed)
        self._seconds: deque[float] = deque(maxlen=32)
        self._changed = asyncio.Event()
        self._use = Use()
        self._stuck: float | None = None

    async def fetch(self) -> None:
        """Fetch all pieces. Raises LinkLost with the reason if no donor gives them, or DiskFull.

        What has come is kept.
        """
        last = monotonic()
        try:
            while not (self.download.is_complete() and self.download.conclude()):
                before = self._progress()
                self._begin_sessions()
                self._look_after_version()
                self._leave_slow()
                await self.wait_changed(TICK)
                self._end_sessions()
                if self._progress() != before:
                    last = monotonic()
                queued = any(session.position for session in self._sessions.running.values())
                if monotonic() - last > (QUEUE_DEADLINE if queued else STALL_DEADLINE) or not (
                    self._sessions or self._hope()
                ):
                    raise LinkLost(self.why_not())
        finally:
            await self._sessions.close()

    def describe(self) -> str:
        """The progress, for people."""
        form, serving = self.download.form, self._serving()
        queued = sorted(
            (session.position, name[-6:])
            for name, session in self._sessions.running.items()
            if session.position
        )
        if not serving and queued:
            return ", ".join(
                f"{_ordinal(position)} in the queue of {name}" for position, name in queued
            )
        told = f"{self.download.size / 1e6:.1f} of {form.size / 1e6:.1f} MB"
        if not serving:
            return f"{told}, calling {len(self._sessions)} peers" if self._sessions else told
        peers = "peer" if len(serving) == 1 else "peers"
        return f"{told} from {len(serving)} {peers}, {self._use.rate(monotonic()) / 1e6:.2f} MB/s"

    def why_not(self) -> str:
        """Why no donor gives what is missing."""
        reasons = [f"{peer[-6:]}: {reason}" for peer, reason in self._sessions.reasons.items()]
        return "; ".join(reasons[:4]) or "nobody has what is missing"

    # reported by sessions

    def received(self, size: int) -> None:
        """Count received bytes."""
        self.bytes_received += size
        self._use.add(size, monotonic())

    def took(self, peer: str, seconds: float) -> None:
        """A piece has come."""
        self._seconds.append(seconds)
        self._sessions.reasons.pop(peer, None)

    def disputed(self, peer: str) -> None:
        """A donor's piece has nothing in common with another's."""
        self._warn(
            f"state of {peer[-6:]} has nothing in common with that of another peer: one of them is "
            "left out"
        )

    def changed(self) -> None:
        """Wake whoever waits for changes."""
        self._changed.set()

    async def wait_changed(self, seconds: float) -> None:
        """Wait until something has changed, or for ``seconds``."""
        changed = self._changed
        try:
            async with asyncio.timeout(seconds):
                await changed.wait()
        except TimeoutError:
            pass
        if changed is self._changed and changed.is_set():
            self._changed = asyncio.Event()

    # sessions

    def _begin_sessions(self) -> None:
        enough = self._enough()
        most = enough if len(self._serving()) >= enough else MOST_SESSIONS
        self._sessions.begin(
            self._donors(), most, lambda donor: DonorSession(self, donor), self.down.rate
        )

    def _end_sessions(self) -> None:
        """Process ended sessions, and leave the queues that are not needed."""
        self._sessions.take_in()
        if len(self._serving()) >= self._enough():
            for name, session in self._sessions.running.items():
                if session.served is None:
                    self._sessions.cancel(name)

    def _refused(self, name: str, error: LowcommError) -> None:
        self.download.strike(name)
        self._warn(f"state of {name[-6:]}: {error}")

    def _look_after_version(self) -> None:
        if not self.download.is_stuck():
            self._stuck = None
        elif self._stuck is None:
            self._stuck = monotonic()
        elif monotonic() - self._stuck > VERSION_PATIENCE:
            self.download.rebase()
            self._stuck = None
            self.changed()

    def _leave_slow(self) -> None:
        """Cancel slow donors when others are idle and can take over."""
        running = self._sessions.running
        if not any(session.idle for session in running.values()):
            return
        most, now = max(SLOW, 8 * median(self._seconds or [0.0])), monotonic()
        for name, session in running.items():
            if session.began is not None and not session.idle and now - session.began > most:
                self._sessions.cancel(name, "sends too slowly")

    def _serving(self) -> list[str]:
        return [name for name, one in self._sessions.running.items() if one.served is not None]

    def _enough(self) -> int:
        """How many donors should serve us: with a low limit each would take bandwidth from the
        others."""
        rate = self.down.rate
        return MOST_SERVING if rate is None or rate >= MOST_SERVING * SHARED_RATE else 1

    def _progress(self) -> tuple[float, ...]:
        return (
            self.bytes_received,
            *(session.since for session in self._sessions.running.values()),
        )

    def _hope(self) -> bool:
        """Whether any donor may be asked again."""
        return any(self._sessions.may_be_asked(donor) for donor in self._donors())


async def _anything(donor: PeerInfo, swarm_step: int) -> bool:
    return True


def _ordinal(number: int) -> str:
    last = (
        "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    )
    return f"{number}{last}"
