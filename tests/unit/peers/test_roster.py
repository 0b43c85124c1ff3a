"""What must hold for who is alive."""

from random import Random

import pytest

from lowcomm_protocol.errors import Refusals
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers import records
from lowcomm_protocol.peers import view as view_module
from lowcomm_protocol.peers.admission import Admission, Rules
from lowcomm_protocol.peers.invites import issue_invite
from lowcomm_protocol.peers.pulse import Pulse, write_pulse
from lowcomm_protocol.peers.records import MAX_CLOCK_SKEW, MAX_LIFE, PeerInfo, Phase, write_record
from lowcomm_protocol.peers.roster import FIRST_REST, MAX_MISSED, REFRESH, RETRY, Roster
from lowcomm_protocol.peers.shards import cell_of

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
        roster.heard(ALICE.peer_id, NOW)
        assert len(roster.partners(NOW)) == 1
        roster.liveness.missed(ALICE.peer_id, NOW)
    assert len(roster.alive(NOW)) == 1 and roster.partners(NOW) == ()
    assert len(roster.partners(NOW + FIRST_REST)) == 1
    roster.liveness.met(ALICE.peer_id, NOW)
    roster.liveness.missed(ALICE.peer_id, NOW)
    assert len(roster.partners(NOW)) == 1, "it has answered in between"


def test_a_full_view_takes_callers_and_few_others_and_keeps_news_of_those_it_knows(
    roster, monkeypatch
):
    monkeypatch.setattr(view_module, "PASSIVE", 4)
    first = PEERS[0]
    roster.hear(record(first), NOW)
    assert roster.heard(first.peer_id, NOW)
    for peer in PEERS[1:5]:
        assert roster.hear(record(peer), NOW) is not None
    roster.view._may_renew, roster.view._counted = 0.0, NOW
    assert roster.hear(record(PEERS[5]), NOW) is None, "others may not replace all that we know"
    assert roster.hear(record(PEERS[5]), NOW, sender=PEERS[5].peer_id) is not None, "it calls us"
    assert {first.peer_id, PEERS[5].peer_id} < set(roster.view.active) | set(roster.view.passive)
    assert roster.hear(record(first, issued=NOW + 1, swarm_step=9), NOW + 1) is not None
    assert steps(roster, NOW + 1)[first.peer_id] == 9


def pulse(identity: Identity = ALICE, issued: float = NOW, run: str = RUN, **fields) -> bytes:
    values = {"peer_id": identity.peer_id, "phase": Phase.TRAINING, "issued": issued} | fields
    return write_pulse(Pulse(**values), run, identity)


def test_the_newest_figures_hold_whether_a_pulse_or_a_record_brings_them(roster):
    assert not roster.hear_pulse(pulse(swarm_step=1), NOW, ALICE.peer_id), "no record"
    roster.hear(record(swarm_step=2), NOW)
    roster.hear_pulse(pulse(issued=NOW + 2, swarm_step=4, tokens=7), NOW + 2, ALICE.peer_id)
    assert steps(roster) == {ALICE.peer_id: 4}
    roster.hear_pulse(pulse(issued=NOW + 1, swarm_step=3), NOW + 2, ALICE.peer_id)
    roster.hear(record(issued=NOW + 1, swarm_step=3), NOW + 2)
    assert steps(roster) == {ALICE.peer_id: 4}, "both are older"
    assert roster.get(ALICE.peer_id, NOW + 2).report.tokens == 7
    roster.hear(record(issued=NOW + 3, swarm_step=5), NOW + 3)
    assert steps(roster) == {ALICE.peer_id: 5}
    assert roster.hear_pulse(pulse(issued=NOW + 4, phase=Phase.PAUSED), NOW + 4, ALICE.peer_id), (
        "its phase changes"
    )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (pulse(PEERS[1]), "misplaced"),
        (pulse(run="cd" * 32), "bad-signature"),
        (pulse(issued=NOW - 601), "expired"),
        (pulse(issued=NOW + MAX_CLOCK_SKEW + 1), "from-the-future"),
        (pulse(held_out_loss=float("inf")), "malformed"),
        (pulse(phase="asleep"), "malformed"),
        (pulse(bits=25), "malformed"),
        (pulse()[:-1], "malformed"),
        (bytes(1000), "too-large"),
    ],
)
def test_a_bad_pulse_changes_nothing_and_is_counted(data, reason):
    refusals = Refusals()
    roster = Roster(ME.peer_id, RUN, refusals=refusals)
    roster.hear(record(swarm_step=1), NOW - 1)
    assert not roster.hear_pulse(data, NOW, ALICE.peer_id)
    assert refusals.counts() == {f"record.{reason}": 1}
    assert steps(roster) == {ALICE.peer_id: 1}


def test_a_link_that_leaves_two_calls_unanswered_is_lost_and_comes_back_when_it_answers(roster):
    roster.hear(record(life=MAX_LIFE), NOW)
    assert [info.peer_id for info in roster.due(NOW, (), 9)] == [ALICE.peer_id], "a candidate"
    assert roster.heard(ALICE.peer_id, NOW) and len(roster.alive(NOW)) == 1
    now, called = NOW, list[float]()
    while roster.alive(now):
        now += 1.0
        if roster.due(now, (), 9):
            called.append(now - NOW)
    assert called == [REFRESH, REFRESH + RETRY] and now == NOW + REFRESH + 2 * RETRY
    assert roster.heard(ALICE.peer_id, now) and len(roster.alive(now)) == 1


def test_a_peer_without_room_for_a_link_is_known_and_not_alive(roster):
    roster.hear(record(), NOW)
    assert not roster.heard(ALICE.peer_id, NOW, full=True)
    assert roster.alive(NOW) == () and len(roster.known(NOW)) == 1


def test_a_peer_hands_over_records_of_others_that_are_there(roster, monkeypatch):
    for peer in PEERS[:3]:
        roster.hear(record(peer), NOW)
        roster.heard(peer.peer_id, NOW)
    assert roster.to_pass(ALICE.peer_id, NOW) == [], "the DHT has all"
    monkeypatch.setattr(view_module, "ACTIVE", 2)
    passed = roster.to_pass(ALICE.peer_id, NOW)
    assert set(passed) == {record(PEERS[1]), record(PEERS[2])}
    assert roster.to_pass(ALICE.peer_id, NOW + 60) == [], "expired"


def test_cells_are_fewer_where_a_peer_would_be_alone_in_one():
    roster = Roster(ME.peer_id, RUN, cells=lambda: 4)

    def cell(peer: str) -> int:
        return cell_of(RUN, peer, 4)

    def meet(identity: Identity) -> None:
        roster.hear(record(identity), NOW)
        roster.heard(identity.peer_id, NOW)
        roster.due(NOW, (), 0)

    keys = [Identity(bytes([number]) * 32) for number in range(1, 60)]
    of_half = [one for one in keys if cell(one.peer_id) // 2 == cell(ME.peer_id) // 2]
    ours = [one for one in of_half if cell(one.peer_id) == cell(ME.peer_id)]
    beside = [one for one in of_half if one not in ours]
    others = [one for one in keys if one not in of_half]
    meet(ours[0])
    assert roster.cells == 4
    meet(beside[0])
    assert roster.cells == 2 and roster.in_cell(beside[0].peer_id)
    meet(others[0])
    assert roster.cells == 1 and roster.in_cell(others[0].peer_id)
    meet(beside[1])
    meet(next(one for one in others[1:] if cell(one.peer_id) == cell(others[0].peer_id)))
    assert roster.cells == 4 and not roster.in_cell(beside[0].peer_id)
