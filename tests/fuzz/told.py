"""What peers and strangers tell: records, credentials, invites, runs, addresses, what the DHT
stores, probes."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from target import Made, cut, join, target

from helpers.packed_runs import spec_of
from lowcomm_node.dht import guard
from lowcomm_node.dht.keys import Provenances, pack, peers_key, removals_key
from lowcomm_node.errors import ConfigError
from lowcomm_node.net.addresses import (
    decode,
    encode,
    host_of,
    is_dialable,
    parse_announced,
    parse_entry_point,
    port_of,
    reach,
    relay_of,
)
from lowcomm_node.net.ping import answer_to
from lowcomm_node.net.tls import CREDENTIAL_KEY, Gatekeeper, pinned
from lowcomm_protocol.errors import LowcommError, ProtocolViolation, SpecError, VersionError
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers import probes
from lowcomm_protocol.peers.admission import Admission, Rules
from lowcomm_protocol.peers.invites import (
    issue_invite,
    read_claim,
    read_removals,
    read_token,
    write_removals,
)
from lowcomm_protocol.peers.records import (
    PeerInfo,
    Phase,
    read_credential,
    read_record,
    write_credential,
    write_record,
)
from lowcomm_protocol.peers.roster import Roster
from lowcomm_protocol.reading import (
    PieceClaim,
    SharedReading,
    TextPiece,
    read_claims,
    read_statement,
    write_claims,
    write_statement,
)
from lowcomm_protocol.spec.amendments import Chain, SpecTimeline, read_chain, write_amendment
from lowcomm_protocol.spec.document import encode as encode_document
from lowcomm_protocol.spec.run import (
    RunSpec,
    parse_canonical,
    parse_toml,
    read_signed_run,
    sign_run,
)

CREATOR, ADA, BOB = (Identity(bytes([number]) * 32) for number in (1, 2, 3))
NOW = 1_800_000_000.0
RUN = "ab" * 32


def signed_by(
    purpose: str, message: Callable[..., Any], who: Identity = ADA
) -> Callable[[bytes], bytes]:
    """What a stranger can do: sign any payload with a key of its own."""
    return lambda payload: message(
        payload=payload, signature=who.sign(purpose, payload)
    ).SerializeToString()


def both(read: Callable[[bytes], Any], sign: Callable[[bytes], bytes]) -> Callable[[bytes], None]:
    """Read bytes as they are, or as a payload that is signed: else nothing gets past the
    signature."""

    def run(data: bytes) -> None:
        try:
            read(sign(data[1:]) if data[:1] > b"\x40" else data[1:])
        except LowcommError as error:
            assert str(error)

    return run


def seeds_of(*whole: bytes, kind: Any) -> list[bytes]:
    """Whole messages, and their payloads to be signed."""
    return [seed for one in whole for seed in (b"\0" + one, b"\xff" + kind.FromString(one).payload)]


def info(**changes: Any) -> PeerInfo:
    fields: dict[str, Any] = {
        "peer_id": ADA.peer_id, "run_id": RUN, "phase": Phase.TRAINING, "issued": NOW,
        "expires": NOW + 60,
        "addresses": ("192.0.2.1:5000", "[2001:db8::1]:5000"), "certificate": b"c" * 32,
        "entry_points": (f"/ip4/192.0.2.1/tcp/31330/p2p/{ADA.peer_id}",), "swarm_step": 7,
        "steps": 5,
    }  # fmt: skip
    return PeerInfo(**fields | changes)


@target
def record() -> Made:
    def read(data: bytes) -> None:
        found = read_record(data, NOW)
        assert found.expires - found.issued <= 601 and len(found.addresses) <= 8
        assert math.isfinite(found.tokens_per_second)
        Roster(BOB.peer_id, RUN).hear(data, NOW, found.peer_id)

    whole = [
        write_record(one, ADA)
        for one in (info(), info(addresses=(), phase=Phase.LEFT), info(claim=b"c" * 40))
    ]
    return both(read, signed_by("peer record", pb.SignedRecord)), seeds_of(
        *whole, kind=pb.SignedRecord
    )


@target
def credential() -> Made:
    def read(data: bytes) -> None:
        read_credential(data, BOB.peer_id, RUN, NOW)
        Gatekeeper(BOB, RUN, lambda: NOW).caller({CREDENTIAL_KEY: data})

    token = issue_invite(CREATOR, RUN, b"i" * 32, NOW + 1000)
    claims = (b"", token.claim(ADA.peer_id, NOW).data)
    whole = [write_credential(ADA, BOB.peer_id, RUN, NOW, bytes(16), claim) for claim in claims]
    return both(read, signed_by("credential", pb.SignedCredential)), seeds_of(
        *whole, kind=pb.SignedCredential
    )


@target
def introduction() -> Made:
    def run(data: bytes) -> None:
        try:
            message = pb.Introduction.FromString(data)
        except DecodeError:
            return  # gRPC's to refuse
        roster, admission = (
            Roster(BOB.peer_id, RUN),
            Admission(Rules(RUN, CREATOR.peer_id, admission="invite")),
        )
        admission.hear_uses(message.uses, NOW)
        admission.load(admission.to_bytes(), NOW)
        roster.hear(message.record.SerializeToString(), NOW, ADA.peer_id)
        admission.uses_to_tell(frozenset())

    uses = [
        pb.Use(
            peer_id=ADA.peer_id,
            claim=issue_invite(CREATOR, RUN, b"i" * 32, NOW + 1000).claim(ADA.peer_id, NOW).data,
        )
    ]
    told = pb.SignedRecord.FromString(write_record(info(), ADA))
    return run, [
        pb.Introduction(record=told, uses=uses * number).SerializeToString() for number in (0, 1, 3)
    ]


@target
def token() -> Made:
    def run(data: bytes) -> None:
        try:
            read_token(data.decode("utf-8", "surrogateescape"))
        except LowcommError as error:
            assert str(error)

    made = (
        issue_invite(CREATOR, RUN, bytes([number]) * 32, NOW + 1000, uses=number + 1)
        for number in range(2)
    )
    return run, [one.text().encode() for one in made]


@target
def claim() -> Made:
    def run(data: bytes) -> None:
        for read in (
            lambda: read_claim(data, ADA.peer_id).verify(CREATOR.peer_id),
            lambda: admission.check(ADA.peer_id, data, NOW),
        ):
            try:
                read()
            except LowcommError as error:
                assert str(error)

    admission = Admission(Rules(RUN, CREATOR.peer_id, admission="invite"))
    invite = issue_invite(CREATOR, RUN, b"i" * 32, NOW + 1000)
    return run, [invite.claim(who.peer_id, NOW).data for who in (ADA, BOB)]


@target
def removals() -> Made:
    def read(data: bytes) -> None:
        found = read_removals(data, CREATOR.peer_id)
        Admission(Rules(found.run_id, CREATOR.peer_id)).hear_removals(data)

    whole = [
        write_removals(CREATOR, RUN, 3, frozenset(ids)).data
        for ids in ([], [ADA.peer_id], [ADA.peer_id, BOB.peer_id])
    ]
    sign = signed_by("removal list", pb.SignedRemovalList, CREATOR)
    return both(read, sign), seeds_of(*whole, kind=pb.SignedRemovalList)


def _spec(**run: Any) -> RunSpec:
    return RunSpec.model_validate({"run": {"name": "fuzz", **run}, "sync": {"method": "noloco"}})


@target
def run_specification() -> Made:
    def run(data: bytes) -> None:
        text = data[1:].decode("utf-8", "replace")
        try:
            spec = (parse_toml if data[:1] > b"\x40" else parse_canonical)(text)
        except (SpecError, VersionError) as error:
            assert str(error)
            return
        assert parse_canonical(spec.canonical().decode()).run_id == spec.run_id
        assert len(spec.run_id) == 64

    methods = ("lowcomm", "noloco", "gossip", "diloco", "streaming-diloco", "local")
    texts = [
        f'[run]\nname = "a"\nseed = 3\n[sync]\nmethod = "{method}"\ninterval = 20\n'
        for method in methods
    ]
    texts[2] = (
        '[run]\nname = "a"\n[model]\nkind = "transformers"\ntype = "gpt_neox"\n[model.config]\n'
        "hidden_size = 32\nnum_hidden_layers = 2\nnum_attention_heads = 4\n"
        "intermediate_size = 48\nrope_theta = 1e5\n"
    )
    return run, [
        *(b"\xff" + text.encode() for text in texts),
        *(b"\0" + parse_toml(text).canonical() for text in texts[:3]),
        b"\0"
        + encode_document(
            json.loads(parse_toml(texts[0]).canonical()) | {"optional": ["b"], "b": [1.5]}
        ),
    ]


@target
def signed_run() -> Made:
    def run(data: bytes) -> None:
        text = data[1:].decode("utf-8", "replace")
        payload = text.encode()
        signature = CREATOR.sign("run specification", payload).hex()
        forged = json.dumps(
            {"creator": CREATOR.peer_id, "signature": signature, "spec": text}
        ).encode()
        try:
            found = read_signed_run(forged if data[:1] > b"\x40" else data[1:])
        except LowcommError as error:
            assert str(error)
            return
        assert found.creator == found.spec.run.creator

    made = [sign_run(_spec(seed=number), CREATOR) for number in range(2)]
    return run, [
        *(b"\0" + one.to_bytes() for one in made),
        *(b"\xff" + one.spec.canonical() for one in made),
    ]


@target
def amendments() -> Made:
    run = sign_run(_spec(steps=400), CREATOR)

    def read(data: bytes) -> None:
        if data[:1] > b"\x80":  # one link, signed as it is
            text = data[1:].decode("utf-8", "replace")
            signature = CREATOR.sign("amendment", text.encode()).hex()
            data = json.dumps([{"document": text, "signature": signature}]).encode()
        try:
            course = SpecTimeline(run.spec, read_chain(data, CREATOR.peer_id))
        except LowcommError as error:
            assert str(error)
            return
        assert course.at(0).sync == course.last.sync == run.spec.sync
        assert course.is_over(course.longest)

    chain = write_amendment(
        CREATOR, run, Chain(), 5, {"run.steps": 500, "train.learning_rate": 0.5}
    )
    chain = write_amendment(
        CREATOR, run, chain, 9, {"run.admission": "list", "run.members": [ADA.peer_id]}
    )
    return read, [chain.data, *(b"\xff" + link.document for link in chain.links)]


@target
def multiaddress() -> Made:
    def run(data: bytes) -> None:
        if (dial := decode(data)) is not None and is_dialable(dial):
            assert decode(encode(dial)) is not None
        text = data.decode("utf-8", "replace")
        for look in (relay_of, host_of, port_of, reach) if is_dialable(text) else (relay_of,):
            look(text)
        try:
            entry = parse_entry_point(text)
        except ConfigError as error:
            assert len(str(error)) < 2000
        else:
            assert parse_entry_point(str(entry)) == entry
            encode(entry.dial)
        try:
            parse_announced(text, ADA.peer_id)
        except ConfigError:
            return

    hosts = (
        "/ip4/192.0.2.1/tcp/1",
        "/ip6/2001:db8::1/udp/31330/quic-v1",
        "/dns4/example.org/tcp/31330",
        "/dns/a.b/tcp/2",
    )
    texts = [f"{host}/p2p/{ADA.peer_id}" for host in hosts]
    texts.append(f"{texts[0]}/p2p-circuit/p2p/{BOB.peer_id}")
    return run, [*(text.encode() for text in texts), *(encode(host) for host in hosts[:3])]


@target
def dht_value() -> Made:
    from lowcomm_node.net.hivemind_parts import DHTID, DHTRecord, MSGPackSerializer

    guard.time = lambda: NOW  # a clock that stands still: what failed once fails again
    invited = sign_run(parse_toml('[run]\nname = "a"\nadmission = "invite"\n'), CREATOR)

    def run(data: bytes) -> None:
        key, subkey, value, expires = [*cut(data), b"", b"", b"", b""][:4]
        provenances = Provenances()
        validator, storage = guard.OwnRecords(provenances), guard.BoundedStorage(provenances)
        later = NOW + int.from_bytes(expires[:4]) / 8
        place = DHTID.generate(source=key.decode("utf-8", "replace"))
        one = DHTRecord(place.to_bytes(), subkey, value, later)
        assert type(validator.validate(one)) is bool
        try:
            name = MSGPackSerializer.loads(subkey)
        except Exception:  # as the guard has it
            return
        raw = DHTRecord(place.to_bytes(), subkey, MSGPackSerializer.dumps(value), later)
        if validator.validate(raw):
            storage.store_subkey(place, name, raw.value, later)

    def seed(key: str, subkey: str, value: bytes) -> bytes:
        packed, life = pack(key, value), (200).to_bytes(4)
        name = MSGPackSerializer.dumps(subkey)
        return (
            join(key.encode(), name, packed, life)
            if len(value) % 2
            else join(key.encode(), name, MSGPackSerializer.dumps(packed), life)
        )

    removed = write_removals(CREATOR, RUN, 1, frozenset([ADA.peer_id])).data
    return run, [
        seed(peers_key(RUN), ADA.peer_id, write_record(info(), ADA)),
        seed("lowcomm/v1/runs", invited.run_id, invited.to_bytes()),
        seed(removals_key(RUN, CREATOR.peer_id), CREATOR.peer_id, removed),
    ]


@target
def pieces_read() -> Made:
    """Statements on packed text: none makes us believe more than its peer can have read."""
    spec = spec_of()

    def read(data: bytes) -> None:
        shared = SharedReading(spec, RUN, BOB.peer_id)
        shared.follow(10, {ADA.peer_id: ()})
        statement = read_statement(data)
        shared.hear(statement)
        for place in shared.places():
            assert shared.pieces_read(place).sum() <= (10 + spec.sync.interval) / 2 + 1
        assert shared.choose(0) is not None

    pieces = np.arange(64) % 3 == 0
    whole = [write_statement(ADA, RUN, place, pieces, 1) for place in ((0, 0), (0, 1), (7, 9))]
    return both(read, signed_by("pieces read", pb.SignedRecord)), seeds_of(
        *whole, kind=pb.SignedRecord
    )


@target
def piece_claims() -> Made:
    """Claims in records of three peers: whatever they are, there is a piece to read."""
    spec = spec_of()

    def run(data: bytes) -> None:
        fields = [one[: len(one) // 7 * 7][: 16 * 7] for one in [*cut(data)][:3]]
        claims = {f"peer{number}": read_claims(one) for number, one in enumerate(fields)}
        shared = SharedReading(spec, RUN, BOB.peer_id)
        shared.follow(0, claims)
        piece = shared.choose(0)
        assert piece is not None and 0 <= piece.piece < 64
        claimed = {one.piece for theirs in claims.values() for one in theirs}
        assert piece not in claimed
        shared.gives_way(piece)
        shared.readers(0, [piece.piece])
        assert all(write_claims(read_claims(one)) == one for one in fields)

    claims = [PieceClaim(TextPiece(0, epoch, 5 * epoch), epoch % 2 == 0) for epoch in range(5)]
    return run, [join(write_claims(claims)), join(*(write_claims(claims[n:]) for n in range(3)))]


@target
def probe() -> Made:
    def run(data: bytes) -> None:
        try:
            asked = probes.read_probe(data)
            match asked.WhichOneof("kind"):
                case "dial_back":
                    probes.check_dial_back(asked.dial_back)
                case "ping":
                    probes.check_ping(asked.ping)
                    assert len(answer_to(asked.ping).content) <= probes.MAX_CONTENT
        except ProtocolViolation:
            pass
        for wanted in ("seen", "dialed_back", "pong"):
            try:
                answer = probes.read_probed(data, wanted)
                probes.read_seen(answer.seen)
            except ProtocolViolation:
                continue

    target_ = pb.Target(port=5000, certificate=bytes(32))
    messages = (
        pb.Probe(look=pb.Look()), pb.Probe(ping=pb.Ping(content=b"x" * 50, wanted=50)),
        pb.Probe(dial_back=pb.DialBack(peer_id=ADA.peer_id, targets=[target_])),
        pb.Probed(seen=pb.Seen(address="/ip4/192.0.2.1/tcp/1")),
        pb.Probed(dialed_back=pb.DialedBack(reached=[True] * 4)),
        pb.Probed(refused="no"),
    )  # fmt: skip
    return run, [message.SerializeToString() for message in messages]


@target
def tls_key() -> Made:
    from lowcomm_node.net.tls import make_certificate

    def run(data: bytes) -> None:
        try:
            pinned(data)
        except LowcommError:
            return

    return run, [make_certificate().public_key, bytes(32), b"\xff" * 32]
