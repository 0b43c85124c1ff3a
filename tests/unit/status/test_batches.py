"""What must hold for what is read of a journal: each thing once, in the order of time, and counts
that go on over every start."""

from pathlib import Path

import pytest

from helpers.journals import NOW, RUN, exchanged, sample, write_down
from lowcomm_node.node.messages import Evaluated
from lowcomm_node.status import track as batches
from lowcomm_node.status.figures import HELD_OUT, WORST_BLOCK
from lowcomm_node.status.journal import Journal
from lowcomm_node.status.track import TrackedPoint, TrackerPosition, next_batch, tracked_of


def evaluated(step: int, loss: float | None) -> Evaluated:
    return Evaluated(loss=loss, tokens=100, swarm_step=step, steps=step)


def read_all(
    path: Path, position: TrackerPosition | None = None
) -> tuple[list[TrackedPoint], TrackerPosition]:
    journal, position, told = Journal(path), position or TrackerPosition(), list[TrackedPoint]()
    while True:
        points, behind = next_batch(journal, position, step_tokens=512)
        if behind == position:
            return told, position
        told += points
        position = behind


@pytest.mark.parametrize("most", [3, 500])
def test_everything_comes_once_and_in_the_order_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(batches, "MOST", most)
    notices = [
        *(exchanged(10 * k + 1, round=k, worst_block=0.5, swarm_step=10 * k) for k in range(12)),
        (NOW + 121, evaluated(120, 3.5)),
        (NOW + 122, evaluated(120, None)),
    ]
    path = write_down(tmp_path, notices, [sample(place) for place in range(20)])
    told, position = read_all(path)
    points = told
    assert len(points) == 12 + 20 + 1
    assert [one.number for one in points] == list(range(len(points)))
    assert [one.time for one in points] == sorted(one.time for one in points)
    assert [one.step for one in points if WORST_BLOCK in one.values] == [10 * k for k in range(12)]
    [held_out] = [one for one in points if HELD_OUT in one.values]
    assert (held_out.tokens, held_out.values[HELD_OUT]) == (61_440, 3.5)
    write_down(tmp_path, [], [sample(20)])
    later, _ = read_all(path, position)
    assert [(one.step, one.number) for one in later] == [(200, len(points))]


def test_a_tracker_is_told_the_settings_of_the_run_and_nobody_who_may_join_it(
    tmp_path: Path,
) -> None:
    write_down(tmp_path, [])
    tracked = tracked_of(tmp_path, RUN.fingerprint, "Ada\x1b[2J")
    assert tracked.settings["sync.method"] == "lowcomm"
    assert tracked.settings["run.admission"] == "list"
    assert RUN.spec.run.members[0] not in repr(tracked.settings)
    assert "\x1b" not in tracked.node
    assert tracked.step_tokens == RUN.spec.tokens_per_step
    bare = tracked_of(tmp_path / "gone", "abc")
    assert (bare.run, bare.node, bare.settings) == ("abc", "gone", {})
