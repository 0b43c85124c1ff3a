"""The state of one exchange between capture and merge, and the outer steps that are kept after it.

In all kinds, ``sent`` is our contribution, ``mean_of`` gives the mean of all, and ``ranges`` are
where there is one. Vectors are flat, float32, in host memory. A kind of exchange has one class,
by `capture_for`, with all that the trainer must know of it.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Any, ClassVar, Generic, TypeVar
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from lowcomm_node.errors import TrainerError
from lowcomm_node.node.messages import Part, Retransmit
from lowcomm_node.system.tasks import Stages
from lowcomm_node.trainer.gpu import Landing
from lowcomm_node.trainer.judging import HEAVY, HEAVY_IN_PAIRS, Judge
from lowcomm_protocol.codecs import BLOCK, Coder, ShardCoder, coder, shard_coder
from lowcomm_protocol.codecs.base import Vector
from lowcomm_protocol.codecs.shards import Bounds, shard_bounds
from lowcomm_protocol.errors import CodecError, ImplausibleError, Offence
from lowcomm_protocol.exchange import kinds, outer
from lowcomm_protocol.exchange.robust import robust_mean
from lowcomm_protocol.spec.names import MAX_GROUP, Mean
from lowcomm_protocol.spec.sections import SyncSettings

Ranges = Sequence[tuple[int, int]]
Slow = tuple[Tensor, Tensor | None]
"""Slow weights, and outer momentum where any is kept."""
AnyCoder = TypeVar("AnyCoder", bound=Coder | ShardCoder)
FP32_BYTES = 4
HEAD = Struct("<BI")
EMPTY = torch.empty(0)
MIXED = 0.25
"""Share of the way to another cell's slow weights that an outer step goes; the momentum goes about
as far again. It is no longer than progress is, so a giver that lies does no more than a member."""


class Scratch:
    """Lends float32 vectors of at most ``numel`` values in host memory; any thread may ask.

    A fresh vector costs page faults, so they are used again as soon as nobody holds them or a view.
    """

    def __init__(
        self, numel: int, most_free: int, allocate: Callable[[int], Vector] | None = None
    ) -> None:
        """``most_free``: unused vectors that are kept."""
        self._numel = numel
        # NumPy asks for huge pages.
        self._allocate = allocate or (lambda numel: np.empty(numel, dtype=np.float32))
        self._free: deque[Vector] = deque(maxlen=most_free)

    def take(self, numel: int) -> Tensor:
        """A vector of ``numel`` arbitrary values; a larger one than we lend is new."""
        if numel > self._numel:
            return torch.empty(numel)
        try:
            memory = self._free.pop()  # the one that was used last
        except IndexError:
            memory = self._allocate(self._numel)
        lent = memory[:numel]
        # Tensors and arrays that share the memory hold this view, not the memory itself.
        finalize(lent, self._free.append, memory).atexit = False
        return torch.from_numpy(lent)


@dataclass(frozen=True)
class PastStep:
    """One outer step of a group, for members that have missed it.

    In bytes: the number of members (1), bit k for the k-th shard that was applied (4,
    little-endian), and the coded means of those shards, in their order.
    """

    members: int
    means: Sequence[tuple[int, bytes]]
    """Shards that were applied, and their coded means."""

    def pack(self) -> bytes:
        """In bytes."""
        applied = sum(1 << shard for shard, _ in self.means)
        return HEAD.pack(self.members, applied) + b"".join(coded for _, coded in self.means)


def read_steps(
    data: memoryview, coder: ShardCoder, numel: int, steps: int
) -> Iterator[tuple[Bounds, Tensor]]:
    """Ranges that each of several packed steps moved, the oldest first, and the mean there, in one
    vector for all. Raises CodecError if these are not ``steps`` steps."""
    mean, at = torch.empty(numel), 0
    for _ in range(steps):
        if len(data) < at + HEAD.size:
            raise CodecError(f"{len(data)} bytes are no {steps} outer steps.")
        members, applied = HEAD.unpack_from(data, at)
        at += HEAD.size
        if not 2 <= members <= min(MAX_GROUP, numel) or not 0 < applied < 1 << members:
            raise CodecError(f"An outer step of {members} members, shards {applied:b}.")
        bounds = shard_bounds(numel, members)
        moved = tuple(one for shard, one in enumerate(bounds) if applied >> shard & 1)
        for start, stop in moved:
            size = coder.codec.coded_size(stop - start)
            coder.codec.decode(data[at : at + size], mean[start:stop].numpy())
            at += size
        yield moved, mean
    if at != len(data):
        raise CodecError(f"{len(data)} bytes are more than {steps} outer steps.")


@dataclass(kw_only=True)
class CapturedFragment(ABC, Generic[AnyCoder]):
    """The part that all kinds share."""

    new_coder: ClassVar[Callable[[str, int, bool], Any]]
    """Makes a coder: codec, number of values, with feedback or without."""
    slack: ClassVar[int] = 0
    """Bytes of a slot beyond those of the coded fragment."""
    heavy: ClassVar[float] = HEAVY
    """Factor above which a norm is an offence, where slow weights may differ."""

    me: str
    members: Sequence[str] = ()
    """Peer ids, sorted; empty in a pair."""
    averaging: Mean = "mean"
    coder: AnyCoder
    judge: Judge
    scratch: Scratch
    sent: Tensor = EMPTY
    """Our contribution; once it is coded, as the others decode it."""
    realign: bool
    keep_momentum: bool = False
    """Whether a realignment leaves the outer momentum as it is."""
    steps: int
    tokens: int
    received: dict[str, Tensor] = field(default_factory=dict)
    """Contributions; in a group, to our shard."""
    left_out: Mapping[str, ImplausibleError] = field(default_factory=dict)
    """Contributors that are not in the mean of our shard, and why."""
    ranges: Ranges = ()
    """Where the mean may be used: ``[start, stop)``."""
    worst_block: float = 0.0
    """Largest spread of the contributions in any block of 256 values; in a group, of our shard."""
    begins: Slow | None = None
    """Where the outer step begins, if it follows steps that we had missed; None: our own."""
    outcome: Slow | None = None
    digests: tuple[str, str] = ("", "")
    """SHA-256 of the outcome, hexadecimal, where all must hold the same."""
    landing: Landing | None = None
    """On a GPU: the weights until they are in host memory; then, until the merge, the new slow
    weights and the weights as they were captured."""
    stages: Stages = field(default_factory=Stages)

    @property
    def theta(self) -> Tensor:
        """The captured weights."""
        return self.judge.theta

    @property
    def phi(self) -> Tensor:
        """The slow weights at the capture."""
        return self.judge.phi

    @property
    def numel(self) -> int:
        """Values of the fragment."""
        return self.judge.theta.numel()

    @property
    def due(self) -> int:
        """Number of values that each of the others brings us."""
        return self.numel

    @property
    def merged(self) -> Ranges:
        """Where slow weights are new."""
        return self.ranges if self.begins is None else ((0, self.numel),)

    @abstractmethod
    def encode(self, out: memoryview) -> Sequence[int]:
        """Code the part for each member into ``out``, one after the other; bytes of each. Raises
        CodecError if the contribution is not finite."""

    @abstractmethod
    def take(self, part: Part, peer: str, data: memoryview) -> Retransmit | None:
        """Decode a peer's part; what of it must come again. Raises CodecError, ImplausibleError."""

    def resend(self, blocks: bytes, out: memoryview) -> int:
        """Code again what a member could not decode; bytes. Raises CodecError for a bad bitmap."""
        raise TrainerError("In this kind of exchange nothing is sent again.")

    def reduce(self, tokens: Mapping[str, int], out: memoryview) -> int:
        """Average our shard, weighted by contributors' ``tokens``, and code the mean; bytes."""
        raise TrainerError("In this kind of exchange nobody has a shard to average.")

    @abstractmethod
    def pool(self, over: Mapping[str, int]) -> None:
        """Apply the mean over these members, weighted where nobody has done so yet."""

    @abstractmethod
    def mean_of(self, start: int, stop: int) -> Tensor:
        """The mean of these values, within one of the ``ranges``; until the next call."""

    def ours(self, here: slice) -> tuple[Tensor, ...]:
        """Our progress and contribution, where outer steps may use them beside the mean."""
        return ()

    def step(self) -> PastStep | None:
        """The step for members that miss it; None where it can't be handed over."""
        return None

    def release(self) -> None:
        """Free contributions: until the merge only captured weights and outcome are needed."""
        self.sent = EMPTY
        self.received.clear()

    @abstractmethod
    def commit(self) -> None:
        """Keep what coding lost and learned, on the thread that codes: the step is applied."""


@dataclass(kw_only=True)
class PairCapture(CapturedFragment[Coder]):
    """In a pair, both members send the whole fragment."""

    heavy = HEAVY_IN_PAIRS
    _weights: Mapping[str, float] = field(default_factory=dict)
    """By member, in the order that both sum up in."""

    @staticmethod
    def new_coder(name: str, numel: int, feedback: bool) -> Coder:
        return coder(name, numel)  # error feedback is for groups alone

    def encode(self, out: memoryview) -> Sequence[int]:
        # The partner may have trained for longer.
        gain = self.judge.gain * self.judge.bound.growth
        self.coder.expect(self.phi.numpy(), self.theta.numpy(), gain)
        # A lossy codec is symmetric: our own share enters the mean exactly as the others see it.
        holds = self.coder.holds_uncoded
        uncoded = self.scratch.take(self.numel).numpy() if holds else None
        return (self.coder.encode(self.sent.numpy(), out, uncoded),)

    def take(self, part: Part, peer: str, data: memoryview) -> Retransmit | None:
        if part is Part.AGAIN:
            self.patch(peer, data)
        elif blocks := self.receive(peer, data):
            least, most = self.coder.resent_sizes(blocks)
            return Retransmit(blocks=blocks, least=least, most=most)
        return None

    def receive(self, peer: str, data: memoryview) -> bytes:
        """Decode the partner's contribution; a bitmap of blocks that must come again, or empty."""
        vector = self.scratch.take(self.numel)
        again = self.coder.decode(data, vector.numpy())
        self.received[peer] = vector
        if not again:
            self._check(peer)
        return again

    def resend(self, blocks: bytes, out: memoryview) -> int:
        return self.coder.resend(blocks, self.sent.numpy(), out)

    def patch(self, peer: str, data: memoryview) -> None:
        """Take in the blocks that came again."""
        self.coder.patch(data, self.received[peer].numpy())
        self._check(peer)

    def _check(self, peer: str) -> None:
        vector = self.received[peer]
        norm = self.judge.check_whole(peer, vector)
        steps = torch.from_numpy(self.coder.lattice_steps)
        self.judge.check_repeat(peer, vector, steps, self.sent)
        self.judge.norms[peer] = norm

    def pool(self, over: Mapping[str, int]) -> None:
        self._weights = dict(zip(over, outer.token_weights(list(over.values())), strict=True))
        self.worst_block = 0.0
        self.ranges = ((0, self.numel),)

    def mean_of(self, start: int, stop: int) -> Tensor:
        vectors = (self.sent if peer == self.me else self.received[peer] for peer in self._weights)
        shares = [vector[start:stop] for vector in vectors]
        self.worst_block = max(self.worst_block, outer.worst_block_spread(shares))
        weights, room = list(self._weights.values()), self.scratch.take(stop - start)
        return outer.mean_contribution(shares, weights, room)

    def ours(self, here: slice) -> tuple[Tensor, ...]:
        theta = self.theta[here]
        own = torch.sub(theta, self.phi[here], out=self.scratch.take(theta.numel()))
        return own, self.sent[here]

    def release(self) -> None:
        self.coder.settle()  # before the partner's contribution is let go
        super().release()

    def commit(self) -> None:
        self.coder.commit()


@dataclass(kw_only=True)
class GroupCapture(CapturedFragment[ShardCoder]):
    """The k-th of ``members`` averages shard k of the fragment and sends the mean to the others."""

    new_coder = staticmethod(shard_coder)
    slack = MAX_GROUP * FP32_BYTES * BLOCK  # shards are cut at blocks: one may be a block longer
    bounds: Bounds = ()
    mean: Tensor = EMPTY
    beyond: Tensor = EMPTY
    """What another cell's slow weights have beyond ours, in our shard; empty: not known."""
    _inbox: Tensor = EMPTY
    """Contributions to our shard, one after the other."""
    _coded: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Means as they travelled, by the owner; none where slow weights may differ anyway."""

    def __post_init__(self) -> None:
        self.bounds = shard_bounds(self.numel, len(self.members))
        self.mean = self.scratch.take(self.numel).zero_()

    @property
    def mine(self) -> int:
        """Index of our shard."""
        return self.members.index(self.me)

    @property
    def due(self) -> int:
        start, stop = self.bounds[self.mine]
        return stop - start

    def encode(self, out: memoryview) -> Sequence[int]:
        # Our own shard takes 0 bytes.
        kept = self.scratch.take(self.numel).numpy()
        return self.coder.encode(self.sent.numpy(), self.mine, self.bounds, out, kept)

    def take(self, part: Part, peer: str, data: memoryview) -> Retransmit | None:
        (self.receive_mean if part is Part.MEAN else self.receive)(peer, data)
        return None

    def receive(self, peer: str, data: memoryview) -> None:
        """Decode a member's contribution to our shard."""
        size, start = self.due, self.bounds[self.mine][0]
        if not self._inbox.numel():
            self._inbox = self.scratch.take((len(self.members) - 1) * size)
        place = [other for other in self.members if other != self.me].index(peer)
        vector = self._inbox[place * size : (place + 1) * size]
        self.coder.codec.decode(data, vector.numpy())
        self.received[peer] = vector
        try:
            self.judge.check_part(peer, vector, start)
        except ImplausibleError as error:
            if error.deed is Offence.HEAVY or len(self.members) == 2 or self.averaging == "mean":
                raise
            self._shorten(vector, start)  # a majority outvotes it: no reason to lose a member
        if len(self.members) == 2:
            self.judge.check_direction(peer, vector, start)
        steps = torch.zeros(-(-size // BLOCK))
        self.judge.check_repeat(peer, vector, steps, self.sent[start : start + size])

    def _shorten(self, vector: Tensor, start: int) -> None:
        """Scale the progress in a contribution down to the largest norm that may enter a mean."""
        limit = self.judge.bound_of_part(vector, start).limit
        factor = limit / self.judge.norm_of(vector, start)
        phi, room = self.phi[start : start + vector.numel()], self.scratch.take(vector.numel())
        vector.add_(outer.apart(vector, phi, self.judge.pull, room).mul_(factor - 1.0))

    def reduce(self, tokens: Mapping[str, int], out: memoryview) -> int:
        start, stop = self.bounds[self.mine]
        others = [peer for peer in tokens if peer != self.me]
        self.left_out = {}
        if len(others) == 1 and len(self.members) > 2:  # nobody could outvote it
            try:
                self.judge.check_direction(others[0], self.received[others[0]], start)
            except ImplausibleError as error:
                self.left_out = {others[0]: error}
        tokens = {peer: count for peer, count in tokens.items() if peer not in self.left_out}
        ours, phi, pull = self.sent[start:stop], self.phi[start:stop], self.judge.pull
        shares = [ours if peer == self.me else self.received[peer] for peer in tokens]
        weights, mean = outer.token_weights(list(tokens.values())), self.mean[start:stop]
        progress = shares
        if pull:
            rooms = self.scratch.take(len(shares) * len(phi)).split(len(phi))
            each = zip(shares, rooms, strict=True)
            progress = [outer.apart(share, phi, pull, room) for share, room in each]
        mean.copy_(robust_mean(self.averaging, progress, weights))
        self.worst_block = outer.worst_block_spread(shares)
        if pull:
            outer.apart(mean, phi, -pull, mean)
        elif self.beyond.numel():
            mean.add_(self.beyond, alpha=min(MIXED, float(mean.norm() / self.beyond.norm())))
        kept = self.scratch.take(mean.numel()).numpy()
        size = self.coder.reduce(mean.numpy(), start, out, kept)
        self._keep(self.me, out[:size])
        return size

    def receive_mean(self, owner: str, data: memoryview) -> None:
        """Decode an owner's mean of its shard."""
        start, stop = self.bounds[self.members.index(owner)]
        mean = self.mean[start:stop]
        self.coder.codec.decode(data, mean.numpy())
        self.judge.norms[owner] = self.judge.check_part(owner, mean, start)
        self._keep(owner, data)

    def _keep(self, owner: str, coded: memoryview) -> None:
        # A contribution that is all progress is what leads from equal weights to equal ones.
        if self.judge.pull == 0.0:
            self._coded[owner] = bytes(coded)

    def step(self) -> PastStep | None:
        means = [
            (shard, self._coded[owner])
            for shard, owner in enumerate(self.members)
            if self.bounds[shard] in self.ranges and owner in self._coded
        ]
        return PastStep(len(self.members), means) if means else None

    def pool(self, over: Collection[str]) -> None:
        """Apply only the shards of these owners."""
        self.ranges = [self.bounds[self.members.index(owner)] for owner in over]
        norms = self.judge.norms
        self.judge.norms = {owner: norm for owner, norm in norms.items() if owner in over}

    def mean_of(self, start: int, stop: int) -> Tensor:
        return self.mean[start:stop]

    def release(self) -> None:
        super().release()
        self.mean = self._inbox = EMPTY

    def commit(self) -> None:
        self.coder.commit(self.ranges)


def capture_for(sync: SyncSettings) -> type[CapturedFragment[Any]]:
    """Class of the captures of a run; pairs where its peers do not exchange."""
    return GroupCapture if kinds.kind_of(sync) is kinds.GROUP else PairCapture
