"""What the members of a group have told of the means of its shards: which shards are applied, and
whether that is certain.

A shard is applied if every held that we know of has the same mean of it, and no commit that we know
of leaves it out. A broken link hides a held from somebody, but whoever has heard of it tells so by
its commit. We are in doubt if a commit counts a held of somebody whose own commit we do not have,
and nobody of us has heard all: then others may have applied less than we. Offers carry digests of
slow weights, so this is found the next time, and a realignment heals it."""

from collections.abc import Collection
from dataclasses import dataclass, field
from hashlib import sha256

from lowcomm_protocol.errors import ProtocolViolation

DIGEST_BYTES = 32
SALT_BYTES = 8
MARK_BYTES = 4


def mark(salt: bytes, digest: bytes) -> bytes:
    """A digest in brief, for one that holds the same; empty for none.

    An owner that sends several means can't have them look alike: the salt is drawn by who holds
    one, after it has come.
    """
    short = sha256(salt + digest).digest()[:MARK_BYTES]
    return (short if any(short) else b"\1" * MARK_BYTES) if digest else b""


@dataclass
class Tally:
    """All that was told in one exchange, by the peer id of who told it, ourselves included."""

    me: str
    members: tuple[str, ...]
    """In sorted order: all tuples here have one of each, and shard k belongs to the k-th."""
    means: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Digests of the means that we hold, by the owner of the shard."""
    helds: dict[str, tuple[bytes, ...]] = field(default_factory=dict[str, tuple[bytes, ...]])
    """Digests of the means that each holds, empty where it holds none; `mark` of them where there
    is a salt."""
    salts: dict[str, bytes] = field(default_factory=dict[str, bytes])
    commits: dict[str, tuple[bool, ...]] = field(default_factory=dict[str, tuple[bool, ...]])
    """Which shards each would apply."""
    heards: dict[str, tuple[bool, ...]] = field(default_factory=dict[str, tuple[bool, ...]])
    """Whose helds count in the commit of each."""

    def digest_of(self, peer: str) -> bytes:
        """The digest of the mean of a member's shard; empty where we do not hold it."""
        return self.means.get(peer, b"")

    def awaits(self, peer: str) -> bool:
        """Whether a mean is missing that could be of use: what one told that it lacks is applied by
        nobody."""
        shard = self.members.index(peer)
        return peer not in self.means and all(held[shard] for held in self.helds.values())

    def hold(self) -> tuple[bytes, ...]:
        """Our own held, which means that come later no longer change."""
        self.helds[self.me] = tuple(self.digest_of(peer) for peer in self.members)
        return self.helds[self.me]

    def commit(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Our own commit: which shards we would apply, and whose helds we know."""
        # Also what a member has told that was lost since: others may count on it.
        self.commits[self.me] = self._alike(self.helds)
        self.heards[self.me] = tuple(peer in self.helds for peer in self.members)
        return self.commits[self.me], self.heards[self.me]

    def add_held(self, peer: str, held: tuple[bytes, ...], salt: bytes = b"") -> None:
        """Take in what a member holds: digests, or marks with their salt. Raises ProtocolViolation,
        and takes in nothing, where it can't be."""
        size = MARK_BYTES if salt else DIGEST_BYTES
        if len(held) != len(self.members) or any(len(digest) not in (0, size) for digest in held):
            raise ProtocolViolation(
                f"{peer} told what it holds in another form than of {len(self.members)} digests."
            )
        theirs, ours = held[self.members.index(peer)], held[self.members.index(self.me)]
        if theirs != _as_told(self.digest_of(peer), salt):
            raise ProtocolViolation(f"{peer} told another digest of its own mean than it sent.")
        if ours not in (b"", _as_told(self.digest_of(self.me), salt)):
            raise ProtocolViolation(f"{peer} told a digest of our mean that we have not sent.")
        self.helds[peer], self.salts[peer] = held, salt

    def add_commit(self, peer: str, shards: tuple[bool, ...], heard: tuple[bool, ...]) -> None:
        """Take in the commit of a member whose held has come. Raises ProtocolViolation as
        ``add_held``."""
        if self.me not in self.helds:
            raise ProtocolViolation(f"{peer} has committed before we told it what we hold.")
        if not len(shards) == len(heard) == len(self.members):
            raise ProtocolViolation(
                f"{peer} has committed to another number of shards than {len(self.members)}."
            )
        both = self._alike([self.me, peer])
        if any(shard and not allowed for shard, allowed in zip(shards, both, strict=True)):
            raise ProtocolViolation(
                f"{peer} has committed to a shard that one of us does not hold."
            )
        if not heard[self.members.index(peer)] or not heard[self.members.index(self.me)]:
            raise ProtocolViolation(f"{peer} has committed without hearing of both of us.")
        self.commits[peer], self.heards[peer] = shards, heard

    def applied(self) -> tuple[bool, ...]:
        """The shards that no commit leaves out."""
        return tuple(all(column) for column in zip(*self.commits.values(), strict=True))

    def is_certain(self) -> bool:
        """Whether nobody can have left out a shard that we apply.

        Commits get smaller by the helds that they count. So either one of ours counts all there
        are, or we have the commits of all whose helds were counted.
        """
        heard = [any(column) for column in zip(*self.heards.values(), strict=True)]
        closed = all(
            peer in self.commits for peer, known in zip(self.members, heard, strict=True) if known
        )
        return closed or any(all(known) for known in self.heards.values())

    def _alike(self, peers: Collection[str]) -> tuple[bool, ...]:
        """The shards of which all these, ourselves among them, hold the same mean."""
        return tuple(
            own != b""
            and all(
                self.helds[peer][shard] == _as_told(own, self.salts.get(peer, b""))
                for peer in peers
            )
            for shard, own in enumerate(self.helds[self.me])
        )


def _as_told(digest: bytes, salt: bytes) -> bytes:
    return mark(salt, digest) if salt else digest
