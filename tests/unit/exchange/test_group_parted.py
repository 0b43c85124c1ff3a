"""What must hold for one exchange of a group whose members have taken different outer steps, or
would take different ones."""

import pytest

from helpers.exchange_stories import ME, THREE, told
from helpers.virtual import OFFER
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange import events
from lowcomm_protocol.exchange.events import Cause, Stage
from lowcomm_protocol.exchange.group import GroupExchange
from lowcomm_protocol.matching import Refusal

DIGESTS = {peer: bytes([number]) * 32 for number, peer in enumerate(THREE)}


def agreed(missed: events.Missed) -> GroupExchange:
    """A group of three that has agreed, of which some lack outer steps."""
    exchange = GroupExchange(me=ME, candidates=("a", "b"), group=4)
    exchange.start()
    effects = told(
        exchange,
        *(events.Accepted(peer=peer, offer=OFFER) for peer in "ab"),
        *(events.Roll(peer=peer, roll=THREE) for peer in "ab"),
        *(events.Members(peer=peer, members=THREE) for peer in "ab"),
    )
    assert effects == [events.Capture(members=THREE)]
    assert told(exchange, missed) == []
    return exchange


def means(*peers: str) -> list[events.PeerEvent]:
    """What comes of these, and what ours becomes with it."""
    return [
        *(events.Shard(peer=peer) for peer in peers),
        events.ReduceClosed(),
        events.Reduced(digest=DIGESTS[ME]),
        *(events.ShardMean(peer=peer, digest=DIGESTS[peer]) for peer in peers),
    ]


def without_a() -> list[events.PeerEvent]:
    """All that comes where ``a`` is slow: nobody waits for its mean."""
    return [*means("b"), events.Holdings(peer="b", held=(b"", DIGESTS["b"], DIGESTS[ME]))]


def test_what_a_member_lacks_goes_before_our_contribution():
    exchange = agreed(events.Missed(receivers=("b",)))
    assert told(exchange, events.Captured()) == [
        events.MissedSteps(peer="b"),
        events.Shard(peer="a"),
        events.Shard(peer="b"),
    ]
    assert [type(one) for one in told(exchange, *means("a", "b"))] == [events.Holdings] * 2


def test_means_are_of_no_use_before_what_we_lack_has_come():
    exchange = agreed(events.Missed(donor="a"))
    assert told(exchange, events.Captured(), *without_a()) == []
    effects = told(exchange, events.MissedSteps(peer="a"))
    assert [type(one) for one in effects] == [events.Holdings] * 2


@pytest.mark.parametrize("peer", ["b", "stranger"])
def test_only_the_donor_hands_over_and_once(peer):
    exchange = agreed(events.Missed(donor="a"))
    told(exchange, events.Captured())
    if peer == "stranger":
        with pytest.raises(ProtocolViolation):
            told(exchange, events.MissedSteps(peer=peer))
    else:  # a third may have offered the two different slow weights
        assert peer not in partners_after(exchange, peer)
    told(exchange, events.MissedSteps(peer="a"))
    assert "a" not in partners_after(exchange, "a")


def partners_after(exchange: GroupExchange, peer: str) -> tuple[str, ...]:
    """Whom is left once ``peer`` has handed over steps that nobody waits for."""
    effects = told(exchange, events.MissedSteps(peer=peer))
    assert events.Abandon(peer=peer, reason="handed over steps that we do not wait for") in effects
    return exchange.partners


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (events.Lost(peer="a", reason="broke"), Cause.LOST),
        (events.DeadlinePassed(), Cause.LATE),
    ],
)
def test_who_does_not_get_what_it_lacks_leaves_the_others_to_their_means(event, cause):
    exchange = agreed(events.Missed(donor="a"))
    effects = told(exchange, events.Captured(), *without_a(), event)
    assert (exchange.stage, exchange.cause) == (Stage.ENDED, cause)
    assert not exchange.in_doubt
    assert events.Abandon(peer="b", reason=exchange.reason) in effects


# Parts of a group


def gathering(*others: str, least: int = 0) -> GroupExchange:
    """An exchange in which most must take part."""
    exchange = GroupExchange(me=ME, candidates=others, group=8)
    assert exchange.handle(events.Equal(least=least)) == []
    exchange.start()
    return exchange


def refused(peer: str, reason: Refusal) -> events.Refused:
    return events.Refused(peer=peer, reason=reason)


def accepted(peer: str) -> events.Accepted:
    return events.Accepted(peer=peer, offer=OFFER)


@pytest.mark.parametrize("reason", [Refusal.BUSY, Refusal.TOO_SOON, Refusal.FULL])
def test_half_of_a_group_leaves_an_exchange_to_the_other_half(reason):
    exchange = gathering("a", "b", "c")
    effects = told(exchange, accepted("a"), refused("b", reason), refused("c", reason))
    assert (exchange.stage, exchange.cause) == (Stage.ENDED, Cause.MINORITY)
    assert events.Abandon(peer="a", reason=exchange.reason) in effects


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
        *(events.Roll(peer=peer, roll=four) for peer in "abc"),
    )
    effects = told(exchange, events.Members(peer="a", members=("a", ME)))
    assert events.Capture(members=("a", ME)) not in effects
    assert exchange.stage is Stage.AGREEING and set(exchange.partners) == {"b", "c"}
