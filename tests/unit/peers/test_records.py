"""What must hold for records of peers and for proofs of who calls."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowcomm_protocol import PROTOCOL_VERSION
from lowcomm_protocol.errors import LowcommError, RecordError, SignatureError, VersionError
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.invites import issue_invite
from lowcomm_protocol.peers.records import (
    MAX_CLOCK_SKEW,
    MAX_LIFE,
    MAX_RECORD_BYTES,
    MAX_SAMPLE,
    PeerInfo,
    Phase,
    SelfReport,
    as_sample,
    is_sample,
    read_credential,
    read_record,
    write_credential,
    write_record,
)

ALICE, BOB = Identity(b"a" * 32), Identity(b"b" * 32)
RUN, OTHER_RUN = "ab" * 32, "cd" * 32
NOW = 1_800_000_000.0
NONCE = b"n" * 16
INFO = PeerInfo(
    peer_id=ALICE.peer_id,
    run_id=RUN,
    phase=Phase.TRAINING,
    issued=NOW - 5,
    expires=NOW + 55,
    addresses=("203.0.113.7:4100", "[2001:db8::1]:4100"),
    certificate=b"digest of 32 bytes".ljust(32),
    swarm_step=400,
    steps=390,
    tokens_per_second=12_345.5,
    entry_points=("/ip4/203.0.113.7/tcp/4101/p2p/" + ALICE.peer_id,),
    claim=b"claim" * 50,
    report=SelfReport(
        name="ada's desk",
        release="0.2.0",
        tokens=10**12,
        held_out_loss=1.25,
        exchanges=40,
        sample="Once upon a time",
        sample_step=390,
    ),
)
RECORD = write_record(INFO, ALICE)
CREDENTIAL = write_credential(ALICE, BOB.peer_id, RUN, NOW, NONCE)


def signed_record(**fields) -> bytes:
    """A record that Alice signed with fields that our own program would not write."""
    signed = pb.SignedRecord.FromString(RECORD)
    record = pb.PeerRecord.FromString(signed.payload)
    for name, value in fields.items():
        record.ClearField(name)
        record.MergeFrom(pb.PeerRecord(**{name: value}))
    payload = record.SerializeToString()
    return pb.SignedRecord(
        payload=payload, signature=ALICE.sign("peer record", payload)
    ).SerializeToString()


def mutated(data: bytes):
    """``data`` with bytes flipped, cut out or put in."""

    def change(edits):
        out = bytearray(data)
        for kind, place, value in edits:
            at = place % max(1, len(out))
            if kind == "flip" and out:
                out[at] ^= value or 1
            elif kind == "cut":
                del out[at : at + 1 + value % 8]
            elif kind == "put":
                out[at:at] = bytes([value])
        return bytes(out)

    edit = st.tuples(
        st.sampled_from(["flip", "cut", "put"]), st.integers(0, 2 * len(data)), st.integers(0, 255)
    )
    return st.lists(edit, min_size=1, max_size=4).map(change).filter(lambda out: out != data)


# Records


LONG_ADDRESS = "[2001:db8:85a3:1234:5678:8a2e:370:7334]:31337"
AT_A_RELAY = (
    "/ip6/2001:db8:85a3:1234:5678:8a2e:370:7334/udp/31337/quic-v1"
    f"/p2p/{BOB.peer_id}/p2p-circuit/p2p/{ALICE.peer_id}"
)


def test_the_longest_record_that_a_node_needs_is_taken_whole():
    run_id = INFO.run_id
    claim = issue_invite(BOB, run_id, b"i" * 32, NOW + 1000, uses=1, peer_id=ALICE.peer_id).claim(
        ALICE.peer_id, NOW
    )
    info = replace(
        INFO, addresses=(LONG_ADDRESS,) * 8, entry_points=(AT_A_RELAY,) * 4, claim=claim.data
    )
    data = write_record(info, ALICE)
    assert read_record(data, NOW) == info
    assert len(data) < 0.85 * MAX_RECORD_BYTES


@given(st.text())
def test_whatever_a_model_writes_becomes_a_sample_that_peers_take(text):
    assert is_sample(as_sample(text))
    assert is_sample(as_sample(text * 50))


def test_a_sample_gives_way_to_addresses_at_which_others_reach_the_peer():
    report = replace(INFO.report, sample="s" * MAX_SAMPLE)
    full = {"addresses": (LONG_ADDRESS,) * 8, "entry_points": (AT_A_RELAY,) * 4}
    long = replace(INFO, claim=b"c" * 512, report=report, **full)
    taken = read_record(write_record(long, ALICE), NOW)
    assert taken == replace(long, report=replace(report, sample=""))
    short = replace(INFO, report=report)
    assert read_record(write_record(short, ALICE), NOW) == short


@given(mutated(pb.SignedRecord.FromString(RECORD).payload))
@settings(max_examples=300)
def test_a_mutated_payload_never_validates(payload):
    signature = pb.SignedRecord.FromString(RECORD).signature
    with pytest.raises(LowcommError):
        read_record(pb.SignedRecord(payload=payload, signature=signature).SerializeToString(), NOW)


def test_a_credential_can_not_be_replayed_as_a_record():
    payload = pb.SignedRecord.FromString(RECORD).payload
    data = pb.SignedRecord(
        payload=payload, signature=ALICE.sign("credential", payload)
    ).SerializeToString()
    with pytest.raises(SignatureError):
        read_record(data, NOW)


def test_a_record_holds_until_it_expires():
    read_record(RECORD, INFO.expires - 0.001)
    with pytest.raises(RecordError, match="expired 0 s ago"):
        read_record(RECORD, INFO.expires)
    with pytest.raises(RecordError, match="expired 1000 s ago"):
        read_record(RECORD, INFO.expires + 1000)


def test_a_record_lives_a_bounded_time():
    longest = replace(INFO, issued=NOW, expires=NOW + MAX_LIFE)
    assert read_record(write_record(longest, ALICE), NOW) == longest
    with pytest.raises(RecordError, match="claims a life of 601 s: at most 600"):
        read_record(write_record(replace(longest, expires=NOW + MAX_LIFE + 1), ALICE), NOW)
    with pytest.raises(RecordError, match="claims a life"):
        read_record(signed_record(expires_ms=2**64 - 1), NOW)
    with pytest.raises(RecordError, match="claims a life"):
        read_record(signed_record(issued_ms=0), NOW)


def test_a_record_from_the_future_is_refused():
    ahead = replace(INFO, issued=NOW + MAX_CLOCK_SKEW, expires=NOW + 100)
    assert read_record(write_record(ahead, ALICE), NOW) == ahead
    with pytest.raises(RecordError, match="61 s ahead: set both clocks right"):
        read_record(write_record(replace(ahead, issued=NOW + MAX_CLOCK_SKEW + 1), ALICE), NOW)


def test_a_record_of_another_protocol_is_a_version_error():
    with pytest.raises(
        VersionError, match=f"of protocol 99 is refused: this is {PROTOCOL_VERSION}"
    ):
        read_record(signed_record(protocol=99), NOW)


@pytest.mark.parametrize(
    "fields",
    [
        {"run_id": b"short"},
        {"phase": "sleeping"},
        {"phase": ""},
        {"certificate": b"x" * 33},
        {"claim": b"x" * 513},
        {"tokens_per_second": float("nan")},
        {"tokens_per_second": float("inf")},
        {"tokens_per_second": -1.0},
        {"swarm_step": 2**53},
        {"report": pb.SelfReport(name="n" * 33)},
        {"report": pb.SelfReport(name="line\nbreak")},
        {"report": pb.SelfReport(name="\u202eabc")},
        {"report": pb.SelfReport(name="\x1b[2J")},
        {"report": pb.SelfReport(release="r" * 33)},
        {"report": pb.SelfReport(sample="s" * 161)},
        {"report": pb.SelfReport(sample="\U0001f40c" * 41)},
        {"report": pb.SelfReport(sample="two\nlines")},
        {"report": pb.SelfReport(sample="\u202eabc")},
        {"report": pb.SelfReport(sample_step=2**53)},
        {"report": pb.SelfReport(tokens=2**53)},
        {"report": pb.SelfReport(exchanges=2**64 - 1)},
        {"report": pb.SelfReport(held_out_loss=float("nan"))},
        {"report": pb.SelfReport(held_out_loss=-1.0)},
        {"report": pb.SelfReport(held_out_loss=1e9)},
        {"steps": 2**64 - 1},
        {"addresses": ["203.0.113.7:1"] * 9},
        {"entry_points": ["/ip4/203.0.113.7/tcp/1"] * 9},
        {"entry_points": ["/" + "x" * 256]},
        {"entry_points": ["/ip4/203.0.113.7\n/tcp/1"]},
        {"entry_points": ["/ip4/２０３.0.113.7"]},
    ],
)
def test_a_field_out_of_bounds_is_refused(fields):
    with pytest.raises(RecordError, match=f"of {ALICE.peer_id} "):
        read_record(signed_record(**fields), NOW)


@pytest.mark.parametrize(
    "address",
    [
        "",
        ":4100",
        "203.0.113.7",
        "203.0.113.7:",
        "203.0.113.7:0",
        "203.0.113.7:65536",
        "203.0.113.7:-1",
        "203.0.113.7:+1",
        "203.0.113.7: 80",
        "203.0.113.7:" + "9" * 5000,
        "203.0.113.7:٤١٠٠",
        "203.0.113.7:80\n",
        "node-1.example.org:4100",
        "[127.0.0.1]:4100",
        "1.2.3:4100",
        "1.2.3.256:4100",
        "0x7f.0.0.1:4100",
        "[1::2::3]:4100",
        "[::1:80",
        "unix:/run/docker.sock:1",
        "a" * 256 + ":80",
    ],
)
def test_an_address_is_a_number_and_a_port(address):
    with pytest.raises(RecordError, match=r"an IP address and a port|at most 2048"):
        read_record(signed_record(addresses=[address]), NOW)


# Credentials


def test_a_credential_tells_the_caller_and_the_nonce():
    for claim in (b"", b"claim"):
        data = write_credential(ALICE, BOB.peer_id, RUN, NOW, NONCE, claim)
        read = read_credential(data, BOB.peer_id, RUN, NOW)
        assert (read.caller, read.nonce, read.claim) == (ALICE.peer_id, NONCE, claim)
        assert read.issued_ms == NOW * 1000
