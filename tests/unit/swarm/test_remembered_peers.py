"""Doors that are kept for the next start: bounded, and checked as if a stranger had written the
file."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowcomm_node.swarm.remembered_peers import (
    MAX_BYTES,
    MAX_REMEMBERED,
    RememberedPeer,
    read_remembered,
    remember,
)
from lowcomm_protocol.identity import Identity

NOW = 1_800_000_000.0


def peer(number: int) -> str:
    return Identity(number.to_bytes(32)).peer_id


def address(number: int) -> str:
    return f"/ip4/203.0.113.7/tcp/1/p2p/{peer(number)}"


def answered(number: int, at: float, named: bool = False) -> RememberedPeer:
    return RememberedPeer(
        peer_id=peer(number), addresses=(address(number),), answered=at, named=named
    )


def ids(path: Path) -> list[str]:
    return [door.peer_id for door in read_remembered(path, NOW)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "doors.json"


def test_what_answered_is_there_at_the_next_start_named_ones_first_then_the_newest(
    path: Path,
) -> None:
    remember(path, [answered(1, NOW - 9, named=True), answered(2, NOW - 8)], NOW)
    remember(path, [answered(3, NOW - 7), answered(1, NOW - 6)], NOW)
    assert ids(path) == [peer(1), peer(3), peer(2)], "the owner has named it once"
    assert read_remembered(path, NOW)[0].answered == NOW - 6
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_oldest_go_and_named_ones_give_way_to_none(path: Path) -> None:
    remember(path, [answered(1, NOW - 1000, named=True)], NOW)
    others = range(100, 100 + 2 * MAX_REMEMBERED)
    remember(path, [answered(number, NOW - 1000 + number) for number in others], NOW)
    kept = ids(path)
    assert len(kept) == MAX_REMEMBERED and kept[0] == peer(1)
    assert peer(100) not in kept and peer(others[-1]) in kept
    assert path.stat().st_size < MAX_BYTES


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
        entry(answered="yesterday"),
        "rubbish",
        None,
    ],
)
def test_a_bad_entry_is_left_out_and_hides_no_good_one(path: Path, bad: object) -> None:
    path.parent.mkdir()
    good = entry(peer_id=peer(2), addresses=[address(2)])
    path.write_text(json.dumps({"version": 1, "doors": [bad, good]}))
    assert ids(path) == [peer(2)]


def test_a_file_that_is_too_large_is_not_read(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(json.dumps({"version": 1, "doors": [entry()]}) + " " * MAX_BYTES)
    assert ids(path) == []


def test_an_answer_from_the_future_does_not_stay_for_ever(path: Path) -> None:
    path.parent.mkdir()
    text = json.dumps({"version": 1, "doors": [entry()]})
    path.write_text(text.replace(str(NOW - 5), "1e300"))
    assert read_remembered(path, NOW)[0].answered == NOW
    path.write_text(text.replace(str(NOW - 5), "Infinity"))
    assert not ids(path)


KEYS = st.sampled_from(["version", "doors", "peer_id", "addresses", "answered"])
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner),
)


@given(JSON)
def test_no_content_raises(tmp_path_factory: pytest.TempPathFactory, content: object) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps({"version": 1, "doors": content}))
    read_remembered(path, NOW)
    path.write_text(json.dumps(content))
    read_remembered(path, NOW)
