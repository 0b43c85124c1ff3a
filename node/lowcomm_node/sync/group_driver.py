"""An exchange of a group at this node: everybody averages one shard, and sends the mean to the
others.

Three slots hold it, however many take part. Members and shards are in the same, sorted order:

    shares    our contribution to the shard of each other member, one after the other
    received  the contributions of the others to our shard, each at the place of its sender
    means     the means of all shards, each at the place of its owner; ours, too

All contributions to our shard are of one size; so are all copies of a mean. A size that differs is
refused unread."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, ClassVar

import grpc

from lowcomm_node.errors import LinkLost, TrainerError, Unusable
from lowcomm_node.node import messages
from lowcomm_node.sync import cells, frames
from lowcomm_node.sync.driver import ExchangeDriver
from lowcomm_node.sync.link import ContentLink, GroupLink, Incoming
from lowcomm_node.system.logs import log
from lowcomm_protocol.codecs import codec
from lowcomm_protocol.codecs.nearby import largest
from lowcomm_protocol.codecs.shards import shard_bounds
from lowcomm_protocol.errors import MAX_REASON, LowcommError
from lowcomm_protocol.exchange import events
from lowcomm_protocol.exchange import group as groups
from lowcomm_protocol.matching import lot
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.spec.names import codec_of_offer

PATIENCE = 0.5
"""Share of the time that an exchange has taken so far for which a mean waits for slow weights of
another cell."""


class GroupDriver(ExchangeDriver):
    """Carries out a ``group`` exchange."""

    LINK: ClassVar[type[ContentLink]] = GroupLink
    sizes: tuple[int, ...] = ()
    """Coded bytes of each shard."""
    _mean: tuple[int, bytes] | None = None
    """Size and digest of the mean of our shard."""
    _missed: tuple[int, bytes] | None = None
    """The same of outer steps that a member lacks."""
    _reading: asyncio.Task[None] | None = None
    """Reads slow weights of another cell."""

    @property
    def mine(self) -> int:
        """Which shard is ours."""
        return self.one.members.index(self.peer.me)

    @property
    def expected(self) -> int:
        if not self.sizes:
            return 0
        # A contribution to each other shard and the mean of ours to each other member: so much goes
        # out, and comes in.
        return 2 * (sum(self.sizes) + (len(self.sizes) - 2) * self.sizes[self.mine])

    # what comes

    async def _read(self, link: GroupLink) -> None:
        peer = link.peer
        await link.read(
            partial(self._place, peer),
            partial(self._take_in, peer),
            lambda frame: self.tell(frames.message_of(peer, frame)),
        )

    async def _place(self, peer: str, content: pb.Content) -> tuple[memoryview, int]:
        """Memory for a member's share, its mean, or missed outer steps, and its fewest bytes."""
        await self._until(self._members_known)
        if peer not in self.one.members:
            raise LinkLost("is not in the list of members")
        if content.part == pb.MISSED:
            return self._room_for_missed(peer), 1
        _, received, means = self.slots
        is_share = content.part == pb.SHARE
        place = self._share_of(peer) if is_share else self._mean_of(peer)
        shard = self.mine if is_share else self.one.members.index(peer)
        if content.size == self._sizes(not self.one.realign)[shard] != place[1]:
            # A third may have offered the two of us different slow weights.
            raise LinkLost("sees in another way than we whether all realign")
        return self._view(received if is_share else means, *place), place[1]

    def _room_for_missed(self, peer: str) -> memoryview:
        """Where the steps go that we lack: beside our contributions to others, in a slot that a
        realignment would fill."""
        lacking = self.one.lacking
        if lacking is None or lacking.donors.get(self.peer.me) != peer:
            # A third may have offered the two of us different slow weights.
            raise LinkLost("hands over outer steps that we do not lack")
        at = sum(self.sizes)
        return self._view(self.slots[0], at, self.arena.slot_bytes - at)

    async def _take_over(self, peer: str, size: int) -> None:
        lacking = self.one.lacking
        assert lacking is not None
        with self.working():
            await self.trainer.ask(
                messages.TakeOver(
                    fragment=self.fragment,
                    steps=lacking.steps[self.peer.me],
                    slot=self.slots[0],
                    offset=sum(self.sizes),
                    size=size,
                    slow_digest=lacking.slow_digest.hex(),
                    momentum_digest=lacking.momentum_digest.hex(),
                )
            )
        self.tell(events.MissedSteps(peer=peer))

    async def _take_in(self, peer: str, content: Incoming) -> None:
        if content.part != pb.MISSED:
            self.arrived(peer)
        await self._until(self._captured)
        _, received, means = self.slots
        if content.part == pb.MISSED:
            await self._take_over(peer, content.size)
        elif content.part == pb.SHARE:
            if peer not in self.one.muted:
                await self._receive(peer, received)
            self.tell(events.Shard(peer=peer))
        else:
            offset, size = self._mean_of(peer)
            await self.decode(messages.Part.MEAN, peer, slot=means, offset=offset, size=size)
            self.note("decoded")
            self.tell(events.ShardMean(peer=peer, digest=content.digest))

    async def _receive(self, peer: str, received: int) -> None:
        offset, size = self._share_of(peer)
        try:
            await self.decode(messages.Part.SHARE, peer, slot=received, offset=offset, size=size)
        except Unusable as error:
            if len(self.one.members) < groups.OUTVOTE:
                raise
            self.tell(events.Unused(peer=peer, reason=str(error)[:MAX_REASON], deed=error.deed))
        self.note("decoded")

    # what goes

    async def _effect(self, effect: Any) -> None:
        if isinstance(effect, events.Reduce):
            await self._reduce(effect.contributors)
            return
        link = self.links[effect.peer]
        match effect:
            case events.MissedSteps():
                if self._missed is None:
                    raise LinkLost("lacks outer steps that we have not kept")
                size, digest = self._missed
                data = self._view(self.slots[0], sum(self.sizes), size)
                await link.send_content(data, digest, pb.MISSED)
            case events.Shard(peer=peer):
                assert self.shared is not None
                shard, sizes = self.one.members.index(peer), self.shared.sizes
                data = self._view(self.slots[0], sum(sizes[:shard]), sizes[shard])
                await link.send_content(data, self.shared.digests[shard], pb.SHARE)
            case events.ShardMean():
                assert self._mean is not None
                place, digest = self._mean_of(self.peer.me), self._mean[1]
                data = self._view(self.slots[2], *place)
                await link.send_content(data, digest, pb.MEAN)
            case _:
                await link.send(frames.frame_of(effect))

    async def _reduce(self, contributors: Sequence[str]) -> None:
        if self._reading is not None:  # it began with the shares, and is of their size
            patience = PATIENCE * (monotonic() - self.one.began)
            await asyncio.wait({self._reading}, timeout=patience)
        offset, _ = self._mean_of(self.peer.me)
        used = [peer for peer in contributors if peer not in self.one.muted]
        try:
            with self.working():
                mean = await self.trainer.ask(
                    messages.AverageShard(
                        fragment=self.fragment,
                        tokens=self._tokens(used),
                        slot=self.slots[2],
                        offset=offset,
                    )
                )
        except TrainerError as error:
            why = f"our shard could not be averaged: {error}"
            self.tell(events.GaveUp(reason=why, cause=events.Cause.OWN_FAULT))
            return
        self._mean = mean.size, mean.digest
        self.tell(events.Reduced(digest=mean.digest))
        for peer, why in mean.left_out.items():
            self.lose(peer, why)

    # our contribution, and the end

    def _prepare(self) -> None:
        self.sizes = self._sizes(self.one.realign)

    def _sizes(self, realign: bool) -> tuple[int, ...]:
        coding = codec("fp32" if realign else codec_of_offer(self.one.offer.codec))
        bounds = shard_bounds(self.ready.numels[self.fragment], len(self.one.members))
        return tuple(coding.coded_size(stop - start) for start, stop in bounds)

    async def _prepare_missed(self) -> None:
        if (lacking := self.one.lacking) is not None:
            for peer in lacking.receivers(self.peer.me):
                await self._write_missed(lacking.steps[peer])
        if self.shared is not None and self.shared.near:
            self._reading = self._start(self._read_another_cell(self.shared.near))

    # another cell

    async def _read_another_cell(self, near: bytes) -> None:
        """Bring slow weights of another cell, in our shard, to the trainer, if they come in
        time."""
        others, where = self.exchanger.around.of_other_cells(), self.one.offer
        if not others:
            return
        start, stop = shard_bounds(self.ready.numels[self.fragment], len(self.sizes))[self.mine]
        place = f"{self.peer.me}/{where.fragment}/{where.round}"
        giver = min(others, key=partial(lot, place))
        slot, size = self.slots[1], largest(stop - start)
        # Beside contributions to our shard: where ours would be, or behind them.
        at = self.mine if size <= self.sizes[self.mine] else len(self.sizes)
        offset = at * self.sizes[self.mine]
        into = self._view(slot, offset, size)
        ask = pb.Ask(fragment=self.fragment, start=start, codes=near)
        try:
            size = await cells.read(self.exchanger, giver, ask, into, self.one.deadline)
            with self.working():
                await self.trainer.ask(
                    messages.TakeSlow(fragment=self.fragment, slot=slot, offset=offset, size=size)
                )
            self.mixes = True
        except (LowcommError, grpc.RpcError) as error:
            log.info("cell.not_read", peer=giver, fragment=self.fragment, reason=str(error))

    async def _write_missed(self, steps: int) -> None:
        slot, offset = self.slots[0], sum(self.sizes)
        with suppress(TrainerError):
            written = await self.trainer.ask(
                messages.WriteOuterSteps(
                    fragment=self.fragment, steps=steps, slot=slot, offset=offset
                )
            )
            self._missed = written.size, written.digest

    # places in slots: offset and size

    def _share_of(self, peer: str) -> tuple[int, int]:
        size = self.sizes[self.mine]
        return self.one.members.index(peer) * size, size

    def _mean_of(self, peer: str) -> tuple[int, int]:
        shard = self.one.members.index(peer)
        return sum(self.sizes[:shard]), self.sizes[shard]

    def _view(self, slot: int, offset: int, size: int) -> memoryview:
        return self.arena.view(slot, offset + size)[offset:]
