"""One stream between two members of a group, as a transition table.

    caller ── hello ──────────────► callee            the offer: run, plan, fragment, progress
    caller ◄───── accept | refuse ─ callee
    both   ── roll ───────────────► both              "I hold streams with these peers"
    both   ── members ────────────► both              "the members are"; a lower list may follow
    donor  ── content, chunk* ────► receiver          outer steps that the receiver lacks, if any
    both   ── content, chunk* ────► both              our contribution to the shard of the other
    both   ── content, chunk* ────► both              the mean of our shard
    both   ── held ───────────────► both              "I hold the means with these digests"
    both   ── commit ─────────────► both              "I would apply these shards; helds I heard"

What we tell goes to all members at once, so the table has only what the other end has told us so
far. As in pairs (``pair/table.py``) a missing key is a violation, and ``docs/states.md`` draws it.
``group/machine.py`` decides what is told when."""

from enum import StrEnum

from lowcomm_protocol.exchange.table import draw, look_up


class State(StrEnum):
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


class Input(StrEnum):
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


TERMINAL = frozenset({State.DONE, State.REFUSED, State.LOST})
HAVE_GIVEN = frozenset({State.GIVEN, State.AVERAGED, State.TOLD, State.DONE})
"""States in which their contribution to our shard may be used."""

TRANSITIONS: dict[tuple[State, Input], State] = {
    (State.OFFERED, Input.ACCEPTED): State.LINKED,
    (State.OFFERED, Input.REFUSED): State.REFUSED,
    (State.LINKED, Input.ROLL): State.ROLLED,
    (State.ROLLED, Input.NAMED): State.NAMED,
    # They heard of a lower list. Once we have agreed we can't follow them there.
    (State.NAMED, Input.NAMED): State.NAMED,
    (State.MEMBER, Input.NAMED): State.LOST,
    (State.NAMED, Input.AGREED): State.MEMBER,
    # Before its contribution, if it hands over any.
    (State.MEMBER, Input.MISSED): State.MEMBER,
    (State.MEMBER, Input.SHARD): State.GIVEN,
    (State.GIVEN, Input.MEAN): State.AVERAGED,
    # Whoever was too slow to make its mean tells so, and sends none.
    (State.GIVEN, Input.HELD): State.TOLD,
    (State.AVERAGED, Input.HELD): State.TOLD,
    (State.TOLD, Input.COMMIT): State.DONE,
    **{(state, Input.FAILED): State.LOST for state in State if state not in TERMINAL},
}


def step(state: State, event: Input) -> State:
    """The next state. Raises ProtocolViolation where the table has no entry."""
    return look_up(TRANSITIONS, state, event)


def mermaid() -> str:
    """The table as a Mermaid state diagram, for docs/states.md."""
    arrows = [(state, event.value, after) for (state, event), after in TRANSITIONS.items()]
    return draw(State.OFFERED, arrows, [state for state in State if state in TERMINAL])
