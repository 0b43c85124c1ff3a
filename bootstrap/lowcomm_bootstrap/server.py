"""The bootstrap server: an entry peer of the DHT that keeps runs published."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lowcomm_bootstrap.registry import Registry
from lowcomm_node.discovery.interface import Discovery
from lowcomm_node.discovery.keys import RUNS_KEY, peers_key
from lowcomm_node.errors import ConfigError
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.run import SignedRun, read_signed_run

RUN_LIFE = 1800.0
LOOK_EVERY = 5.0
"""Seconds between two looks for runs that creators have published."""


class BootstrapServer:
    """Publishes the runs of a registry, and takes in those that creators publish, unless it is closed to them."""

    def __init__(
        self, discovery: Discovery, registry: Registry, closed: bool, tell: Callable[[dict[str, Any]], None]
    ) -> None:
        self._discovery, self._registry, self._closed, self._tell = discovery, registry, closed, tell
        self._since_published = RUN_LIFE

    async def start(self) -> None:
        """Enter the DHT and publish. Raises PortInUse, NodeError."""
        await self._discovery.start()
        for path in self._registry.damaged():
            self._tell({"event": "run.damaged", "path": str(path)})
        await self._publish()

    async def run(self) -> None:
        """Keep publishing until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            self._since_published += LOOK_EVERY
            if not self._closed:
                await self._adopt()
            if self._since_published >= RUN_LIFE / 3:
                await self._publish()

    async def count_peers(self) -> dict[str, int]:
        """Peers that each run shows in the DHT, by run id."""
        runs = self._registry.runs()
        return {run.run_id: len(await self._discovery.lookup(peers_key(run.run_id))) for run in runs}

    async def close(self) -> None:
        """Leave the DHT."""
        await self._discovery.close()

    async def _publish(self) -> None:
        self._since_published = 0.0
        for run in self._registry.runs():
            await self._discovery.publish(RUNS_KEY, run.run_id, run.to_bytes(), RUN_LIFE)

    async def _adopt(self) -> None:
        for data in (await self._discovery.lookup(RUNS_KEY)).values():
            run = _read(data)
            if run is None:
                continue
            with suppress(ConfigError):  # no room: the creator's own peers keep it published
                if self._registry.add(run):
                    self._tell({"event": "run.adopted", "name": run.spec.run.name, "fingerprint": run.fingerprint})
                    await self._discovery.publish(RUNS_KEY, run.run_id, run.to_bytes(), RUN_LIFE)


def _read(data: bytes) -> SignedRun | None:
    try:
        return read_signed_run(data)
    except LowcommError:
        return None
