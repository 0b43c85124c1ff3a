"""What must hold for what is read of a journal: each thing once, in the order of time, and counts
that go on over every start."""

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.journals import NOW, RUN, exchanged, sample, write_down
from lowcomm_node.status import track as batches
from lowcomm_node.status.figures import HELD_OUT, WORST_BLOCK
from lowcomm_node.status.journal import Journal
from lowcomm_node.status.track import TrackedPoint, TrackerPosition, next_batch, tracked_of


def read_all(
    path: Path, position: TrackerPosition | None = None
) -> tuple[list[TrackedPoint], TrackerPosition]:
    journal, position, told = Journal(path), position or TrackerPosition(), list[TrackedPoint]()
    while True:
        points, behind = next_batch(journal, position)
        if behind == position:
            return told, position
        told += points
        position = behind


@pytest.mark.parametrize("most", [3, 500])
def test_everything_comes_once_and_in_the_order_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(batches, "MOST", most)
    measured = {7: 4.5, 8: 4.5, 12: 3.5, 13: 3.5}
    samples = [sample(place, val_loss=measured.get(place)) for place in range(20)]
    spread = [0.5 if place < 4 else 0.25 for place in range(20)]
    samples = [replace(one, worst_block=now) for one, now in zip(samples, spread, strict=True)]
    path = write_down(tmp_path, [exchanged(1.0)], samples)
    points, position = read_all(path)
    assert len(points) == 20
    assert [one.number for one in points] == list(range(len(points)))
    assert [one.time for one in points] == sorted(one.time for one in points)
    assert [one.step for one in points if WORST_BLOCK in one.values] == [0, 40]
    held_out = [(one.step, one.tokens) for one in points if HELD_OUT in one.values]
    assert held_out == [(70, 35_840), (120, 61_440)]
    served = replace(samples[-1], time=NOW + 195)
    write_down(tmp_path, [], [served, replace(served, time=NOW + 196, val_loss=3.25)])
    last, position = read_all(path, position)
    assert [one.values[HELD_OUT] for one in last] == [3.25], "a node that serves makes no points"
    write_down(tmp_path, [], [sample(20)])
    later, _ = read_all(path, position)
    assert [(one.step, one.number) for one in later] == [(200, len(points) + 1)]


def test_a_tracker_is_told_the_settings_of_the_run_and_nobody_who_may_join_it(
    tmp_path: Path,
) -> None:
    write_down(tmp_path, [])
    tracked = tracked_of(tmp_path, RUN.fingerprint, "Ada\x1b[2J")
    assert tracked.settings["sync.method"] == "lowcomm"
    assert tracked.settings["run.admission"] == "list"
    assert RUN.spec.run.members[0] not in repr(tracked.settings)
    assert "\x1b" not in tracked.node
    bare = tracked_of(tmp_path / "gone", "abc")
    assert (bare.run, bare.node, bare.settings) == ("abc", "gone", {})
