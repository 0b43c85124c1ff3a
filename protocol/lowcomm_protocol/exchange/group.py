"""One exchange of one fragment in a group of at most eight members: reduce-scatter and all-gather
over direct streams.

    GATHERING   call all of the slice at once, accept calls
    AGREEING    tell all partners whom we hold a stream with (roll); the lowest peer id names a
                list of members, of whom each holds a stream with each; everybody names it to all
                in it. It is agreed when all have named it
    CAPTURING   the fragment is cut in one shard a member, in sorted order; our contribution is
                captured and coded
    REDUCING    everybody sends every member its contribution to the shard that this member owns
    AVERAGING   every owner sends all the mean of its shard
    CONFIRMING  everybody tells all the digests of the means that it holds (held)
    COMMITTING  everybody tells all which shards it would apply, and whose digests it has heard
                of (commit)
    APPLIED     the shards that most would apply are applied
    ENDED       nothing is applied, training goes on

What one stream carries:

    caller ── hello ──────────────► callee            the offer: run, plan, fragment, progress
    caller ◄───── accept | refuse ─ callee
    both   ── roll ───────────────► both              "I hold streams with these peers"
    both   ── members ────────────► both              "the members are"; a lower list may follow
    donor  ── content, chunk* ────► receiver          outer steps that the receiver lacks, if any
    both   ── content, chunk* ────► both              our contribution to the shard of the other
    both   ── content, chunk* ────► both              the mean of our shard
    both   ── held ───────────────► both              "I hold the means with these digests"
    both   ── commit ─────────────► both              "I would apply these shards; helds I heard"

The table of transitions has only what the other end has told us so far, since what we tell goes to
all members at once. A missing key is a violation. A member that is
lost costs its own shard, and no more. No clock, no sockets: events go in, effects come out.

**Lists.** If the leader dies half-way, or some hear of its loss before others, more than one list
may be under way. Lists are ordered; everybody goes over to the lowest that it hears of until all of
a list have named it, and never back. So of two lists that differ no two members can both agree on
one while they count on each other: a member that still goes over after we have agreed is lost.

**Shards.** ``tally.py`` tells which are applied. We are in doubt if votes are missing that could
decide, if others apply a shard that we lack, or if a member did not answer our commit. Where all
must hold the same slow weights, a member that lacks such a shard applies nothing but the steps that
it has taken over: so what it holds is what others held before, and they can hand over the rest.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange.base import (
    Accepted,
    Apply,
    Capture,
    Captured,
    Cause,
    Crossed,
    DeadlinePassed,
    Dial,
    Effect,
    Equal,
    ExchangeMember,
    Gathering,
    GatheringClosed,
    GaveUp,
    Lost,
    Missed,
    NeedsMost,
    Refused,
    Stage,
    Stumbled,
    look_up,
    no_partner,
)
from lowcomm_protocol.exchange.tally import DIGEST_BYTES, Tally
from lowcomm_protocol.matching import Refusal


class GroupState(StrEnum):
    """What one member has told us so far, always in this order."""

    OFFERED = "offered"  # we called; no answer yet
    LINKED = "linked"  # accepted
    ROLLED = "rolled"  # their roll has come
    NAMED = "named"  # they have named a list of members
    MEMBER = "member"  # the list is agreed, and they are in it
    GIVEN = "given"  # their contribution to our shard has arrived whole
    AVERAGED = "averaged"  # the mean of their shard has, too
    TOLD = "told"  # they have told which means they hold
    DONE = "done"  # they have committed
    REFUSED = "refused"
    LOST = "lost"


class GroupInput(StrEnum):
    """What can happen to a stream of a group."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    ROLL = "roll"
    NAMED = "named"  # a list of members
    AGREED = "agreed"  # all members have named the same list
    MISSED = "missed"  # outer steps that we had missed have come whole, and lead to what most hold
    SHARD = (
        "shard"  # their contribution to our shard has arrived whole, and decodes to what is allowed
    )
    MEAN = "mean"  # the same of the mean of their shard
    HELD = "held"
    COMMIT = "commit"
    FAILED = "failed"  # stream lost, corrupt content, deadline, or either side gave up


TERMINAL = frozenset({GroupState.DONE, GroupState.REFUSED, GroupState.LOST})
HAVE_GIVEN = frozenset({GroupState.GIVEN, GroupState.AVERAGED, GroupState.TOLD, GroupState.DONE})
"""States in which their contribution to our shard may be used."""

GROUP_TRANSITIONS: dict[tuple[GroupState, GroupInput], GroupState] = {
    (GroupState.OFFERED, GroupInput.ACCEPTED): GroupState.LINKED,
    (GroupState.OFFERED, GroupInput.REFUSED): GroupState.REFUSED,
    (GroupState.LINKED, GroupInput.ROLL): GroupState.ROLLED,
    (GroupState.ROLLED, GroupInput.NAMED): GroupState.NAMED,
    # They heard of a lower list. Once we have agreed we can't follow them there.
    (GroupState.NAMED, GroupInput.NAMED): GroupState.NAMED,
    (GroupState.MEMBER, GroupInput.NAMED): GroupState.LOST,
    (GroupState.NAMED, GroupInput.AGREED): GroupState.MEMBER,
    # Before its contribution, if it hands over any.
    (GroupState.MEMBER, GroupInput.MISSED): GroupState.MEMBER,
    (GroupState.MEMBER, GroupInput.SHARD): GroupState.GIVEN,
    (GroupState.GIVEN, GroupInput.MEAN): GroupState.AVERAGED,
    # Whoever was too slow to make its mean tells so, and sends none.
    (GroupState.GIVEN, GroupInput.HELD): GroupState.TOLD,
    (GroupState.AVERAGED, GroupInput.HELD): GroupState.TOLD,
    (GroupState.TOLD, GroupInput.COMMIT): GroupState.DONE,
    **{
        (state, GroupInput.FAILED): GroupState.LOST for state in GroupState if state not in TERMINAL
    },
}


def step(state: GroupState, event: GroupInput) -> GroupState:
    """The next state. Raises ProtocolViolation where the table has no entry."""
    return look_up(GROUP_TRANSITIONS, state, event)


_ELSEWHERE = frozenset(
    {Refusal.BUSY, Refusal.TOO_SOON, Refusal.FULL, Cause.GAVE_UP, Cause.DISAGREED}
)
"""Why a peer takes no part that is there."""
VOIDED = 2
"""Shards of others that a member must leave out, and all others apply, until it is a stumble: one
may be missing because a stream broke, or because its owner lied to this member alone."""
SILENT = 2
"""Looks at who holds up the others after which those that have committed go on."""
OUTVOTE = 4
"""Members from which on a group keeps one whose contribution can't be used: whoever lost it would
be outvoted by the others. Of fewer, its mean is worth less than the shard that is lost with it."""
MAX_PEER_ID = 64
"""Characters of a peer id in a roll; ours have 52."""

# Events, besides those of every exchange. What one peer sent is reported in the order in which it
# was sent.


@dataclass(frozen=True, kw_only=True)
class RollCame:
    """A partner told whom it holds a stream with."""

    peer: str
    roll: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MembersCame:
    """A partner named a list of members."""

    peer: str
    members: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class AgreeingClosed:
    """Time is up for who holds up the list of members; to be told every few seconds after gathering
    has closed.

    The leader gives up at once who has sent no roll. The others let pass one more or two, because
    the leader may have waited until now itself: then they give up the leader, or who has not named
    the list. At the end it is up for who does not commit, where the other votes decide."""


@dataclass(frozen=True, kw_only=True)
class MissedVerified:
    """The steps that we had missed have arrived whole, and lead to what most hold."""

    peer: str


@dataclass(frozen=True, kw_only=True)
class ShardVerified:
    """A member's contribution to our shard has arrived whole and decodes to what is allowed, be it
    too late or not."""

    peer: str


@dataclass(frozen=True, kw_only=True)
class ReduceClosed:
    """Time is up for contributions to our shard; who is missing is not in the mean, but takes
    part."""


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """The mean of our shard is coded and can be sent."""

    digest: bytes


@dataclass(frozen=True, kw_only=True)
class MeanVerified:
    """The mean of a member's own shard has arrived whole and decodes to what is allowed."""

    peer: str
    digest: bytes


@dataclass(frozen=True, kw_only=True)
class HeldCame:
    """A member told which means it holds: a digest for each member, empty where it holds none."""

    peer: str
    held: tuple[bytes, ...]
    salt: bytes = b""
    """Salt of the marks that stand in place of digests (``tally.mark``)."""


@dataclass(frozen=True, kw_only=True)
class ConfirmingClosed:
    """Time is up for helds; to be told between the two ``DeadlinePassed``."""


@dataclass(frozen=True, kw_only=True)
class CommitCame:
    """A member told which shards it would apply, and whose helds it knows; one of each for each
    member."""

    peer: str
    shards: tuple[bool, ...]
    heard: tuple[bool, ...]


Event = (
    Accepted
    | Refused
    | Crossed
    | GatheringClosed
    | RollCame
    | MembersCame
    | AgreeingClosed
    | Captured
    | NeedsMost
    | Equal
    | Missed
    | MissedVerified
    | ShardVerified
    | ReduceClosed
    | Reduced
    | MeanVerified
    | HeldCame
    | ConfirmingClosed
    | CommitCame
    | Lost
    | DeadlinePassed
    | GaveUp
)

# Effects, besides those of every exchange. What goes to a peer that called us goes after our
# acceptance.


@dataclass(frozen=True, kw_only=True)
class SendRoll(Effect):
    """Tell a partner whom we hold a stream with, sorted, our own id included."""

    peer: str
    roll: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SendMembers(Effect):
    """Name a list of members to one of them."""

    peer: str
    members: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SendMissed(Effect):
    """Hand over to a member the steps that it has missed."""

    peer: str


@dataclass(frozen=True, kw_only=True)
class SendShard(Effect):
    """Send a member our contribution to the shard that it owns."""

    peer: str


@dataclass(frozen=True, kw_only=True)
class Reduce(Effect):
    """Average our shard over these members' contributions, our own included."""

    contributors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SendMean(Effect):
    """Send a member the mean of our shard."""

    peer: str


@dataclass(frozen=True, kw_only=True)
class SendHeld(Effect):
    """Tell a member which means we hold."""

    peer: str
    held: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True)
class SendCommit(Effect):
    """Tell a member which shards we would apply, and whose helds we know."""

    peer: str
    shards: tuple[bool, ...]
    heard: tuple[bool, ...]


def clique(rolls: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """Peers that all hold streams with each other, the lowest one among them: taken from the one
    with the most streams on, each that fits those taken before."""
    # By their ids alone, one that most leave out would keep those out.
    links = {
        one: {peer for peer in rolls if one in rolls[peer] and peer in rolls[one]} for one in rolls
    }
    leader, taken = min(rolls), list[str]()
    for peer in sorted(rolls, key=lambda one: (one != leader, -len(links[one]), one)):
        if links[peer].issuperset(taken):
            taken.append(peer)
    return tuple(sorted(taken))


@dataclass
class GroupExchange(Gathering):
    """The decisions of one peer in one exchange of a group. ``handle`` takes an event and gives
    effects to carry out."""

    members: tuple[str, ...] = ()
    """The list that we have named, and agreed on once we are past AGREEING: sorted; shard k belongs
    to the k-th."""
    tally: Tally = field(init=False)
    """What was told of the means; begins anew when the list is agreed on."""
    _rolls: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    _lists: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """What every partner told us, and what we told ourselves, by peer id."""
    _proposed: tuple[str, ...] = ()
    """The list that we made ourselves, as leader."""
    _least: int | None = None
    """How many members are needed, besides more than are elsewhere; None: any."""
    _receivers: tuple[str, ...] = ()
    """Whom we hand over what they have missed."""
    _donor: str = ""
    """Who hands over what we have missed, until it has come."""
    _took_over: bool = False
    _equal: bool = False
    """Whether all must hold the same slow weights."""
    _stranded: bool = False
    """Whether ours are others than those of most, and nobody can hand over the steps between."""
    _waited: int = 0
    _reduce_closed: bool = False
    _late: bool = False
    _unanswered: bool = False

    def __post_init__(self) -> None:
        self.tally = Tally(self.me, ())

    def start(self) -> list[Effect]:
        """Begin to call the slice."""
        # Peers that called first have their places already.
        room = self.group - 1 - len(self._members)
        peers = [peer for peer in self.candidates if peer not in self._members][: max(0, room)]
        self._members.update({peer: ExchangeMember(GroupState.OFFERED) for peer in peers})
        return [Dial(peer=peer) for peer in peers] or self._gather()

    def handle(self, event: Event) -> list[Effect]:
        """Take in one event. Raises ProtocolViolation where a peer did what is not allowed in its
        state."""
        if self.over:
            return []
        match event:
            case Accepted():
                return self._on_accepted(event)
            case Refused(peer=peer, reason=reason, detail=detail):
                return self._on_refused(peer, reason, detail)
            case Crossed(peer=peer):
                return self._on_crossed(peer)
            case GatheringClosed():
                return self._on_gathering_closed()
            case RollCame(peer=peer, roll=roll):
                return self._on_roll(peer, roll)
            case MembersCame(peer=peer, members=members):
                return self._on_members(peer, members)
            case AgreeingClosed():
                return self._on_agreeing_closed()
            case Captured():
                return self._on_captured()
            case NeedsMost(least=least):
                self._least = least
                return []
            case Equal():
                self._equal = True
                return []
            case Missed(receivers=receivers, donor=donor, stranded=stranded):
                self._receivers, self._donor, self._stranded = receivers, donor, stranded
                return []
            case MissedVerified(peer=peer):
                return self._on_missed(peer)
            case ShardVerified(peer=peer):
                return self._advance(peer, GroupInput.SHARD) + self._settle()
            case ReduceClosed():
                self._reduce_closed = True
                return self._settle()
            case Reduced(digest=digest):
                return self._on_reduced(digest)
            case MeanVerified(peer=peer, digest=digest):
                return self._on_mean(peer, digest)
            case HeldCame(peer=peer, held=held, salt=salt):
                return self._on_held(peer, held, salt)
            case ConfirmingClosed():
                return self._on_confirming_closed()
            case CommitCame(peer=peer, shards=shards, heard=heard):
                return self._on_commit(peer, shards, heard)
            case Lost(peer=peer, reason=reason, cause=cause):
                return self._on_lost(peer, reason or "was lost", cause)
            case DeadlinePassed():
                return self._on_deadline()
            case GaveUp(reason=reason, cause=cause):
                return self._give_in(reason, cause)

    def takes_part(self, peer: str) -> bool | None:
        others = [roll for other, roll in self._rolls.items() if other not in (self.me, peer)]
        return 2 * sum(peer in roll for roll in others) > len(others) if others else None

    # AGREEING

    def _begin(self) -> list[Effect]:
        if not self._are_most(1 + len(self.partners)):
            return self._end_as_minority()
        self.stage = Stage.AGREEING
        roll = self._rolls[self.me] = tuple(sorted([self.me, *self.partners]))
        return [*(SendRoll(peer=peer, roll=roll) for peer in self.partners), *self._agree()]

    def _on_roll(self, peer: str, roll: tuple[str, ...]) -> list[Effect]:
        if self._would(peer, GroupInput.ROLL) is None:
            return []
        self._check_list(peer, roll)
        self._advance(peer, GroupInput.ROLL)
        self._rolls[peer] = roll
        return self._agree()

    def _on_members(self, peer: str, members: tuple[str, ...]) -> list[Effect]:
        after = self._would(peer, GroupInput.NAMED)
        if after is None:
            return []
        self._check_list(peer, members)
        self._check_named(peer, members)
        if after is GroupState.LOST:
            why = "has agreed with others on another list of members"
            return self._give_up([peer], why, Cause.DISAGREED) + self._go_on()
        self._advance(peer, GroupInput.NAMED)
        self._lists[peer] = members
        return self._agree()

    def _check_list(self, peer: str, ids: tuple[str, ...]) -> None:
        # Lists are compared as they stand, and shards are dealt by position: so only one order is
        # allowed.
        in_form = len(ids) <= self.group and all(0 < len(one) <= MAX_PEER_ID for one in ids)
        if not in_form or list(ids) != sorted(set(ids)) or not {peer, self.me} <= set(ids):
            raise ProtocolViolation(
                f"{peer} sent a list of peers that is malformed, or lacks one of us."
            )

    def _check_named(self, peer: str, members: tuple[str, ...]) -> None:
        # A list is made from the rolls of all in it. So it comes after ours, and names nobody whom
        # ours does not.
        if not set(members) <= set(self._rolls.get(self.me, ())):
            raise ProtocolViolation(f"{peer} named members that we hold no streams with.")
        if members[0] == self.me and members != self._proposed:
            raise ProtocolViolation(
                f"{peer} named a list of which we are the leader and that is not ours."
            )
        if peer in self._lists and members >= self._lists[peer]:
            raise ProtocolViolation(f"{peer} named a list of members after a lower one.")

    def _agree(self) -> list[Effect]:
        """Name the lowest list, and go on if all in it have named it."""
        if self.stage is not Stage.AGREEING:
            return []
        if not self.partners:
            return self._end_alone()
        if not self._others_in_list():
            self.members = ()  # We have lost all that we named it to: it binds nobody.
        leader = self._leader()
        theirs = self._lists.get(leader, ())
        if (
            not self.members
            and theirs
            and not self._are_most(len(theirs), len(set(self.partners) - set(theirs)))
        ):
            # Most leave it out, or it them: they go on without it, and so do we.
            why = "named too few of the group as its members"
            return self._give_up([leader], why, Cause.DISAGREED) + self._agree()
        effects = self._name()
        others = self._others_in_list()
        if not others or any(self._lists.get(peer) != self.members for peer in others):
            return effects
        left_out = [peer for peer in self.partners if peer not in others]
        if not self._are_most(len(self.members), len(left_out)):
            return effects + self._end_as_minority()
        self.stage, self.tally = Stage.CAPTURING, Tally(self.me, self.members)
        for peer in others:
            self._advance(peer, GroupInput.AGREED)
        effects += self._give_up(left_out, "is not in the list of members", Cause.DISAGREED)
        return [*effects, Capture(members=self.members)]

    def _are_most(self, count: int, elsewhere: int = 0) -> bool:
        """Whether so many may go on without those that are elsewhere; ``elsewhere``: besides those
        that are out already."""
        elsewhere += sum(cause in _ELSEWHERE for cause in self.causes.values())
        return self._least is None or count >= max(self._least, elsewhere + 1)

    def _end_as_minority(self) -> list[Effect]:
        return self._give_in("most of the group take no part now", Cause.MINORITY)

    def _name(self) -> list[Effect]:
        leader = self._leader()
        # What our leader named only he can tell. A list of a later one waits: our leader may still
        # name a lower one.
        named = [(peer, self._lists[peer]) for peer in self.partners if peer in self._lists]
        lists = [
            members
            for peer, members in named
            if members[0] < leader or members[0] == leader == peer
        ]
        if leader == self.me and not self.members and not self._in(GroupState.LINKED):
            self._proposed = clique({peer: self._rolls[peer] for peer in (self.me, *self.partners)})
            lists.append(self._proposed)
        lowest = min(lists, default=self.members)
        if not lowest or (self.members and lowest >= self.members):
            return []
        self.members, self._waited = lowest, 0
        return [SendMembers(peer=peer, members=lowest) for peer in self._others_in_list()]

    def _leader(self) -> str:
        return min(self.me, *self.partners)

    def _others_in_list(self) -> list[str]:
        return [peer for peer in self.partners if peer in self.members]

    def _on_agreeing_closed(self) -> list[Effect]:
        if self.stage is Stage.COMMITTING:
            self._waited += 1
            decided = self._waited >= SILENT and self.tally.outcome().is_certain
            return self._go_on_without_silent() if decided else []
        if self.stage is not Stage.AGREEING:
            return []
        leader = self._leader()
        if not self.members and leader == self.me:
            why = "did not tell its links in time"
            return self._give_up(self._in(GroupState.LINKED), why, Cause.LATE) + self._agree()
        self._waited += 1
        if self._waited < self._patience(leader):
            return []
        self._waited = 0
        late = [peer for peer in self._others_in_list() if self._lists.get(peer) != self.members]
        why = "did not name the members in time"
        silent = late if self.members else [leader]
        return self._give_up(silent, why, Cause.LATE) + self._agree()

    def _patience(self, leader: str) -> int:
        """How often time must be up until others are given up: whoever waits for somebody that
        waits has more of it."""
        if self.members:
            return 3  # others may be waiting for the leader, who told us but not them
        return 2 + sum(peer < leader for peer in self._rolls.get(leader, ()))

    # CAPTURING, REDUCING, AVERAGING

    def _on_captured(self) -> list[Effect]:
        if self.stage is not Stage.CAPTURING:
            raise ProtocolViolation(f"A capture is not expected while {self.stage.value}.")
        self.stage = Stage.REDUCING
        missed = [SendMissed(peer=peer) for peer in self._receivers if peer in self.partners]
        shards = [SendShard(peer=peer) for peer in self.partners]
        return [*missed, *shards, *self._settle()]

    def _on_missed(self, peer: str) -> list[Effect]:
        if self._would(peer, GroupInput.MISSED) is None:
            return []
        if peer != self._donor:
            raise ProtocolViolation(f"{peer} handed over steps that we do not wait for.")
        self._advance(peer, GroupInput.MISSED)
        self._donor, self._took_over = "", True
        return self._settle()

    def _on_reduced(self, digest: bytes) -> list[Effect]:
        if self.me in self.tally.helds:
            return []  # We have told that we do not hold it: it comes too late.
        if (
            self.stage is not Stage.AVERAGING
            or self.me in self.tally.means
            or len(digest) != DIGEST_BYTES
        ):
            raise ProtocolViolation(f"A mean of ours is not expected while {self.stage.value}.")
        self.tally.means[self.me] = digest
        return [*(SendMean(peer=peer) for peer in self.partners), *self._settle()]

    def _on_mean(self, peer: str, digest: bytes) -> list[Effect]:
        if self._would(peer, GroupInput.MEAN) is None:
            return []
        if len(digest) != DIGEST_BYTES:
            raise ProtocolViolation(
                f"The mean of {peer} has a digest of {len(digest)} bytes, not {DIGEST_BYTES}."
            )
        self._advance(peer, GroupInput.MEAN)
        self.tally.means[peer] = digest
        return self._settle()

    # CONFIRMING, COMMITTING

    def _on_held(self, peer: str, held: tuple[bytes, ...], salt: bytes) -> list[Effect]:
        if self._would(peer, GroupInput.HELD) is None:
            return []
        self.tally.add_held(peer, held, salt)
        self._advance(peer, GroupInput.HELD)
        return self._settle()

    def _on_commit(
        self, peer: str, shards: tuple[bool, ...], heard: tuple[bool, ...]
    ) -> list[Effect]:
        if self._would(peer, GroupInput.COMMIT) is None:
            return []
        self.tally.add_commit(peer, shards, heard)
        self._advance(peer, GroupInput.COMMIT)
        return self._settle()

    def _on_confirming_closed(self) -> list[Effect]:
        if self.stage is not Stage.CONFIRMING:
            return []
        silent = self._in(GroupState.MEMBER, GroupState.GIVEN, GroupState.AVERAGED)
        why = "did not tell in time what it holds"
        return self._give_up(silent, why, Cause.LATE) + self._go_on()

    # From stage to stage: as far as what has come allows

    def _settle(self) -> list[Effect]:
        effects: list[Effect] = []
        # One event may complete several stages, such as the loss of the member that all wait for.
        if self.stage is Stage.REDUCING and (
            self._reduce_closed or not self._in(GroupState.MEMBER)
        ):
            effects += self._reduce()
        if self.stage in (Stage.REDUCING, Stage.AVERAGING) and not self._awaits():
            effects += self._confirm()
        if self.stage is Stage.CONFIRMING and not self._in(
            GroupState.MEMBER, GroupState.GIVEN, GroupState.AVERAGED
        ):
            effects += self._commit()
        if self.stage is Stage.COMMITTING and not self._in(GroupState.TOLD):
            effects += self._conclude()
        return effects

    def _awaits(self) -> bool:
        return self.tally.awaits((self.me, *self.partners)) or bool(self._donor)

    def _reduce(self) -> list[Effect]:
        self.stage = Stage.AVERAGING
        return [Reduce(contributors=tuple(sorted([self.me, *self._in(*HAVE_GIVEN)])))]

    def _confirm(self) -> list[Effect]:
        self.stage, held = Stage.CONFIRMING, self.tally.hold()
        return [SendHeld(peer=peer, held=held) for peer in self.partners]

    def _commit(self) -> list[Effect]:
        self.stage, (shards, heard) = Stage.COMMITTING, self.tally.commit()
        self._waited = 0
        return [SendCommit(peer=peer, shards=shards, heard=heard) for peer in self.partners]

    def _conclude(self) -> list[Effect]:
        found = self.tally.outcome()
        behind = found.is_outvoted and self._equal
        doubt = self._unanswered or found.is_outvoted or not found.is_certain
        voids = self.tally.voids(found.applied)
        voiding = [peer for peer, count in voids.items() if count >= VOIDED]
        left_out = "left out means that most others hold and apply"
        effects: list[Effect] = [Stumbled(peer=peer, reason=left_out) for peer in voiding]
        shards = (False,) * len(self.members) if behind else found.applied
        why = ""
        if self._stranded:
            why = "our slow weights are others than those of most, which nobody can hand over"
        elif not any(shards) and not self._took_over:
            why = "most apply means that we lack" if behind else "too few hold the same mean"
        if why:
            return [*effects, *self._end(why, Cause.DISAGREED, in_doubt=doubt)]
        self.stage, self.in_doubt = Stage.APPLIED, doubt
        swarm_step = max(offer.swarm_step for offer in self.offers(self.partners))
        return [*effects, Apply(members=self.members, swarm_step=swarm_step, shards=shards)]

    def _go_on_without_silent(self) -> list[Effect]:
        silent, why = self._in(GroupState.TOLD), "did not commit in time"
        return self._give_up(silent, why, Cause.LATE) + self._go_on()

    # any stage

    def _on_lost(self, peer: str, reason: str, cause: Cause | Refusal) -> list[Effect]:
        if not self.is_open(peer):
            return []
        self._lose(peer, reason, cause)
        return self._go_on()

    def _go_on(self) -> list[Effect]:
        """Go on without those that are lost."""
        if self.stage is Stage.GATHERING:
            return self._gather()
        if self.stage is Stage.AGREEING:
            return self._agree()
        if not self.partners:
            why = f"nobody else is left of the group: {no_partner(self.refusals)}"
            return self._give_in(why, self._common_cause())
        if self._donor and self._donor not in self.partners:
            # What the others agree on means nothing to us without the steps before it.
            return self._give_in("what we had missed does not come", Cause.LOST)
        return self._settle()

    def _lose(self, peer: str, reason: str, cause: Cause | Refusal) -> None:
        # Its commit may be lost on the way: then it has applied what we do not.
        self._unanswered = self._unanswered or (
            self.stage is Stage.COMMITTING and peer in self._in(GroupState.TOLD)
        )
        super()._lose(peer, reason, cause)

    def _on_deadline(self) -> list[Effect]:
        first, self._late = not self._late, True
        if self._donor:
            return self._give_in("what we had missed did not come in time", Cause.LATE)
        if self.stage in (Stage.REDUCING, Stage.AVERAGING):
            if not set(self.tally.means) - {self.me}:
                # To tell that we hold nothing would keep everybody from applying what they all
                # hold.
                why = "no mean of another member came before its deadline"
                return self._give_in(why, Cause.LATE)
            return self._confirm() + self._settle()
        if self.stage in (Stage.CONFIRMING, Stage.COMMITTING) and first:
            return []  # What others tell may be on its way.
        if self.stage is Stage.COMMITTING:
            # Those that have committed apply what we know of, most likely: they are more, and so we
            # go with them.
            return self._go_on_without_silent()
        return self._give_in("ran past its deadline", Cause.LATE)

    def _give_in(self, reason: str, cause: Cause | Refusal) -> list[Effect]:
        return self._end(reason, cause, in_doubt=self.stage is Stage.COMMITTING)

    def _would(self, peer: str, event: GroupInput) -> GroupState | None:
        """The state that an event leads to; None if it was on its way when we gave the member
        up."""
        member = self._members.get(peer)
        if member is None:
            raise ProtocolViolation(
                f"{peer}: {event.value!r} from a peer that has no part in this exchange."
            )
        return None if member.state == GroupState.LOST else step(GroupState(member.state), event)

    def _step(self, peer: str, member: ExchangeMember, event: str) -> list[Effect]:
        member.state = step(GroupState(member.state), GroupInput(event))
        return []
