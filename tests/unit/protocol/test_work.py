"""Proof of work in open runs: what it costs, when it is good, and where it is asked for."""

import asyncio
from pathlib import Path

import pytest

from helpers.waiting import until_async
from lowcomm_node.dht.keys import RUNS_KEY, Provenances, pack, peers_key
from lowcomm_node.net.tls import CREDENTIAL_KEY, Gatekeeper
from lowcomm_node.swarm import proofs_of_work as proving
from lowcomm_node.swarm.proofs_of_work import Prover
from lowcomm_protocol import work
from lowcomm_protocol.errors import AdmissionError, Reason, Refusals, SpecError
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers.admission import Admission, Rules
from lowcomm_protocol.peers.records import PeerInfo, Phase, write_record
from lowcomm_protocol.peers.roster import Roster
from lowcomm_protocol.spec.run import parse_canonical, parse_toml, sign_run
from lowcomm_protocol.work import MAX_BITS, OVERLAP, WEEK, Proof, Proofs, week_of, zero_bits

CREATOR, ADA, BOB = (Identity(bytes([number]) * 32) for number in (1, 2, 3))
BITS = 3
RUN = sign_run(parse_toml(f'[run]\nname = "a"\nwork = {BITS}\n'), CREATOR)
NOW = 2950 * WEEK + 1000.0


def find(peer: Identity = ADA, week: int = 2950, run_id: str = RUN.run_id) -> bytes:
    """A proof, as anybody can find one."""
    nonce = next(n for n in range(10**6) if zero_bits(run_id, peer.peer_id, Proof(week, n)) >= BITS)
    return Proof(week, nonce).to_bytes()


@pytest.fixture(scope="module")
def proof() -> bytes:
    return find()


def reason(rules: Rules, data: bytes, peer: Identity = ADA, now: float = NOW) -> Reason | None:
    """Why a proof is refused; None if it is taken."""
    try:
        rules.check(peer.peer_id, data, now)
    except AdmissionError as error:
        return error.reason
    return None


def test_a_proof_is_the_same_at_every_implementation():
    # scrypt("lowcomm/work" 00 | 32 x ab | key | 4 bytes of week,
    #        salt = 8 bytes of nonce, N = 1024, r = 8, p = 1)
    assert zero_bits("ab" * 32, ADA.peer_id, Proof(2950, 1)) == 5
    assert Proof(2950, 7).to_bytes() == bytes.fromhex("00000b86" + "0000000000000007")


def test_a_proof_is_good_for_one_run_one_key_and_its_week(proof: bytes):
    rules, other = Rules.of(RUN), Rules("cd" * 32, CREATOR.peer_id, work=40)
    assert reason(rules, proof) is None
    assert reason(rules, b"") is Reason.NO_WORK
    assert reason(rules, proof[:-1]) is Reason.MALFORMED
    assert reason(other, proof) is Reason.NO_WORK
    assert reason(Rules(RUN.run_id, CREATOR.peer_id, work=40), proof, BOB) is Reason.NO_WORK
    end = 2951 * WEEK
    assert reason(rules, proof, now=end + OVERLAP - 1) is None
    assert reason(rules, proof, now=end + OVERLAP) is Reason.EXPIRED
    assert reason(rules, proof, now=2950 * WEEK - 61) is Reason.FROM_FUTURE


def test_the_creator_needs_none():
    assert reason(Rules.of(RUN), b"", CREATOR) is None


def test_a_proof_is_hashed_once_and_strangers_get_no_more_than_their_share(
    proof: bytes, monkeypatch
):
    hashed: list[Proof] = []

    def count(run_id: str, peer_id: str, one: Proof) -> int:
        hashed.append(one)
        return 0 if one.nonce >= 10**6 else 20

    monkeypatch.setattr(work, "zero_bits", count)
    proofs = Proofs()
    for _ in range(5):
        proofs.check(proof, RUN.run_id, ADA.peer_id, BITS, NOW)
    assert len(hashed) == 1
    for number in range(200):
        with pytest.raises(AdmissionError):
            proofs.check(Proof(2950, 10**6 + number).to_bytes(), RUN.run_id, BOB.peer_id, BITS, NOW)
    assert len(hashed) == work.MAX_FRESH
    proofs.check(proof, RUN.run_id, ADA.peer_id, BITS, NOW)
    proofs.check(find(), RUN.run_id, BOB.peer_id, BITS, NOW + 1)


def test_a_run_may_ask_for_bounded_work_and_only_if_it_is_open():
    assert parse_canonical(RUN.spec.canonical().decode()).run.work == BITS
    assert b"work" not in parse_toml('[run]\nname = "a"\n').canonical(), (
        "a run without it is signed as before"
    )
    with pytest.raises(SpecError, match="work = 17"):
        parse_toml(f'[run]\nname = "a"\nwork = {MAX_BITS + 1}\n')
    with pytest.raises(SpecError, match="open"):
        parse_toml('[run]\nname = "a"\nadmission = "invite"\nwork = 4\n')


# Where it is asked for


def record(claim: bytes, peer: Identity = ADA) -> bytes:
    info = PeerInfo(
        peer_id=peer.peer_id,
        run_id=RUN.run_id,
        phase=Phase.TRAINING,
        issued=NOW,
        expires=NOW + 30,
        claim=claim,
    )
    return write_record(info, peer)


def test_a_record_without_work_is_neither_stored_nor_counted(proof: bytes):
    provenances, key = Provenances(), peers_key(RUN.run_id)
    assert provenances.check(pack(RUNS_KEY, RUN.to_bytes()), RUN.run_id, NOW) is not None
    assert provenances.check(pack(key, record(b"")), ADA.peer_id, NOW) is None
    assert provenances.check(pack(key, record(proof)), ADA.peer_id, NOW) is not None
    roster = Roster(BOB.peer_id, RUN.run_id, Admission(Rules.of(RUN)))
    assert roster.hear(record(b""), NOW) is None and roster.get(ADA.peer_id, NOW) is None
    assert roster.hear(record(proof), NOW) is not None and roster.get(ADA.peer_id, NOW) is not None
    assert provenances.refusals.counts() == {"record.no-work": 1}


def test_a_call_without_work_is_refused_also_through_a_tunnel(proof: bytes):
    admission, refusals = Admission(Rules.of(RUN)), Refusals()
    bob = Gatekeeper(BOB, RUN.run_id, lambda: NOW, admission=admission, refusals=refusals)
    ada = Gatekeeper(ADA, RUN.run_id, lambda: NOW)
    with pytest.raises(AdmissionError):
        bob.caller(dict(ada.credential_for(BOB.peer_id)))
    with pytest.raises(AdmissionError):
        bob.tunneled(ADA.peer_id, {})
    ada.show(proof)
    metadata = dict(ada.credential_for(BOB.peer_id))
    assert CREDENTIAL_KEY in metadata and bob.caller(metadata) == ADA.peer_id
    assert bob.tunneled(ADA.peer_id, {}) == ADA.peer_id, "it has shown its proof"
    assert refusals.counts() == {"call.no-work": 2}
    assert not admission.barred(ADA.peer_id, NOW)
    assert admission.barred(ADA.peer_id, NOW + WEEK + OVERLAP), "the week is over"


# Finding one


class Node:
    """A prover with a clock that a test sets."""

    def __init__(self, path: Path | None, bits: int = BITS) -> None:
        self.now, self.shown = NOW, list[str | None]()
        self.rules = Rules(RUN.run_id, CREATOR.peer_id, work=bits)
        self.prover = Prover(self.rules, ADA.peer_id, path, self.shown.append, lambda: self.now)


async def test_a_proof_is_found_told_of_and_kept_for_the_next_start(tmp_path: Path, monkeypatch):
    node = Node(tmp_path / "run" / "work")
    proof = await node.prover.prove()
    node.rules.check(ADA.peer_id, proof, NOW)
    assert node.shown[0] is not None and "about" in node.shown[0] and node.shown[-1] is None
    again = Node(tmp_path / "run" / "work")
    assert await again.prover.prove() == proof
    assert again.shown == [], "a restart costs nothing"
    (tmp_path / "run" / "work").write_bytes(b"damaged" * 9)
    node.rules.check(ADA.peer_id, await Node(tmp_path / "run" / "work").prover.prove(), NOW)
    assert await Node(None).prover.prove()


async def test_a_search_that_is_cancelled_ends_at_once():
    node = Node(None, bits=200)
    searching = asyncio.create_task(node.prover.prove())

    async def is_searching() -> bool:
        return len(node.shown) >= 2

    await until_async(is_searching, 30, "it tells how far it is")
    searching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await searching
    assert node.shown[-1] is None


async def test_the_next_weeks_proof_is_found_before_and_used_when_its_week_begins(
    tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(proving, "CHECK_EVERY", 0.001)
    node, used = Node(tmp_path / "work"), list[bytes]()
    await node.prover.prove()
    node.now = 2951 * WEEK - OVERLAP / 2
    renewing = asyncio.create_task(node.prover.renew(used.append))

    async def is_found() -> bool:
        return [one.week for one in node.prover._proofs] == [2950, 2951]

    async def is_used() -> bool:
        return bool(used)

    try:
        await until_async(is_found, 30, "the next proof is there")
        assert used == []
        node.now = 2951 * WEEK + 1
        await until_async(is_used, 30, "it is shown")
        node.rules.check(ADA.peer_id, used[0], node.now + WEEK)
        assert week_of(node.now) == work.read_proof(used[0]).week
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
