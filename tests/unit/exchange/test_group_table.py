"""What must hold for one stream of a group, as the table of transitions has it."""

from itertools import product

import pytest

from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange.group import (
    GROUP_TRANSITIONS,
    TERMINAL,
    GroupInput,
    GroupState,
    step,
)


@pytest.mark.parametrize(("state", "event"), list(product(GroupState, GroupInput)))
def test_every_pair_is_in_the_table_or_a_violation(state, event):
    if (state, event) in GROUP_TRANSITIONS:
        assert step(state, event) is GROUP_TRANSITIONS[state, event]
    else:
        with pytest.raises(
            ProtocolViolation, match=f"'{event.value}' is not allowed in state '{state.value}'"
        ):
            step(state, event)


@pytest.mark.parametrize("state", list(GroupState))
def test_terminal_states_accept_nothing_and_all_others_can_be_lost(state):
    if state in TERMINAL:
        assert not [key for key in GROUP_TRANSITIONS if key[0] is state]
    else:
        assert step(state, GroupInput.FAILED) is GroupState.LOST


def test_everything_is_told_once_and_in_one_order():
    rank = {event: number for number, event in enumerate(GroupInput)}
    open_: list[tuple[GroupState, tuple[GroupInput, ...]]] = [(GroupState.OFFERED, ())]
    ways = []
    while open_:
        state, told = open_.pop()
        if state is GroupState.DONE:
            ways.append(told)
        for (before, event), after in GROUP_TRANSITIONS.items():
            if before is state and after is not state and event is not GroupInput.FAILED:
                assert not told or rank[event] > rank[told[-1]] or after is GroupState.LOST
                open_.append((after, (*told, event)))
    assert {frozenset(GroupInput) - set(way) for way in ways} == {
        frozenset({GroupInput.REFUSED, GroupInput.FAILED, GroupInput.MISSED}),
        frozenset({GroupInput.REFUSED, GroupInput.FAILED, GroupInput.MISSED, GroupInput.MEAN}),
    }
