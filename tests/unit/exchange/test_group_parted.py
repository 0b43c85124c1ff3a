"""What must hold for one exchange of a group whose members have taken different outer steps, or
would take different ones."""

import pytest

from helpers.virtual import OFFER
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange import base
from lowcomm_protocol.exchange import group as groups
from lowcomm_protocol.exchange.base import Cause, Stage
from lowcomm_protocol.exchange.group import GroupExchange
from lowcomm_protocol.matching import Refusal

ME, THREE = "m", ("a", "b", "m")
DIGESTS = {peer: bytes([number]) * 32 for number, peer in enumerate(THREE)}


def told(exchange: GroupExchange, *happenings: groups.Event) -> list[base.Effect]:
    """The effects of the last event."""
    effects: list[base.Effect] = []
    for event in happenings:
        effects = exchange.handle(event)
    return effects


def agreed(missed: base.Missed) -> GroupExchange:
    """A group of three that has agreed, of which some lack outer steps."""
    exchange = GroupExchange(me=ME, candidates=("a", "b"), group=4)
    exchange.start()
    effects = told(
        exchange,
        *(base.Accepted(peer=peer, offer=OFFER) for peer in "ab"),
        *(groups.RollCame(peer=peer, roll=THREE) for peer in "ab"),
        *(groups.MembersCame(peer=peer, members=THREE) for peer in "ab"),
    )
    assert effects == [base.Capture(members=THREE)]
    assert told(exchange, missed) == []
    return exchange


def means(*peers: str) -> list[groups.Event]:
    """What comes of these, and what ours becomes with it."""
    return [
        *(groups.ShardVerified(peer=peer) for peer in peers),
        groups.ReduceClosed(),
        groups.Reduced(digest=DIGESTS[ME]),
        *(groups.MeanVerified(peer=peer, digest=DIGESTS[peer]) for peer in peers),
    ]


def without_a() -> list[groups.Event]:
    """All that comes where ``a`` is slow: nobody waits for its mean."""
    return [*means("b"), groups.HeldCame(peer="b", held=(b"", DIGESTS["b"], DIGESTS[ME]))]


def test_what_a_member_lacks_goes_before_our_contribution():
    exchange = agreed(base.Missed(receivers=("b",)))
    assert told(exchange, base.Captured()) == [
        groups.SendMissed(peer="b"),
        groups.SendShard(peer="a"),
        groups.SendShard(peer="b"),
    ]
    assert [type(one) for one in told(exchange, *means("a", "b"))] == [groups.SendHeld] * 2


def test_means_are_of_no_use_before_what_we_lack_has_come():
    exchange = agreed(base.Missed(donor="a"))
    assert told(exchange, base.Captured(), *without_a()) == []
    effects = told(exchange, groups.MissedVerified(peer="a"))
    assert [type(one) for one in effects] == [groups.SendHeld] * 2


@pytest.mark.parametrize("peer", ["b", "stranger"])
def test_only_the_donor_hands_over_and_once(peer):
    exchange = agreed(base.Missed(donor="a"))
    told(exchange, base.Captured())
    with pytest.raises(ProtocolViolation):
        told(exchange, groups.MissedVerified(peer=peer))
    told(exchange, groups.MissedVerified(peer="a"))
    with pytest.raises(ProtocolViolation):
        told(exchange, groups.MissedVerified(peer="a"))


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (base.Lost(peer="a", reason="broke"), Cause.LOST),
        (base.DeadlinePassed(), Cause.LATE),
    ],
)
def test_who_does_not_get_what_it_lacks_leaves_the_others_to_their_means(event, cause):
    exchange = agreed(base.Missed(donor="a"))
    effects = told(exchange, base.Captured(), *without_a(), event)
    assert (exchange.stage, exchange.cause) == (Stage.ENDED, cause)
    assert not exchange.in_doubt
    assert base.Abandon(peer="b", reason=exchange.reason) in effects


# Parts of a group


def gathering(*others: str, least: int = 0) -> GroupExchange:
    """An exchange in which most must take part."""
    exchange = GroupExchange(me=ME, candidates=others, group=8)
    assert exchange.handle(base.NeedsMost(least=least)) == []
    exchange.start()
    return exchange


def refused(peer: str, reason: Refusal) -> base.Refused:
    return base.Refused(peer=peer, reason=reason, detail="no")


def accepted(peer: str) -> base.Accepted:
    return base.Accepted(peer=peer, offer=OFFER)


@pytest.mark.parametrize("reason", [Refusal.BUSY, Refusal.TOO_SOON, Refusal.FULL])
def test_half_of_a_group_leaves_an_exchange_to_the_other_half(reason):
    exchange = gathering("a", "b", "c")
    effects = told(exchange, accepted("a"), refused("b", reason), refused("c", reason))
    assert (exchange.stage, exchange.cause) == (Stage.ENDED, Cause.MINORITY)
    assert base.Abandon(peer="a", reason=exchange.reason) in effects


@pytest.mark.parametrize("reason", [Refusal.NOT_TRAINING, Refusal.NOT_TRUSTED, Refusal.OTHER_RUN])
def test_peers_that_would_not_take_part_in_any_case_do_not_count(reason):
    exchange = gathering("a", "b", "c")
    told(exchange, accepted("a"), refused("b", reason), refused("c", reason))
    assert exchange.stage is Stage.AGREEING


@pytest.mark.parametrize(("least", "goes_on"), [(3, True), (4, False)])
def test_so_many_are_needed_where_others_may_not_be_known_yet(least, goes_on):
    exchange = gathering("a", "b", least=least)
    told(exchange, accepted("a"), accepted("b"))
    assert (exchange.stage is Stage.AGREEING) == goes_on


def test_members_that_go_with_others_count_until_ours_are_captured():
    exchange = gathering("a", "b", "c")
    four = ("a", "b", "c", ME)
    told(
        exchange,
        *(accepted(peer) for peer in "abc"),
        *(groups.RollCame(peer=peer, roll=four) for peer in "abc"),
    )
    effects = told(exchange, groups.MembersCame(peer="a", members=("a", ME)))
    assert base.Capture(members=("a", ME)) not in effects
    assert exchange.stage is Stage.AGREEING and set(exchange.partners) == {"b", "c"}
