"""What is kept of a fragment between its capture and its merge: in a pair, and in a group that shares it out by shards.

Both end the same way: ``sent`` is our contribution as the others decoded it, ``mean`` the mean of all, and ``ranges`` say
where there is one. Vectors are flat, float32, in host memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lowcomm_protocol.choices import Mean
from lowcomm_protocol.codecs import Coder
from lowcomm_protocol.codecs.shards import Bounds, ShardCoder, shard_bounds
from lowcomm_protocol.errors import ImplausibleError
from lowcomm_protocol.outer import mean_contribution, token_weights, worst_block_spread
from lowcomm_protocol.repeats import Brought, Repeats
from lowcomm_protocol.robust import UsualNorm, robust_mean

Ranges = Sequence[tuple[int, int]]


@dataclass(kw_only=True)
class Capture(ABC):
    """The part that pairs and groups share."""

    me: str
    theta: Tensor
    progress: Tensor
    anchor: Tensor | None
    """What of a contribution is no progress: ``consensus * phi``; None if all of it is."""
    sent: Tensor
    """Our contribution; once it is coded, as the others decode it."""
    realign: bool
    own: float
    """Norm that our own progress would have after as many steps as the others claim."""
    most: float
    """The largest norm that the progress of others may have."""
    usual: UsualNorm
    """Learns what norms they bring."""
    norms: dict[str, float] = field(default_factory=dict)
    """What was plausible of what they have brought this time."""
    worst_block: float = 0.0
    """Spread of the contributions in the block of 256 values where it is largest; in a group, of our shard."""
    steps: int
    """Inner steps and tokens of this replica that were done by then."""
    tokens: int
    mean: Tensor = field(default_factory=lambda: torch.empty(0))
    ranges: Ranges = ()
    """Where the mean may be used: ``[start, stop)``."""
    outcome: tuple[Tensor, Tensor] | None = None
    """New slow weights and momentum, once the outer step is computed."""

    def seen(self, vector: Tensor, start: int = 0) -> Tensor:
        """The progress in a contribution to what begins at ``start``, as it looks from our slow weights."""
        return vector if self.anchor is None else vector - self.anchor[start : start + vector.numel()]

    def commit(self) -> None:
        """The outer step is applied: what it taught is kept."""
        for norm in self.norms.values():
            self.usual.applied(norm, self.own)

    @abstractmethod
    def forget(self) -> None:
        """Nothing is applied."""


@dataclass(kw_only=True)
class PairCapture(Capture):
    """Two members send each other the whole fragment."""

    coder: Coder
    repeats: Repeats
    """Learns what they bring, to know it again."""
    received: dict[str, Tensor] = field(default_factory=dict)
    brought: dict[str, Brought] = field(default_factory=dict)

    def encode(self, out: memoryview) -> int:
        """Code the contribution into ``out``; bytes. Raises CodecError if it is not finite."""
        # A lossy codec is symmetric: our own share enters the mean exactly as the others see it.
        return self.coder.encode(self.sent.numpy(), out)

    def receive(self, peer: str, data: memoryview) -> bytes:
        """Decode the partner's contribution; a bitmap of blocks that must come again, or empty.

        Raises CodecError or ImplausibleError if it can't be used.
        """
        vector = np.empty(self.sent.numel(), dtype=np.float32)
        again = self.coder.decode(data, vector)
        self.received[peer] = torch.from_numpy(vector)
        if not again:
            self._check(peer)
        return again

    def resend(self, blocks: bytes, out: memoryview) -> int:
        """Code blocks that the partner could not decode again; bytes. Raises CodecError for a bad bitmap."""
        return self.coder.resend(blocks, self.sent.numpy(), out)

    def patch(self, peer: str, data: memoryview) -> None:
        """Take in the blocks that came again. Raises as ``receive`` does."""
        self.coder.patch(data, self.received[peer].numpy())
        self._check(peer)

    def _check(self, peer: str) -> None:
        norm = float(self.seen(self.received[peer]).norm())
        self.usual.saw(peer, norm)
        if not norm <= self.most:
            raise ImplausibleError(f"brings progress of norm {norm:.3g} where {self.most:.3g} is plausible")
        brought = self.repeats.sample(self.received[peer], torch.from_numpy(self.coder.lattice_steps))
        if self.repeats.repeats(peer, brought):
            raise ImplausibleError("brings what it has brought before, as if it had not trained since")
        self.norms[peer], self.brought[peer] = norm, brought

    def pool(self, tokens: Mapping[str, int]) -> None:
        """Take the mean over the peers in ``tokens``, in the order that all of them sum in, weighted by tokens."""
        shares = [self.sent if peer == self.me else self.received[peer] for peer in tokens]
        self.mean = mean_contribution(shares, token_weights(list(tokens.values())))
        self.worst_block = worst_block_spread(shares)
        self.ranges = ((0, self.sent.numel()),)

    def commit(self) -> None:
        """See Capture."""
        super().commit()
        for peer, brought in self.brought.items():
            self.repeats.applied(peer, brought)
        self.coder.commit()

    def forget(self) -> None:
        """See Capture."""
        self.coder.forget()


@dataclass(kw_only=True)
class GroupCapture(Capture):
    """Each member averages one shard of the fragment and sends the mean to the others."""

    coder: ShardCoder
    kind: Mean
    members: Sequence[str]
    """Peer ids, sorted: the k-th owns shard k."""
    bounds: Bounds = ()
    received: dict[str, Tensor] = field(default_factory=dict)
    """Contributions to our shard."""

    def __post_init__(self) -> None:
        self.bounds = shard_bounds(self.sent.numel(), len(self.members))
        self.mean = torch.zeros_like(self.sent)

    @property
    def mine(self) -> int:
        """Which shard is ours."""
        return self.members.index(self.me)

    def encode(self, out: memoryview) -> list[int]:
        """Code what every other owner gets, one after the other, into ``out``; bytes of each, 0 for our own shard."""
        return self.coder.encode(self.sent.numpy(), self.mine, self.bounds, out)

    def receive(self, peer: str, data: memoryview) -> None:
        """Decode a member's contribution to our shard. Raises CodecError if it can't be used."""
        start, stop = self.bounds[self.mine]
        vector = np.empty(stop - start, dtype=np.float32)
        self.coder.decode(data, vector)
        self.received[peer] = torch.from_numpy(vector)

    def reduce(self, tokens: Mapping[str, int], out: memoryview) -> int:
        """Average our shard over the contributors in ``tokens``, weighted by them, and code the mean; bytes."""
        start, stop = self.bounds[self.mine]
        shares = [self.sent[start:stop] if peer == self.me else self.received[peer] for peer in tokens]
        mean = robust_mean(self.kind, [self.seen(one, start) for one in shares], token_weights(list(tokens.values())))
        self.worst_block = worst_block_spread(shares)
        if self.anchor is not None:
            mean += self.anchor[start:stop]
        size = self.coder.reduce(mean.numpy(), start, out)
        self.mean[start:stop] = mean
        return size

    def receive_mean(self, owner: str, data: memoryview) -> None:
        """Decode an owner's mean of its shard. Raises CodecError or ImplausibleError if it can't be used."""
        start, stop = self.bounds[self.members.index(owner)]
        mean = self.mean[start:stop]
        self.coder.decode(data, mean.numpy())
        # Against all of our own progress: what a shard holds may have moved elsewhere and not here (rare tokens).
        norm = float(self.seen(mean, start).norm())
        whole = norm * (self.sent.numel() / mean.numel()) ** 0.5
        self.usual.saw(owner, whole)
        if not norm <= self.most:
            raise ImplausibleError(f"sent a mean of norm {norm:.3g} where {self.most:.3g} is plausible")
        self.norms[owner] = whole

    def pool(self, owners: Sequence[str]) -> None:
        """Only the shards of these owners are applied."""
        self.ranges = [self.bounds[self.members.index(owner)] for owner in owners]
        self.norms = {owner: norm for owner, norm in self.norms.items() if owner in owners}

    def commit(self) -> None:
        """See Capture."""
        super().commit()
        self.coder.commit(self.ranges)

    def forget(self) -> None:
        """See Capture."""
        self.coder.forget()
