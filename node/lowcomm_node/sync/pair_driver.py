"""An exchange of two at this node: both send their whole contribution, and a part of it again where
it must be."""

from functools import partial
from typing import Any

from lowcomm_node.net.stream import Stream
from lowcomm_node.node.messages import (
    CaptureContribution,
    Merge,
    OuterStepApplied,
    Part,
    Receive,
    Resend,
    Retransmit,
    Shared,
)
from lowcomm_node.sync.driver import ExchangeDriver, Station
from lowcomm_node.sync.link import PairLink
from lowcomm_protocol.errors import LowcommError, ProtocolViolation
from lowcomm_protocol.exchange import events
from lowcomm_protocol.exchange.underway import Underway


class PairDriver(ExchangeDriver):
    """Carries out a ``pair`` exchange. Its slots: our contribution, and theirs."""

    def __init__(self, station: Station, one: Underway) -> None:
        super().__init__(station, one)
        self.least = 0
        self.most = 0
        """Fewest and most bytes that one contribution may have."""
        self.content: Shared | None = None
        """Ours."""

    @property
    def expected(self) -> int:
        return 2 * (self.content.sizes[0] if self.content else self.most)

    def _link(self, peer: str, stream: Stream) -> PairLink:
        return PairLink(peer, stream, self.station.bandwidth, *self.pace_of(peer))

    async def _read(self, link: PairLink) -> None:
        await self._until(self._members_known)
        _, slot = self.slots
        await link.read(
            self.arena.view(slot, self.most),
            self.least,
            partial(self._take_in, link.peer, slot),
            lambda blocks: self._start(self._resend(link, blocks)) and None,
            lambda members: self.tell(events.Confirm(peer=link.peer, members=members)),
        )

    async def _take_in(self, peer: str, slot: int, size: int, again: bool) -> Retransmit | None:
        """Have a contribution decoded, or what of it came again; what is missing still."""
        self.arrived(peer)
        await self._until(self._captured)
        with self.working():
            part = Part.AGAIN if again else Part.WHOLE
            received = await self.trainer.ask(
                Receive(
                    fragment=self.fragment, part=part, peer=peer, slot=slot, offset=0, size=size
                )
            )
        if received.again is not None:
            return received.again
        self.note("decoded")
        self.tell(events.WholeContribution(peer=peer))
        return None

    async def _effect(self, effect: Any) -> None:
        link = self.links[effect.peer]
        match effect:
            case events.WholeContribution():
                assert self.content is not None
                (size,), (digest,) = self.content.sizes, self.content.digests
                data = self.arena.view(self.slots[0], size)
                await link.send_content(data, digest)
            case events.Confirm(members=members):
                await link.send_confirm(members)

    async def _resend(self, link: PairLink, blocks: bytes) -> None:
        """Send blocks of our contribution again, from the slot that it lay in."""
        try:
            if self.content is None or link.bytes_sent < self.content.sizes[0]:
                raise ProtocolViolation("asked for what was not sent yet")
            resent = await self.trainer.ask(
                Resend(fragment=self.fragment, blocks=blocks, slot=self.slots[0])
            )
            data = self.arena.view(self.slots[0], resent.size)
            await link.send_content(data, resent.digest)
        except LowcommError as error:
            self.lose(link.peer, error)

    def _prepare(self) -> None:
        self.least, self.most = self.station.ready.sizes[self.fragment]
        if self.one.realign:
            self.least = self.most = self.station.ready.realign_sizes[self.fragment]

    async def _code(self) -> None:
        one = self.one
        self.content = await self.trainer.ask(
            CaptureContribution(
                fragment=self.fragment,
                slot=self.slots[0],
                realign=one.realign,
                ahead=one.ahead,
                apart=one.apart,
            )
        )

    async def _merge(self, effect: events.Apply) -> OuterStepApplied:
        return await self.trainer.ask(
            Merge(
                fragment=self.fragment,
                swarm_step=effect.swarm_step,
                over=self._tokens(effect.members),
                keep_momentum=self.one.keep_momentum,
            )
        )
