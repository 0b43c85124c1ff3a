"""What must hold for messages between daemon and trainer: they arrive as they were sent, or are
refused with the reason."""

from collections.abc import Mapping
from dataclasses import fields
from enum import StrEnum
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.light_process import READY
from lowcomm_node.errors import TrainerError, Unusable
from lowcomm_node.node import messages
from lowcomm_node.node.ipc import TABLE, TrainerEvent, TrainerMessage, decode, encode, read_request
from lowcomm_node.node.messages import LenderFigures
from lowcomm_protocol.errors import Offence

st.register_type_strategy(
    Mapping, lambda kind: st.dictionaries(*map(st.from_type, get_args(kind)), max_size=3)
)
st.register_type_strategy(
    messages.TrainerSettings,
    st.builds(
        messages.TrainerSettings,
        **dict.fromkeys(("spec", "peer_id", "checkpoints", "data_cache"), st.text()),
    ),
)
EVERY = sorted(TABLE.values(), key=lambda kind: kind.wire_name)


@given(st.sampled_from(EVERY).flatmap(st.builds), st.integers(0) | st.none())
def test_every_message_arrives_as_it_was_sent(message: TrainerMessage, number: int | None) -> None:
    arrived, sent = decode(encode(message, number)), (message, number)
    assert arrived == sent or repr(arrived) == repr(sent)  # a NaN equals nothing, not even itself


LINE = encode(
    messages.Receive(fragment=1, part=messages.Part.WHOLE, peer="b", slot=2, offset=0, size=3), 7
)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (LINE, LINE[:-9], "receive can't be"),
        (LINE, b"[1]\n", "is not a line of a message"),
        (b" 7 ", b" ", "is not a line of a message"),
        (b" 7 ", b" x ", "is not a line of a message"),
        (b"receive ", b"dance ", "'dance .* is not a line of a message"),
        (b'"slot":2,', b"", r"receive\.slot .* required"),
        (b'"slot"', b'"slut"', r"receive\.(slot|slut)"),
        (b'"slot":2', b'"slot":"2"', r"receive\.slot can't be '2'"),
        (b'"slot":2', b'"slot":2.5', r"receive\.slot can't be '2\.5'"),
        (b'"slot":2', b'"slot":true', r"receive\.slot can't be 'True'"),
        (b'"slot":2', b'"slot":null', r"receive\.slot can't be 'None'"),
        (b'"whole"', b'"half"', r"receive\.part can't be 'half'"),
    ],
)
def test_a_line_that_was_cut_or_changed_is_refused_with_what_is_wrong(
    old: bytes, new: bytes, why: str
) -> None:
    assert old in LINE
    with pytest.raises(TrainerError, match=why):
        decode(LINE.replace(old, new))


@pytest.mark.parametrize(
    ("message", "old", "new", "where"),
    [
        (messages.Resent(size=1, digest=b"ab"), b"6162", b"616", "resent.digest"),
        (
            messages.AverageShard(fragment=0, tokens={"a": 1}, slot=0, offset=0),
            b'"a":1',
            b'"a":[]',
            "reduce.tokens.a",
        ),
        (messages.Shared(sizes=(1, 2), digests=(), steps=0), b"[1,2]", b"[1,{}]", "shared.sizes"),
        (messages.Shared(sizes=(1, 2), digests=(), steps=0), b"[1,2]", b"3", "shared.sizes"),
        (READY, b'"sizes":[[1,1]]', b'"sizes":[[1]]', "ready.sizes"),
        (
            messages.Received(again=messages.Retransmit(blocks=b"", least=1, most=1)),
            b'"least":1',
            b'"least":""',
            "received.again.least",
        ),
    ],
)
def test_what_lies_deeper_is_checked_too(
    message: TrainerMessage, old: bytes, new: bytes, where: str
) -> None:
    line = encode(message, 1)
    assert old in line
    with pytest.raises(TrainerError, match=where.replace(".", r"\.")):
        decode(line.replace(old, new))


def test_the_trainer_takes_requests_with_a_number_only() -> None:
    assert read_request(LINE) == decode(LINE)
    for line in (encode(messages.Stop()), encode(messages.Done(), 1), encode(messages.Held())):
        with pytest.raises(TrainerError, match="no request"):
            read_request(line)


def test_a_refusal_becomes_the_error_that_it_was() -> None:
    for deed in (*Offence, None):
        error = messages.RequestFailed(text="too large", unusable=True, deed=deed).to_error()
        assert isinstance(error, Unusable) and (str(error), error.deed) == ("too large", deed)
    other = messages.RequestFailed(text="no", exit_code=78).to_error()
    assert not isinstance(other, Unusable) and other.exit_code == 78


def test_an_event_is_told_under_its_name_with_what_json_can_hold() -> None:
    event = messages.TrainerFailed(reason="It broke.")
    assert event.to_json() == {
        "event": "failed",
        "reason": "It broke.",
        "kind": "error",
        "exit_code": 1,
    }
    for kind in EVERY:
        if issubclass(kind, TrainerEvent):
            assert all(plain(one.type) for one in fields(kind))  # type: ignore[arg-type]


def plain(kind: Any) -> bool:
    """Whether JSON has this type."""
    known = (int, float, str, bool, int | None, float | None, bool | None, Mapping[str, float])
    return kind in (*known, tuple[LenderFigures, ...]) or issubclass(kind, StrEnum)
