"""What must hold for keys, peer ids and signatures."""

from collections.abc import Iterator

import base58
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from lowcomm_protocol.errors import SignatureError
from lowcomm_protocol.identity import (
    Identity,
    identity_from_libp2p,
    peer_id_of,
    public_key_of,
    verify,
)

ALICE, BOB = Identity(b"a" * 32), Identity(b"b" * 32)


# The Ed25519 key of the libp2p specification's test vectors: private key file and public key, as
# protobuf.
SPEC_PUBLIC = "080112201ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
SPEC_PRIVATE = (
    "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d" + SPEC_PUBLIC[8:]
)


def test_keys_and_peer_ids_are_libp2ps():
    identity = identity_from_libp2p(bytes.fromhex(SPEC_PRIVATE))
    assert identity.public_key.hex() == SPEC_PUBLIC[8:]
    assert identity.to_libp2p().hex() == SPEC_PRIVATE
    # The identity multihash (code 0, length 36) of the public key's protobuf, in base58.
    number, digits = int("0024" + SPEC_PUBLIC, 16), ""
    while number:
        number, digit = divmod(number, 58)
        digits = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"[digit] + digits
    assert (
        identity.peer_id == "1" + digits == "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"
    )


def keys_of_nobody() -> list[bytes]:
    """Every encoding of a point of small order: multiples of the group's order leave nothing but
    those."""
    field, order = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493
    d = -121665 * pow(121666, -1, field) % field

    def add(p: tuple[int, int], q: tuple[int, int]) -> tuple[int, int]:
        (x, y), (u, v) = p, q
        product = d * x * u * y * v
        return (
            (x * v + u * y) * pow(1 + product, -1, field) % field,
            (y * v + x * u) * pow(1 - product, -1, field) % field,
        )

    def times(count: int, p: tuple[int, int]) -> tuple[int, int]:
        result = (0, 1)
        for bit in f"{count:b}":
            result = add(result, result)
            result = add(result, p) if bit == "1" else result
        return result

    def points() -> Iterator[tuple[int, int]]:
        for y in range(2, 40):
            square = (y * y - 1) * pow(d * y * y + 1, -1, field) % field
            x = pow(square, (field + 3) // 8, field)
            for root in (x, x * pow(2, (field - 1) // 4, field) % field):
                if root * root % field == square:
                    yield root, y

    small = {times(order, point) for point in points()}
    small |= {add(one, other) for one in small for other in small}
    assert len(small) == 8
    heights = {y + more for _, y in small for more in (0, field) if y + more < 2**255}
    return sorted({(y | sign << 255).to_bytes(32, "little") for y in heights for sign in (0, 1)})


def test_a_key_that_anybody_can_sign_for_is_no_identity():
    keys = keys_of_nobody()
    assert len(keys) == 14
    Ed25519PublicKey.from_public_bytes(b"\1" + bytes(31)).verify(
        b"\1" + bytes(63), b"anything"
    )  # signed by nobody
    for key in keys:
        with pytest.raises(SignatureError, match="anybody can sign for"):
            public_key_of(peer_id_of(key))
    above = (2**255 - 19 + 3).to_bytes(32, "little")
    with pytest.raises(SignatureError, match="anybody can sign for"):
        public_key_of(peer_id_of(above))


@given(
    st.one_of(
        st.text(max_size=80), st.binary(max_size=60).map(lambda raw: base58.b58encode(raw).decode())
    )
)
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


def test_the_key_file_of_p2pd_round_trips():
    assert identity_from_libp2p(ALICE.to_libp2p()) == ALICE
