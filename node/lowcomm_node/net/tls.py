"""TLS certificates and call credentials.

Every node makes a self-signed P-256 certificate at start (gRPC can't use Ed25519 certificates) and
publishes its SHA-256 in its signed record. A caller pins exactly that certificate. The caller
proves its own identity by a credential in the metadata of each call, signed by its key and bound to
the callee, the run and the time.
"""

import datetime
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lowcomm_node.net.nonces import Nonces
from lowcomm_protocol.errors import LowcommError, Reason, RecordError, Refusals, What
from lowcomm_protocol.identity import Identity, public_key_of
from lowcomm_protocol.peers.admission import Admission, Rules
from lowcomm_protocol.peers.records import CREDENTIAL_LIFE, read_credential, write_credential

SERVER_NAME = "lowcomm"
"""The name in every certificate. Callers check the certificate itself."""
CREDENTIAL_KEY = "lowcomm-credential-bin"
_TEN_YEARS = datetime.timedelta(days=3650)
_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate and its key."""

    der: bytes
    pem: bytes
    key_pem: bytes = field(repr=False)

    @property
    def digest(self) -> bytes:
        """SHA-256 of ``der``, as in records."""
        return sha256(self.der).digest()

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server."""
        return grpc.ssl_server_credentials([(self.key_pem, self.pem)])


def make_certificate(now: datetime.datetime) -> Certificate:
    """A new certificate, valid from a day before ``now`` (UTC) for ten years.

    Peers pin the certificate, so its dates mean little.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _TEN_YEARS)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    return Certificate(certificate.public_bytes(serialization.Encoding.DER), pem, key_pem)


def pinned(der: bytes) -> grpc.ChannelCredentials:
    """Channel credentials that trust one certificate (DER). Raises RecordError if it is invalid."""
    try:
        pem = x509.load_der_x509_certificate(der).public_bytes(serialization.Encoding.PEM)
    except (ValueError, x509.InvalidVersion):
        raise RecordError("The peer's certificate can't be read: it is not called.") from None
    return grpc.ssl_channel_credentials(root_certificates=pem)


class Gatekeeper:
    """Makes our credentials and checks those of callers: a nonce is valid once, and callers must be
    admitted."""

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
        """``claim``: the invite by which we were admitted. Without an ``admission`` anybody may
        call."""
        self._identity = identity
        self.run_id = run_id
        self._clock = clock
        self._admission = admission or Admission(Rules(run_id, creator=""))
        self._claim = claim
        self._refusals = refusals or Refusals()
        self._own_peer_id = identity.peer_id
        self._nonces = Nonces(2 * CREDENTIAL_LIFE)  # one may come that life ahead of our clock

    def credential_for(self, callee: str) -> tuple[tuple[str, bytes], ...]:
        """Metadata that proves our identity to ``callee``."""
        nonce = secrets.token_bytes(16)
        credential = write_credential(
            self._identity, callee, self.run_id, self._clock(), nonce, self._claim
        )
        return ((CREDENTIAL_KEY, credential),)

    def caller(self, metadata: dict[str, bytes], place: str = "") -> str:
        """The peer id of an authenticated and admitted caller; ``place``: the address it calls
        from.

        Raises RecordError, SignatureError or AdmissionError; each is counted.
        """
        try:
            return self._caller(metadata.get(CREDENTIAL_KEY), place, self._clock())
        except LowcommError as error:
            self._refusals.count(What.CALL, error.reason)
            raise

    def tunneled(self, peer_id: str, metadata: dict[str, bytes], place: str = "") -> str:
        """The same for a caller that libp2p has authenticated: it needs a credential only to show
        an invite.

        Raises RecordError, SignatureError or AdmissionError; each is counted.
        """
        if CREDENTIAL_KEY in metadata:
            caller = self.caller(metadata, place)
            if caller != peer_id:
                self._refusals.count(What.CALL, Reason.MISPLACED)
                raise RecordError(
                    "A credential of another peer than the one that calls is refused."
                )
            return caller
        now = self._clock()
        try:
            public_key_of(peer_id)  # libp2p lets in keys that anybody can sign for
            self._admission.check_again(peer_id, now)
        except LowcommError as error:
            self._refusals.count(What.CALL, error.reason)
            raise
        return peer_id

    def _caller(self, data: object, place: str, now: float) -> str:
        if not isinstance(data, bytes):
            raise RecordError("A call without a credential is refused.", reason=Reason.MISSING)
        caller = read_credential(data, self._own_peer_id, self.run_id, now)
        if self._nonces.was_used(caller.peer_id, caller.nonce, caller.issued, now):
            raise RecordError(
                "A credential that was used before is refused.", reason=Reason.REPLAYED
            )
        # Checked before the nonce is stored: peers that are not admitted must not fill the table.
        self._admission.check(caller.peer_id, caller.claim, now)
        self._nonces.use(caller.peer_id, place, caller.nonce, caller.issued, now)
        return caller.peer_id
