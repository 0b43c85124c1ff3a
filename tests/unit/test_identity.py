"""What must hold for keys, peer ids and signatures."""

import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowcomm_protocol.errors import LowcommError, SignatureError
from lowcomm_protocol.identity import Identity, identity_from_libp2p, peer_id_of, public_key_of, verify

ALICE, BOB = Identity(b"a" * 32), Identity(b"b" * 32)


# The Ed25519 key of the libp2p specification's test vectors: private key file and public key, as protobuf.
SPEC_PUBLIC = "080112201ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
SPEC_PRIVATE = "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d" + SPEC_PUBLIC[8:]


def test_keys_and_peer_ids_are_libp2ps():
    identity = identity_from_libp2p(bytes.fromhex(SPEC_PRIVATE))
    assert identity.public_key.hex() == SPEC_PUBLIC[8:]
    assert identity.to_libp2p().hex() == SPEC_PRIVATE
    # The identity multihash (code 0, length 36) of the public key's protobuf, in base58.
    number, digits = int("0024" + SPEC_PUBLIC, 16), ""
    while number:
        number, digit = divmod(number, 58)
        digits = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"[digit] + digits
    assert identity.peer_id == "1" + digits == "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"


@given(st.binary(min_size=32, max_size=32))
def test_a_peer_id_holds_its_public_key(key):
    assert public_key_of(peer_id_of(key)) == key


@given(st.one_of(st.text(max_size=80), st.binary(max_size=60).map(lambda raw: base58.b58encode(raw).decode())))
def test_anything_but_a_peer_id_is_a_signature_error(text):
    with pytest.raises(SignatureError):
        public_key_of(text)


@pytest.mark.parametrize("decorate", ["{}\n", "{} ", "{}\t\n", " {}", "1{}", "{}1"])
def test_one_key_has_one_name(decorate):
    with pytest.raises(SignatureError):
        public_key_of(decorate.format(ALICE.peer_id))


def test_a_signature_holds_for_its_signer_purpose_and_payload_only():
    signature = ALICE.sign("peer record", b"payload")
    verify(ALICE.peer_id, "peer record", b"payload", signature)
    for peer, purpose, payload in (
        (BOB.peer_id, "peer record", b"payload"),
        (ALICE.peer_id, "credential", b"payload"),
        (ALICE.peer_id, "peer record", b"payloae"),
        (ALICE.peer_id, "peer record\0payload", b""),
    ):
        with pytest.raises(SignatureError):
            verify(peer, purpose, payload, signature)


@given(st.binary(max_size=100))
def test_no_bytes_but_the_signature_verify(signature):
    with pytest.raises(SignatureError):
        verify(ALICE.peer_id, "peer record", b"payload", signature)


def test_the_secret_is_masked():
    assert "a" * 8 not in repr(ALICE)
    assert repr(ALICE) == "Identity()"


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_a_key_of_another_length_is_refused(length):
    with pytest.raises(SignatureError, match=f"32 bytes, not {length}"):
        Identity(b"k" * length)


def test_the_key_file_of_p2pd_round_trips():
    assert identity_from_libp2p(ALICE.to_libp2p()) == ALICE


@given(st.integers(0, 67), st.integers(1, 255))
def test_a_damaged_key_file_is_refused(place, flip):
    data = bytearray(ALICE.to_libp2p())
    data[place] ^= flip
    with pytest.raises(SignatureError, match="restore"):
        identity_from_libp2p(bytes(data))


@given(st.binary(max_size=100))
def test_no_bytes_make_reading_a_key_file_raise_anything_else(data):
    with pytest.raises(LowcommError):
        identity_from_libp2p(data)
