"""Who the members of a group are: all name the same list before any content travels.

    GATHERING   call all of the slice at once, accept calls
    AGREEING    tell all partners whom we hold a stream with (roll); the lowest peer id names a
                list of members, of whom each holds a stream with each; everybody names it to all
                in it. It is agreed when all have named it

If the leader dies half-way, or some hear of its loss before others, more than one list may be under
way. Lists are ordered; everybody goes over to the lowest that it hears of until all of a list have
named it, and never back. So of two lists that differ no two members can both agree on one while
they count on each other: a member that still goes over after we have agreed is lost.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange import base, events
from lowcomm_protocol.exchange.events import Cause, Effect, Stage
from lowcomm_protocol.exchange.tally import Tally
from lowcomm_protocol.matching import Refusal


class GroupState(StrEnum):
    """States of a member of a group, in the order of its messages; states of every kind come
    beside."""

    LINKED = "linked"  # accepted
    ROLLED = "rolled"  # their roll has come
    NAMED = "named"  # they have named a list of members
    MEMBER = "member"  # the list is agreed, and they are in it
    GIVEN = "given"  # their contribution to our shard has arrived whole
    AVERAGED = "averaged"  # the mean of their shard has, too
    TOLD = "told"  # they have told which means they hold


class GroupInput(StrEnum):
    """What can happen to a stream of a group, besides the inputs of every kind."""

    ROLL = "roll"
    NAMED = "named"  # a list of members
    AGREED = "agreed"  # all members have named the same list
    MISSED = "missed"  # outer steps that we had missed have come, and lead to what most hold
    SHARD = "shard"  # their contribution to our shard
    MEAN = "mean"  # the mean of their shard
    HELD = "held"
    COMMIT = "commit"


ELSEWHERE = frozenset(
    {Refusal.BUSY, Refusal.TOO_SOON, Refusal.FULL, Cause.GAVE_UP, Cause.DISAGREED}
)
"""Why a peer takes no part that is there."""
_MINORITY = ("most of the group take no part now", Cause.MINORITY)
MAX_PEER_ID = 64
"""Characters of a peer id in a roll; ours have 52."""


def clique(rolls: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """Peers that all hold streams with each other, the lowest one among them: taken from the one
    with the most streams on, each that fits those taken before."""
    # By their ids alone, a peer that most leave out would keep those out.
    links = {
        one: {peer for peer in rolls if one in rolls[peer] and peer in rolls[one]} for one in rolls
    }
    leader, taken = min(rolls), list[str]()
    for peer in sorted(rolls, key=lambda one: (one != leader, -len(links[one]), one)):
        if links[peer].issuperset(taken):
            taken.append(peer)
    return tuple(sorted(taken))


@dataclass
class AgreeingExchange(base.Gathering):
    """An exchange of a group until its members are agreed on."""

    # It has only what the other end has told us so far, since what we tell goes to all at once.
    TRANSITIONS: ClassVar[base.Transitions] = base.with_failures(
        {
            (base.OFFERED, base.ACCEPTED_INPUT): GroupState.LINKED,
            (base.OFFERED, base.REFUSED_INPUT): base.REFUSED,
            (GroupState.LINKED, GroupInput.ROLL): GroupState.ROLLED,
            (GroupState.ROLLED, GroupInput.NAMED): GroupState.NAMED,
            # They heard of a lower list. Once we have agreed we can't follow them there.
            (GroupState.NAMED, GroupInput.NAMED): GroupState.NAMED,
            (GroupState.MEMBER, GroupInput.NAMED): base.LOST,
            (GroupState.NAMED, GroupInput.AGREED): GroupState.MEMBER,
            # Before its contribution, if it hands over any.
            (GroupState.MEMBER, GroupInput.MISSED): GroupState.MEMBER,
            (GroupState.MEMBER, GroupInput.SHARD): GroupState.GIVEN,
            (GroupState.GIVEN, GroupInput.MEAN): GroupState.AVERAGED,
            # A member that was too slow to make its mean says so, and sends none.
            (GroupState.GIVEN, GroupInput.HELD): GroupState.TOLD,
            (GroupState.AVERAGED, GroupInput.HELD): GroupState.TOLD,
            (GroupState.TOLD, GroupInput.COMMIT): base.DONE,
        }
    )

    tally: Tally = field(init=False)
    """What was said of the means; begins again when the members are agreed on."""
    members: tuple[str, ...] = ()
    """Sorted members that we named; agreed on once we are past AGREEING. Shard k belongs to the
    k-th."""
    _rolls: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    _lists: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Lists that every partner and we ourselves sent, by peer id."""
    _proposed: tuple[str, ...] = ()
    """Members that we proposed as leader."""
    _least: int | None = None
    """Members needed, besides outnumbering those elsewhere; None: any number."""
    _waited: int = 0
    """Looks at the members that hold up the others since a message of one came."""

    def __post_init__(self) -> None:
        self.tally = Tally(self.me, ())

    def start(self) -> list[Effect]:
        # Peers that called first have their places already.
        room = self.group - 1 - len(self._members)
        peers = [peer for peer in self.candidates if peer not in self._members][: max(0, room)]
        self._members.update({peer: base.ExchangeMember(base.OFFERED) for peer in peers})
        return [events.Dial(peer=peer) for peer in peers] or self._gather()

    def takes_part(self, peer: str) -> bool | None:
        others = [roll for other, roll in self._rolls.items() if other not in (self.me, peer)]
        return 2 * sum(peer in roll for roll in others) > len(others) if others else None

    def _begin(self) -> list[Effect]:
        if not self._are_most(1 + len(self.partners)):
            return self._give_in(*_MINORITY)
        self.stage = Stage.AGREEING
        roll = self._rolls[self.me] = tuple(sorted([self.me, *self.partners]))
        return [*self._to_all(events.Roll, roll=roll), *self._agree()]

    def _on_roll(self, peer: str, roll: tuple[str, ...]) -> list[Effect]:
        if self._next_state(peer, GroupInput.ROLL) is None:
            return []
        self._check_list(peer, roll)
        self._advance(peer, GroupInput.ROLL)
        self._rolls[peer] = roll
        return self._agree()

    def _on_members(self, peer: str, members: tuple[str, ...]) -> list[Effect]:
        after = self._next_state(peer, GroupInput.NAMED)
        if after is None:
            return []
        self._check_list(peer, members)
        self._check_named(peer, members)
        if after == base.LOST:
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
            return self._close_gathering()
        if not self._others_in_list():
            self.members = ()  # We have lost all that we named it to: it binds nobody.
        leader = min(self.me, *self.partners)
        theirs = self._lists.get(leader, ())
        if (
            not self.members
            and theirs
            and not self._are_most(len(theirs), len(set(self.partners) - set(theirs)))
        ):
            # Most leave it out, or it them: they go on without it, and so do we.
            why = "named too few of the group as its members"
            return self._give_up([leader], why, Cause.DISAGREED) + self._agree()
        effects = self._name(leader)
        others = self._others_in_list()
        if not others or any(self._lists.get(peer) != self.members for peer in others):
            return effects
        left_out = [peer for peer in self.partners if peer not in others]
        if not self._are_most(len(self.members), len(left_out)):
            return effects + self._give_in(*_MINORITY)
        self.stage, self.tally = Stage.CAPTURING, Tally(self.me, self.members)
        for peer in others:
            self._advance(peer, GroupInput.AGREED)
        effects += self._give_up(left_out, "is not in the list of members", Cause.DISAGREED)
        return [*effects, events.Capture(members=self.members)]

    def _are_most(self, count: int, elsewhere: int = 0) -> bool:
        """Whether ``count`` may go on without those that are elsewhere; ``elsewhere`` counts none
        that are out already."""
        elsewhere += sum(cause in ELSEWHERE for cause in self.causes.values())
        return self._least is None or count >= max(self._least, elsewhere + 1)

    def _name(self, leader: str) -> list[Effect]:
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
        return [events.Members(peer=peer, members=lowest) for peer in self._others_in_list()]

    def _others_in_list(self) -> list[str]:
        return [peer for peer in self.partners if peer in self.members]

    def _on_agreeing_closed(self) -> list[Effect]:
        # A leader gives up at once the members that have sent no roll. The others let one or two
        # looks pass, because the leader may have waited until now itself.
        leader = min(self.me, *self.partners)
        if not self.members and leader == self.me:
            why = "did not tell its links in time"
            return self._give_up(self._in(GroupState.LINKED), why, Cause.LATE) + self._agree()
        self._waited += 1
        # A peer that waits for another that waits has more patience than that.
        patience = 2 + sum(peer < leader for peer in self._rolls.get(leader, ()))
        if self._waited < (3 if self.members else patience):  # 3: the leader told us, but not all
            return []
        self._waited = 0
        late = [peer for peer in self._others_in_list() if self._lists.get(peer) != self.members]
        why = "did not name the members in time"
        silent = late if self.members else [leader]
        return self._give_up(silent, why, Cause.LATE) + self._agree()

    def _go_on(self) -> list[Effect]:
        """Go on without those that are lost."""
        return self._gather() if self.stage is Stage.GATHERING else self._agree()
