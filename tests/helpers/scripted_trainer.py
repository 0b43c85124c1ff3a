"""A trainer of bytes in place of tensors; a test holds its requests or lets them fail."""

import asyncio
import os
from collections import Counter, defaultdict
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from blake3 import blake3

from lowcomm_node.errors import TrainerError
from lowcomm_node.node import messages
from lowcomm_node.node.ipc import Arena, create_file
from lowcomm_node.node.messages import (
    Done,
    OuterStepApplied,
    Part,
    Received,
    Resent,
    Retransmit,
    ShardAveraged,
    Shared,
)
from lowcomm_protocol.codecs import codec
from lowcomm_protocol.codecs.shards import shard_bounds

SIZE = 512 * 1024 + 77
"""Bytes of a contribution in a pair: a few chunks."""
REALIGN_SIZE = SIZE + 5


def contribution(peer: str, fragment: int, number: int, size: int) -> bytes:
    """The bytes of a peer's contribution, the ``number``-th of a fragment."""
    block = sha256(f"{peer}/{fragment}/{number}".encode()).digest()
    return (block * (size // len(block) + 1))[:size]


def mean_of(owner: str, contributions: dict[str, bytes]) -> bytes:
    """In place of the mean of a shard: bytes that depend on every contribution."""
    told = sha256()
    for peer in sorted(contributions):
        told.update(peer.encode() + contributions[peer])
    size = len(next(iter(contributions.values())))
    return contribution(f"{owner}/{told.hexdigest()}", 0, 0, size)


@dataclass(frozen=True)
class Merge:
    """What a trainer was asked to merge."""

    fragment: int
    contributions: dict[str, bytes]
    """In a pair what both brought; in a group the means of the applied shards, by owner."""
    tokens: dict[str, int]
    swarm_step: int


@dataclass
class SharedOut:
    """A fragment that a group shares out."""

    members: tuple[str, ...]
    sizes: tuple[int, ...]
    ours: bytes
    """Our contribution to our own shard."""
    received: dict[str, bytes]
    means: dict[str, bytes]


class ScriptedTrainer:
    """In place of ``Trainer``: a test holds it, and lets it fail, where it likes."""

    def __init__(self, peer_id: str, slots: int, size: int, codec_name: str, numel: int) -> None:
        self.peer_id = peer_id
        self.size = size
        self.codec_name = codec_name
        self.numel = numel
        memory = create_file()
        self.arena: Arena | None = Arena(
            memory, slots, max(size, REALIGN_SIZE, 4 * numel + 8 * 4 * 256)
        )
        os.close(memory)
        self.asked: list[str] = []
        self.holds: defaultdict[str, asyncio.Event] = defaultdict(set_event)
        self.errors: dict[str, Exception] = {}
        """By the name of a request, or by that and a peer's id."""
        self.captures: Counter[int] = Counter()
        self.merges: list[Merge] = []
        self.taken_over: list[tuple[bytes, tuple[str, str]]] = []
        """Steps that it lacked, and the digests that they lead to."""
        self.near = b""
        """Steps of blocks that another cell is asked for."""
        self.taken: list[bytes] = []
        """Slow weights of other cells."""
        self.again: Retransmit | None = None
        """What the next contribution is asked for again."""
        self.swarm_step = self.steps = self.tokens = 0
        """By fragment: what digests are in its exchange."""
        self._contributions: dict[int, dict[str, bytes]] = {}
        self._shared_out: dict[int, SharedOut] = {}
        self._turn = asyncio.Lock()  # like the real one it answers in the order of asking

    async def ask(self, request: Any, deadline: float | None = None) -> Any:
        """Answer as the real one does. A test knows what is asked by the name of its method."""
        match request:
            case messages.Receive(part=Part.WHOLE):
                return await self.receive(request)
            case messages.Receive(part=Part.AGAIN):
                return await self.patch(request)
            case messages.Receive(part=Part.SHARE):
                return await self.receive_share(request)
            case messages.Receive():
                return await self.receive_mean(request)
            case messages.CaptureContribution(members=()):
                return await self.capture(request)
            case messages.CaptureContribution():
                return await self.share(request)
        return await getattr(self, request.wire_name.replace("-", "_"))(request)

    async def capture(self, request: messages.CaptureContribution) -> Shared:
        await self._asked("capture")
        fragment = request.fragment
        assert fragment not in self._contributions, "captured twice"
        self.captures[fragment] += 1
        size = REALIGN_SIZE if request.realign else self.size
        data = contribution(self.peer_id, fragment, self.captures[fragment], size)
        self._view(request.slot, size)[:] = data
        self._contributions[fragment] = {self.peer_id: data}
        digest = blake3(data).digest()
        return Shared(sizes=(size,), digests=(digest,), steps=self.steps)

    async def receive(self, request: messages.Receive) -> Received:
        await self._asked("receive")
        brought = bytes(self._view(request.slot, request.size))
        self._contributions[request.fragment][request.peer] = brought
        again, self.again = self.again, None
        return Received(again=again)

    async def resend(self, request: messages.Resend) -> Resent:
        await self._asked("resend")
        data = b"again" + request.blocks
        self._view(request.slot, len(data))[:] = data
        return Resent(size=len(data), digest=blake3(data).digest())

    async def patch(self, request: messages.Receive) -> Received:
        await self._asked("patch")
        brought = bytes(self._view(request.slot, request.size))
        self._contributions[request.fragment][request.peer] += brought
        return Received(again=None)

    async def share(self, request: messages.CaptureContribution) -> Shared:
        await self._asked("share")
        fragment, members = request.fragment, request.members
        assert fragment not in self._shared_out, "captured twice"
        self.captures[fragment] += 1
        sizes = shard_sizes(
            "fp32" if request.realign else self.codec_name, self.numel, len(members)
        )
        shares = [
            contribution(f"{self.peer_id}>{owner}", fragment, self.captures[fragment], size)
            for owner, size in zip(members, sizes, strict=True)
        ]
        mine = members.index(self.peer_id)
        self._shared_out[fragment] = SharedOut(
            members, sizes, shares[mine], {self.peer_id: shares[mine]}, {}
        )
        shares[mine] = b""
        data = b"".join(shares)
        self._view(request.slot, len(data))[:] = data
        digests = tuple(blake3(share).digest() for share in shares)
        sent = tuple(map(len, shares))
        return Shared(sizes=sent, digests=digests, steps=self.steps, near=self.near)

    async def give_slow(self, request: messages.GiveSlow) -> Resent:
        await self._asked("give_slow")
        data = self.slow_from(request.start, len(request.codes))
        self._view(request.slot, len(data))[:] = data
        return Resent(size=len(data), digest=blake3(data).digest())

    def slow_from(self, start: int, blocks: int) -> bytes:
        """In place of its slow weights."""
        return f"{blocks} blocks of {self.peer_id} from {start}".encode()

    async def take_slow(self, request: messages.TakeSlow) -> Done:
        await self._asked("take_slow")
        self.taken.append(self._place(request))
        return Done()

    async def receive_share(self, request: messages.Receive) -> Received:
        await self._asked("receive_share", request.peer)
        self._shared(request.fragment).received[request.peer] = self._place(request)
        return Received(again=None)

    async def reduce(self, request: messages.AverageShard) -> ShardAveraged:
        await self._asked("reduce")
        one = self._shared(request.fragment)
        mean = mean_of(self.peer_id, {peer: one.received[peer] for peer in request.tokens})
        self._view(request.slot, request.offset + len(mean))[request.offset :] = mean
        one.means[self.peer_id] = mean
        return ShardAveraged(size=len(mean), digest=blake3(mean).digest(), refused={})

    async def receive_mean(self, request: messages.Receive) -> Received:
        await self._asked("receive_mean", request.peer)
        self._shared(request.fragment).means[request.peer] = self._place(request)
        return Received(again=None)

    async def missed(self, request: messages.WriteOuterSteps) -> Resent:
        await self._asked("missed")
        data = b"step " * request.steps
        self._view(request.slot, request.offset + len(data))[request.offset :] = data
        return Resent(size=len(data), digest=blake3(data).digest())

    async def take_over(self, request: messages.TakeOver) -> Done:
        await self._asked("take_over")
        digests = request.slow_digest, request.momentum_digest
        self.taken_over.append((self._place(request), digests))
        return Done()

    async def merge(self, request: messages.Merge) -> OuterStepApplied:
        await self._asked("merge")
        fragment, over, swarm_step = request.fragment, request.over, request.swarm_step
        if fragment in self._contributions:
            brought = self._contributions.pop(fragment)
            self.merges.append(Merge(fragment, brought, dict(over), swarm_step))
        else:
            means = self._shared_out.pop(fragment).means
            self.merges.append(
                Merge(fragment, {owner: means[owner] for owner in over}, {}, swarm_step)
            )
        self.swarm_step = max(self.swarm_step, swarm_step)
        return OuterStepApplied(
            swarm_step=self.swarm_step,
            merged_steps=self.steps,
            merged_tokens=self.tokens,
            slow_digest="33" * 32,
        )

    async def drop(self, request: messages.Drop) -> Done:
        await self._asked("drop")
        self._contributions.pop(request.fragment, None)
        self._shared_out.pop(request.fragment, None)
        return Done()

    def _place(self, request: messages.Receive | messages.TakeOver | messages.TakeSlow) -> bytes:
        return bytes(self._view(request.slot, request.offset + request.size)[request.offset :])

    async def _asked(self, name: str, peer: str = "") -> None:
        self.asked.append(name)
        async with self._turn:
            await self.holds[name].wait()
        for key in (name, name + peer):
            if key in self.errors:
                raise self.errors[key]

    def _shared(self, fragment: int) -> SharedOut:
        if fragment not in self._shared_out:
            raise TrainerError("it is not captured any more")
        return self._shared_out[fragment]

    def _view(self, slot: int, size: int) -> memoryview:
        assert self.arena is not None
        return self.arena.view(slot, size)


def shard_sizes(codec_name: str, numel: int, count: int) -> tuple[int, ...]:
    """Coded bytes of each shard."""
    return tuple(
        codec(codec_name).coded_size(stop - start) for start, stop in shard_bounds(numel, count)
    )


def set_event() -> asyncio.Event:
    """An event that is set: what waits for it goes on until a test clears it."""
    event = asyncio.Event()
    event.set()
    return event
