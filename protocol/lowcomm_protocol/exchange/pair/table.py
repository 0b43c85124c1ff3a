"""One stream between two peers, as a transition table.

    caller ── hello ──────────────► callee            the offer: run, plan, fragment, progress
    caller ◄───── accept | refuse ─ callee
    both   ── content, chunk* ────► both              at once, in both directions
    both   ── confirm ────────────► both              "I hold exactly these contributions"

The table is the protocol: a missing key is a violation. An exchange (``pair/machine.py``) runs such
a stream to its partner and decides what is captured, confirmed and applied. ``docs/states.md``
draws the table. Groups have a table of their own (``group/table.py``).
"""

from enum import StrEnum

from lowcomm_protocol.exchange.table import draw, look_up


class State(StrEnum):
    """Where one stream stands, as seen from one end."""

    OFFERED = "offered"  # we called; no answer yet
    AGREED = "agreed"  # accepted; our contribution is not captured yet
    RECEIVED = "received"  # as AGREED, and theirs has arrived whole
    STREAMING = "streaming"  # ours is on its way, theirs has not arrived
    PROMISED = "promised"  # as STREAMING, and they have confirmed
    HELD = "held"  # theirs has arrived whole
    READY = "ready"  # as HELD, and they have confirmed
    CONFIRMING = "confirming"  # we have confirmed, they have not
    DONE = "done"  # both have confirmed
    REFUSED = "refused"
    LOST = "lost"


class Input(StrEnum):
    """What can happen to a stream."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    CAPTURED = "captured"  # our contribution is coded
    VERIFIED = "verified"  # their contribution has arrived whole, and decodes to what is allowed
    SETTLED = "settled"  # the exchange knows its members
    CONFIRMED = "confirmed"  # they have confirmed
    FAILED = "failed"  # stream lost, corrupt content, deadline, or either side gave up


class Output(StrEnum):
    """What a stream must send."""

    SEND_CONTENT = "send-content"
    SEND_CONFIRM = "send-confirm"


TERMINAL = frozenset({State.DONE, State.REFUSED, State.LOST})
HOLDING = frozenset({State.HELD, State.READY, State.CONFIRMING, State.DONE})
"""States in which their contribution may be used."""

_NOTHING: tuple[Output, ...] = ()
_CONTENT = (Output.SEND_CONTENT,)
_CONFIRM = (Output.SEND_CONFIRM,)

TRANSITIONS: dict[tuple[State, Input], tuple[tuple[Output, ...], State]] = {
    (State.OFFERED, Input.ACCEPTED): (_NOTHING, State.AGREED),
    (State.OFFERED, Input.REFUSED): (_NOTHING, State.REFUSED),
    (State.AGREED, Input.CAPTURED): (_CONTENT, State.STREAMING),
    (State.AGREED, Input.VERIFIED): (_NOTHING, State.RECEIVED),
    (State.RECEIVED, Input.CAPTURED): (_CONTENT, State.HELD),
    # They confirm only what they hold, so no confirmation can come before our content was sent.
    (State.STREAMING, Input.VERIFIED): (_NOTHING, State.HELD),
    (State.STREAMING, Input.CONFIRMED): (_NOTHING, State.PROMISED),
    (State.PROMISED, Input.VERIFIED): (_NOTHING, State.READY),
    (State.HELD, Input.CONFIRMED): (_NOTHING, State.READY),
    (State.HELD, Input.SETTLED): (_CONFIRM, State.CONFIRMING),
    (State.READY, Input.SETTLED): (_CONFIRM, State.DONE),
    (State.CONFIRMING, Input.CONFIRMED): (_NOTHING, State.DONE),
    **{(state, Input.FAILED): (_NOTHING, State.LOST) for state in State if state not in TERMINAL},
}


def step(state: State, event: Input) -> tuple[tuple[Output, ...], State]:
    """What to send, and the next state. Raises ProtocolViolation where the table has no entry."""
    return look_up(TRANSITIONS, state, event)


def mermaid() -> str:
    """The table as a Mermaid state diagram, for docs/states.md: inputs on the arrows, outputs after
    the slash."""
    arrows: list[tuple[StrEnum, str, StrEnum]] = []
    for (state, event), (outputs, after) in TRANSITIONS.items():
        arrows.append(
            (state, event.value + "".join(f" / {output.value}" for output in outputs), after)
        )
    return draw(State.OFFERED, arrows, [state for state in State if state in TERMINAL])
