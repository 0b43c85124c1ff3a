"""Between cells: each owner of a shard reads it from a peer of another cell, while its group
exchanges, and puts a part of the difference into the mean that it sends.

    reader ── ask: fragment, start, a step code for each block ──► giver
    reader ◄── content chunk* | refuse ────────────────────────── giver

All members of a cell hold the same slow weights, so any of them can give. A read that fails or
comes late costs nothing: the mean goes without it.
"""

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from lowcomm_node.errors import LinkLost, TrainerError
from lowcomm_node.net.stream import CalleeStream
from lowcomm_node.node import messages
from lowcomm_node.node.ipc import Arena
from lowcomm_node.sync import frames
from lowcomm_node.sync.link import ContentLink, Incoming
from lowcomm_node.system.tasks import in_time
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.matching import REFUSAL_TEXT, Refusal
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.spec.names import BLOCK

if TYPE_CHECKING:
    from lowcomm_node.node.process import Trainer
    from lowcomm_node.sync.exchanger import Exchanger

MAX_BLOCKS = 1 << 20
"""Most blocks that a peer asks for at once, so that their codes fit into a message to the
trainer."""


class CellLink(ContentLink):
    """The stream on which one content comes from another cell."""

    LAST = "slow weights"
    _NEXT: ClassVar[dict[str, set[str]]] = {"": {LAST, "refuse"}}


@dataclass
class Given:
    """What was given of a fragment since an outer step of it: as much as all of it, at most."""

    version: int
    """The number of outer steps."""
    peers: set[str] = field(default_factory=set[str])
    blocks: int = 0


class Giver:
    """Gives slow weights to other cells."""

    def __init__(self, exchanger: "Exchanger") -> None:
        self._exchanger = exchanger
        self._given: dict[int, Given] = {}
        """By fragment."""
        self._coding = asyncio.Lock()

    async def give(self, peer: str, stream: CalleeStream, ask: pb.Ask) -> None:
        """Answer what a peer of another cell asks for. Raises LinkLost, ProtocolViolation."""
        refusal = self._refusal(peer, ask)
        deadlines = self._exchanger.peer.budget.deadlines
        async with in_time(deadlines.longest, "did not take our slow weights in time"):
            if refusal is not None:
                await stream.send(frames.refuse(refusal))
                return
            _, trainer, arena = self._exchanger.trainer_now()  # it may end while we wait
            async with self._coding:
                data, digest = await self._code(ask, trainer, arena)
            # A reader that takes its time holds up no other one.
            link = ContentLink(peer, stream, self._exchanger.bandwidth)
            await link.send_content(memoryview(data), digest, pb.SLOW)

    async def _code(self, ask: pb.Ask, trainer: "Trainer", arena: Arena) -> tuple[bytes, bytes]:
        """The coded slow weights, and their digest. Raises LinkLost."""
        if not (slots := arena.take(1)):
            raise LinkLost("has no memory left to give from")
        request = messages.GiveSlow(
            fragment=ask.fragment, start=ask.start, codes=ask.codes, slot=slots[0]
        )
        try:
            given = await trainer.ask(request)
            return bytes(arena.view(slots[0], given.size)), given.digest
        except TrainerError as error:
            raise LinkLost(f"could not give its slow weights: {error}") from None
        finally:
            arena.give_back(slots[0])

    def _refusal(self, peer: str, ask: pb.Ask) -> Refusal | None:
        """Why we do not give; None counts it as given. Raises ProtocolViolation."""
        exchanger = self._exchanger
        schedule = exchanger.peer.position.schedule
        if not exchanger.exchanging or exchanger.peer.position.ready is None:
            return Refusal.NOT_TRAINING
        if ask.fragment >= len(schedule):
            return Refusal.UNKNOWN_FRAGMENT
        blocks = -(-exchanger.trainer_now()[0].numels[ask.fragment] // BLOCK)
        most = min(MAX_BLOCKS, blocks - ask.start // BLOCK)
        if ask.start % BLOCK or not 0 < len(ask.codes) <= most:
            raise ProtocolViolation(
                f"asked for {len(ask.codes)} blocks from value {ask.start} on, of {blocks} blocks"
            )
        version = schedule[ask.fragment].version
        given = self._given.get(ask.fragment)
        if given is None or given.version != version:
            given = self._given[ask.fragment] = Given(version)
        if peer in given.peers or given.blocks + len(ask.codes) > blocks:
            return Refusal.BUSY
        given.peers.add(peer)
        given.blocks += len(ask.codes)
        return None


async def read(
    exchanger: "Exchanger", peer: str, ask: pb.Ask, into: memoryview, seconds: float
) -> int:
    """Read slow weights of a peer of another cell into memory; bytes. Raises LinkLost,
    ProtocolViolation."""
    size = 0

    async def place(content: pb.Content) -> tuple[memoryview, int]:
        return into, 1

    async def on_content(content: Incoming) -> None:
        nonlocal size
        link.awaits_more, size = False, content.size

    def on_frame(frame: Any) -> None:
        reason = frames.read_refusal(frame.refuse)
        raise LinkLost(f"gives no slow weights: it {REFUSAL_TEXT[reason]}")

    async with in_time(seconds, "did not give its slow weights in time"):
        stream = await exchanger.call(peer)
        link = CellLink(peer, stream, exchanger.bandwidth)
        link.awaits_more = True  # of its content, which is the last that it says
        try:
            await stream.send(pb.Frame(ask=ask))
            await link.read(place, on_content, on_frame)
            await stream.close()
        except BaseException:
            stream.cancel()
            raise
    return size
