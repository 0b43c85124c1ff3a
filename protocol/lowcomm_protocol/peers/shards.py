"""Shards: where a peer's record stands in the DHT, and how many peers there are.

A key holds a part of a run's records, so no keeper answers for all of them. A shard of depth
``bits`` has the peers whose hash begins with its number. Peers of a shard count its records and
move one depth down or up where there are more than MOST or fewer than LEAST of them. The key of
depth 0, the *door*, is where newcomers look. In a swarm of more peers it has a sample: those of
lowest rank, which changes every PERIOD seconds.
"""

from collections import deque
from functools import lru_cache
from hashlib import sha256
from statistics import median

LEAST, MOST = 16, 48
"""Records of a shard below which its peers move up, and above which they move down."""
MAX_LISTED = 64
"""Records that a keeper keeps under one key."""
MAX_BITS = 24
PERIOD = 600.0
AT_DOOR = 2 * MAX_LISTED
"""Peers that publish their record at the door, on average: keepers choose among them."""
REMEMBERED = 8
"""Shards from whose counts the number of peers follows."""


@lru_cache(maxsize=8192)
def shard_of(run_id: str, peer_id: str, bits: int) -> int:
    """The number of a peer's shard of a depth: the first ``bits`` bits of a hash."""
    digest = sha256(f"{run_id}/{peer_id}".encode()).digest()
    return int.from_bytes(digest[:4]) >> (32 - bits)


def cell_of(run_id: str, peer_id: str, cells: int) -> int:
    """The number of a peer's cell of ``cells``, a power of two: that of a shard."""
    return shard_of(run_id, peer_id, cells.bit_length() - 1)


def rank(peer_id: str, now: float) -> float:
    """A peer's place among those that want to be at the door at Unix time ``now``, from 0 to 1."""
    digest = sha256(f"{int(now // PERIOD)}/{peer_id}".encode()).digest()
    return int.from_bytes(digest[:8]) / 2**64


class SwarmSize:
    """Estimates the number of peers, and chooses the depth of our shard."""

    def __init__(self) -> None:
        self.bits = 0
        self._counts: deque[int] = deque(maxlen=REMEMBERED)
        """Peers in all, by each count of a shard."""
        self._before: int | None = None
        """Records of the shard that we counted before, if of this depth."""

    @property
    def peers(self) -> int:
        """About how many peers have a record, ourselves included."""
        return round(median(self._counts)) if self._counts else 0

    @property
    def shards(self) -> int:
        """How many shards were counted; 0: none, or one that has all peers."""
        return len(self._counts) if self.bits else 0

    def follow(self, bits: int) -> None:
        """Go on to the depth that other peers have, when we have moved down."""
        self.bits = max(self.bits, min(bits, MAX_BITS))

    def count(self, records: int, own: bool) -> bool:
        """Take in the number of records of a shard of our depth. Returns whether we move.

        ``own``: whether it is our shard.
        """
        bits, other, is_first = self.bits, self._before or 0, self._before is None
        self._counts.append(records << bits)
        self._before = records
        if not own or (bits and is_first):
            return False
        # Our shard alone may be flooded, or its records hidden, so another one must agree.
        if records > MOST and bits < MAX_BITS and (not bits or other >= LEAST):
            self.bits += 1
        elif records < LEAST and bits and other < 2 * LEAST:
            self.bits -= 1
        if self.bits != bits:
            self._before = None
            self._counts.clear()
            self._counts.append(records << bits)
        return self.bits != bits

    def is_at_door(self, peer_id: str, now: float) -> bool:
        """Whether our record is published at the door at Unix time ``now``."""
        return self.bits <= 1 or rank(peer_id, now) * self.peers < AT_DOOR
