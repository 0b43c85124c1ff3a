"""What messages of the virtual network would cost as frames."""

import pytest

from lowcomm_node.simulation.words import control_bytes
from lowcomm_node.sync import frames
from lowcomm_protocol.exchange.tally import SALT_BYTES
from lowcomm_protocol.matching import Offer, Refusal
from lowcomm_protocol.messages import exchange_pb2 as pb

OFFER = Offer(
    protocol=3,
    run_id="ab" * 32,
    plan="cd" * 32,
    codec="mod3/3",
    fragment=2,
    round=40,
    swarm_step=160,
    steps=160,
    tokens=81920,
    version=39,
    slow_digest=b"",
)
PEERS = tuple(f"peer-{number}" for number in range(4))
SALT = bytes(SALT_BYTES)


@pytest.mark.parametrize(
    ("kind", "payload", "frame"),
    [
        ("hello", OFFER, pb.Frame(hello=frames.to_message(OFFER))),
        ("accept", OFFER, pb.Frame(accept=frames.to_message(OFFER))),
        ("refuse", Refusal.BUSY, frames.refuse(Refusal.BUSY)),
        ("confirm", b"m" * 32, pb.Frame(confirm=pb.Confirm(members=b"m" * 32))),
        ("roll", PEERS, frames.roll(PEERS, PEERS)),
        ("members", PEERS, frames.members(PEERS, PEERS)),
        ("held", (b"d" * 32,) * 4, frames.held((b"d" * 32,) * 4, SALT)),
        ("commit", ((True,) * 4, (False,) * 4), frames.commit((True,) * 4, (False,) * 4)),
    ],
)
def test_a_message_costs_what_its_frame_has_in_bytes(kind, payload, frame):
    assert control_bytes(kind, payload) == len(frame.SerializeToString()) > 0


def test_of_a_content_only_what_stands_around_its_chunks_counts():
    assert 0 < control_bytes("content", bytes(1000)) < 64
    more = control_bytes("content", bytes(2_000_000)) - control_bytes("content", bytes(1000))
    assert 0 < more < 200, "a few bytes a chunk"


def test_the_end_of_a_stream_is_no_frame():
    assert control_bytes("closed", None) == 0
