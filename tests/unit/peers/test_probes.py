"""Probes on the wire: what is asked and answered is checked before it is used."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers import probes

PEER = Identity(b"x" * 32).peer_id


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ([], "0 calls"),
        ([pb.Target(kind=pb.Target.TCP, port=1)] * (probes.MAX_TARGETS + 1), "5 calls"),
        ([pb.Target(kind=pb.Target.TCP, port=0)], "port 0"),
        ([pb.Target(kind=pb.Target.QUIC, port=65536)], "port 65536"),
        ([pb.Target(kind=7, port=1)], "kind 7"),  # pyright: ignore[reportArgumentType]
        ([pb.Target(kind=pb.Target.DIRECT, port=1, certificate=b"short")], "5 bytes"),
        ([pb.Target(kind=pb.Target.TCP, port=1, certificate=b"d" * 32)], "32 bytes"),
    ],
)
def test_a_request_for_other_calls_than_are_possible_is_refused(
    targets: list[pb.Target], words: str
):
    with pytest.raises(ProtocolViolation, match=words):
        probes.check_dial_back(pb.DialBack(peer_id=PEER, targets=targets))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_probe_or_refused(data: bytes):
    try:
        probe = probes.read_probe(data)
    except ProtocolViolation:
        return
    assert probe.WhichOneof("kind") in ("look", "dial_back", "ping")


@given(st.binary(max_size=200), st.sampled_from(["seen", "dialed_back", "pong"]))
def test_any_bytes_are_the_answer_that_is_wanted_or_refused(data: bytes, wanted: str):
    try:
        probed = probes.read_probed(data, wanted)
    except ProtocolViolation:
        return
    assert probed.WhichOneof("kind") in (wanted, "refused")


def test_sizes_are_bounded():
    with pytest.raises(ProtocolViolation):
        probes.read_probe(bytes(probes.MAX_MESSAGE + 1))
    for ping in (
        pb.Ping(wanted=probes.MAX_CONTENT + 1),
        pb.Ping(content=bytes(probes.MAX_CONTENT + 1)),
    ):
        with pytest.raises(ProtocolViolation):
            probes.check_ping(ping)
    largest = pb.Ping(content=bytes(probes.MAX_CONTENT), wanted=probes.MAX_CONTENT)
    probes.check_ping(largest)
    probes.read_probe(pb.Probe(ping=largest).SerializeToString())
    seen = probes.read_seen(pb.Seen(address="x" * 9999, entry_points=["y" * 9999, *["z"] * 99]))
    assert (
        len(seen.address) == probes.MAX_ADDRESS
        and len(seen.entry_points) == probes.MAX_ENTRY_POINTS - 1
    )
