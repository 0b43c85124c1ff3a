"""What must hold for who is alive."""

from random import Random

import pytest

from lowcomm_protocol import roster as roster_module
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.records import MAX_LIFE, PeerInfo, Phase, write_record
from lowcomm_protocol.roster import Roster

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
    return {info.peer_id: info.swarm_step for info in roster.alive(now)}


def test_a_peer_is_there_until_its_record_expires(roster):
    info = roster.hear(record(), NOW)
    assert info is not None
    assert roster.alive(NOW + 59.9) == (info,)
    assert roster.get(ALICE.peer_id, NOW + 59.9) == info
    assert roster.alive(NOW + 60) == ()
    assert roster.get(ALICE.peer_id, NOW + 60) is None


def test_the_newest_record_holds_in_whatever_order_they_come(roster):
    records = [record(issued=NOW + number, swarm_step=number) for number in range(20)]
    Random(1).shuffle(records)
    for data in records:
        roster.hear(data, NOW + 20)
    assert steps(roster, NOW + 20) == {ALICE.peer_id: 19}


def test_an_older_or_equal_record_is_no_news(roster):
    assert roster.hear(record(swarm_step=5), NOW) is not None
    assert roster.hear(record(swarm_step=6), NOW) is None
    assert roster.hear(record(issued=NOW - 1, swarm_step=7), NOW) is None
    assert steps(roster) == {ALICE.peer_id: 5}


@pytest.mark.parametrize("phase", [Phase.LEFT, Phase.FINISHED])
def test_a_peer_that_left_is_not_brought_back_by_an_older_record(roster, phase):
    roster.hear(record(issued=NOW - 1), NOW)
    assert roster.hear(record(phase=phase), NOW) is not None
    assert roster.hear(record(issued=NOW - 1), NOW) is None
    assert roster.alive(NOW) == ()
    assert roster.get(ALICE.peer_id, NOW) is None


def test_a_short_goodbye_outlives_every_older_record(roster):
    longest = record(issued=NOW - 1, life=MAX_LIFE)
    roster.hear(record(phase=Phase.LEFT, life=5), NOW)
    for now in (NOW + 1, NOW + 6, NOW + MAX_LIFE - 2):
        roster.hear(record(PEERS[1], issued=now), now)  # makes the roster sweep
        assert roster.hear(longest, now) is None
        assert ALICE.peer_id not in steps(roster, now)


def test_a_peer_that_left_may_come_back_with_a_newer_record(roster):
    roster.hear(record(phase=Phase.LEFT), NOW)
    assert roster.hear(record(issued=NOW + 1), NOW + 1) is not None
    assert len(roster.alive(NOW + 1)) == 1


def test_what_is_not_ours_to_hear_is_refused(roster):
    assert roster.hear(record(ME), NOW) is None
    assert roster.hear(record(run_id="cd" * 32), NOW) is None
    assert roster.hear(record(issued=NOW - 100), NOW) is None
    assert roster.hear(record()[:-1], NOW) is None
    assert roster.hear(b"", NOW) is None
    assert roster.alive(NOW) == ()


def test_every_peer_lists_the_same_order(roster):
    other = Roster(ME.peer_id, RUN)
    for peer in PEERS:
        roster.hear(record(peer), NOW)
    for peer in reversed(PEERS):
        other.hear(record(peer), NOW)
    assert roster.alive(NOW) == other.alive(NOW)
    assert len(roster.alive(NOW)) == len(PEERS)


def test_phases_are_told_apart(roster):
    roster.hear(record(PEERS[0]), NOW)
    roster.hear(record(PEERS[1], phase=Phase.JOINING), NOW)
    roster.hear(record(PEERS[2], phase=Phase.LEFT), NOW)
    assert [info.peer_id for info in roster.in_phase(Phase.TRAINING, NOW)] == [PEERS[0].peer_id]
    assert len(roster.alive(NOW)) == 2
    assert roster.in_phase(Phase.LEFT, NOW) == ()


def test_a_full_roster_takes_news_of_known_peers_but_no_new_ones(roster, monkeypatch):
    monkeypatch.setattr(roster_module, "MAX_PEERS", 4)
    for peer in PEERS:
        roster.hear(record(peer), NOW)
    assert set(steps(roster)) == {peer.peer_id for peer in PEERS[:4]}
    assert roster.hear(record(PEERS[3], issued=NOW + 1, swarm_step=9), NOW + 1) is not None
    assert steps(roster, NOW + 1)[PEERS[3].peer_id] == 9


def test_a_full_roster_makes_room_when_records_expire(roster, monkeypatch):
    monkeypatch.setattr(roster_module, "MAX_PEERS", 4)
    for peer in PEERS[:4]:
        roster.hear(record(peer), NOW)
    later = NOW + 61
    for peer in PEERS[4:]:
        assert roster.hear(record(peer, issued=later), later) is not None
    assert set(steps(roster, later)) == {peer.peer_id for peer in PEERS[4:]}
