"""A trainer of bytes in place of tensors; a test holds its requests or lets them fail."""

import asyncio
import os
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

from lowcomm_node.errors import TrainerError
from lowcomm_node.node.ipc import Arena, content_hash, create_file
from lowcomm_node.node.messages import Again, Captured, Merged, Reduced, Shared
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
        self.again: Again | None = None
        """What the next contribution is asked for again."""
        self.bend: Callable[[Captured], Captured] = lambda captured: captured
        """What is told of a capture, when it is not the truth."""
        self.swarm_step = self.steps = self.tokens = 0
        self._blake3: dict[int, bool] = {}
        """By fragment: what digests are in its exchange."""
        self._contributions: dict[int, dict[str, bytes]] = {}
        self._shared_out: dict[int, SharedOut] = {}
        self._turn = asyncio.Lock()  # like the real one it answers in the order of asking

    async def capture(
        self,
        fragment: int,
        slot: int,
        realign: bool,
        ahead: int,
        blake3: bool = False,
        apart: int = 0,
    ) -> Captured:
        """See Trainer."""
        await self._asked("capture")
        assert fragment not in self._contributions, "captured twice"
        self.captures[fragment] += 1
        size = REALIGN_SIZE if realign else self.size
        data = contribution(self.peer_id, fragment, self.captures[fragment], size)
        self._view(slot, size)[:] = data
        self._contributions[fragment] = {self.peer_id: data}
        self._blake3[fragment] = blake3
        digest = self._digest(fragment, data)
        return self.bend(Captured(size=size, digest=digest, steps=self.steps))

    async def receive(self, fragment: int, peer: str, slot: int, size: int) -> Again | None:
        """See Trainer."""
        await self._asked("receive")
        self._contributions[fragment][peer] = bytes(self._view(slot, size))
        again, self.again = self.again, None
        return again

    async def resend(self, fragment: int, blocks: bytes, slot: int) -> tuple[int, bytes]:
        """See Trainer."""
        await self._asked("resend")
        data = b"again" + blocks
        self._view(slot, len(data))[:] = data
        return len(data), self._digest(fragment, data)

    async def patch(self, fragment: int, peer: str, slot: int, size: int) -> None:
        """See Trainer."""
        await self._asked("patch")
        self._contributions[fragment][peer] += bytes(self._view(slot, size))

    async def share(
        self,
        fragment: int,
        slot: int,
        realign: bool,
        members: tuple[str, ...],
        ahead: int,
        blake3: bool = False,
    ) -> Shared:
        """See Trainer."""
        await self._asked("share")
        assert fragment not in self._shared_out, "captured twice"
        self.captures[fragment] += 1
        sizes = shard_sizes("fp32" if realign else self.codec_name, self.numel, len(members))
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
        self._view(slot, len(data))[:] = data
        self._blake3[fragment] = blake3
        digests = tuple(self._digest(fragment, share) for share in shares)
        return Shared(sizes=tuple(map(len, shares)), digests=digests, steps=self.steps)

    async def receive_share(
        self, fragment: int, peer: str, slot: int, offset: int, size: int
    ) -> None:
        """See Trainer."""
        await self._asked("receive_share", peer)
        self._shared(fragment).received[peer] = bytes(self._view(slot, offset + size)[offset:])

    async def reduce(
        self, fragment: int, tokens: dict[str, int], slot: int, offset: int
    ) -> Reduced:
        """See Trainer."""
        await self._asked("reduce")
        one = self._shared(fragment)
        mean = mean_of(self.peer_id, {peer: one.received[peer] for peer in tokens})
        self._view(slot, offset + len(mean))[offset:] = mean
        one.means[self.peer_id] = mean
        return Reduced(size=len(mean), digest=self._digest(fragment, mean), refused={})

    async def receive_mean(
        self, fragment: int, owner: str, slot: int, offset: int, size: int
    ) -> None:
        """See Trainer."""
        await self._asked("receive_mean", owner)
        self._shared(fragment).means[owner] = bytes(self._view(slot, offset + size)[offset:])

    async def missed(self, fragment: int, steps: int, slot: int, offset: int) -> tuple[int, bytes]:
        """See Trainer."""
        await self._asked("missed")
        data = b"step " * steps
        self._view(slot, offset + len(data))[offset:] = data
        return len(data), self._digest(fragment, data)

    async def take_over(
        self,
        fragment: int,
        steps: int,
        place: tuple[int, int, int],
        digests: tuple[str, str],
    ) -> None:
        """See Trainer."""
        await self._asked("take_over")
        slot, offset, size = place
        self.taken_over.append((bytes(self._view(slot, offset + size)[offset:]), digests))

    async def merge(
        self,
        fragment: int,
        over: dict[str, int] | list[str],
        swarm_step: int,
        keep_momentum: bool = False,
    ) -> Merged:
        """See Trainer."""
        await self._asked("merge")
        if isinstance(over, dict):
            self.merges.append(Merge(fragment, self._contributions.pop(fragment), over, swarm_step))
        else:
            means = self._shared_out.pop(fragment).means
            self.merges.append(
                Merge(fragment, {owner: means[owner] for owner in over}, {}, swarm_step)
            )
        self.swarm_step = max(self.swarm_step, swarm_step)
        return Merged(
            swarm_step=self.swarm_step,
            merged_steps=self.steps,
            merged_tokens=self.tokens,
            slow_digest="33" * 32,
        )

    async def drop(self, fragment: int) -> None:
        """See Trainer."""
        await self._asked("drop")
        self._contributions.pop(fragment, None)
        self._shared_out.pop(fragment, None)

    async def _asked(self, name: str, peer: str = "") -> None:
        self.asked.append(name)
        async with self._turn:
            await self.holds[name].wait()
        for key in (name, name + peer):
            if key in self.errors:
                raise self.errors[key]

    def _digest(self, fragment: int, data: bytes) -> bytes:
        hashed = content_hash(self._blake3[fragment])
        hashed.update(data)
        return hashed.digest()

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
