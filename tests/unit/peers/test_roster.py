"""What must hold for who is alive."""

from random import Random

import pytest

from lowcomm_protocol.errors import Refusals
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers import records
from lowcomm_protocol.peers import roster as roster_module
from lowcomm_protocol.peers.admission import Admission, Rules
from lowcomm_protocol.peers.invites import issue_invite
from lowcomm_protocol.peers.records import MAX_CLOCK_SKEW, MAX_LIFE, PeerInfo, Phase, write_record
from lowcomm_protocol.peers.roster import FIRST_REST, MAX_MISSED, Roster

ME = Identity(b"m" * 32)
PEERS = [Identity(bytes([number]) * 32) for number in range(1, 8)]
ALICE = PEERS[0]
RUN = "ab" * 32
NOW = 1_800_000_000.0


def record(identity: Identity = ALICE, issued: float = NOW, life: float = 60.0, **fields) -> bytes:
    values = {"peer_id": identity.peer_id, "run_id": RUN, "phase": Phase.TRAINING} | fields
    return write_record(PeerInfo(issued=issued, expires=issued + life, **values), identity)


@pytest.fixture
def roster() -> Roster:
    return Roster(ME.peer_id, RUN)


def steps(roster: Roster, now: float = NOW) -> dict[str, int]:
    return {info.peer_id: info.swarm_step for info in roster.known(now)}


def test_a_peer_is_there_until_its_record_expires(roster):
    info = roster.hear(record(), NOW)
    assert info is not None
    assert roster.known(NOW + 59.9) == (info,)
    assert roster.get(ALICE.peer_id, NOW + 59.9) == info
    assert roster.known(NOW + 60) == ()
    assert roster.get(ALICE.peer_id, NOW + 60) is None


def test_the_newest_record_holds_in_whatever_order_they_come(roster):
    records = [record(issued=NOW + number, swarm_step=number) for number in range(20)]
    Random(1).shuffle(records)
    for data in records:
        roster.hear(data, NOW + 20)
    assert steps(roster, NOW + 20) == {ALICE.peer_id: 19}


def test_a_record_from_when_both_clocks_were_ahead_hides_no_newer_one(roster):
    assert roster.hear(record(issued=NOW + 3600, swarm_step=5), NOW + 3600) is not None
    assert roster.hear(record(swarm_step=6), NOW) is not None
    assert steps(roster) == {ALICE.peer_id: 6}
    assert roster.hear(record(issued=NOW - 1, swarm_step=7), NOW) is None


def test_a_record_that_only_the_clock_was_against_is_taken_once_that_is_right():
    refusals = Refusals()
    roster = Roster(ME.peer_id, RUN, refusals=refusals)
    for ahead in (-3600.0, 3600.0, 3600.0):
        assert roster.hear(record(), NOW + ahead) is None
    assert refusals.counts() == {"record.from-the-future": 1}, "the same bytes count once"
    assert roster.hear(record(), NOW) is not None


def test_a_peer_that_left_is_not_brought_back_by_an_older_record(roster):
    roster.hear(record(issued=NOW - 1), NOW)
    assert roster.hear(record(phase=Phase.LEFT), NOW) is not None
    assert roster.hear(record(issued=NOW - 1), NOW) is None
    assert roster.known(NOW) == ()
    assert roster.get(ALICE.peer_id, NOW) is None


def test_what_is_not_ours_to_hear_is_refused(roster):
    assert roster.hear(record(ME), NOW) is None
    assert roster.hear(record(run_id="cd" * 32), NOW) is None
    assert roster.hear(record(issued=NOW - 100), NOW) is None
    assert roster.hear(record()[:-1], NOW) is None
    assert roster.hear(b"", NOW) is None
    assert roster.known(NOW) == ()


def test_of_a_peer_whose_clock_was_set_back_nothing_older_is_believed_for_long(
    roster,
):
    roster.hear(record(issued=NOW + MAX_CLOCK_SKEW, swarm_step=2), NOW)
    assert roster.hear(record(issued=NOW + 1, swarm_step=1), NOW + 1) is None
    later = NOW + MAX_CLOCK_SKEW + 1
    assert roster.hear(record(issued=later, swarm_step=3), later) is not None


def test_the_same_bytes_are_looked_at_once(roster, monkeypatch):
    assert roster.hear(record(), NOW) is not None
    assert roster.hear(record(issued=NOW - 1), NOW) is None
    monkeypatch.setattr(records, "read_record", lambda *_: pytest.fail("it was read again"))
    assert roster.hear(record(), NOW) is None
    assert roster.hear(record(issued=NOW - 1), NOW) is None
    assert steps(roster) == {ALICE.peer_id: 0}


def test_who_may_not_take_part_is_not_there():
    admission = Admission(Rules(RUN, ME.peer_id, "invite"))
    roster = Roster(ME.peer_id, RUN, admission)
    claim = issue_invite(ME, RUN, b"i" * 32, NOW + 30).claim(ALICE.peer_id, NOW).data
    assert roster.hear(record(), NOW) is None
    assert roster.hear(record(PEERS[1], claim=claim), NOW) is None, "somebody else's claim"
    assert roster.hear(record(claim=claim), NOW) is not None
    assert roster.get(ALICE.peer_id, NOW + 29) is not None
    assert roster.get(ALICE.peer_id, NOW + 30) is None, "the invite has expired, the record has not"


def test_a_peer_that_answers_no_offers_is_alive_and_no_partner_for_a_while(roster):
    roster.hear(record(life=MAX_LIFE), NOW)
    for _ in range(MAX_MISSED):
        roster.liveness.heard(ALICE.peer_id, NOW)
        assert len(roster.partners(NOW)) == 1
        roster.liveness.missed(ALICE.peer_id, NOW)
    assert len(roster.alive(NOW)) == 1 and roster.partners(NOW) == ()
    assert len(roster.partners(NOW + FIRST_REST)) == 1
    roster.liveness.met(ALICE.peer_id, NOW)
    roster.liveness.missed(ALICE.peer_id, NOW)
    assert len(roster.partners(NOW)) == 1, "it has answered in between"


def test_records_of_peers_that_never_answered_make_room_in_a_full_roster(roster, monkeypatch):
    monkeypatch.setattr(roster_module, "MAX_PEERS", 4)
    alive, *silent = PEERS[:4]
    for peer in (alive, *silent):
        roster.hear(record(peer), NOW)
    roster.liveness.heard(alive.peer_id, NOW)
    assert roster.hear(record(PEERS[4]), NOW) is None, "none of them was tried yet"
    assert roster.hear(record(PEERS[4]), NOW, sender=PEERS[4].peer_id) is not None, "it calls us"
    assert roster.liveness.due([(silent[1].peer_id, ())], NOW)
    assert roster.hear(record(PEERS[5]), NOW) is not None
    assert {alive.peer_id, PEERS[4].peer_id, PEERS[5].peer_id} < set(steps(roster))


def test_a_full_roster_takes_news_of_known_peers_but_no_new_ones(roster, monkeypatch):
    monkeypatch.setattr(roster_module, "MAX_PEERS", 4)
    for peer in PEERS:
        roster.hear(record(peer), NOW)
    assert set(steps(roster)) == {peer.peer_id for peer in PEERS[:4]}
    assert roster.hear(record(PEERS[3], issued=NOW + 1, swarm_step=9), NOW + 1) is not None
    assert steps(roster, NOW + 1)[PEERS[3].peer_id] == 9
