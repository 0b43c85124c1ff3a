"""The last outer steps of a fragment, as means that travelled, for members that have missed them.

One step in bytes: the number of members (1), bit k for the k-th shard that was applied (4,
little-endian), and the coded means of those shards, in their order. Steps follow each other, the
oldest first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import Struct

import torch
from torch import Tensor

from lowcomm_protocol.codecs import ShardCoder
from lowcomm_protocol.codecs.shards import Bounds, shard_bounds
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.spec.names import MAX_GROUP

HEAD = Struct("<BI")


@dataclass(frozen=True)
class Step:
    """One outer step."""

    members: int
    means: Sequence[tuple[int, bytes]]
    """Shards that were applied, and their coded means."""

    def pack(self) -> bytes:
        """In bytes."""
        applied = sum(1 << shard for shard, _ in self.means)
        return HEAD.pack(self.members, applied) + b"".join(coded for _, coded in self.means)


def read(
    data: memoryview, coder: ShardCoder, numel: int, steps: int
) -> Iterator[tuple[Bounds, Tensor]]:
    """Of each step the ranges that it moved, and the mean there; the vector is the same for all.

    Raises CodecError if these are not so many steps, and nothing else.
    """
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
            size = coder.coded_size(stop - start)
            if len(data) < at + size:
                raise CodecError(f"{len(data)} bytes are no {steps} outer steps.")
            coder.decode(data[at : at + size], mean[start:stop].numpy())
            at += size
        yield moved, mean
    if at != len(data):
        raise CodecError(f"{len(data)} bytes are more than {steps} outer steps.")
