"""An exchange of two at this node: both send their whole contribution, and a part of it again where
it must be."""

from functools import partial
from typing import Any, ClassVar

from lowcomm_node.node.messages import Part, Resend, Retransmit
from lowcomm_node.sync import frames
from lowcomm_node.sync.driver import ExchangeDriver
from lowcomm_node.sync.link import Link, PairLink
from lowcomm_protocol.errors import LowcommError, ProtocolViolation
from lowcomm_protocol.exchange import events


class PairDriver(ExchangeDriver):
    """Carries out a ``pair`` exchange. Its slots: our contribution, and theirs."""

    LINK: ClassVar[type[Link]] = PairLink
    least = most = 0
    """Fewest and most bytes that one contribution may have."""

    @property
    def expected(self) -> int:
        return 2 * (self.shared.sizes[0] if self.shared else self.most)

    async def _read(self, link: PairLink) -> None:
        await self._until(self._members_known)
        peer, slot = link.peer, self.slots[1]
        await link.read(
            self.arena.view(slot, self.most),
            self.least,
            partial(self._take_in, peer, slot),
            lambda blocks: self._start(self._resend(link, blocks)) and None,
            lambda frame: self.tell(frames.message_of(peer, frame)),
        )

    async def _take_in(self, peer: str, slot: int, size: int, again: bool) -> Retransmit | None:
        """Have a contribution decoded, or what of it came again; what is missing still."""
        self.arrived(peer)
        await self._until(self._captured)
        part = Part.AGAIN if again else Part.WHOLE
        missing = await self.decode(part, peer, slot=slot, offset=0, size=size)
        if missing is None:
            self.note("decoded")
            self.tell(events.WholeContribution(peer=peer))
        return missing

    async def _effect(self, effect: Any) -> None:
        link = self.links[effect.peer]
        if not isinstance(effect, events.WholeContribution):
            await link.send(frames.frame_of(effect))
            return
        assert self.shared is not None
        (size,), (digest,) = self.shared.sizes, self.shared.digests
        await link.send_content(self.arena.view(self.slots[0], size), digest)

    async def _resend(self, link: PairLink, blocks: bytes) -> None:
        """Send blocks of our contribution again, from the slot that it lay in."""
        slot = self.slots[0]
        try:
            if self.shared is None or link.bytes_sent < self.shared.sizes[0]:
                raise ProtocolViolation("asked for what was not sent yet")
            resent = await self.trainer.ask(
                Resend(fragment=self.fragment, blocks=blocks, slot=slot)
            )
            await link.send_content(self.arena.view(slot, resent.size), resent.digest)
        except LowcommError as error:
            self.lose(link.peer, error)

    def _prepare(self) -> None:
        self.least, self.most = self.ready.sizes[self.fragment]
        if self.one.realign:
            self.least = self.most = self.ready.realign_sizes[self.fragment]

    async def _prepare_missed(self) -> None:
        """Do nothing: in a pair nobody hands over steps."""
