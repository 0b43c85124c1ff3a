"""What must hold for the frames by which members of an exchange agree."""

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import group_frames
from lowcomm_node.sync import frames
from lowcomm_protocol.errors import MAX_REASON, ProtocolViolation
from lowcomm_protocol.exchange.events import Commit, Confirm, Holdings, MemberMessage, Members, Roll
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.spec.names import MAX_GROUP

PEERS = sorted(f"12D3KooW{sha256(bytes([n])).hexdigest()[:44]}" for n in range(MAX_GROUP))

peers = st.lists(st.sampled_from(PEERS), max_size=MAX_GROUP).map(tuple)
digests = st.lists(st.binary(max_size=32), max_size=MAX_GROUP).map(tuple)
flags = st.lists(st.booleans(), max_size=MAX_GROUP).map(tuple)


def sent(frame: pb.Frame) -> pb.Frame:
    """A frame as it arrives."""
    return pb.Frame.FromString(frame.SerializeToString())


@given(
    st.one_of(
        st.builds(Confirm, peer=st.just("a"), members=st.binary(max_size=40)),
        st.builds(Roll, peer=st.just("a"), roll=peers),
        st.builds(Members, peer=st.just("a"), members=peers),
        st.builds(Holdings, peer=st.just("a"), held=digests),
        st.builds(Commit, peer=st.just("a"), shards=flags, heard=flags),
    )
)
def test_a_message_arrives_as_it_was_sent(message: MemberMessage) -> None:
    assert frames.message_of("a", sent(frames.frame_of(message))) == message


@pytest.mark.parametrize(
    "frame",
    [
        group_frames.roll(["a"] * (MAX_GROUP + 1)),
        group_frames.members(["a" * 65]),
        group_frames.held([bytes(33)]),
        group_frames.held([b""] * (MAX_GROUP + 1)),
        group_frames.commit([True], [True] * (MAX_GROUP + 1)),
        pb.Frame(),
    ],
)
def test_what_is_longer_than_any_group_is_a_violation(frame: pb.Frame) -> None:
    with pytest.raises(ProtocolViolation):
        frames.message_of("a", sent(frame))


def test_no_bytes_of_a_stranger_are_told_of_its_violation() -> None:
    """Must be seen. A roll of 1.9 MB left 9.3 MB in the log and in the journal each."""
    with pytest.raises(ProtocolViolation) as caught:
        frames.message_of("a", sent(group_frames.roll(["\1secret" * 240_000])))
    assert "secret" not in str(caught.value)
    assert len(str(ProtocolViolation("x" * 10_000))) == MAX_REASON
