"""Whatever a stranger sends that is not sound is refused, counted by its reason, and costs next to
nothing."""

import pytest

from helpers import refusals as hostile
from lowcomm_protocol.errors import Refusals

CASES = {case.name: case for case in hostile.CASES}


@pytest.mark.parametrize("name", CASES)
def test_each_is_refused_counted_by_its_reason_and_takes_little_memory(name):
    case = CASES[name]
    refuse, refusals = case.prepare()
    refuse()
    assert refusals.counts() == {case.counted: 1}
    refuse, _ = case.prepare()
    assert hostile.peak_kib(refuse) < hostile.MAX_KIB


@pytest.mark.parametrize("name", [name for name in CASES if "1 MB" in name])
def test_what_is_too_large_is_refused_before_it_is_hashed_parsed_or_verified(name, monkeypatch):
    refuse, refusals = CASES[name].prepare()

    def fail(*_: object) -> None:
        raise AssertionError("bytes that are too many were looked at")

    for module in ("peers.records", "identity", "peers.invites", "spec.run"):
        monkeypatch.setattr(f"lowcomm_protocol.{module}.verify", fail)
    monkeypatch.setattr("lowcomm_protocol.peers.records.pb.SignedRecord", None)
    monkeypatch.setattr("lowcomm_protocol.peers.roster.sha256", fail)
    monkeypatch.setattr("lowcomm_node.dht.keys.sha256", fail)
    refuse()
    assert list(refusals.counts()) == [CASES[name].counted]


@pytest.mark.parametrize(
    "name",
    ["an expired record", "a record without an invite", "a record whose signature is forged"],
)
def test_the_same_bytes_are_verified_and_counted_once_however_often_the_dht_tells_them(
    name, monkeypatch
):
    refuse, refusals = CASES[name].prepare()
    refuse()
    monkeypatch.setattr(
        "lowcomm_protocol.peers.records.verify", lambda *_: pytest.fail("verified again")
    )
    for _ in range(5):
        refuse()
    assert sum(refusals.counts().values()) == 1


def test_a_flood_of_refusals_keeps_a_bounded_memory(monkeypatch):
    monkeypatch.setattr("lowcomm_protocol.peers.roster.MAX_DIGESTS", 10)
    refusals = Refusals()
    roster = hostile.Roster(hostile.ME.peer_id, hostile.RUN, None, refusals)
    for number in range(50):
        roster.hear(b"%d" % number, hostile.NOW)
    assert sum(refusals.counts().values()) == 50
    assert len(roster._heard) == 10
