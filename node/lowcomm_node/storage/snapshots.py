"""Snapshots on disk: the state at one moment, written once and never changed, for joiners to copy.

snapshots/
  NAME/            SHA-256 of its manifest
    manifest       sent to joiners first
    state          all pieces, in their order
  .writing-*       left behind by a crash

They are no checkpoints: nobody needs them after a restart, so nothing is synced, and all are
removed when the node starts.
"""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from math import inf
from pathlib import Path
from time import monotonic

from lowcomm_node.errors import NodeError, RetryLater
from lowcomm_node.storage.files import WRITING, disk_full_error, require_space
from lowcomm_node.system.logs import log

MAX_SNAPSHOTS = 2  # on disk at once
KEEP_SECONDS = 120.0  # seconds to keep an unused snapshot, so interrupted joiners can resume
SHORTEST_LIFE = 2.0  # seconds before another one is made,
COST_SHARE = 4.0  # and at least this many times what making one takes
FAILED_PAUSE = 30.0  # seconds before the next attempt after a failure


def write_snapshot(
    folder: Path,
    size: int,
    pieces: Iterable[bytes],
    seal: Callable[[list[bytes]], bytes],
    taken: Callable[[], None] = lambda: None,
) -> str:
    """Write ``size`` bytes of pieces, and the manifest that ``seal`` makes of their digests; its
    name. ``taken`` is called after the last piece, and may raise. Raises DiskFull."""
    folder.mkdir(parents=True, exist_ok=True)
    require_space(folder, size)
    temporary = Path(tempfile.mkdtemp(prefix=WRITING, dir=folder))
    try:
        with disk_full_error(folder, size):
            with (temporary / "state").open("wb") as file:
                sizes = [file.write(data) for data in pieces]
            taken()
            # The writer of the pieces trains on: digests take longer than writing does.
            with (temporary / "state").open("rb") as file:
                manifest = seal([sha256(file.read(size)).digest() for size in sizes])
            (temporary / "manifest").write_bytes(manifest)
            name = sha256(manifest).hexdigest()
            if not (folder / name).exists():
                temporary.rename(folder / name)
            return name
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@dataclass(eq=False)
class StoredSnapshot:
    """A snapshot on disk."""

    path: Path
    swarm_step: int
    made: float
    took: float  # seconds
    users: int = 0
    left: float = field(default_factory=monotonic)  # when its last user let go of it

    @property
    def name(self) -> bytes:
        """SHA-256 of its manifest."""
        return bytes.fromhex(self.path.name)


class Snapshots:
    """The snapshots of one node: made on demand when the last is old, and shared."""

    def __init__(
        self,
        folder: Path,
        make: Callable[[], Awaitable[tuple[str, int]]],
        swarm_step: Callable[[], int],
        stale: int,
        useless: float = inf,
    ) -> None:
        """``make`` writes one into ``folder``, and returns name and swarm step. It is old after
        ``stale`` steps; more than ``useless`` steps away, as after a merge with a peer far ahead,
        it helps nobody, and `SHORTEST_LIFE` does not keep it."""
        self.folder = folder
        self._make = make
        self._swarm_step = swarm_step
        self._stale = stale
        self._useless = useless
        self._held: list[StoredSnapshot] = []
        self._making = asyncio.Lock()
        self._failed = -inf
        shutil.rmtree(folder, ignore_errors=True)

    @asynccontextmanager
    async def use(self, name: bytes = b"") -> AsyncIterator[StoredSnapshot]:
        """Context that holds the snapshot of this name, or a fresh one. Raises RetryLater."""
        known = next((one for one in self._held if one.name == name), None)
        snapshot = known or await self._fresh()
        snapshot.users += 1
        try:
            yield snapshot
        finally:
            snapshot.users -= 1
            snapshot.left = monotonic()
            asyncio.get_running_loop().call_later(KEEP_SECONDS, self._prune)

    async def close(self) -> None:
        """Remove all snapshots."""
        self._held.clear()
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)

    async def _fresh(self) -> StoredSnapshot:
        async with self._making:  # those who ask meanwhile get the same one
            newest = self._held[-1] if self._held else None
            if newest is not None and (not self._is_old(newest) or not await self._has_room()):
                return newest
            began = monotonic()
            refusal = RetryLater("no snapshot can be made here now: ask another peer, or later.")
            if began - self._failed < FAILED_PAUSE:
                raise refusal
            try:
                name, swarm_step = await self._make()
            except NodeError as error:
                self._failed = monotonic()
                log.info("snapshot.failed", reason=str(error))
                if newest is None:  # the error names a path of this machine
                    raise refusal from None
                return newest
            made = StoredSnapshot(self.folder / name, swarm_step, monotonic(), monotonic() - began)
            self._held = [one for one in self._held if one.path != made.path] + [made]
            return made

    def _is_old(self, one: StoredSnapshot) -> bool:
        away, cost = abs(self._swarm_step() - one.swarm_step), COST_SHARE * one.took
        life = cost if away > self._useless else max(SHORTEST_LIFE, cost)
        return away > self._stale and monotonic() - one.made > life

    async def _has_room(self) -> bool:
        """Make room for one more, if one is unused."""
        idle = [one for one in self._held if not one.users]
        if len(self._held) >= MAX_SNAPSHOTS and idle:
            self._held.remove(idle[0])
            await asyncio.to_thread(shutil.rmtree, idle[0].path, ignore_errors=True)
        return len(self._held) < MAX_SNAPSHOTS

    def _prune(self) -> None:
        for one in list(self._held):
            if not one.users and monotonic() - one.left >= KEEP_SECONDS:
                self._held.remove(one)
                # Gigabytes take a disk a while: the event loop does not wait for it.
                asyncio.get_running_loop().run_in_executor(None, shutil.rmtree, one.path, True)
