"""The runs that this server keeps published: one signed file a run, in a folder.

A run of the operator stays. Any other run leaves when no peer of it has answered for a day.
One network gets a quarter of the places. If there is no room, the run leaves whose peers have been
silent longest. A run in its first hour, or with peers that answer, gives way to the operator's
runs alone.

A file is as old as the last answer of a peer of its run, so a restart forgets nothing. Beside it,
``RUN.ended`` holds the swarm step at which the peers of a run have finished it.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, time

from cachetools import TTLCache

from lowcomm_node.errors import ConfigError, NodeError
from lowcomm_node.storage.files import write_atomic
from lowcomm_protocol.errors import LowcommError, VersionError
from lowcomm_protocol.spec.run import MAX_SPEC_BYTES, SignedRun, read_signed_run

MAX_FILE_BYTES = 2 * MAX_SPEC_BYTES
MAX_BYTES = 2 * 1024**2
"""Bytes of all runs together; the DHT takes no more under one key."""
KEPT_EMPTY = 86_400.0
"""Seconds that a run stays without a peer that answers."""
SHARE = 4
"""One network gets this fraction of the places, and as many places at least."""
GRACE = 3600.0
"""Seconds in which a new run, and any run after a start of this server, needs no peers."""
FORGOTTEN_FOR = 7200.0
"""Seconds in which a run that has left is not adopted again: the DHT keeps it for an hour."""
MAX_FORGOTTEN = 1024
TOUCH_EVERY = 600.0
_BEGAN = time() - monotonic()


def steady_time() -> float:
    """Unix time that no later change of the clock moves: a clock that is ahead for a moment must
    not end a day."""
    return _BEGAN + monotonic()


@dataclass
class KeptRun:
    """A run that is kept."""

    run: SignedRun
    size: int
    added: float
    """Unix time, seconds."""
    alive: float
    """Time of the last answer of a peer; at first, of its arrival."""
    peers: int = 0
    """Peers that answer."""
    own: bool = False
    """Whether the operator wants it kept."""
    network: str = ""
    """Where it was published from; empty if that is not known."""
    ended: int = 0
    """Swarm step at which its peers have finished it, as they say; 0: they have not."""


class Registry:
    """Signed runs on disk, at most ``max_runs`` and MAX_BYTES, each verified once, when read."""

    def __init__(
        self, folder: Path, max_runs: int = 64, clock: Callable[[], float] = steady_time
    ) -> None:
        """Reads the folder. A damaged file is renamed to ``NAME.damaged``.

        A run of another version is left for the release that reads it: an upgrade may be reverted.
        """
        self._folder = folder
        self._max_runs = max_runs
        self._clock = clock
        self.kept: dict[str, KeptRun] = {}
        """By run id."""
        self.left: TTLCache[str, bool] = TTLCache(MAX_FORGOTTEN, FORGOTTEN_FOR, timer=clock)
        """Runs that left recently, so that only the DHT still holds them."""
        self.unread: dict[Path, str] = {}
        """Files that are no run of this release: `run.damaged`, renamed just now, or
        `run.other_version`."""
        for path in sorted(folder.glob("*.json")):
            self._read(path)

    def runs(self) -> list[SignedRun]:
        """All runs, by name."""
        runs = (held.run for held in self.kept.values())
        return sorted(runs, key=lambda run: (run.spec.run.name, run.run_id))

    def add(self, run: SignedRun, network: str = "", own: bool = False) -> bool:
        """Keep a run; whether it is new. Raises ConfigError if there is no room, DiskFull.

        ``network``: where it was published from; ``own``: the operator wants it kept.
        """
        known, now = self.kept.get(run.run_id), self._clock()
        if known is not None:
            known.own = known.own or own
            known.network = known.network or network
            return False
        data = run.to_bytes()
        new = KeptRun(run, len(data), now, now, own=own, network=network)
        gone = self._those_to_go(new, now)
        path = self._path(run.run_id)
        try:
            write_atomic(path, data)
            os.utime(path, (now, now))
        except OSError as error:
            reason = f"{self._folder}: {error.strerror}"
            raise ConfigError(f"{reason}: make it writable, or choose another --home.") from None
        for run_id in gone:
            self._remove(run_id)
        self.left.pop(run.run_id, None)
        self.kept[run.run_id] = new
        return True

    def saw(self, run_id: str, peers: int) -> None:
        """Take in that this number of peers of a run have answered."""
        held, now = self.kept[run_id], self._clock()
        before, held.peers = held.alive, peers
        held.alive = now if peers else before
        if held.alive > before and now // TOUCH_EVERY != before // TOUCH_EVERY:
            with suppress(OSError):
                os.utime(self._path(run_id), (now, now))

    def end(self, run_id: str, swarm_step: int) -> bool:
        """Keep where the peers of a run have finished it; 0: they train. Returns whether that is
        news. A disk that can't take it costs only a restart's memory."""
        held = self.kept.get(run_id)
        if held is None or held.ended == swarm_step:
            return False
        held.ended = swarm_step
        path = self._path(run_id).with_suffix(".ended")
        with suppress(OSError, NodeError):
            if swarm_step:
                write_atomic(path, b"%d\n" % swarm_step)
            else:
                path.unlink(missing_ok=True)
        return True

    def expire(self) -> list[SignedRun]:
        """Remove the runs of which no peer has answered for KEPT_EMPTY, and return them."""
        gone = [held.run for run_id, held in self.kept.items() if self.stays(run_id) == 0]
        for run in gone:
            self._remove(run.run_id)
        return gone

    def stays(self, run_id: str) -> float | None:
        """Seconds that a run stays without peers: infinite for the operator's, None if not kept."""
        held = self.kept.get(run_id)
        if held is None:
            return None
        return float("inf") if held.own else max(0.0, held.alive + KEPT_EMPTY - self._clock())

    def _those_to_go(self, new: KeptRun, now: float) -> set[str]:
        """The runs that give way to a new one. Raises ConfigError if there is no room for it."""
        others = [held for held in self.kept.values() if not held.own]
        if new.network and not new.own:
            same = sum(held.network == new.network for held in others)
            if same >= max(SHARE, self._max_runs // SHARE):
                raise ConfigError(
                    f"{new.network} has published {same} runs here: one network gets a quarter of "
                    f"--max-runs {self._max_runs}."
                )
        if not new.own:
            others = [held for held in others if not held.peers and now >= held.added + GRACE]
        others.sort(key=lambda held: (held.peers > 0, held.alive), reverse=True)
        gone, count = set[str](), len(self.kept) + 1
        used = self._used + new.size
        while count > self._max_runs or used > MAX_BYTES:
            if not others:
                raise ConfigError(
                    f"{self._folder} holds {len(self.kept)} runs, {self._used} bytes, and each "
                    "has more claim to its place: remove one, or raise --max-runs "
                    f"(all runs together may have {MAX_BYTES} bytes)."
                )
            held = others.pop()
            gone.add(held.run.run_id)
            count, used = count - 1, used - held.size
        return gone

    @property
    def _used(self) -> int:
        return sum(held.size for held in self.kept.values())

    def _remove(self, run_id: str) -> None:
        del self.kept[run_id]
        self.left[run_id] = True
        for path in (self._path(run_id), self._path(run_id).with_suffix(".ended")):
            with suppress(OSError):
                path.unlink()

    def _path(self, run_id: str) -> Path:
        return self._folder / f"{run_id}.json"

    def _read(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                run = read_signed_run(file.read(MAX_FILE_BYTES + 1), str(path))
            if path.stem != run.run_id:
                raise ConfigError(f"{path} holds the run {run.run_id}: give it that name.")
        except VersionError:
            self.unread[path] = "run.other_version"
            return
        except LowcommError:
            aside = path.with_name(f"{path.name}.damaged")
            try:
                path.replace(aside)
            except OSError:
                aside = path  # we can only read this folder
            self.unread[aside] = "run.damaged"
            return
        except OSError as error:
            reason = f"{path}: {error.strerror}"
            raise ConfigError(f"{reason}: make it readable, or choose another --home.") from None
        stat, now = path.stat(), self._clock()
        if len(self.kept) < self._max_runs and self._used + stat.st_size <= MAX_BYTES:
            # Its peers could not answer while we were away.
            alive = min(now, max(stat.st_mtime, now - KEPT_EMPTY + GRACE))
            ended = 0
            with suppress(OSError, ValueError):
                ended = max(0, int(path.with_suffix(".ended").read_bytes()[:20]))
            self.kept[run.run_id] = KeptRun(run, stat.st_size, stat.st_mtime, alive, ended=ended)
