"""Doors that are kept for the next start: bounded, and checked as if a stranger had written the
file."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowcomm_node.swarm.remembered_peers import (
    MAX_AGE,
    MAX_BYTES,
    MAX_NAMED,
    MAX_REMEMBERED,
    RememberedPeers,
)
from lowcomm_protocol.identity import Identity

NOW = 1_800_000_000.0


def peer(number: int) -> str:
    return Identity(number.to_bytes(32)).peer_id


def address(number: int, port: int = 1) -> str:
    return f"/ip4/203.0.113.7/tcp/{port}/p2p/{peer(number)}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "doors.json"


def test_what_answered_is_there_at_the_next_start_named_ones_first_then_the_newest(
    path: Path,
) -> None:
    known = RememberedPeers(path, NOW)
    known.answered(peer(1), [address(1)], NOW, named=True)
    known.answered(peer(2), [address(2)], NOW + 1)
    known.answered(peer(3), [address(3)], NOW + 2)
    known.save()
    again = RememberedPeers(path, NOW + 10)
    assert [door.peer_id for door in again.peers()] == [peer(1), peer(3), peer(2)]
    assert again.peers() == known.peers()
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_oldest_go_and_named_ones_give_way_to_none(path: Path) -> None:
    known = RememberedPeers(path, NOW)
    for number in range(2 * MAX_NAMED):
        known.answered(peer(number), [address(number)], NOW - 1000 + number, named=True)
    for number in range(100, 100 + 2 * MAX_REMEMBERED):
        known.answered(peer(number), [address(number)], NOW + number)
    doors = known.peers()
    assert len(doors) == MAX_REMEMBERED
    assert [door.peer_id for door in doors if door.named] == [
        peer(n) for n in range(2 * MAX_NAMED - 1, MAX_NAMED - 1, -1)
    ]
    ids = {door.peer_id for door in doors}
    assert peer(100) not in ids and peer(99 + 2 * MAX_REMEMBERED) in ids
    known.save()
    assert path.stat().st_size < MAX_BYTES
    assert RememberedPeers(path, NOW).peers()


def entry(**changed: object) -> dict[str, object]:
    return {
        "peer_id": peer(1),
        "addresses": [address(1)],
        "answered": NOW - 5,
        "named": False,
    } | changed


@pytest.mark.parametrize(
    "bad",
    [
        entry(peer_id="Qm"),
        entry(peer_id=7),
        entry(addresses=[address(2)]),
        entry(addresses=["/unix/etc/passwd/p2p/" + peer(1)]),
        entry(addresses=address(1)),
        entry(addresses=[{"a": 1}]),
        entry(addresses=[address(1) + "\n"]),
        entry(answered="yesterday"),
        entry(answered=True),
        entry(answered=NOW - 2 * MAX_AGE),
        "rubbish",
        None,
    ],
)
def test_a_bad_entry_is_left_out_and_hides_no_good_one(path: Path, bad: object) -> None:
    path.parent.mkdir()
    good = entry(peer_id=peer(2), addresses=[address(2)])
    path.write_text(json.dumps({"version": 1, "doors": [bad, good]}))
    assert [door.peer_id for door in RememberedPeers(path, NOW).peers()] == [peer(2)]


def test_a_file_that_is_too_large_is_not_read(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(json.dumps({"version": 1, "doors": [entry()]}) + " " * MAX_BYTES)
    assert RememberedPeers(path, NOW).peers() == []


def test_an_answer_from_the_future_does_not_stay_for_ever(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(
        '{"version": 1, "doors": [' + json.dumps(entry()).replace(str(NOW - 5), "1e300") + "]}"
    )
    (door,) = RememberedPeers(path, NOW).peers()
    assert door.answered <= NOW - MAX_AGE
    path.write_text(
        '{"version": 1, "doors": [' + json.dumps(entry()).replace(str(NOW - 5), "Infinity") + "]}"
    )
    assert not RememberedPeers(path, NOW).peers()


KEYS = st.sampled_from(["version", "doors", "peer_id", "addresses", "answered"])
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner),
)


@given(JSON)
def test_no_content_raises(tmp_path_factory: pytest.TempPathFactory, content: object) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps({"version": 1, "doors": content}))
    RememberedPeers(path, NOW)
    path.write_text(json.dumps(content))
    RememberedPeers(path, NOW)
