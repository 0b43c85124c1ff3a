"""What must hold for one stream, as the table of transitions has it."""

from itertools import product

import pytest

from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.exchange.pair import (
    HOLDING,
    PAIR_TRANSITIONS,
    TERMINAL,
    Output,
    PairInput,
    PairState,
    step,
)


def reachable(start: PairState) -> set[PairState]:
    found, open_ = {start}, [start]
    while open_:
        here = open_.pop()
        for (state, _), (_, after) in PAIR_TRANSITIONS.items():
            if state is here and after not in found:
                found.add(after)
                open_.append(after)
    return found


def paths(
    state: PairState = PairState.OFFERED, sofar: tuple[PairInput, ...] = ()
) -> list[tuple[tuple[PairInput, ...], PairState]]:
    """Every way through the table; it has no loops."""
    assert len(sofar) <= len(PairState), "the table has a loop"
    found = [(sofar, state)]
    for (before, event), (_, after) in PAIR_TRANSITIONS.items():
        if before is state:
            found += paths(after, (*sofar, event))
    return found


@pytest.mark.parametrize(("state", "event"), list(product(PairState, PairInput)))
def test_every_pair_is_in_the_table_or_a_violation(state, event):
    if (state, event) in PAIR_TRANSITIONS:
        assert step(state, event) == PAIR_TRANSITIONS[state, event]
    else:
        with pytest.raises(
            ProtocolViolation, match=f"'{event.value}' is not allowed in state '{state.value}'"
        ):
            step(state, event)


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_terminal_states_accept_nothing(state):
    assert not [key for key in PAIR_TRANSITIONS if key[0] is state]


@pytest.mark.parametrize("state", [state for state in PairState if state not in TERMINAL])
def test_every_open_state_can_be_lost_and_only_a_refusal_can_not_end_well(state):
    assert step(state, PairInput.FAILED) == ((), PairState.LOST)
    assert PairState.DONE in reachable(state)


def test_every_state_can_be_reached():
    assert reachable(PairState.OFFERED) == set(PairState)


def test_done_needs_both_contributions_and_both_confirmations():
    needed = {
        PairInput.ACCEPTED,
        PairInput.CAPTURED,
        PairInput.VERIFIED,
        PairInput.SETTLED,
        PairInput.CONFIRMED,
    }
    done = [inputs for inputs, state in paths() if state is PairState.DONE]
    assert len(done) >= 4
    for inputs in done:
        assert set(inputs) == needed
        assert len(inputs) == len(needed)


def test_content_and_confirmation_are_sent_once_and_in_this_order():
    for inputs, state in paths():
        sent: list[Output] = []
        here = PairState.OFFERED
        for event in inputs:
            outputs, here = step(here, event)
            sent += outputs
        assert here is state
        assert sent == [Output.SEND_CONTENT, Output.SEND_CONFIRM][: len(sent)]
        assert state not in (PairState.CONFIRMING, PairState.DONE) or len(sent) == 2


def test_a_contribution_is_used_only_after_it_was_verified_and_ours_was_sent():
    for inputs, state in paths():
        if state in HOLDING:
            assert {PairInput.VERIFIED, PairInput.CAPTURED} <= set(inputs)


def test_they_confirm_only_after_our_content_was_sent():
    for inputs, _ in paths():
        if PairInput.CONFIRMED in inputs:
            assert PairInput.CAPTURED in inputs[: inputs.index(PairInput.CONFIRMED)]
