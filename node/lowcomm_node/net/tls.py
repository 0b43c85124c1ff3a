"""Certificates of TLS, and the credentials of calls.

At start a node draws a key for TLS (P-256, since gRPC can't use Ed25519 here) and publishes its 32
bytes in the signed record. Caller and callee build the same certificate from these, so a caller
pins the callee's certificate without fetching it. The caller proves its own identity by a
credential in the metadata of each call: signed by its key, bound to the callee, the run and the
time, and valid once.
"""

import datetime
import secrets
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

import grpc
from cachetools import TTLCache
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID

from lowcomm_protocol.errors import LowcommError, Reason, RecordError, Refusals, What
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers.admission import Admission, Rules
from lowcomm_protocol.peers.records import CREDENTIAL_LIFE, read_credential, write_credential

SERVER_NAME = "lowcomm"
"""The name in every certificate. Callers check the certificate itself."""
CREDENTIAL_KEY = "lowcomm-credential-bin"
MAX_NONCES = 65_536
"""Credentials remembered as used; a peer may call 1200 times a minute, and each is remembered for
two minutes."""
_EVEN = b"\x02"
"""First byte of a compressed point whose y is even. Each node draws such a key, so x is enough."""
_SIGNER = ed25519.Ed25519PrivateKey.from_private_bytes(sha256(b"lowcomm certificate").digest())
"""Signs every certificate, since the format wants a signature. The key is public and proves
nothing: TLS trusts one certificate as a whole, and its server must hold the key inside."""


@dataclass(frozen=True)
class Certificate:
    """A certificate and its private key."""

    public_key: bytes
    """The 32 bytes in records: the x coordinate of the key."""
    pem: bytes
    private_pem: bytes = field(repr=False)

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server."""
        return grpc.ssl_server_credentials([(self.private_pem, self.pem)])

    @property
    def der(self) -> bytes:
        """The certificate in DER."""
        return ssl.PEM_cert_to_DER_cert(self.pem.decode())


def make_certificate() -> Certificate:
    """A new key with its certificate."""
    while True:
        key = ec.generate_private_key(ec.SECP256R1())
        point = key.public_key().public_bytes(
            serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint
        )
        if point.startswith(_EVEN):
            break
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Certificate(point[1:], certificate_of(point[1:]), pem)


def read_certificate(private_pem: bytes) -> Certificate:
    """The certificate of a key that ``make_certificate`` drew. Raises ValueError."""
    key = serialization.load_pem_private_key(private_pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != "secp256r1":
        raise ValueError("not a key of P-256")
    x = key.public_key().public_numbers().x.to_bytes(32)
    return Certificate(x, certificate_of(x), private_pem)


def pinned(public_key: bytes) -> grpc.ChannelCredentials:
    """Channel credentials that trust only the holder of a key. Raises RecordError if it is none."""
    try:
        return grpc.ssl_channel_credentials(root_certificates=certificate_of(public_key))
    except ValueError:
        raise RecordError("The peer's TLS key is not a point of P-256: it is not called.") from None


def certificate_of(public_key: bytes) -> bytes:
    """The certificate of a key in PEM: the same bytes wherever it is built. Raises ValueError."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
    key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), _EVEN + public_key)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key)
        .serial_number(1)
        .not_valid_before(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .sign(_SIGNER, None)
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


class Gatekeeper:
    """Makes our credentials, and checks those of callers, who must be admitted to the run."""

    def __init__(
        self,
        identity: Identity,
        run_id: str,
        clock: Callable[[], float],
        *,
        admission: Admission | None = None,
        claim: bytes = b"",
        refusals: Refusals | None = None,
    ) -> None:
        """``claim``: our invite; without an ``admission`` anybody may call."""
        self._identity = identity
        self.run_id = run_id
        self._clock = clock
        self._admission = admission or Admission(Rules(run_id, creator=""))
        self._claim = claim
        self._refusals = refusals or Refusals()
        self._own_peer_id = identity.peer_id
        # A credential may come CREDENTIAL_LIFE ahead of our clock, and ends with the last moment.
        self._used: TTLCache[bytes, bool] = TTLCache(MAX_NONCES, 2 * CREDENTIAL_LIFE + 1, clock)
        """Digests of used credentials."""

    def credential_for(self, callee: str) -> tuple[tuple[str, bytes], ...]:
        """Metadata that proves our identity to ``callee``."""
        nonce = secrets.token_bytes(16)
        credential = write_credential(
            self._identity, callee, self.run_id, self._clock(), nonce, self._claim
        )
        return ((CREDENTIAL_KEY, credential),)

    def caller(self, metadata: dict[str, bytes], tunneled: str = "") -> str:
        """The peer id of an authenticated and admitted caller. Raises RecordError, SignatureError
        or AdmissionError, and counts the refusal.

        ``tunneled``: whom libp2p has authenticated, if the call comes through a pipe.
        """
        try:
            caller = self._caller(metadata.get(CREDENTIAL_KEY), self._clock())
            if tunneled not in ("", caller):
                raise RecordError(
                    "A credential of another peer than the one that calls is refused.",
                    reason=Reason.MISPLACED,
                )
            return caller
        except LowcommError as error:
            self._refusals.count(What.CALL, error.reason)
            raise

    def _caller(self, data: object, now: float) -> str:
        if not isinstance(data, bytes):
            raise RecordError("A call without a credential is refused.", reason=Reason.MISSING)
        credential = read_credential(data, self._own_peer_id, self.run_id, now)
        digest = sha256(credential.caller.encode() + credential.nonce).digest()[:16]
        if digest in self._used:
            raise RecordError(
                "A credential that was used before is refused.", reason=Reason.REPLAYED
            )
        # Before it is remembered: peers that are not admitted must not fill the table.
        self._admission.check(credential.caller, credential.claim, now)
        self._used[digest] = True
        return credential.caller
