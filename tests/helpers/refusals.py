"""Everything that strangers may send and a node refuses: how to prepare each, and what it costs.

Not in the peaks of memory: what gRPC and libp2p hold of a message before they hand it over (at
most 2 MiB and 4 MiB). Every attempt has fresh bytes, since known ones are refused by their
digest."""

import itertools
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from lowcomm_node.dht.keys import Provenances, pack, peers_key
from lowcomm_node.net.tls import CREDENTIAL_KEY, Gatekeeper
from lowcomm_protocol.errors import LowcommError, Refusals
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.admission import Admission, Rules
from lowcomm_protocol.peers.invites import Token, issue_invite, write_removals
from lowcomm_protocol.peers.records import PeerInfo, Phase, write_credential, write_record
from lowcomm_protocol.peers.roster import Roster

MAX_KIB = 64.0
CREATOR, ADA, BOB, ME = (Identity(bytes([number]) * 32) for number in (1, 2, 3, 4))
RUN, OTHER_RUN = "ab" * 32, "cd" * 32
NOW = 1_800_000_000.0
MEGABYTE = 1_000_000
_fresh = itertools.count()

Attempt = tuple[Callable[[], object], Refusals]


@dataclass(frozen=True)
class Case:
    """One thing that is refused."""

    name: str
    counted: str
    """As ``status`` shows it."""
    prepare: Callable[[], Attempt]
    """Fresh bytes and a fresh refuser; what it returns is measured, and counts in those
    refusals."""


def record(**fields: object) -> bytes:
    """A record of Ada, of bytes that nobody has seen."""
    info = PeerInfo(
        peer_id=ADA.peer_id, run_id=RUN, phase=Phase.TRAINING, issued=NOW - 5, expires=NOW + 25,
        addresses=("203.0.113.7:31331",), certificate=bytes(32), swarm_step=next(_fresh),
    )  # fmt: skip
    return write_record(replace(info, **fields), ADA)


def oversized() -> bytes:
    """A record of a megabyte with a good signature."""
    signed = pb.SignedRecord.FromString(record())
    inner = pb.PeerRecord.FromString(signed.payload)
    inner.certificate = bytes(MEGABYTE)
    payload = inner.SerializeToString()
    return pb.SignedRecord(
        payload=payload, signature=ADA.sign("peer record", payload)
    ).SerializeToString()


def invite(uses: int = 1, expires: float = NOW + 1000, creator: Identity = CREATOR) -> Token:
    """An invite of its own secret."""
    return issue_invite(creator, RUN, next(_fresh).to_bytes(32, "big"), expires, uses)


def rules(mode: str = "invite", members: frozenset[str] = frozenset()) -> Rules:
    """Of a run that lets in only some."""
    return Rules(RUN, CREATOR.peer_id, mode, members)  # pyright: ignore[reportArgumentType]


def hears(data: bytes, admission: Admission | None = None, sender: str | None = None) -> Attempt:
    """A peer hears a record."""
    refusals = Refusals()
    roster = Roster(ME.peer_id, RUN, admission, refusals)
    return lambda: roster.hear(data, NOW, sender), refusals


def stores(data: bytes, subkey: str = ADA.peer_id) -> Attempt:
    """A peer of the DHT is asked to store a record, or reads it there."""
    refusals = Refusals()
    provenances = Provenances(refusals)
    stored = pack(peers_key(RUN), data)
    return lambda: provenances.check(stored, subkey, NOW), refusals


def is_called(data: bytes | None, admission: Admission | None = None, times: int = 1) -> Attempt:
    """A peer is called ``times``; the last call is the one that is measured."""
    refusals = Refusals()
    keeper = Gatekeeper(ME, RUN, lambda: NOW, admission=admission, refusals=refusals)
    metadata = {} if data is None else {CREDENTIAL_KEY: data}

    def call() -> None:
        with suppress(LowcommError):
            keeper.caller(metadata)

    for _ in range(times - 1):
        call()
    return call, refusals


def credential(
    signer: Identity = ADA, issued: float = NOW, run: str = RUN, claim: bytes = b"", **to: str
) -> bytes:
    """What a caller shows."""
    nonce = next(_fresh).to_bytes(16, "big")
    return write_credential(signer, to.get("callee", ME.peer_id), run, issued, nonce, claim)


def forged(data: bytes) -> bytes:
    """A credential that another peer has signed."""
    signed = pb.SignedCredential.FromString(data)
    return pb.SignedCredential(
        payload=signed.payload, signature=BOB.sign("credential", signed.payload)
    ).SerializeToString()


def forged_record() -> bytes:
    """A record of Ada that another peer has signed."""
    signed = pb.SignedRecord.FromString(record())
    return pb.SignedRecord(
        payload=signed.payload, signature=BOB.sign("peer record", signed.payload)
    ).SerializeToString()


def used_up() -> tuple[Admission, bytes]:
    """Who is in by an invite of one use, and the claim of Ada who came later."""
    admission, token = Admission(rules()), invite()
    admission.check(BOB.peer_id, token.claim(BOB.peer_id, NOW - 1).data, NOW)
    return admission, token.claim(ADA.peer_id, NOW).data


def claim(**fields: object) -> bytes:
    """A claim of Ada."""
    return invite(**fields).claim(ADA.peer_id, NOW - 10).data  # pyright: ignore[reportArgumentType]


def without(peer_id: str) -> Admission:
    """An open run that a peer was removed from."""
    admission = Admission(Rules(RUN, CREATOR.peer_id))
    admission.hear_removals(write_removals(CREATOR, RUN, 1, frozenset([peer_id])).data)
    return admission


def late_record() -> Attempt:
    """Ada's record, whose invite was used up before she came."""
    admission, late = used_up()
    return hears(record(claim=late), admission)


def late_call() -> Attempt:
    """Ada's call, whose invite was used up before she came."""
    admission, late = used_up()
    return is_called(credential(claim=late), admission)


def invited(data: bytes = b"") -> Attempt:
    """Ada's record in a run that takes invited peers only."""
    return hears(record(claim=data), Admission(rules()))


def calls(data: bytes = b"") -> Attempt:
    """Ada's call in a run that takes invited peers only."""
    return is_called(credential(claim=data), Admission(rules()))


CASES = [
    Case("a stolen record under another peer id, in the DHT", "record.misplaced",
        lambda: stores(record(), BOB.peer_id)),
    Case("a stolen record that another peer tells", "record.misplaced",
        lambda: hears(record(), sender=BOB.peer_id)),
    Case("a record of another run", "record.misplaced", lambda: hears(record(run_id=OTHER_RUN))),
    Case("an expired record", "record.expired",
        lambda: hears(record(issued=NOW - 60, expires=NOW - 1))),
    Case("a record from the future", "record.from-the-future",
        lambda: hears(record(issued=NOW + 61, expires=NOW + 99))),
    Case("a record for centuries", "record.lives-too-long",
        lambda: stores(record(expires=NOW + 9e9))),
    Case("a record of 1 MB, told by a peer", "record.too-large", lambda: hears(oversized())),
    Case("a record of 1 MB, in the DHT", "record.too-large", lambda: stores(oversized())),
    Case("a record whose signature is forged", "record.bad-signature",
        lambda: hears(forged_record())),
    Case("a call without a credential", "call.missing", lambda: is_called(None)),
    Case("an expired credential", "call.expired", lambda: is_called(credential(issued=NOW - 61))),
    Case("a credential from the future", "call.from-the-future",
        lambda: is_called(credential(issued=NOW + 61))),
    Case("a replayed credential", "call.replayed", lambda: is_called(credential(), times=2)),
    Case("a credential for another callee", "call.misplaced",
        lambda: is_called(credential(callee=BOB.peer_id))),
    Case("a credential for another run", "call.misplaced",
        lambda: is_called(credential(run=OTHER_RUN))),
    Case("a forged credential", "call.bad-signature", lambda: is_called(forged(credential()))),
    Case("a credential of 1 MB", "call.too-large",
        lambda: is_called(credential() + bytes(MEGABYTE))),
    Case("a record without an invite", "record.not-invited", invited),
    Case("a call without an invite", "call.not-invited", calls),
    Case("a record with an expired invite", "record.invite-expired",
        lambda: invited(claim(expires=NOW))),
    Case("a call with an expired invite", "call.invite-expired", lambda: calls(claim(expires=NOW))),
    Case("a record with an overused invite", "record.invite-used-up", late_record),
    Case("a call with an overused invite", "call.invite-used-up", late_call),
    Case("an invite of a stranger", "record.bad-signature", lambda: invited(claim(creator=BOB))),
    Case("a claim of another peer", "call.bad-signature",
        lambda: calls(invite().claim(BOB.peer_id, NOW).data)),
    Case("a peer that is not on the list", "record.not-listed",
        lambda: hears(record(), Admission(rules("list")))),
    Case("a call of one that is not on the list", "call.not-listed",
        lambda: is_called(credential(), Admission(rules("list")))),
    Case("a record of a removed peer", "record.removed",
        lambda: hears(record(), without(ADA.peer_id))),
    Case("a call of a removed peer", "call.removed",
        lambda: is_called(credential(), without(ADA.peer_id))),
]  # fmt: skip


def peak_kib(refuse: Callable[[], object]) -> float:
    """KiB that Python allocates at most while it refuses."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        refuse()
        return (tracemalloc.get_traced_memory()[1] - before) / 1024
    finally:
        tracemalloc.stop()
