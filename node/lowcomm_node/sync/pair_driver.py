"""An exchange of two at this node: both send their whole contribution, and a part of it again where
it must be."""

from functools import partial
from typing import Any, ClassVar

from lowcomm_node.node.messages import Part, Resend
from lowcomm_node.sync import frames
from lowcomm_node.sync.driver import ExchangeDriver
from lowcomm_node.sync.link import ContentLink, Incoming, PairLink
from lowcomm_protocol.errors import LowcommError, ProtocolViolation
from lowcomm_protocol.exchange import events
from lowcomm_protocol.messages import exchange_pb2 as pb


class PairDriver(ExchangeDriver):
    """Carries out a ``pair`` exchange. Its slots: our contribution, and theirs."""

    LINK: ClassVar[type[ContentLink]] = PairLink
    most = 0
    """Most bytes that one contribution may have."""
    _due: tuple[int, int] | None = None
    """Fewest and most bytes of what is to come next from the partner."""

    @property
    def expected(self) -> int:
        return 2 * (self.shared.sizes[0] if self.shared else self.most)

    async def _read(self, link: PairLink) -> None:
        await self._until(self._members_known)
        await link.read(self._place, partial(self._take_in, link), partial(self._hear, link))

    async def _place(self, content: pb.Content) -> tuple[memoryview, int]:
        """Memory for the partner's contribution or its resent blocks, and its fewest bytes."""
        due, self._due = self._due, None
        if due is None:
            raise ProtocolViolation("began a second contribution")
        least, most = due
        return self.arena.view(self.slots[1], most), least

    async def _take_in(self, link: PairLink, content: Incoming) -> None:
        """Have a contribution decoded, or what of it came again; ask for what is missing still."""
        self.arrived(link.peer)
        await self._until(self._captured)
        part, place = Part.AGAIN if link.awaits_more else Part.WHOLE, self.slots[1]
        again = await self.decode(part, link.peer, slot=place, offset=0, size=content.size)
        link.awaits_more = again is not None
        if again is not None:
            self._due = again.least, again.most
            await link.send(pb.Frame(resend=pb.Resend(blocks=again.blocks)))
            return
        self.note("decoded")
        self.tell(events.WholeContribution(peer=link.peer))

    def _hear(self, link: PairLink, frame: pb.Frame) -> None:
        if frame.WhichOneof("kind") == "resend":
            self._start(self._resend(link, frame.resend.blocks))
        else:
            self.tell(frames.message_of(link.peer, frame))

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
        least, self.most = self.ready.sizes[self.fragment]
        if self.one.realign:
            least = self.most = self.ready.realign_sizes[self.fragment]
        self._due = least, self.most
