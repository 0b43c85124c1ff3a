"""What must hold until the members of a group are agreed on."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.exchange_stories import ME, accepted, after, group, refused, told, well
from lowcomm_protocol.exchange import events
from lowcomm_protocol.exchange.agreeing import clique
from lowcomm_protocol.exchange.events import Stage
from lowcomm_protocol.exchange.group import GroupExchange


def leader(*rolls: tuple[str, ...]) -> GroupExchange:
    """An exchange that we lead, with three partners that have sent these rolls."""
    exchange = group("x", "y", "z")
    told(exchange, *(accepted(peer) for peer in "xyz"))
    told(
        exchange,
        *(events.Roll(peer=peer, roll=roll) for peer, roll in zip("xyz", rolls, strict=False)),
    )
    return exchange


def test_a_leader_takes_members_that_all_hold_streams_with_each_other_and_sends_the_others_away():
    exchange = leader((ME, "x", "z"), (ME, "y", "z"))
    effects = told(exchange, events.Roll(peer="z", roll=(ME, "x", "y", "z")))
    named = (ME, "x", "z")
    assert effects == [events.Members(peer=peer, members=named) for peer in "xz"]
    effects = told(exchange, *(events.Members(peer=peer, members=named) for peer in "xz"))
    assert effects == [
        events.Abandon(peer="y", reason="is not in the list of members"),
        events.Capture(members=named),
    ]
    assert exchange.partners == ("x", "z")


def test_a_leader_gives_up_who_sends_no_roll_in_time_and_others_give_up_their_leader_later():
    four = (ME, "x", "y", "z")
    exchange = leader(four, four)
    effects = told(exchange, events.AgreeingClosed())
    assert effects == [
        events.Abandon(peer="z", reason="did not tell its links in time"),
        *(events.Members(peer=peer, members=(ME, "x", "y")) for peer in "xy"),
    ]
    exchange = group("a", "b")
    told(exchange, *well()[:4])
    assert told(exchange, events.AgreeingClosed()) == []
    assert told(exchange, events.AgreeingClosed()) == [
        events.Abandon(peer="a", reason="did not name the members in time")
    ]
    assert told(exchange, events.Members(peer="b", members=("b", ME)))[-1] == events.Capture(
        members=("b", ME)
    )


def test_a_list_of_the_next_leader_waits_for_ours():
    exchange = group("a", "b", "c")
    four = ("a", "b", "c", ME)
    told(
        exchange,
        *(accepted(peer) for peer in "abc"),
        *(events.Roll(peer=peer, roll=four) for peer in "abc"),
    )
    assert told(exchange, events.Members(peer="b", members=("b", "c", ME))) == []
    assert told(exchange, events.Members(peer="a", members=("a", "c", ME))) == [
        events.Members(peer=peer, members=("a", "c", ME)) for peer in "ac"
    ]
    effects = told(exchange, events.Members(peer="c", members=("a", "c", ME)))
    assert effects == [
        events.Abandon(peer="b", reason="is not in the list of members"),
        events.Capture(members=("a", "c", ME)),
    ]


def test_the_lower_of_two_lists_wins_until_all_have_named_one():
    exchange = group("a", "x", "y")
    four = ("a", ME, "x", "y")
    told(
        exchange,
        *(accepted(peer) for peer in "axy"),
        *(events.Roll(peer=peer, roll=four) for peer in "axy"),
    )
    assert told(exchange, events.Lost(peer="a", reason="broke")) == [
        events.Members(peer=peer, members=(ME, "x", "y")) for peer in "xy"
    ]
    assert told(exchange, events.Members(peer="x", members=four)) == [
        events.Members(peer=peer, members=four) for peer in "xy"
    ]
    # What y names is our own former list: it had not heard of the lower one.
    assert told(exchange, events.Members(peer="y", members=(ME, "x", "y"))) == []
    assert told(exchange, events.Members(peer="y", members=four)) == [events.Capture(members=four)]


def test_who_goes_over_to_another_list_after_we_have_agreed_is_lost_without_a_violation():
    exchange = group("a", "b", "c")
    four = ("a", "b", "c", ME)
    told(
        exchange,
        *(accepted(peer) for peer in "abc"),
        *(events.Roll(peer=peer, roll=four) for peer in "abc"),
    )
    told(
        exchange,
        events.Lost(peer="a", reason="broke"),
        events.Members(peer="b", members=("b", "c", ME)),
    )
    told(exchange, events.Members(peer="c", members=("b", "c", ME)))
    assert exchange.stage is Stage.CAPTURING
    effects = told(exchange, events.Members(peer="c", members=four))
    assert effects == [
        events.Abandon(peer="c", reason="has agreed with others on another list of members")
    ]
    assert exchange.partners == ("b",)


LONG = "a" * 65


@pytest.mark.parametrize(
    "roll",
    [
        ("a", "b"), ("b", ME), (ME, "a"), ("a", "a", ME), ("a", "b", "c", "d", ME), (),
        ("a", ME, ""), ("", "a", ME),
        ("a", LONG, ME),
    ],
)  # fmt: skip
def test_a_roll_in_another_form_is_a_violation_and_changes_nothing(roll):
    refused(after(2), events.Roll(peer="a", roll=roll))


@pytest.mark.parametrize(
    "members", [("a", "b"), ("b", ME), (ME, "a"), ("a", "c", ME), ("a", "b", "c", "d", ME), ()]
)
def test_a_list_in_another_form_or_with_strangers_is_a_violation_and_changes_nothing(members):
    refused(after(4), events.Members(peer="a", members=members))


@given(
    st.dictionaries(
        st.sampled_from("abcdefgh"), st.frozensets(st.sampled_from("abcdefgh")), min_size=1
    )
)
def test_a_clique_holds_all_streams_and_leaves_out_nobody_who_fits(rolls):
    taken = clique(rolls)
    assert taken[0] == min(rolls)
    assert list(taken) == sorted(set(taken))
    for one, other in combinations(taken, 2):
        assert one in rolls[other]
        assert other in rolls[one]
    for peer in set(rolls) - set(taken):
        assert any(peer not in rolls[other] or other not in rolls[peer] for other in taken)
