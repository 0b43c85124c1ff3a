"""What must hold for one stream of a group, as the table of transitions has it."""

from itertools import product

import pytest

from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange.group.table import TERMINAL, TRANSITIONS, Input, State, step


@pytest.mark.parametrize(("state", "event"), list(product(State, Input)))
def test_every_pair_is_in_the_table_or_a_violation(state, event):
    if (state, event) in TRANSITIONS:
        assert step(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(
            ProtocolViolation, match=f"'{event.value}' is not allowed in state '{state.value}'"
        ):
            step(state, event)


@pytest.mark.parametrize("state", list(State))
def test_terminal_states_accept_nothing_and_all_others_can_be_lost(state):
    if state in TERMINAL:
        assert not [key for key in TRANSITIONS if key[0] is state]
    else:
        assert step(state, Input.FAILED) is State.LOST


def test_everything_is_told_once_and_in_one_order():
    rank = {event: number for number, event in enumerate(Input)}
    open_: list[tuple[State, tuple[Input, ...]]] = [(State.OFFERED, ())]
    ways = []
    while open_:
        state, told = open_.pop()
        if state is State.DONE:
            ways.append(told)
        for (before, event), after in TRANSITIONS.items():
            if before is state and after is not state and event is not Input.FAILED:
                assert not told or rank[event] > rank[told[-1]] or after is State.LOST
                open_.append((after, (*told, event)))
    assert {frozenset(Input) - set(way) for way in ways} == {
        frozenset({Input.REFUSED, Input.FAILED, Input.MISSED}),
        frozenset({Input.REFUSED, Input.FAILED, Input.MISSED, Input.MEAN}),
    }
