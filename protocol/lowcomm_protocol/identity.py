"""Keys, peer ids and signatures.

A peer *is* its Ed25519 key: the libp2p peer id of such a key contains the public key itself, so the
peer id alone suffices to check a signature. Every signature is bound to a purpose, so that bytes
signed for one use (a peer record, say) can't be replayed for another (a run specification).

Layout of a peer id (libp2p specification, "peer ids"): base58 of the identity multihash ``00 24``
of the protobuf ``08 01 12 20 || public key (32 bytes)``.
"""

from dataclasses import dataclass, field

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from lowcomm_protocol.errors import SignatureError

KEY_BYTES = 32
SIGNATURE_BYTES = 64
_FIELD = 2**255 - 19
_SMALL_Y = frozenset(
    number % _FIELD
    for root in (0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826,)
    for number in (0, 1, -1, root, -root)
)
"""y of all points of order 1, 2, 4 or 8 (RFC 8032, 5.1): anybody can sign for such a key."""
_PEER_ID_PREFIX = bytes.fromhex("002408011220")
# Protobuf of libp2p: key_type = Ed25519, data = 64 bytes
_PRIVATE_KEY_PREFIX = bytes.fromhex("08011240")


@dataclass(frozen=True)
class Identity:
    """The private key of a node or of a run's creator; masked in ``repr``."""

    secret: bytes = field(repr=False)
    """Ed25519 seed, 32 bytes; drawn by the caller."""

    def __post_init__(self) -> None:
        if len(self.secret) != KEY_BYTES:
            raise SignatureError(
                f"An identity key has {KEY_BYTES} bytes, not {len(self.secret)}: restore the key "
                "file."
            )

    @property
    def public_key(self) -> bytes:
        """Ed25519 public key, 32 bytes."""
        return self._private_key.public_key().public_bytes_raw()

    @property
    def peer_id(self) -> str:
        """The libp2p peer id, base58."""
        return peer_id_of(self.public_key)

    def sign(self, purpose: str, payload: bytes) -> bytes:
        """Sign ``payload`` for one ``purpose``; 64 bytes."""
        return self._private_key.sign(_bound(purpose, payload))

    def to_libp2p(self) -> bytes:
        """The key as the protobuf file that p2pd reads."""
        return _PRIVATE_KEY_PREFIX + self.secret + self.public_key

    @property
    def _private_key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.secret)


def identity_from_libp2p(data: bytes) -> Identity:
    """Read the key file of p2pd. Raises SignatureError if it is not an Ed25519 key, or damaged."""
    expected = len(_PRIVATE_KEY_PREFIX) + 2 * KEY_BYTES
    if len(data) != expected or not data.startswith(_PRIVATE_KEY_PREFIX):
        raise SignatureError(
            f"The identity key is not an Ed25519 key in libp2p's form ({len(data)} bytes): restore "
            "it."
        )
    identity = Identity(data[len(_PRIVATE_KEY_PREFIX) : len(_PRIVATE_KEY_PREFIX) + KEY_BYTES])
    if not data.endswith(identity.public_key):
        raise SignatureError(
            "The two halves of the identity key do not belong together: restore the key file."
        )
    return identity


def peer_id_of(public_key: bytes) -> str:
    """The peer id (base58) of an Ed25519 public key (32 bytes)."""
    return base58.b58encode(_PEER_ID_PREFIX + public_key).decode()


def check_key(public_key: bytes) -> None:
    """Raise SignatureError for a public key of small order, or one that is not canonical."""
    y = int.from_bytes(public_key, "little") & (2**255 - 1)
    if y >= _FIELD or y in _SMALL_Y:
        raise SignatureError(
            f"The public key {public_key.hex()} is one that anybody can sign for: it is refused."
        )


def public_key_of(peer_id: str) -> bytes:
    """The Ed25519 public key (32 bytes) inside a peer id. Raises SignatureError."""
    try:
        if len(peer_id) > 64:
            raise ValueError
        raw = base58.b58decode(peer_id)
    except ValueError:
        raise SignatureError(
            f"{peer_id[:64]!r} is not a peer id: expected base58 such as 12D3KooW..."
        ) from None
    public_key = raw[len(_PEER_ID_PREFIX) :]
    # base58 decoding accepts trailing white space; without this check one key would have many
    # names.
    if len(raw) != len(_PEER_ID_PREFIX) + KEY_BYTES or peer_id_of(public_key) != peer_id:
        raise SignatureError(
            f"The peer id {peer_id[:64]!r} holds no Ed25519 key: expected one that begins with "
            "12D3KooW."
        )
    check_key(public_key)
    return public_key


def verify(peer_id: str, purpose: str, payload: bytes, signature: bytes) -> None:
    """Raise SignatureError unless ``peer_id`` signed ``payload`` for ``purpose``."""
    key = Ed25519PublicKey.from_public_bytes(public_key_of(peer_id))
    try:
        key.verify(signature, _bound(purpose, payload))
    except InvalidSignature:
        raise SignatureError(
            f"The signature of this {purpose} is not one of {peer_id}: it is refused."
        ) from None


def _bound(purpose: str, payload: bytes) -> bytes:
    return b"lowcomm/" + purpose.encode() + b"\0" + payload
