"""The bootstrap server: an entry peer of the DHT that keeps runs published.

start                  publish all runs
every LOOK_EVERY       watch the connection, adopt what creators publish, count peers
every RUN_LIFE / 3     publish all runs again
when a creator asks    adopt its run, and tell whether and for how long it is kept
"""

import asyncio
import math
import os
import random
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from cachetools import TTLCache

from lowcomm_bootstrap.registry import Registry
from lowcomm_node.dht.hivemind import Discovery
from lowcomm_node.dht.keys import RUNS_KEY, amendments_key, peers_key, shard_key
from lowcomm_node.errors import NodeError
from lowcomm_node.swarm.rejoin import Rejoin
from lowcomm_node.system.quota import prefixes_of
from lowcomm_node.system.systemd import Condition
from lowcomm_node.system.tasks import Enduring
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.peers.probes import Keeping
from lowcomm_protocol.peers.records import PeerInfo, Phase, read_record
from lowcomm_protocol.peers.shards import SwarmSize
from lowcomm_protocol.spec.amendments import newest
from lowcomm_protocol.spec.run import SignedRun, read_signed_run

if TYPE_CHECKING:
    from lowcomm_bootstrap.web import SwarmPage

RUN_LIFE = 1800.0
LOST_AFTER = 30.0
"""Seconds after which a run is published again that nobody has any more: a clock that was ahead has
made all records expire."""
LOOK_EVERY = 5.0
LOOK_DEADLINE = 300.0
"""Seconds after which a look must have ended: all that it waits for has deadlines of its own."""
PROBE_EVERY = 600.0
"""Seconds between two calls to peers of a run of which none has proved to be there."""
PROBES = 3
"""Peers that are called then."""
COMPARED = 16
"""Peers of a run that are looked at to see whether it is over."""
MAX_PROBED = 4096
MAX_REFUSED = 100
"""Runs whose refusal is told: a flood of them must not fill the log."""
GONE = frozenset({Phase.LEFT, Phase.FINISHED})

Tell = Callable[[dict[str, Any]], None]


class BootstrapServer:
    """Publishes the runs of a registry, and adopts those that creators publish, unless closed."""

    def __init__(
        self,
        discovery: Discovery,
        registry: Registry,
        closed: bool,
        tell: Tell,
        rejoin: Rejoin,
        sign: Path | None = None,
        page: "SwarmPage | None" = None,
    ) -> None:
        """``rejoin``: keeps us connected to other bootstrap servers; ``sign``: file that
        shows by its time when we last looked at the swarm, with a p2pd that answered; ``page``:
        shows the findings."""
        self._discovery = discovery
        self._registry = registry
        self._closed = closed
        self._tell = tell
        self._rejoin = rejoin
        self._sign = sign
        self._page = page
        rejoin.publish = self._publish
        self._published = 0.0
        self._looked_at: float | None = None
        """Time of the end of the last look; None before it serves."""
        self._peers: dict[str, int] = {}
        self._sizes: dict[str, SwarmSize] = {}
        """By run."""
        self._probed: TTLCache[str, bool] = TTLCache(MAX_PROBED, PROBE_EVERY, timer=monotonic)
        """Runs whose peers were called recently."""
        self._refused: set[str] = set()

    async def start(self) -> None:
        """Enter the DHT and publish. Raises PortInUse, ConfigError, NodeError."""
        for path, event in self._registry.unread.items():
            self._tell({"event": event, "path": str(path)})
        await self._discovery.start()
        await self._publish()

    async def run(self) -> None:
        """Serve until cancelled."""
        self._looked_at = monotonic()
        enduring = Enduring("a look at the swarm has failed")
        while True:
            await asyncio.sleep(LOOK_EVERY)
            with enduring:
                await self.look()
            self._looked_at = monotonic()

    def condition(self, now: float) -> Condition:
        """The state for the service manager at a time (monotonic seconds).

        The server is ready as soon as it serves, even if nobody is connected.
        """
        if self._looked_at is None:
            return Condition(ready=False, line="starting")
        runs, peers = len(self._registry.runs()), sum(self._peers.values())
        serving = f"serving: {runs} runs published, {peers} peers alive in them"
        line = self._rejoin.reason or serving
        late = now - self._looked_at
        overdue = f"a look at the swarm has taken {late:.0f} s" if late > LOOK_DEADLINE else None
        return Condition(ready=True, line=line, overdue=overdue)

    async def look(self) -> None:
        """Do once what is due every LOOK_EVERY seconds."""
        await self._rejoin.step()
        published = await self._discovery.lookup(RUNS_KEY)
        if not self._closed:
            await self._adopt(published)
        lost = any(run.run_id not in published for run in self._registry.runs())
        if monotonic() - self._published >= (LOST_AFTER if lost else RUN_LIFE / 3):
            await self._publish()
        await self._count()
        if self._sign is not None and self._rejoin.has_p2pd:
            with suppress(OSError):
                os.utime(self._sign)

    async def keep(self, run_id: str, place: str | None) -> Keeping:
        """Whether a run is kept. If its creator has just published it from ``place``, it is
        adopted where there is room."""
        if place is not None and not self._closed and self._registry.stays(run_id) is None:
            data = (await self._discovery.lookup(RUNS_KEY)).get(run_id)
            run = _read_run(data) if data is not None else None
            if run is None:
                return Keeping(reason="this server has not received it")
            try:
                await self._take_in(run, place)
            except (NodeError, OSError):
                return Keeping(reason="this server has no room for it")
        stays, kept = self._registry.stays(run_id), self._registry.kept
        own = tuple(kept_id for kept_id, held in kept.items() if held.own)
        if stays is None:
            return Keeping(reason="this server is closed to runs of others", own=own)
        seconds = None if math.isinf(stays) else stays
        return Keeping(kept=True, seconds=seconds, swarm_step=kept[run_id].ended, own=own)

    async def _publish(self) -> None:
        self._published = monotonic()
        for run in self._registry.runs():
            await self._publish_run(run)

    async def _publish_run(self, run: SignedRun) -> None:
        if not await self._discovery.publish(RUNS_KEY, run.run_id, run.to_bytes(), RUN_LIFE):
            self._tell_of(run, "run.not_published", reason="no peer took it; tried again")

    async def _adopt(self, published: Mapping[str, bytes]) -> None:
        for data in published.values():
            run = _read_run(data)
            if run is None or run.run_id in self._registry.left:
                continue
            try:
                await self._take_in(run, self._discovery.origin(RUNS_KEY, run.run_id))
            except (NodeError, OSError) as error:
                # No room here or on the disk. The peers of that run keep it published.
                if run.run_id not in self._refused and len(self._refused) < MAX_REFUSED:
                    self._refused.add(run.run_id)
                    self._tell_of(run, "run.not_kept", reason=str(error))

    async def _take_in(self, run: SignedRun, place: str) -> None:
        if self._registry.add(run, prefixes_of(place)[-1] if place else ""):
            self._tell_of(run, "run.adopted")
            await self._publish_run(run)

    def _tell_of(self, run: SignedRun, event: str, **more: Any) -> None:
        names = {"name": run.spec.run.name, "fingerprint": run.fingerprint}
        self._tell({"event": event, **names, **more})

    async def _count(self) -> None:
        counts: dict[str, int] = {}
        for run in self._registry.runs():
            key, size = peers_key(run.run_id), self._sizes.setdefault(run.run_id, SwarmSize())
            records = await self._sample(run.run_id, size)
            count = counts[run.run_id] = max(len(records), size.peers)
            await self._probe(run.run_id, records)
            if run.run_id not in self._registry.kept:
                continue  # it gave way to another one meanwhile
            # A record alone does not prove that its peer is there.
            proved = self._discovery.proved(key) & set(records)
            self._registry.saw(run.run_id, len(proved))
            await self._look_for_end(run, records, proved)
            if self._page is not None:
                self._page.saw(run, records, proved, size.peers if size.shards else 0)
            if count != self._peers.get(run.run_id, 0):
                self._tell_of(run, "run.peers", peers=count)
        self._peers = counts
        self._sizes = {run_id: self._sizes[run_id] for run_id in counts}
        if self._page is not None:
            self._page.looked(set(counts))
        for run in self._registry.expire():
            self._tell_of(run, "run.left", reason="no peer of it has answered for a day")

    async def _sample(self, run_id: str, size: SwarmSize) -> dict[str, bytes]:
        """The records of a run at the door, and of a random shard where it has only a sample."""
        records = await self._discovery.lookup(peers_key(run_id))
        if not size.bits:
            size.count(len(records), own=True)
        if size.bits:
            key = shard_key(run_id, size.bits, random.randrange(1 << size.bits))
            shard = await self._discovery.lookup(key)
            size.count(len(shard), own=True)
            records |= shard
        return records

    async def _look_for_end(
        self, run: SignedRun, records: Mapping[str, bytes], proved: Set[str]
    ) -> None:
        """Keep whether the peers of a run that have proved to be there have finished it."""
        some = random.sample(sorted(proved), min(COMPARED, len(proved)))
        infos = [info for peer in some if (info := read_info(records[peer], time())) is not None]
        before = self._registry.kept[run.run_id].ended
        reached = max((info.swarm_step for info in infos if info.phase in GONE), default=0)
        reached = max(reached, before)
        if not reached:
            return
        chain = await self._discovery.lookup(amendments_key(run.run_id, run.creator))
        is_over = newest(run.spec, run.run_id, list(chain.values())).is_over
        training = (info.swarm_step for info in infos if info.phase is Phase.TRAINING)
        if not all(is_over(swarm_step) for swarm_step in (*training, reached)):
            self._registry.end(run.run_id, 0)
        elif not before and self._registry.end(run.run_id, reached):
            self._tell_of(run, "run.over", swarm_step=reached)

    async def _probe(self, run_id: str, records: Mapping[str, bytes]) -> None:
        """Call a few peers of a run now and then, if none has proved to be there."""
        proved = self._discovery.proved(peers_key(run_id)) & set(records)
        if proved or not records or run_id in self._probed:
            return
        self._probed[run_id] = True
        some = random.sample(sorted(records), min(PROBES, len(records)))
        infos = {peer: read_info(records[peer], time()) for peer in some}
        entry_points = {peer: info.entry_points if info else () for peer, info in infos.items()}
        for peer, knock in (await self._discovery.knock(entry_points)).items():
            if knock.reason is None:
                self._discovery.answered(peer)


def read_info(record: bytes, now: float) -> PeerInfo | None:
    """Read the record of a peer at a Unix time; None if it is not valid."""
    try:
        return read_record(record, now)
    except LowcommError:
        return None


def _read_run(data: bytes) -> SignedRun | None:
    try:
        return read_signed_run(data)
    except (LowcommError, ValueError):
        return None
