"""What must hold for one exchange of a group: among honest peers in any weather, and against any
sequence of events."""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.exchange_stories import (
    AGREED,
    COMMITTED,
    GIVEN,
    HELD,
    ME,
    MEANS,
    REDUCED,
    SENT,
    THREE,
    D,
    accepted,
    after,
    at,
    commit,
    group,
    group_peers,
    held,
    joined,
    refused,
    run_to_end,
    told,
    well,
)
from helpers.virtual import CALM, OFFER, STORM, Swarm, VirtualPeer, Weather, check, naming, stories
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange import events
from lowcomm_protocol.exchange.events import Stage
from lowcomm_protocol.exchange.group import GroupExchange
from lowcomm_protocol.matching import Refusal

pytestmark = pytest.mark.slow

# Swarms of honest peers


@pytest.mark.parametrize(
    ("group", "size"),
    [(3, 6), (4, 4), (8, 2), (8, 5), (8, 16), (32, 20)],
)
def test_without_faults_every_group_applies_all_shards_of_its_whole_slice(group, size):
    for swarm in stories(
        group, range(size, size + 1), CALM, 60 if size < 8 else 15 if group < 32 else 1
    ):
        for peer in group_peers(swarm):
            assert len(peer.applied or ()) == min(group, size), swarm.story
            assert all(peer.shards), swarm.story
            assert peer.averaged == peer.applied, swarm.story
            assert not peer.group.in_doubt, swarm.story


@pytest.mark.slow
@pytest.mark.parametrize(("group", "count"), [(4, 500), (8, 200)])
def test_in_a_storm_members_agree_or_are_in_doubt_and_all_end_in_time(group, count):
    applied = whole = doubts = 0
    for swarm in stories(group, range(2, 11), STORM, count):
        applied += sum(peer.applied is not None for peer in group_peers(swarm))
        whole += sum(all(peer.shards) for peer in group_peers(swarm) if peer.applied)
        doubts += sum(peer.exchange.in_doubt for peer in group_peers(swarm) if peer.exchange)
    assert applied > count, "the storm is so strong that it tests nothing"
    assert applied - whole > 100, "the storm is so weak that no shard is left out"
    assert doubts > 20, "the storm is so weak that it tests nothing"


def test_partial_views_cost_no_doubt():
    for swarm in stories(4, range(2, 11), Weather(blind=0.2, unready=0.2), 100):
        assert not any(peer.exchange.in_doubt for peer in swarm.peers.values() if peer.exchange), (
            swarm.story
        )


PHASES = (
    events.Dial, events.Roll, events.Members, events.Capture, events.Shard,
    events.Reduce, events.ShardMean, events.Holdings, events.Commit, events.Apply,
)  # fmt: skip
"""In each of them a test breaks something, just before the effect is carried out."""
SINGLE = (events.Capture, events.Reduce, events.Apply)
AFTER_AGREEMENT = PHASES[PHASES.index(events.Capture) :]


DEATHS = [(phase, number) for phase in PHASES for number in range(1 if phase in SINGLE else 3)]


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "silent"])
@pytest.mark.parametrize("role", [0, 1, 3], ids=["leader", "next", "last"])
@pytest.mark.parametrize(("phase", "number"), DEATHS)
def test_a_death_in_any_phase_costs_no_more_than_the_shard_of_the_dead(
    phase, number, role, noticed
):
    dead = 0
    for seed in range(3):
        swarm = Swarm(seed, 4, 4, CALM)
        victim = group_peers(swarm)[role]
        victim.before = at(phase, number, lambda victim=victim: victim.die(noticed))
        with naming(swarm):
            check(swarm.run())
            dead += victim.dead
            alive = [peer for peer in group_peers(swarm) if not peer.dead]
            assert len({peer.outcome for peer in alive}) == 1, (
                "the living have not applied the same"
            )
            for peer in alive:
                assert peer.applied is not None
                assert {one.name for one in alive} <= set(peer.applied), (
                    "a living peer was left out"
                )
                assert peer.applied == tuple(swarm.peers) or phase not in AFTER_AGREEMENT
                shards = zip(peer.applied, peer.shards, strict=True)
                assert all(shard for name, shard in shards if name != victim.name), (
                    "a living peer lost its shard"
                )
    # A peer that was called by all does not call, so it may never come to its third call.
    assert dead or phase is events.Dial, "nobody has died"


def agree_but_for_one(peers: list[VirtualPeer], ends: tuple[VirtualPeer, ...]) -> None:
    """Whether all of a group have applied the same, but for one end of a broken link, which is in
    doubt and has applied less."""
    most, *rest = Counter(peer.outcome for peer in peers if peer.outcome).most_common()
    assert len(rest) <= 1, "a broken link has parted more than one"
    for peer in peers:
        if peer.outcome and peer.outcome != most[0]:
            assert peer in ends
            assert peer.group.in_doubt
            digests = zip(peer.outcome[1], most[0][1], strict=True)
            assert all(ours in (b"", theirs) for ours, theirs in digests)
            assert most[1] == len(peers) - 1


@pytest.mark.parametrize(("one", "other"), list(combinations(range(4), 2)))
@pytest.mark.parametrize("phase", PHASES[1:])
def test_a_link_that_breaks_in_any_phase_costs_one_of_its_ends_a_shard_at_most(phase, one, other):
    for seed in range(5):
        swarm = Swarm(seed, 4, 4, CALM)
        first, second = (group_peers(swarm)[place] for place in (one, other))

        def cut(swarm=swarm, first=first, second=second) -> None:
            if second.name in first.links:
                swarm.break_(first.links[second.name])

        first.before = at(phase, 0 if phase in SINGLE else 1, cut)
        with naming(swarm):
            check(swarm.run())
            applied = [peer for peer in group_peers(swarm) if peer.applied]
            if phase in AFTER_AGREEMENT:
                assert len(applied) == 4, "a broken link has cost somebody the exchange"
            assert len(applied) >= 2
            for members in {peer.applied for peer in applied}:
                same = [peer for peer in applied if peer.applied == members]
                agree_but_for_one(same, (first, second))


@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, 3), (2, 3)])
@pytest.mark.parametrize("phase", AFTER_AGREEMENT)
def test_where_all_must_hold_the_same_the_end_of_a_broken_link_applies_all_or_nothing(
    phase, one, other
):
    for seed in range(5):
        swarm = Swarm(seed, 4, 4, CALM, method="streaming-diloco")
        first, second = (group_peers(swarm)[place] for place in (one, other))
        first.before = at(
            phase,
            0 if phase in SINGLE else 1,
            lambda swarm=swarm, ends=(first, second): swarm.break_(ends[0].links[ends[1].name]),
        )
        with naming(swarm):
            check(swarm.run())
            applied = [peer for peer in group_peers(swarm) if peer.applied]
            assert len({peer.outcome for peer in applied}) == 1
            behind = [peer for peer in group_peers(swarm) if not peer.applied]
            assert len(behind) <= 1
            assert all(peer in (first, second) and peer.group.in_doubt for peer in behind)


# Any sequence of events

PEERS = ("a", "b", "z", "stranger")


def any_event():
    peer = st.sampled_from(PEERS)
    lists = st.sampled_from(
        [
            ("a", "b", "m", "z"),
            ("a", "b", "m"),
            ("b", "m", "z"),
            ("a", "m"),
            ("b", "m"),
            ("m", "z"),
            ("m", "b"),
            (),
            ("m",),
        ]
    )
    digest = st.sampled_from([*D.values(), b"", b"short"])
    helds = st.sampled_from(
        [
            tuple(D.values()),
            (D["a"], D["b"], D["m"]),
            (D["a"], b"", D["m"]),
            (b"", b""),
            (D["a"], D["m"]),
            (b"x",),
            (),
        ]
    )
    bits = st.sampled_from(
        [
            (True,) * 2,
            (True,) * 3,
            (True,) * 4,
            (False, True),
            (True, False, True),
            (False,) * 4,
            (),
        ]
    )
    return st.one_of(
        st.builds(events.Accepted, peer=peer, offer=st.just(OFFER), called_us=st.booleans()),
        st.builds(events.Refused, peer=peer, reason=st.sampled_from(Refusal)),
        st.builds(events.Roll, peer=peer, roll=lists),
        st.builds(events.Members, peer=peer, members=lists),
        st.builds(
            events.Missed, receivers=st.lists(peer, max_size=1).map(tuple), donor=st.just("") | peer
        ),
        st.builds(events.MissedSteps, peer=peer),
        st.builds(events.Shard, peer=peer),
        st.builds(events.Reduced, digest=digest),
        st.builds(events.ShardMean, peer=peer, digest=digest),
        st.builds(events.Holdings, peer=peer, held=helds),
        st.builds(events.Commit, peer=peer, shards=bits, heard=bits),
        st.builds(events.Lost, peer=peer, reason=st.sampled_from(["broke", ""])),
        st.sampled_from(
            [
                events.Equal(), events.Captured(), events.GatheringClosed(),
                events.AgreeingClosed(), events.ReduceClosed(), events.ConfirmingClosed(),
                events.DeadlinePassed(), events.GaveUp(reason="stop"),
            ]
        ),
    )  # fmt: skip


EVENTS = any_event()


@settings(max_examples=500)
@given(
    st.sampled_from([3, 4, 8]),
    st.permutations(["a", "b", "z"]).flatmap(
        lambda order: st.integers(0, 3).map(lambda n: order[:n])
    ),
    st.none() | st.sampled_from(PEERS),
    st.lists(EVENTS, max_size=40),
)
def test_no_sequence_of_events_breaks_an_exchange(group, order, expected, happenings):
    exchange = GroupExchange(me=ME, candidates=order, group=group)
    if expected is not None:
        exchange.expect(expected)
    effects = exchange.start() + run_to_end(exchange, happenings)
    check_effects(effects, exchange)


@settings(max_examples=500)
@given(
    st.lists(
        st.tuples(st.integers(0, 16), st.integers(0, 2), st.lists(EVENTS, max_size=2)),
        min_size=1,
        max_size=4,
    )
)
def test_no_story_that_goes_wrong_half_way_breaks_an_exchange(disturbances):
    """As above, but beginning well and with few disturbances, so that it gets far."""
    happenings = well()
    for place, cut, others in disturbances:
        happenings[place : place + cut] = others
    exchange = GroupExchange(me=ME, candidates=("a", "b", "z"), group=4)
    effects = [
        *exchange.start(),
        *exchange.handle(events.Lost(peer="z", reason="broke")),
        *run_to_end(exchange, happenings),
    ]
    check_effects(effects, exchange)


def check_effects(effects: list[events.Effect], exchange: GroupExchange) -> None:
    kinds = [type(effect) for effect in effects]
    counts = Counter((type(effect), getattr(effect, "peer", "")) for effect in effects)
    repeats = (
        events.Abandon,
        events.Members,
        events.Roll,
    )  # who was lost may call in anew; lists may get lower
    assert all(count == 1 or kind in repeats for (kind, _), count in counts.items()), counts
    assert all(count <= 4 for (kind, _), count in counts.items() if kind is not events.Abandon), (
        counts
    )
    assert isinstance(effects[-1], events.Apply | events.End)
    assert kinds.count(events.Apply) + kinds.count(events.End) == 1
    ordered = [
        kind for kind in kinds if kind in PHASES and kind not in (events.Dial, events.Members)
    ]
    assert ordered == sorted(ordered, key=PHASES.index), "effects out of order"
    lists = [effect.members for effect in effects if isinstance(effect, events.Members)]
    assert all(ME in members and list(members) == sorted(members) for members in lists)
    for effect in effects:
        if isinstance(effect, events.Apply):
            assert any(effect.shards)
            assert len(effect.shards) == len(effect.members)
            applied = [
                name for name, shard in zip(effect.members, effect.shards, strict=True) if shard
            ]
            assert all(exchange.tally.digest_of(name) for name in applied), (
                "a shard was applied that we do not hold"
            )
            assert {ME, *exchange.partners} <= set(exchange.tally.commits), (
                "somebody who takes part has not committed"
            )
            assert len(exchange.tally.commits) > 1, "applied alone"


def test_memory_is_bounded_by_the_group():
    exchange = group("a", "b")
    for event in [
        *joined(),
        *(events.Members(peer="a", members=("a", f"x{n}", ME)) for n in range(100)),
    ]:
        try:
            exchange.handle(event)
        except ProtocolViolation:
            size = len(repr(exchange))
    assert len(repr(exchange)) == size < 5000


# Single stories


def test_a_group_that_goes_well():
    exchange = GroupExchange(me=ME, candidates=("a", "b"), group=4)
    assert exchange.start() == [events.Dial(peer="a"), events.Dial(peer="b")]
    story = iter(well())
    both = "ab"
    all_, none = (True,) * 3, []
    for effects in (
        none, [events.Roll(peer=peer, roll=THREE) for peer in both], none, none,
        [events.Members(peer=peer, members=THREE) for peer in both],
        [events.Capture(members=THREE)],
        [events.Shard(peer=peer) for peer in both], none, [events.Reduce(contributors=THREE)],
        [events.ShardMean(peer=peer, digest=D[ME]) for peer in both], none,
        [events.Holdings(peer=peer, held=MEANS) for peer in both],
        none, [events.Commit(peer=peer, shards=all_, heard=all_) for peer in both],
        none, [events.Apply(members=THREE, swarm_step=40, shards=all_)],
    ):  # fmt: skip
        assert exchange.handle(next(story)) == effects
    assert exchange.stage is Stage.APPLIED
    assert not exchange.in_doubt
    assert set(exchange.tally.commits) == set(THREE)


def test_who_calls_in_after_gathering_is_sent_away_and_leaves_no_trace():
    exchange = group("a", "b")
    told(exchange, accepted("a"), events.Lost(peer="b", reason="broke"))
    assert exchange.stage is Stage.AGREEING
    for peer in ("b", "c"):
        assert not exchange.has_room_for(peer)
        assert told(exchange, accepted(peer, called_us=True)) == [
            events.Abandon(peer=peer, reason="the exchange has begun without you")
        ]
    assert exchange.partners == ("a",)
    assert [
        e.peer
        for e in told(exchange, events.GaveUp(reason="stop"))
        if isinstance(e, events.Abandon)
    ] == ["a"]


def test_a_group_holds_no_more_than_its_bound():
    exchange = GroupExchange(me=ME, candidates=("a", "b", "c", "d"), group=4)
    exchange.expect("stranger")
    assert exchange.start() == [events.Dial(peer="a"), events.Dial(peer="b")]
    assert not exchange.has_room_for("d")
    told(exchange, accepted("stranger", called_us=True), events.Lost(peer="a", reason="broke"))
    assert exchange.has_room_for("d")


@pytest.mark.parametrize(
    ("count", "event"),
    [
        (1, events.Roll(peer="b", roll=THREE)),
        (3, events.Roll(peer="a", roll=THREE)),
        (3, events.Members(peer="b", members=THREE)),
        (4, events.Captured()),
        (5, events.Shard(peer="a")),
        (AGREED, events.ShardMean(peer="a", digest=D["a"])),
        (AGREED, events.Reduced(digest=D[ME])),
        (AGREED, events.Shard(peer="stranger")),
        (SENT, events.Captured()),
        (SENT, held("a", *MEANS)),
        (SENT + 1, events.Shard(peer="a")),
        (GIVEN, events.Reduced(digest=b"short")),
        (GIVEN, events.ShardMean(peer="a", digest=b"short")),
        (GIVEN, held("a", b"", b"", D[ME])),
        (GIVEN, held("a", *MEANS)),
        (REDUCED, events.Reduced(digest=D[ME])),
        (REDUCED + 1, events.ShardMean(peer="a", digest=D["a"])),
        (REDUCED + 1, commit("a", "111")),
        (HELD, held("a", *MEANS[:2])),
        (HELD, held("a", *MEANS, b"")),
        (HELD, held("a", D["a"], b"short", D[ME])),
        (HELD, held("a", D["b"], D["b"], D[ME])),
        (HELD, held("a", b"", D["b"], D[ME])),
        (HELD, held("a", D["a"], D["b"], D["b"])),
        (HELD, held("stranger", *MEANS)),
        (HELD, commit("a", "111")),
        (HELD + 1, held("a", *MEANS)),
        (HELD + 1, commit("a", "11", "111")),
        (HELD + 1, commit("a", "111", "11")),
        (HELD + 1, commit("a", "111", "011")),
        (HELD + 1, commit("a", "111", "110")),
        (COMMITTED + 1, commit("a", "111")),
    ],
)
def test_what_can_not_be_is_a_violation_and_changes_nothing(count, event):
    refused(after(count), event)


def test_who_is_late_with_a_contribution_is_not_in_the_mean_but_takes_part():
    exchange = after(SENT + 1)
    assert told(exchange, events.ReduceClosed()) == [events.Reduce(contributors=("a", ME))]
    assert told(exchange, events.Shard(peer="b")) == []
    assert isinstance(told(exchange, *well()[GIVEN:])[0], events.Apply)


def test_a_member_that_is_lost_costs_its_shard_only():
    exchange = after(REDUCED + 1)
    assert told(exchange, events.Lost(peer="b", reason="broke")) == [
        events.Holdings(peer="a", held=(D["a"], b"", D[ME]))
    ]
    (send,) = told(exchange, held("a", D["a"], b"", D[ME]))
    assert send == events.Commit(peer="a", shards=(True, False, True), heard=(True, False, True))
    assert told(exchange, commit("a", "101", "101")) == [
        events.Apply(members=THREE, swarm_step=40, shards=(True, False, True))
    ]
    assert not exchange.in_doubt


def test_who_holds_no_mean_of_another_at_the_deadline_leaves_the_others_to_theirs():
    exchange = after(GIVEN)
    effects = told(exchange, events.DeadlinePassed())
    assert effects[-1] == events.End(reason="no mean of another member came before its deadline")
    assert {effect.peer for effect in effects[:-1]} == {"a", "b"}
    assert not exchange.in_doubt


@pytest.mark.parametrize("count", [0, 2, AGREED])
def test_the_deadline_ends_what_has_not_begun_to_send(count):
    exchange = after(count)
    effects = told(exchange, events.DeadlinePassed())
    assert effects[-1] == events.End(reason="ran past its deadline")
    assert {effect.peer for effect in effects[:-1]} == {"a", "b"}
    assert not exchange.in_doubt


def test_who_does_not_tell_what_it_holds_is_given_up_when_confirming_closes():
    exchange = after(HELD + 1)
    assert told(exchange, events.DeadlinePassed()) == []
    effects = told(exchange, events.ConfirmingClosed())
    why = "did not tell in time what it holds"
    assert effects == [
        events.Abandon(peer="b", reason=why),
        events.Commit(peer="a", shards=(True,) * 3, heard=(True, False, True)),
    ]
    assert isinstance(told(exchange, commit("a", "111", "101"))[-1], events.Apply)
    assert not exchange.in_doubt


def test_the_second_deadline_applies_what_is_committed_and_is_a_doubt():
    exchange = after(COMMITTED)
    told(exchange, commit("a", "110"))
    assert told(exchange, events.DeadlinePassed()) == []
    abandon, apply = told(exchange, events.DeadlinePassed())
    assert abandon == events.Abandon(peer="b", reason="did not commit in time")
    assert apply == events.Apply(members=THREE, swarm_step=40, shards=(True, True, False))
    assert exchange.in_doubt


def test_members_that_have_committed_go_on_without_one_that_does_not_if_the_votes_decide():
    exchange = after(COMMITTED)
    told(exchange, commit("a", "111"))
    assert told(exchange, events.AgreeingClosed()) == []
    abandon, apply = told(exchange, events.AgreeingClosed())
    assert abandon.peer == "b"
    assert apply.shards == (True,) * 3
    exchange = after(COMMITTED)
    told(exchange, commit("a", "110"))
    assert told(exchange, *[events.AgreeingClosed()] * 5) == [], "its vote on the last one decides"


def test_a_member_that_leaves_out_what_the_others_apply_stumbles():
    exchange = after(COMMITTED)
    stumbled, apply = told(exchange, commit("a", "000"), commit("b", "111"))
    assert stumbled.peer == "a"
    assert apply.shards == (True,) * 3
    exchange = after(COMMITTED)
    (apply,) = told(exchange, commit("a", "101"), commit("b", "111"))
    assert apply.shards == (True,) * 3, "one shard may be the fault of a link"


@pytest.mark.parametrize(
    "happenings",
    [
        [events.GaveUp(reason="stop")],
        [events.Lost(peer="a", reason="broke"), events.Lost(peer="b", reason="")],
        [events.DeadlinePassed(), events.DeadlinePassed()],
    ],
)
@pytest.mark.parametrize(("count", "doubt"), [(AGREED, False), (HELD, False), (COMMITTED, True)])
def test_an_end_after_our_commit_is_in_doubt_and_before_it_is_not(count, doubt, happenings):
    exchange = after(count)
    told(exchange, *happenings)
    assert exchange.stage is Stage.ENDED
    assert exchange.in_doubt is doubt


def test_what_a_member_that_was_given_up_still_sends_is_ignored():
    exchange = after(AGREED)
    told(exchange, events.Lost(peer="b", reason="broke"))
    for late in (
        events.Roll(peer="b", roll=THREE), events.Members(peer="b", members=THREE),
        events.Shard(peer="b"),
        events.ShardMean(peer="b", digest=b""), held("b"), commit("b", ""),
        events.Lost(peer="b", reason="broke"),
    ):  # fmt: skip
        assert told(exchange, late) == []
