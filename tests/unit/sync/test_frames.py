"""What must hold for the frames by which members of a group agree."""

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowcomm_node.sync import frames
from lowcomm_node.sync.link import gave_up
from lowcomm_protocol.errors import MAX_REASON, ProtocolViolation
from lowcomm_protocol.exchange.tally import SALT_BYTES, Tally
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.spec.names import MAX_GROUP

PEERS = sorted(f"12D3KooW{sha256(bytes([n])).hexdigest()[:44]}" for n in range(MAX_GROUP))
SALT = bytes(range(SALT_BYTES))
DIGESTS = [sha256(bytes([n])).digest() for n in range(MAX_GROUP)]

flags = st.lists(st.booleans(), min_size=1, max_size=MAX_GROUP)


def sent(frame: pb.Frame) -> pb.Frame:
    """A frame as it arrives."""
    return pb.Frame.FromString(frame.SerializeToString())


@given(st.sets(st.sampled_from(PEERS), min_size=1))
def test_a_roll_by_places_has_the_same_peers(peers: set[str]) -> None:
    roll = sorted(peers)
    by_place, full = frames.roll(roll, PEERS), frames.roll(roll)
    assert frames.read_roll(sent(by_place).roll, PEERS) == tuple(roll)
    assert frames.read_roll(sent(full).roll, PEERS) == tuple(roll)
    assert not by_place.roll.peers


@pytest.mark.parametrize(
    "message",
    [pb.Roll(slice=0b100), pb.Roll(slice=1, peers=PEERS[:1]), pb.Roll(slice=2**32 - 1)],
)
def test_places_outside_the_slice_are_a_violation(message: pb.Roll) -> None:
    with pytest.raises(ProtocolViolation, match="a slice that is not ours"):
        frames.read_roll(message, PEERS[:2])


def test_no_bytes_of_a_stranger_are_told_of_its_violation() -> None:
    """Must be seen. A roll of 1.9 MB left 9.3 MB in the log and in the journal each."""
    roll = pb.Roll(slice=1, peers=["\1secret" * 240_000])
    with pytest.raises(ProtocolViolation) as caught:
        frames.read_roll(sent(pb.Frame(roll=roll)).roll, PEERS[:2])
    assert "secret" not in str(caught.value)
    assert len(str(ProtocolViolation("x" * 10_000))) == MAX_REASON


def test_the_reason_of_a_peer_that_gives_up_is_short_and_printable() -> None:
    told = str(gave_up(pb.Abandon(reason="\x1b[2Jno\nmore" + "x" * 10_000)))
    assert told.isprintable() and len(told) <= MAX_REASON + len("gave up: ")


@given(flags, flags)
def test_a_commit_arrives_as_it_was_sent(shards: list[bool], heard: list[bool]) -> None:
    heard = (heard * MAX_GROUP)[: len(shards)]
    frame = sent(frames.commit(shards, heard))
    assert frames.read_commit(frame.commit) == (tuple(shards), tuple(heard))


@given(st.lists(st.booleans(), max_size=6), flags)
def test_members_that_hold_the_same_means_agree_on_them_by_marks(
    ours: list[bool], theirs: list[bool]
) -> None:
    theirs = (theirs * MAX_GROUP)[: len(ours)]
    digests = [DIGESTS[k] if there else b"" for k, there in enumerate([True, True, *theirs])]
    members = tuple(PEERS[: len(digests)])
    me, peer = members[:2]
    tally, held = Tally(me, members), [True, True, *ours]
    tally.means = {one: DIGESTS[k] for k, one in enumerate(members) if held[k]}
    tally.hold()
    tally.add_held(peer, *frames.read_held(sent(frames.held(digests, SALT)).held))
    alike = [both == (True, True) for both in zip(ours, theirs, strict=True)]
    assert tally.commit()[0] == (True, True, *alike)
