"""What must hold for one exchange of two: among honest peers in any weather, and against any
sequence of events."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.exchange_stories import ME, accepted, run_to_end, told
from helpers.virtual import CALM, OFFER, STORM, stories
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange import events
from lowcomm_protocol.exchange.events import Stage
from lowcomm_protocol.exchange.pair import PairExchange, members_digest
from lowcomm_protocol.matching import REFUSAL_TEXT, Refusal

STORIES = 1000
"""Schedules of one test; all tests here run about 3,000 in a few seconds."""


# Swarms of honest peers


@pytest.mark.parametrize("size", [2, 4, 6, 8, 16])
def test_without_faults_an_even_swarm_applies_in_pairs(size):
    for swarm in stories(2, range(size, size + 1), CALM, 60):
        assert all(
            peer.applied is not None and len(peer.applied) == 2 for peer in swarm.peers.values()
        )


def test_peers_that_begin_at_once_cross_and_meet_all_the_same():
    for swarm in stories(2, range(8, 9), replace(CALM, skew=0.0), 200):
        assert all(peer.applied for peer in swarm.peers.values())


@pytest.mark.slow
def test_in_a_storm_partners_agree_or_are_in_doubt_and_all_end_in_time():
    applied = doubts = 0
    for swarm in stories(2, range(2, 11), STORM, STORIES):
        applied += sum(peer.applied is not None for peer in swarm.peers.values())
        doubts += sum(peer.exchange.in_doubt for peer in swarm.peers.values() if peer.exchange)
    assert applied > 500, "the storm is so strong that it tests nothing"
    assert doubts > 20, "the storm is so weak that it tests nothing"


# Any sequence of events

PEERS = ("a", "b", "c", "z", "stranger")


def any_event():
    peer = st.sampled_from(PEERS)
    digests = st.sampled_from(
        [
            members_digest(["m", "a"]),
            members_digest(["m", "b"]),
            members_digest(["m", "a", "b"]),
            b"",
        ]
    )
    return st.one_of(
        st.builds(events.Accepted, peer=peer, offer=st.just(OFFER), called_us=st.booleans()),
        st.builds(events.Refused, peer=peer, reason=st.sampled_from(Refusal)),
        st.just(events.Captured()),
        st.builds(events.WholeContribution, peer=peer),
        st.builds(events.Confirm, peer=peer, members=digests),
        st.builds(events.Lost, peer=peer, reason=st.sampled_from(["broke", ""])),
        st.sampled_from(
            [events.GatheringClosed(), events.DeadlinePassed(), events.GaveUp(reason="stop")]
        ),
    )


@pytest.mark.slow
@settings(max_examples=800)
@given(
    st.permutations(["a", "b", "c", "z"]).flatmap(
        lambda order: st.integers(0, 4).map(lambda n: order[:n])
    ),
    st.none() | st.sampled_from(PEERS),
    st.lists(any_event(), max_size=40),
)
def test_no_sequence_of_events_breaks_an_exchange(order, expected, happenings):
    exchange = PairExchange(me=ME, candidates=order)
    effects: list[events.Effect] = []
    if expected is not None:
        exchange.expect(expected)
    else:
        effects += exchange.start()
    effects += run_to_end(exchange, happenings)
    check_effects(effects, exchange)


def check_effects(effects: list[events.Effect], exchange: PairExchange) -> None:
    counts = Counter((type(effect), getattr(effect, "peer", "")) for effect in effects)
    # A peer that was lost may call in anew: only it is told twice that it is left out.
    assert all(count == 1 or kind is events.Abandon for (kind, _), count in counts.items()), counts
    assert (events.Apply, "") in counts or (events.End, "") in counts
    assert isinstance(effects[-1], events.Apply | events.End)
    captured = next(
        (i for i, effect in enumerate(effects) if isinstance(effect, events.Capture)), None
    )
    for index, effect in enumerate(effects):
        if isinstance(effect, events.WholeContribution):
            assert captured is not None
            assert captured < index
        if isinstance(effect, events.Confirm):
            assert events.WholeContribution(peer=effect.peer) in effects[:index]
        if isinstance(effect, events.Apply):
            told = {e.peer: e.members for e in effects if isinstance(e, events.Confirm)}
            assert set(told) == set(effect.members) - {ME}
            assert set(told.values()) == {members_digest(effect.members)}
            assert not exchange.in_doubt


# Single stories


def confirmed(peer: str, *members: str) -> events.Confirm:
    return events.Confirm(peer=peer, members=members_digest(members))


def pair(*order: str) -> PairExchange:
    exchange = PairExchange(me=ME, candidates=order)
    exchange.start()
    return exchange


CAPTURE_WITH_A = events.Capture(members=("a", ME))


def test_a_pair_that_goes_well():
    exchange = PairExchange(me=ME, candidates=("a", "b"))
    assert exchange.start() == [events.Dial(peer="a")]
    assert exchange.handle(accepted("a", step=77)) == [CAPTURE_WITH_A]
    assert exchange.handle(events.Captured()) == [events.WholeContribution(peer="a")]
    confirm = events.Confirm(peer="a", members=members_digest(["a", ME]))
    assert exchange.handle(events.WholeContribution(peer="a")) == [confirm]
    assert exchange.handle(confirmed("a", ME, "a")) == [
        events.Apply(members=("a", ME), swarm_step=77)
    ]
    assert exchange.stage is Stage.APPLIED
    assert not exchange.in_doubt


def test_a_crossed_call_waits_for_the_winners_own():
    exchange = pair("a", "b")
    assert told(exchange, events.Refused(peer="a", reason=Refusal.CROSSED)) == []
    assert exchange.has_room_for("a")
    assert not exchange.has_room_for("b")
    assert told(exchange, accepted("a", called_us=True)) == [CAPTURE_WITH_A]


def test_a_peer_that_called_after_it_had_refused_is_called_once_more():
    exchange = pair("z", "b")
    assert told(exchange, events.Crossed(peer="z")) == []
    refused = events.Refused(peer="z", reason=Refusal.FULL)
    assert told(exchange, refused) == [events.Dial(peer="z")]
    assert told(exchange, events.Crossed(peer="z")) == []
    assert told(exchange, refused) == [events.Dial(peer="b")]
    assert exchange.refusals == {"z": REFUSAL_TEXT[Refusal.FULL]}


FULL = Refusal.FULL


def test_who_knocks_while_another_is_called_is_admitted_before_anybody_else_is_called():
    exchange = pair("a", "b", "c")
    told(exchange, events.Refused(peer="a", reason=FULL))
    assert told(exchange, events.Knocked(peer="a")) == []
    refused = events.Refused(peer="b", reason=FULL)
    assert told(exchange, refused) == [events.Admit(peer="a")]
    assert told(exchange, accepted("a", called_us=True)) == [CAPTURE_WITH_A]


def test_who_calls_in_after_gathering_is_sent_away_and_leaves_no_trace():
    exchange = pair("a", "b")
    told(exchange, events.Lost(peer="a", reason="broke"), accepted("b"))
    assert exchange.stage is Stage.CAPTURING
    for peer in ("a", "c"):
        assert not exchange.has_room_for(peer)
        assert told(exchange, accepted(peer, called_us=True)) == [
            events.Abandon(peer=peer, reason="the exchange has begun without you")
        ]
    assert exchange.partners == ("b",)
    assert not exchange.is_calling("c")
    assert [
        e.peer
        for e in told(exchange, events.GaveUp(reason="stop"))
        if isinstance(e, events.Abandon)
    ] == ["b"]


@pytest.mark.parametrize(
    "event",
    [
        accepted("a"),
        accepted("a", called_us=True),
        accepted("stranger"),
        events.Refused(peer="a", reason=Refusal.BUSY),
        events.Refused(peer="stranger", reason=Refusal.BUSY),
        events.WholeContribution(peer="stranger"),
        confirmed("stranger", ME),
        confirmed("a", ME, "a"),
    ],
)
def test_what_can_not_be_is_a_violation_and_changes_nothing(event):
    exchange = pair("a", "b")
    told(exchange, accepted("a"))
    before = repr(exchange)
    with pytest.raises(ProtocolViolation):
        exchange.handle(event)
    assert repr(exchange) == before


def test_what_a_peer_that_was_given_up_still_sends_is_ignored():
    exchange = pair("a", "b")
    told(
        exchange,
        events.Lost(peer="a", reason="broke"),
        accepted("b"),
        events.Captured(),
        events.WholeContribution(peer="b"),
    )
    for late in (
        events.WholeContribution(peer="a"),
        confirmed("a", ME, "a"),
        events.Lost(peer="a", reason="broke"),
    ):
        assert told(exchange, late) == []
    assert isinstance(told(exchange, confirmed("b", ME, "b"))[0], events.Apply)


def test_partners_that_hold_other_contributions_apply_nothing_and_have_no_doubt():
    exchange = pair("a", "b")
    told(exchange, accepted("a"), events.Captured(), events.WholeContribution(peer="a"))
    effects = told(exchange, confirmed("a", ME, "a", "b"))
    assert effects[-1] == events.End(reason="the members do not hold the same contributions")
    assert [effect.peer for effect in effects if isinstance(effect, events.Abandon)] == ["a"]
    assert not exchange.in_doubt


@pytest.mark.parametrize(
    "event",
    [
        events.Lost(peer="a", reason="broke"),
        events.GaveUp(reason="stop"),
        events.Lost(peer="a", reason=""),
    ],
)
def test_an_end_between_the_confirmations_is_in_doubt(event):
    exchange = pair("a")
    told(exchange, accepted("a"), events.Captured(), events.WholeContribution(peer="a"))
    assert exchange.stage is Stage.CONFIRMING
    told(exchange, event)
    assert exchange.stage is Stage.ENDED
    assert exchange.in_doubt


def test_confirmations_under_way_get_a_grace_after_the_deadline():
    exchange = pair("a")
    told(exchange, accepted("a"), events.Captured(), events.WholeContribution(peer="a"))
    assert told(exchange, events.DeadlinePassed()) == []
    assert not exchange.over
    effects = told(exchange, events.DeadlinePassed())
    assert effects[-1] == events.End(reason="ran past its deadline")
    assert exchange.in_doubt


@pytest.mark.parametrize("happenings", [(), (accepted("a"),)])
def test_the_deadline_ends_what_has_not_begun_to_trade(happenings):
    exchange = pair("a")
    effects = told(exchange, *happenings, events.DeadlinePassed())
    assert effects == [
        events.Abandon(peer="a", reason="ran past its deadline"),
        events.End(reason="ran past its deadline"),
    ]
