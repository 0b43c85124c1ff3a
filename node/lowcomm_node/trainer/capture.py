"""The state of one exchange between capture and merge.

In all kinds, ``sent`` is our contribution, ``mean_of`` gives the mean of all, and ``ranges`` say
where there is one. Vectors are flat, float32, in host memory. A pair holds the weights as captured,
our contribution, and what came; a coder of a modulo codec holds our contribution before it was
coded, too.

A kind of exchange has one entry in `CAPTURES`: a class that knows all that the trainer must know
of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from lowcomm_node.errors import TrainerError
from lowcomm_node.node.messages import Again, Part
from lowcomm_node.system.stages import Stages
from lowcomm_node.trainer.gpu import Landing
from lowcomm_node.trainer.missed import Step
from lowcomm_node.trainer.scratch import Scratch
from lowcomm_protocol.codecs import BLOCK, Coder, ShardCoder, coder, shard_coder
from lowcomm_protocol.codecs.shards import Bounds, shard_bounds
from lowcomm_protocol.errors import Deed, ImplausibleError
from lowcomm_protocol.exchange import kinds
from lowcomm_protocol.exchange.judging import (
    HEAVY,
    HEAVY_IN_PAIRS,
    Bound,
    Brought,
    Directions,
    Repeats,
    UsualNorm,
)
from lowcomm_protocol.exchange.outer import (
    apart,
    mean_contribution,
    square_and_cosine_apart,
    square_apart,
    token_weights,
    worst_block_spread,
)
from lowcomm_protocol.exchange.robust import robust_mean
from lowcomm_protocol.spec.names import MAX_GROUP, Mean
from lowcomm_protocol.spec.sections import SyncSettings

Ranges = Sequence[tuple[int, int]]
AnyCoder = TypeVar("AnyCoder", bound=Coder | ShardCoder)
FP32_BYTES = 4


@dataclass(kw_only=True)
class Capture(ABC, Generic[AnyCoder]):
    """The part that all kinds share."""

    new_coder: ClassVar[Callable[[str, int, bool], Any]]
    """A coder for a codec and so many values, with feedback or without."""
    slack: ClassVar[int] = 0
    """Bytes of a slot beyond those of the coded fragment."""
    heavy: ClassVar[float] = HEAVY
    """The bound of what can't happen to an honest peer, where slow weights may differ."""

    me: str
    coder: AnyCoder
    members: Sequence[str] = ()
    """Peer ids, sorted; empty in a pair."""
    averaging: Mean = "mean"
    """How three or more are averaged."""
    scratch: Scratch
    theta: Tensor
    phi: Tensor
    pull: float
    """``pull * phi`` is the part of a contribution that is no progress: ``consensus``, or 1 in a
    realignment."""
    sent: Tensor = field(default_factory=lambda: torch.empty(0))
    """Our contribution; once it is coded, as the others decode it."""
    realign: bool
    keep_momentum: bool = field(default=False, kw_only=True)
    """Whether a realignment leaves the outer momentum as it is."""
    blake3: bool = field(default=False, kw_only=True)
    """Whether digests of what is coded are BLAKE3; else SHA-256."""
    digests: tuple[str, str] = field(default=("", ""), kw_only=True)
    """SHA-256 of the new slow weights and momentum, hexadecimal, where all must hold the same."""
    bound: Bound
    """How large the progress of others may be."""
    gain: float
    """Factor of our own progress in a contribution."""
    usual: UsualNorm
    """Learns what norms they bring."""
    directions: Directions
    """Learns whether they point along ours."""
    norms: dict[str, float] = field(default_factory=dict)
    """What was plausible of what they have brought this time."""
    worst_block: float = 0.0
    """The largest spread of the contributions in any block of 256 values; in a group, of our
    shard."""
    repeats: Repeats = field(default_factory=lambda: Repeats(0))
    """Learns what they bring, to know it again; in a group, to our shard."""
    received: dict[str, Tensor] = field(default_factory=dict)
    """Contributions; in a group, to our shard."""
    brought: dict[str, Brought] = field(default_factory=dict)
    left_out: dict[str, ImplausibleError] = field(default_factory=dict)
    """Contributors left out of our mean: they point against us, and nobody could outvote them."""
    steps: int
    """Inner steps and tokens of this replica that were done by then."""
    tokens: int
    ranges: Ranges = ()
    """Where the mean may be used: ``[start, stop)``."""
    begins: tuple[Tensor, Tensor | None] | None = None
    """Slow weights and momentum that the outer step begins with, where steps that we had missed
    came first; None: our own."""
    outcome: tuple[Tensor, Tensor | None] | None = None
    """New slow weights and momentum, if any is kept, once the outer step is computed."""
    landing: Landing | None = None
    """On a GPU: the weights until they are in host memory; then, until the merge, the new slow
    weights and the weights as they were captured."""
    stages: Stages = field(default_factory=Stages)
    """Seconds that each stage has taken so far."""
    _own_squares: dict[tuple[int, int], float] = field(default_factory=dict)
    """The squared norm of our progress in a range: weights that are captured do not change."""

    @property
    def numel(self) -> int:
        """Values of the fragment."""
        return self.theta.numel()

    def norm_of(self, vector: Tensor, start: int = 0) -> float:
        """The norm of the progress in a contribution from ``start`` on, relative to our slow
        weights."""
        base = self.phi[start : start + vector.numel()]
        return square_apart(vector, base, self.pull) ** 0.5

    def own_norm(self, start: int = 0, stop: int | None = None) -> float:
        """The norm of our own progress, times its gain in a contribution."""
        return self.gain * self._own_square(start, stop) ** 0.5

    def _own_square(self, start: int, stop: int | None) -> float:
        here = (start, self.numel if stop is None else stop)
        if here not in self._own_squares:
            theta, phi = self.theta[slice(*here)], self.phi[slice(*here)]
            self._own_squares[here] = square_apart(theta, phi, 1.0)
        return self._own_squares[here]

    def _norm_and_cosine(self, vector: Tensor, start: int = 0) -> tuple[float, float]:
        """`norm_of` a contribution, and the cosine between its progress and ours: one pass for
        both."""
        here = slice(start, start + vector.numel())
        own = self._own_square(here.start, here.stop)
        theta, phi = self.theta[here], self.phi[here]
        square, cosine = square_and_cosine_apart(vector, theta, phi, self.pull, own)
        return square**0.5, cosine

    def _compare(self, peer: str, steps: Tensor, ours: Tensor) -> None:
        """Raises ImplausibleError if a peer resends its previous contribution."""
        brought = self.repeats.sample(self.received[peer], steps, ours)
        if self.repeats.repeats(peer, brought):
            raise ImplausibleError(
                "brings what it has brought before, as if it had not trained since"
            )
        self.brought[peer] = brought

    @property
    def merged(self) -> Ranges:
        """Where slow weights are new."""
        return self.ranges if self.begins is None else ((0, self.numel),)

    def step(self) -> Step | None:
        """What was applied, to hand it over to members that miss it; None where that can't be."""
        return None

    def learn(self) -> None:
        """Keep what this exchange taught of the others: its outer step is applied."""
        for norm in self.norms.values():
            self.usual.applied(norm, self.bound.grown)
        for peer, brought in self.brought.items():
            self.repeats.applied(peer, brought)

    @abstractmethod
    def commit(self) -> None:
        """Keep what coding lost and learned, on the thread that codes: the step is applied."""

    def release(self) -> None:
        """Let go of what was averaged: until the merge, which may be steps away, only the weights
        as they were captured and the outcome are needed."""
        self.sent = torch.empty(0)
        self.received.clear()

    def forget(self) -> None:
        """Keep nothing of what it taught: nothing is applied."""
        self.coder.forget()

    @property
    def due(self) -> int:
        """How many values each of the others brings us."""
        return self.numel

    def ours(self, here: slice) -> tuple[Tensor, ...]:
        """Our progress and contribution, where outer steps may use them beside the mean."""
        return ()

    def resend(self, blocks: bytes, out: memoryview) -> int:
        """Code again what a member could not decode; bytes. Raises CodecError for a bad bitmap."""
        raise TrainerError("In this kind of exchange nothing is sent again.")

    def reduce(self, tokens: Mapping[str, int], out: memoryview) -> int:
        """Average our shard, weighted by ``tokens`` of each contributor, and code the mean;
        bytes."""
        raise TrainerError("In this kind of exchange nobody has a shard to average.")

    @abstractmethod
    def code(self, out: memoryview) -> tuple[int, ...]:
        """Code the contribution into ``out``: what each member gets, one after the other; bytes."""

    @abstractmethod
    def take(self, part: Part, peer: str, data: memoryview) -> Again | None:
        """Decode a part that a peer brings; what of it must come again."""

    @abstractmethod
    def pool(self, over: Mapping[str, int]) -> None:
        """Apply the mean over these members, weighted where nobody has done so yet."""

    @abstractmethod
    def mean_of(self, start: int, stop: int) -> Tensor:
        """The mean of these values, within one of the ``ranges``; until the next one is asked
        for."""


@dataclass(kw_only=True)
class PairCapture(Capture[Coder]):
    """In a pair, both members send the whole fragment."""

    @staticmethod
    def new_coder(name: str, numel: int, feedback: bool) -> Coder:
        """A coder of a fragment. Pairs have no feedback."""
        return coder(name, numel)

    heavy = HEAVY_IN_PAIRS
    _over: Sequence[str] = ()
    _weights: Sequence[float] = ()
    _mean: Tensor = field(default_factory=lambda: torch.empty(0))
    _own: Tensor = field(default_factory=lambda: torch.empty(0))

    def encode(self, out: memoryview) -> int:
        """Code the contribution into ``out``; bytes. Raises CodecError if it is not finite."""
        # The partner may have trained for longer.
        gain = self.gain * self.bound.growth
        self.coder.expect(self.phi.numpy(), self.theta.numpy(), gain)
        # A lossy codec is symmetric: our own share enters the mean exactly as the others see it.
        holds = self.coder.holds_uncoded
        uncoded = self.scratch.take(self.numel).numpy() if holds else None
        return self.coder.encode(self.sent.numpy(), out, uncoded)

    def code(self, out: memoryview) -> tuple[int, ...]:
        """See Capture."""
        return (self.encode(out),)

    def take(self, part: Part, peer: str, data: memoryview) -> Again | None:
        """See Capture."""
        if part is Part.AGAIN:
            self.patch(peer, data)
            return None
        blocks = self.receive(peer, data)
        if not blocks:
            return None
        least, most = self.coder.resent_sizes(blocks)
        return Again(blocks=blocks, least=least, most=most)

    def receive(self, peer: str, data: memoryview) -> bytes:
        """Decode the partner's contribution; a bitmap of blocks that must come again, or empty.

        Raises CodecError or ImplausibleError if it can't be used.
        """
        vector = self.scratch.take(self.numel)
        again = self.coder.decode(data, vector.numpy())
        self.received[peer] = vector
        if not again:
            self._check(peer)
        return again

    def resend(self, blocks: bytes, out: memoryview) -> int:
        """See Capture."""
        return self.coder.resend(blocks, self.sent.numpy(), out)

    def patch(self, peer: str, data: memoryview) -> None:
        """Take in the blocks that came again. Raises as ``receive`` does."""
        self.coder.patch(data, self.received[peer].numpy())
        self._check(peer)

    def _check(self, peer: str) -> None:
        vector, cosine = self.received[peer], None
        if self.usual.is_lone(peer):
            norm, cosine = self._norm_and_cosine(vector)
        else:
            norm = self.norm_of(vector)
        self.usual.saw(peer, norm)
        self.bound.check(norm, "brings progress")
        if cosine is not None:
            self.directions.check(peer, cosine)
        self._compare(peer, torch.from_numpy(self.coder.lattice_steps), self.sent)
        self.norms[peer] = norm

    def pool(self, over: Mapping[str, int]) -> None:
        """Weigh these peers by tokens, in the order that all of them use."""
        self._over = tuple(over)
        self._weights = token_weights(list(over.values()))
        self.worst_block = 0.0
        self.ranges = ((0, self.numel),)

    def mean_of(self, start: int, stop: int) -> Tensor:
        """See Capture."""
        ours = self.sent[start:stop]
        shares = [
            ours if peer == self.me else self.received[peer][start:stop] for peer in self._over
        ]
        self.worst_block = max(self.worst_block, worst_block_spread(shares))
        if self._mean.numel() < stop - start:
            self._mean = torch.empty(stop - start)
        return mean_contribution(shares, self._weights, self._mean[: stop - start])

    def release(self) -> None:
        """See Capture."""
        self.coder.settle()  # before what came is let go
        super().release()

    def commit(self) -> None:
        """See Capture."""
        self.coder.commit()

    def ours(self, here: slice) -> tuple[Tensor, ...]:
        """See Capture."""
        theta = self.theta[here]
        if self._own.numel() < theta.numel():
            self._own = torch.empty(theta.numel())
        own = torch.sub(theta, self.phi[here], out=self._own[: theta.numel()])
        return own, self.sent[here]


@dataclass(kw_only=True)
class GroupCapture(Capture[ShardCoder]):
    """Each member averages one shard of the fragment and sends the mean to the others: the k-th of
    ``members`` shard k."""

    new_coder = staticmethod(shard_coder)
    slack = MAX_GROUP * FP32_BYTES * BLOCK  # shards are cut at blocks: one may be a block longer
    bounds: Bounds = ()
    mean: Tensor = field(default_factory=lambda: torch.empty(0))
    _inbox: Tensor = field(default_factory=lambda: torch.empty(0))
    _coded: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Means as they travelled, by the owner; none where slow weights may differ anyway."""

    def __post_init__(self) -> None:
        self.bounds = shard_bounds(self.numel, len(self.members))
        self.mean = self.scratch.take(self.numel).zero_()

    @property
    def mine(self) -> int:
        """Which shard is ours."""
        return self.members.index(self.me)

    @property
    def due(self) -> int:
        """See Capture."""
        start, stop = self.bounds[self.mine]
        return stop - start

    def encode(self, out: memoryview) -> list[int]:
        """Code one shard for each member into ``out``, one after the other; bytes of each.

        Our own shard takes 0 bytes.
        """
        kept = self.scratch.take(self.numel).numpy()
        return self.coder.encode(self.sent.numpy(), self.mine, self.bounds, out, kept)

    def code(self, out: memoryview) -> tuple[int, ...]:
        """See Capture."""
        return tuple(self.encode(out))

    def take(self, part: Part, peer: str, data: memoryview) -> Again | None:
        """See Capture."""
        if part is Part.MEAN:
            self.receive_mean(peer, data)
        else:
            self.receive(peer, data)
        return None

    def receive(self, peer: str, data: memoryview) -> None:
        """Decode a member's contribution to our shard.

        Raises CodecError or ImplausibleError if it can't be used.
        """
        start, stop = self.bounds[self.mine]
        vector = self._room_for(peer, stop - start)
        self.coder.decode(data, vector.numpy())
        self.received[peer] = vector
        try:
            self._check(peer, vector, self.mine, "brings progress")
        except ImplausibleError as error:
            if error.deed is Deed.HEAVY or len(self.members) == 2 or self.averaging == "mean":
                raise
            self._shorten(vector, start)  # a majority outvotes it: no reason to lose a member
        if len(self.members) == 2:
            self.directions.check(peer, self._norm_and_cosine(vector, start)[1])
        steps = torch.zeros(-(-vector.numel() // BLOCK))
        self._compare(peer, steps, self.sent[start:stop])

    def _room_for(self, peer: str, size: int) -> Tensor:
        """Where a member's contribution to our shard goes: all of them are in one vector."""
        if not self._inbox.numel():
            self._inbox = self.scratch.take((len(self.members) - 1) * size)
        others = [one for one in self.members if one != self.me]
        place = others.index(peer)
        return self._inbox[place * size : (place + 1) * size]

    def _seen(self, vectors: Sequence[Tensor], start: int) -> Sequence[Tensor]:
        """The progress in contributions to our shard."""
        if self.pull == 0.0:
            return vectors
        size = vectors[0].numel()
        room = self.scratch.take(len(vectors) * size).split(size)
        phi = self.phi[start : start + size]
        return [apart(one, phi, self.pull, out) for one, out in zip(vectors, room, strict=True)]

    def _shorten(self, vector: Tensor, start: int) -> None:
        """Scale the progress in a contribution down to the largest norm that may enter a mean."""
        share = vector.numel() / self.numel
        own = self.own_norm(start, start + vector.numel())
        factor = self.bound.part(own, share).limit / self.norm_of(vector, start)
        too_much = self.scratch.take(vector.numel())
        phi = self.phi[start : start + vector.numel()]
        vector.add_(apart(vector, phi, self.pull, too_much).mul_(factor - 1.0))

    def reduce(self, tokens: Mapping[str, int], out: memoryview) -> int:
        """See Capture."""
        start, stop = self.bounds[self.mine]
        self.left_out = self._against(tokens)
        tokens = {peer: count for peer, count in tokens.items() if peer not in self.left_out}
        ours = self.sent[start:stop]
        shares = [ours if peer == self.me else self.received[peer] for peer in tokens]
        weights = token_weights(list(tokens.values()))
        mean = self.mean[start:stop]
        mean.copy_(robust_mean(self.averaging, self._seen(shares, start), weights))
        self.worst_block = worst_block_spread(shares)
        if self.pull:
            apart(mean, self.phi[start:stop], -self.pull, mean)
        kept = self.scratch.take(mean.numel()).numpy()
        size = self.coder.reduce(mean.numpy(), start, out, kept)
        self._keep(self.me, out[:size])
        return size

    def _against(self, contributors: Iterable[str]) -> dict[str, ImplausibleError]:
        others = [peer for peer in contributors if peer != self.me]
        if len(others) != 1 or len(self.members) == 2:
            return {}
        try:
            start, _ = self.bounds[self.mine]
            vector = self.received[others[0]]
            self.directions.check(others[0], self._norm_and_cosine(vector, start)[1])
        except ImplausibleError as error:
            return {others[0]: error}
        return {}

    def _check(self, peer: str, vector: Tensor, shard: int, what: str) -> float:
        """The norm of the progress in a shard, scaled to the whole fragment.

        Raises ImplausibleError if it is too large.
        """
        start, stop = self.bounds[shard]
        share = vector.numel() / self.numel
        norm = self.norm_of(vector, start)
        self.usual.saw(peer, norm / share**0.5)
        self.bound.part(self.own_norm(start, stop), share).check(norm, what)
        return norm / share**0.5

    def receive_mean(self, owner: str, data: memoryview) -> None:
        """Decode an owner's mean of its shard.

        Raises CodecError or ImplausibleError if it can't be used.
        """
        start, stop = self.bounds[self.members.index(owner)]
        mean = self.mean[start:stop]
        self.coder.decode(data, mean.numpy())
        self.norms[owner] = self._check(owner, mean, self.members.index(owner), "sent a mean")
        self._keep(owner, data)

    def _keep(self, owner: str, coded: memoryview) -> None:
        # A contribution that is all progress is what leads from equal weights to equal ones.
        if self.pull == 0.0:
            self._coded[owner] = bytes(coded)

    def step(self) -> Step | None:
        """See Capture."""
        means = [
            (shard, self._coded[owner])
            for shard, owner in enumerate(self.members)
            if self.bounds[shard] in self.ranges and owner in self._coded
        ]
        return Step(len(self.members), means) if means else None

    def mean_of(self, start: int, stop: int) -> Tensor:
        """See Capture."""
        return self.mean[start:stop]

    def pool(self, over: Collection[str]) -> None:
        """Only the shards of these owners are applied."""
        self.ranges = [self.bounds[self.members.index(owner)] for owner in over]
        self.norms = {owner: norm for owner, norm in self.norms.items() if owner in over}

    def release(self) -> None:
        """See Capture."""
        super().release()
        self.mean = self._inbox = torch.empty(0)

    def commit(self) -> None:
        """See Capture."""
        self.coder.commit(self.ranges)


CAPTURES: dict[str, type[Capture[Any]]] = {
    kinds.PAIR.name: PairCapture,
    kinds.GROUP.name: GroupCapture,
}
"""By the name of the kind."""


def capture_for(sync: SyncSettings) -> type[Capture[Any]]:
    """What exchanges of a run are captured with; pairs where its peers do not exchange."""
    return CAPTURES[(kinds.kind_of(sync) or kinds.PAIR).name]
