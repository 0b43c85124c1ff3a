"""Votes of a group on the means of its shards: which shards are applied, and whether that is
certain.

A commit is a vote for the shards that its sender holds as most others do, by the helds that it
knows. A shard is applied if more than half of those that were heard vote for it. So one member that
holds or commits to nothing takes nothing from the others, and one that lies to some of them does
not part the rest. The owner of a shard has no vote on it: it could send every member another mean
and agree with each. Of three it has one, or else either of the others could void it.

A member that is outvoted lacks a shard that the others apply. It applies nothing where all must
hold the same, and takes the step over in the next exchange. We are in doubt where votes that we do
not know could decide."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from lowcomm_protocol.errors import ProtocolViolation

DIGEST_BYTES = 32


@dataclass(frozen=True)
class VoteResult:
    """What members apply, by their votes."""

    applied: tuple[bool, ...]
    """The shards that we apply: most vote for our mean of them. Where the votes that we know do not
    decide, those that we and at least half of the others voted for."""
    is_outvoted: bool
    """Whether others apply more, or may."""
    is_certain: bool
    """Whether the votes that we know decide."""


@dataclass
class Tally:
    """All votes of one exchange, by peer id, ours included."""

    me: str
    members: tuple[str, ...]
    """In sorted order: all tuples here have one of each, and shard k belongs to the k-th."""
    means: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Digests of the means that we hold, by the owner of the shard."""
    helds: dict[str, tuple[bytes, ...]] = field(default_factory=dict[str, tuple[bytes, ...]])
    """Digests of the means that each holds, empty where it holds none."""
    commits: dict[str, tuple[bool, ...]] = field(default_factory=dict[str, tuple[bool, ...]])
    """Which shards each would apply."""
    heards: dict[str, tuple[bool, ...]] = field(default_factory=dict[str, tuple[bool, ...]])
    """Whose helds count in the commit of each."""

    def digest_of(self, peer: str) -> bytes:
        """The digest of the mean of a member's shard; empty where we do not hold it."""
        return self.means.get(peer, b"")

    def awaits(self, peers: Collection[str]) -> bool:
        """Whether a mean of one of these is missing that could be of use: none is that most would
        leave out."""
        missing = [
            shard
            for shard, peer in enumerate(self.members)
            # An owner that has told what it holds, and no mean of its own, sends none any more.
            if peer in peers
            and peer not in self.means
            and (peer not in self.helds or self.helds[peer][shard])
        ]
        if not missing or not self.helds:
            return bool(missing)
        agreed = self._agreed(hopeful=True)
        return any(agreed[shard] for shard in missing)

    def hold(self) -> tuple[bytes, ...]:
        """Our own held, which means that come later no longer change."""
        self.helds[self.me] = tuple(self.digest_of(peer) for peer in self.members)
        return self.helds[self.me]

    def commit(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Our own commit: which shards we would apply, and whose helds we know."""
        # The word of a member that was lost since, too: others may count on it.
        self.commits[self.me] = self._agreed()
        self.heards[self.me] = tuple(peer in self.helds for peer in self.members)
        return self.commits[self.me], self.heards[self.me]

    def add_held(self, peer: str, held: tuple[bytes, ...]) -> None:
        """Take in the digests that a member holds. Raises ProtocolViolation, and takes in nothing,
        where that can't be."""
        sizes = {len(digest) for digest in held}
        if len(held) != len(self.members) or not sizes <= {0, DIGEST_BYTES}:
            raise ProtocolViolation(
                f"{peer} told what it holds in another form than of {len(self.members)} digests."
            )
        theirs, ours = held[self.members.index(peer)], held[self.members.index(self.me)]
        if theirs != self.digest_of(peer):
            raise ProtocolViolation(f"{peer} told another digest of its own mean than it sent.")
        if ours not in (b"", self.digest_of(self.me)):
            raise ProtocolViolation(f"{peer} told a digest of our mean that we have not sent.")
        self.helds[peer] = held

    def add_commit(self, peer: str, shards: tuple[bool, ...], heard: tuple[bool, ...]) -> None:
        """Take in the commit of a member whose held has come. Raises ProtocolViolation as
        ``add_held``."""
        if self.me not in self.helds:
            raise ProtocolViolation(f"{peer} has committed before we told it what we hold.")
        if not len(shards) == len(heard) == len(self.members):
            raise ProtocolViolation(
                f"{peer} has committed to another number of shards than {len(self.members)}."
            )
        held = self.helds[peer]
        if any(shard and not digest for shard, digest in zip(shards, held, strict=True)):
            raise ProtocolViolation(f"{peer} has committed to a shard that it does not hold.")
        if not heard[self.members.index(peer)] or not heard[self.members.index(self.me)]:
            raise ProtocolViolation(f"{peer} has committed without hearing of both of us.")
        self.commits[peer], self.heards[peer] = shards, heard

    def outcome(self) -> VoteResult:
        """What is applied, by the votes that we know."""
        columns = zip(*self.heards.values(), strict=True)
        heard = [peer for peer, column in zip(self.members, columns, strict=True) if any(column)]
        applied, outvoted, is_certain = list[bool](), False, True
        for shard, owner in enumerate(self.members):
            voters = [peer for peer in heard if peer != owner or len(heard) <= 3]
            votes = [peer for peer in voters if peer in self.commits and self.commits[peer][shard]]
            missing = sum(peer not in self.commits for peer in voters)
            is_open = 2 * len(votes) <= len(voters) < 2 * (len(votes) + missing)
            # A member that is silent towards us has most likely sent the others what they go by.
            others = [votes_of[shard] for peer, votes_of in self.commits.items() if peer != self.me]
            is_likely = is_open and 2 * sum(others) >= len(others)
            for_ours = [peer for peer in votes if self._agrees(peer, shard)]
            ours = 2 * len(for_ours) > len(voters) or (is_likely and self.commits[self.me][shard])
            applied.append(ours)
            outvoted = outvoted or (not ours and (is_likely or 2 * len(votes) > len(voters)))
            is_certain = is_certain and not is_open
        return VoteResult(tuple(applied), outvoted, is_certain)

    def voids(self, applied: Sequence[bool]) -> dict[str, int]:
        """How many of the shards that are applied each other member leaves out, its own not
        counted."""
        return {
            peer: sum(
                ours and not vote and owner != peer
                for owner, ours, vote in zip(self.members, applied, votes, strict=True)
            )
            for peer, votes in self.commits.items()
            if peer != self.me
        }

    def _agreed(self, *, hopeful: bool = False) -> tuple[bool, ...]:
        """The shards of which most members hold the same mean as we: without a few of them, if the
        others have more in common then. ``hopeful``: means that are missing here, and helds that
        nobody has told, may still agree."""
        kept = [peer for peer in self.members if hopeful or peer in (self.me, *self.helds)]
        most, dropped = len(kept) / 2, 0
        # Of three, an owner that sends two means would part the two others: what one of them gains
        # without the other must be more than that shard. Of more, one may be left out for a shard:
        # then no held of a single member decides what others vote for.
        gain = 2 if len(kept) <= 3 else 1
        best = self._alike(kept, hopeful)
        while len(kept) - 1 > most and not all(best):
            others = [peer for peer in kept if peer != self.me]
            kept.remove(min(others, key=lambda peer: sum(self._alike([peer], hopeful))))
            dropped += 1
            alike = self._alike(kept, hopeful)
            if sum(alike) >= sum(best) + gain * dropped:
                best, dropped, gain = alike, 0, 2
        return best

    def _alike(self, peers: Collection[str], hopeful: bool) -> tuple[bool, ...]:
        """The shards of which all these and we hold the same mean."""
        own = self.helds.get(self.me) or tuple(self.digest_of(peer) for peer in self.members)
        return tuple(
            (digest != b"" or hopeful) and all(self._agrees(peer, shard, hopeful) for peer in peers)
            for shard, digest in enumerate(own)
        )

    def _agrees(self, peer: str, shard: int, hopeful: bool = False) -> bool:
        """Whether a member holds the same mean of a shard as we."""
        if peer == self.me or (hopeful and peer not in self.helds):
            return True
        own, theirs = self.digest_of(self.members[shard]), self.helds[peer][shard]
        if not own:
            return hopeful and theirs != b""
        return theirs == own
