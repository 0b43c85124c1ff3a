"""What must hold for what is read of a journal: each thing once, in the order of time, and counts
that go on over every start."""

from pathlib import Path

import pytest

from helpers.journals import NOW, RUN, exchanged, sample, write_down
from helpers.statuses import make_status
from lowcomm_node.node.messages import Evaluated
from lowcomm_node.status import track as batches
from lowcomm_node.status.journal import Journal
from lowcomm_node.status.metrics import NodeCollector
from lowcomm_node.status.track import (
    HELD_OUT,
    OTHERS,
    SAMPLED,
    WAITING,
    WORST_BLOCK,
    TrackedPoint,
    TrackerPosition,
    next_batch,
    tracked_of,
)


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


def test_counts_go_on_where_a_node_began_anew_and_waiting_is_a_share(tmp_path: Path) -> None:
    again = sample(4, completed=1, bytes_sent=300, computing=1.5, waited=1.5)
    path = write_down(tmp_path, [], [sample(1), sample(2), again, sample(5, completed=2)])
    values = [one.values for one in read_all(path)[0]]
    assert [one["lowcomm_exchanges_total/applied"] for one in values] == [1, 2, 3, 4]
    assert [one["lowcomm_content_bytes_total/sent"] for one in values] == [1000, 2000, 2300, 7000]
    assert [one[WAITING] for one in values[:3]] == pytest.approx([0.1, 0.1, 0.5])


def test_a_node_that_only_stands_there_tells_nothing_new(tmp_path: Path) -> None:
    still = [sample(3, time=NOW + 100 * k, memory=k, peers=k) for k in range(1, 5)]
    path = write_down(tmp_path, [], [sample(2, swarm_step=None), *still])
    assert [one.step for one in read_all(path)[0]] == [30]


def test_a_journal_that_began_anew_is_followed_and_nothing_of_it_is_told_twice(
    tmp_path: Path,
) -> None:
    old = [exchanged(k, worst_block=0.5, swarm_step=k) for k in range(5)]
    path = write_down(tmp_path, old)
    _, position = read_all(path)
    path.unlink()
    write_down(tmp_path, [old[-1], exchanged(9, worst_block=0.5, swarm_step=9)])
    told, behind = read_all(path, position)
    assert [one.step for one in told] == [9]
    assert read_all(path, behind)[0] == []


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


def test_every_name_but_a_share_is_that_of_a_metric() -> None:
    status = make_status(
        trainer={
            "swarm_step": 1,
            "steps": 1,
            "tokens": 1,
            "loss": 1.0,
            "val_loss_last": 1.0,
            "tokens_per_second": 1.0,
            "learning_rate": 0.1,
            "computing": 1.0,
            "waited": {"merge": 1.0},
            "memory": {"taken": 1, "most": 2, "reckoned": 3, "trainer": 1, "daemon": 1},
        },
        exchanges={"worst_block": 0.5},
    )
    known = {
        "/".join([one.name, *one.labels.values()])
        for metric in NodeCollector(status).collect()
        for one in metric.samples
    }
    told = {one.name for one in SAMPLED} | set(OTHERS)
    assert told - {WAITING} <= {*known, *(name.rpartition("/")[0] for name in known)}
