"""This node's copy of the amendments of its run: from its home, the DHT and peers.

The chain lies in the folder of the run, written by the node or by `lowcomm-node amend`. A damaged
file counts as missing.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lowcomm_node.dht.interface import Discovery
from lowcomm_node.dht.keys import amendments_key
from lowcomm_node.storage.files import read_small, write_atomic
from lowcomm_node.system.logs import log
from lowcomm_protocol.errors import LowcommError, SpecError, VersionError
from lowcomm_protocol.spec.amendments import MAX_CHAIN_BYTES, Amendment, Course, read_chain
from lowcomm_protocol.spec.run import SignedRun

AMENDMENTS_LIFE = 1800.0


class Amending:
    """The course of one run."""

    def __init__(self, run: SignedRun, path: Path) -> None:
        """Read what the home keeps."""
        self.course = Course(run.spec)
        self.on_news: Callable[[list[Amendment]], None] = lambda news: None
        """Called with new amendments."""
        self.on_trouble: Callable[[str], None] = lambda reason: None
        """Called once with the reason why a chain signed by the creator can't be followed."""
        self._run = run
        self._path = path
        self._refused: bytes = b""
        self.hear(read_small(path, MAX_CHAIN_BYTES))

    def hear(self, data: bytes) -> bool:
        """Take in an untrusted chain. Returns whether it is newer than ours."""
        if not data or data in (self.course.chain.data, self._refused):
            return False
        try:
            chain = read_chain(data, self._run.creator)
            if chain.run_id != self._run.run_id or chain.order <= self.course.chain.order:
                return False
            before = len(self.course.chain.links)
            self.course = Course(self._run.spec, chain)
        except (SpecError, VersionError) as error:
            self._refused = data
            self.on_trouble(
                f"the creator has amended the run in a way that this node can't follow: {error}"
            )
            return False
        except LowcommError as error:
            log.debug("amendments.refused", reason=str(error))
            return False
        self.on_news(list(chain.links[before:]))
        return True

    async def look(self, discovery: Discovery) -> bool:
        """Compare with the home and the DHT, and publish ours if theirs is older. Returns whether
        there was a newer one.

        Raises DiskFull, OSError.
        """
        newer = self.hear(await asyncio.to_thread(read_small, self._path, MAX_CHAIN_BYTES))
        told = (await discovery.lookup(self._key)).get(self._run.creator, b"")
        newer |= self.hear(told)
        data = self.course.chain.data
        if data != told:
            await self.publish(discovery)
        if data and data != await asyncio.to_thread(read_small, self._path, MAX_CHAIN_BYTES):
            await asyncio.to_thread(write_atomic, self._path, data)
        return newer

    async def publish(self, discovery: Discovery) -> None:
        """Keep the chain alive in the DHT, since its creator may be away."""
        with suppress(LowcommError):
            if self.course.chain.data:
                await discovery.publish(
                    self._key, self._run.creator, self.course.chain.data, AMENDMENTS_LIFE
                )

    @property
    def _key(self) -> str:
        return amendments_key(self._run.run_id, self._run.creator)
