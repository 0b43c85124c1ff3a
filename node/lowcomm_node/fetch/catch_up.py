"""Whole states of other peers: a late peer copies where the swarm is, an export averages a few.

A late peer copies the most advanced peers, from several at once. An export needs slow weights only,
but a piece of a state holds all its vectors, and a donor sends whole pieces. So whole states are
fetched, checked as those of a joiner, and of each only the slow weights are kept.
"""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from time import time

from lowcomm_node.errors import CheckpointError, DiskFull, LinkLost, NodeError, TrainerError
from lowcomm_node.fetch import Gathered, StateAdopted
from lowcomm_node.fetch.engine import Fetch
from lowcomm_node.fetch.state import StateDownload
from lowcomm_node.net.bandwidth import BandwidthLimit
from lowcomm_node.net.channels import Channels
from lowcomm_node.node.messages import Adopt, Ready
from lowcomm_node.node.process import Trainer
from lowcomm_node.storage.files import DiskQuota
from lowcomm_node.swarm.membership import Membership
from lowcomm_protocol.peers.records import PeerInfo, Phase
from lowcomm_protocol.plan import is_supported, largest_jump
from lowcomm_protocol.spec.run import SignedRun
from lowcomm_protocol.spec.sections import SyncSettings
from lowcomm_protocol.state import StateForm, tolerated_lag

ROUNDS = 5  # copies in a row
MOST_GATHERED = 3  # peers whose weights an export averages


def _reached(peers: Sequence[PeerInfo]) -> int:
    """The swarm step that two of these peers have reached, so that none makes others copy alone."""
    steps = sorted((info.swarm_step for info in peers), reverse=True)
    return steps[min(1, len(steps) - 1)] if steps else 0


def state_form(run: SignedRun, ready: Ready, steps: int) -> StateForm:
    """The form of this run's state; ``steps``: its largest swarm step."""
    return StateForm.of(run.run_id, ready.plan, steps, ready.runs, ready.ranges)


@dataclass(frozen=True, kw_only=True)
class CatchUp:
    """Copies states; ``show`` receives what we wait for, ``tell`` takes events."""

    run: SignedRun
    trainer: Trainer
    channels: Channels
    membership: Membership
    trusts: Callable[[str], bool]
    down: BandwidthLimit
    disk_quota: DiskQuota
    folder: Path
    show: Callable[[str], None]
    warn: Callable[[str, str], None]
    tell: Callable[[StateAdopted], None]

    async def run_from(self, own: int, form: StateForm, drifted: bool) -> Ready | None:
        """Copy the state of peers that are ahead of swarm step ``own`` by more than a merge can
        heal; ``drifted``: also of peers that are no further.

        Returns what the trainer has then; None if no donor could provide its state. A copy may take
        long. If others would not believe its swarm step any more, it is repeated, as long as each
        is less than half as old as the one before.
        """
        copied: Ready | None = None
        least = inf
        for _ in range(ROUNDS):
            await self.membership.acquaint()
            await self.membership.greet_all()
            if not self._donors(own, drifted):
                if copied is None and self._believed(own, drifted):
                    # No copy is needed: what is here of one has come for nothing.
                    await _remove(self.folder)
                return copied
            try:
                copied = await self._copy(own, form, drifted)
            except (LinkLost, CheckpointError, TrainerError, DiskFull) as error:
                self.warn("state-not-copied", f"the state of others could not be copied: {error}")
                if copied is not None:
                    return copied
                continue
            own, drifted = copied.swarm_step, False
            await self.membership.greet_all()
            behind = _reached(self._believed(own, drifted)) - own
            if behind <= self._jump or behind > least:
                return copied
            least = behind // 2
            self.warn(
                "state-old",
                f"the state that was copied is {behind} swarm steps old by now: copying it again",
            )
        if copied is None:
            self.warn(
                "no-donor",
                "no peer could hand over its state: training begins from our own, and merges bring "
                "it closer",
            )
        return copied

    @property
    def _sync(self) -> SyncSettings:
        return self.run.spec.sync

    @property
    def _jump(self) -> int:
        """Swarm steps ahead of all others that are believed."""
        return largest_jump(self._sync.interval)

    def _donors(self, own: int, drifted: bool) -> list[PeerInfo]:
        """The peers where the swarm is, at random; none unless that is far ahead, or we drift."""
        believed, lag = self._believed(own, drifted), tolerated_lag(self._sync)
        reached = _reached(believed)
        # Nobody merges any more with peers that have finished.
        is_over = not own and all(info.phase is Phase.FINISHED for info in believed)
        if not drifted and reached <= own + (0 if is_over else lag):
            return []
        near = [info for info in believed if abs(info.swarm_step - reached) <= lag]
        # Only those of our cell hold the slow weights that ours must equal.
        near = [info for info in near if self.membership.roster.in_cell(info.peer_id)] or near
        return Random().sample(near, len(near))  # so that not all joiners ask the same one

    def _believed(self, own: int, drifted: bool) -> list[PeerInfo]:
        """The peers with a plausible swarm step, as far as the others support it."""
        if self._sync.group == 1:
            return []
        there = self.membership.donors()
        # To a peer that has drifted, honest contributions look implausible, so it may distrust
        # every peer. Then it considers all of them.
        known = [info for info in there if self.trusts(info.peer_id)] or (there if drifted else [])
        # No single peer can lead us far ahead of all others; a sole peer must be believed. Our own
        # step supports no claim if we drift, since most others do not believe it.
        ours = 0 if drifted else own

        def is_believed(info: PeerInfo) -> bool:
            others = [other.swarm_step for other in known if other is not info]
            return not others or is_supported(info.swarm_step, ours, others, self._jump)

        return [info for info in known if is_believed(info)]

    async def _is_plausible(self, donor: PeerInfo, swarm_step: int) -> bool:
        """Whether a snapshot may be of this swarm step; its donor may have trained on since."""
        if swarm_step <= donor.swarm_step + self._jump:
            return True
        await self.membership.greet_all()
        newest = self.membership.roster.get(donor.peer_id, time()) or donor
        return swarm_step <= newest.swarm_step + self._jump

    async def _copy(self, own: int, form: StateForm, drifted: bool) -> Ready:
        self.disk_quota.require(form.size, "The state of a peer", part=self.folder / "state")
        self.show("looking at what is here of the swarm's state")
        warn = partial(self.warn, "donor-left-out")
        download = StateDownload(self.folder, form, self._sync, Random(), self._is_plausible, warn)
        donors = partial(self._donors, own, drifted)
        fetch = Fetch(self.channels, download, donors, self.down, warn)
        try:
            await asyncio.to_thread(download.load)
            await fetch.run(lambda text: self.show(f"copying the state of the swarm: {text}"))
        finally:
            download.close()
        self.show("checking the state and loading it")
        # A peer that drifted ahead of all others goes back to their step: they would never believe
        # its own.
        base = download.base
        back = drifted and base is not None and base.swarm_step + self._jump < own
        try:
            ready = await self.trainer.ask(Adopt(folder=str(self.folder), back=back))
        except TrainerError:  # the copy is unusable
            await _remove(self.folder)
            raise
        await _remove(self.folder)
        given, received = tuple(download.peers), fetch.bytes_received
        self.tell(StateAdopted(donors=given, swarm_step=ready.swarm_step, bytes=received))
        return ready


@dataclass(frozen=True, kw_only=True)
class Gatherer:
    """Fetches slow weights of peers of one run."""

    form: StateForm
    sync: SyncSettings
    channels: Channels
    down: BandwidthLimit
    disk_quota: DiskQuota

    async def gather(
        self, peers: Sequence[PeerInfo], own: int, folder: Path, seconds: float
    ) -> Gathered:
        """The slow weights of the peers nearest to swarm step ``own``, at most three, as far as
        they come within ``seconds``. ``folder`` is emptied first."""
        near = sorted(peers, key=lambda info: abs(info.swarm_step - own))[:MOST_GATHERED]
        await _remove(folder)
        folder.mkdir(parents=True)
        if not near:
            return Gathered(folder=str(folder), missing="no peer trains beside this node now")
        try:
            self.disk_quota.require(len(near) * self.form.size, "The state of peers")
        except DiskFull as error:
            return Gathered(folder=str(folder), missing=str(error))
        reasons = await asyncio.gather(*(self._one(info, folder, seconds) for info in near))
        came = dict(zip([info.peer_id for info in near], reasons, strict=True))
        return Gathered(
            folder=str(folder),
            peers=tuple(peer for peer, reason in came.items() if not reason),
            missing="; ".join(f"{peer[-6:]}: {reason}" for peer, reason in came.items() if reason),
        )

    async def _one(self, donor: PeerInfo, folder: Path, seconds: float) -> str:
        """Fetch one state. Returns why it has not come; empty if it has."""
        incoming = folder / f".{donor.peer_id}"
        download = StateDownload(incoming, self.form, self.sync, Random())
        try:
            async with asyncio.timeout(seconds):
                await asyncio.to_thread(download.load)
                await Fetch(self.channels, download, lambda: [donor], self.down).run()
                await asyncio.to_thread(_keep_slow, incoming, self.form)
                (incoming / "slow").rename(folder / donor.peer_id)
        except TimeoutError:
            return "it was too slow"
        except NodeError as error:
            return str(error)
        finally:
            download.close()
            await _remove(incoming)
        return ""


async def _remove(folder: Path) -> None:
    """Remove a folder, on a thread: whole states take a while."""
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _keep_slow(folder: Path, form: StateForm) -> None:
    """Copy the slow weights of all pieces, which come in the order of the values."""
    with (folder / "state").open("rb") as source, (folder / "slow").open("wb") as target:
        for piece, offset in zip(form.pieces, form.offsets, strict=True):
            fast, slow = (4 * count for count in piece.counts[:2])
            source.seek(offset + fast)
            target.write(source.read(slow))
