"""Slow weights of a few peers, for an average of the swarm.

A piece of a state holds all its vectors, and a donor sends whole pieces. So whole states are
fetched, checked as those of a joiner, and of each only the slow weights are kept.
"""

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from lowcomm_node.errors import CheckpointError, DiskFull, NodeError
from lowcomm_node.fetch.download import Download
from lowcomm_node.fetch.fetch import Fetcher
from lowcomm_node.fetch.records import Gathered
from lowcomm_node.net.bandwidth import BandwidthLimit
from lowcomm_node.net.channels import Channels
from lowcomm_node.storage.files import DiskQuota
from lowcomm_protocol.peers.records import PeerInfo
from lowcomm_protocol.spec.sections import SyncSettings
from lowcomm_protocol.state import StateForm

MOST_PEERS = 3
COPY_BYTES = 1 << 22
"""Copied at once."""


@dataclass(frozen=True, kw_only=True)
class Gatherer:
    """Fetches states of peers of one run."""

    form: StateForm
    sync: SyncSettings
    channels: Channels
    down: BandwidthLimit
    disk_quota: DiskQuota

    async def gather(
        self, peers: Sequence[PeerInfo], own: int, folder: Path, seconds: float
    ) -> Gathered:
        """The slow weights of those nearest to swarm step ``own``, at most three, as far as they
        come within so many seconds. ``folder`` is begun anew."""
        near = sorted(peers, key=lambda info: abs(info.swarm_step - own))[:MOST_PEERS]
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if not near:
            return Gathered(folder=str(folder), missing="no peer trains beside this node now")
        try:
            self.disk_quota.require(len(near) * self.form.size, "The state of peers")
        except DiskFull as error:
            return Gathered(folder=str(folder), missing=str(error))
        tasks = {info.peer_id: asyncio.create_task(self._one(info, folder)) for info in near}
        await asyncio.wait(tasks.values(), timeout=seconds)
        for task in tasks.values():
            task.cancel()
        found = await asyncio.gather(*tasks.values(), return_exceptions=True)
        failed = {
            peer: _reason(one) for peer, one in zip(tasks, found, strict=True) if one is not None
        }
        return Gathered(
            folder=str(folder),
            peers=tuple(peer for peer in tasks if peer not in failed),
            missing="; ".join(f"{peer[-6:]}: {reason}" for peer, reason in failed.items()),
        )

    async def _one(self, donor: PeerInfo, folder: Path) -> None:
        """Fetch one state. Raises NodeError."""
        incoming = folder / f".{donor.peer_id}"
        download = Download(incoming, self.form, self.sync, Random())
        try:
            await asyncio.to_thread(download.load)
            fetcher = Fetcher(self.channels, download, lambda: [donor], down=self.down)
            await fetcher.fetch()
            await asyncio.to_thread(
                _keep_slow, incoming / "state", folder / donor.peer_id, self.form
            )
        finally:
            download.close()
            shutil.rmtree(incoming, ignore_errors=True)


def _reason(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "it was too slow"
    if isinstance(error, NodeError):
        return str(error)
    raise error


def _keep_slow(state: Path, file: Path, form: StateForm) -> None:
    """Copy the slow weights of all pieces, which come in the order of the values."""
    part = file.with_name(f".{file.name}.part")
    with state.open("rb") as source, part.open("wb") as target:
        for piece, offset in zip(form.pieces, form.offsets, strict=True):
            fast, slow = (4 * count for count in piece.counts[:2])
            source.seek(offset + fast)
            while slow:
                data = source.read(min(COPY_BYTES, slow))
                if not data:
                    raise CheckpointError(f"{state} is cut short.")
                target.write(data)
                slow -= len(data)
    part.rename(file)
