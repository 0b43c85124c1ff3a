"""What must hold for trackers: they get all of a journal once, also where they were killed or could
not be reached, and both ends of an exchange make one trace."""

import json
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from typer.testing import CliRunner, Result

from helpers.collector import Collector, collector
from helpers.exchanging import INTERVAL, swarm
from helpers.journals import NOW, RUN, exchanged, sample, write_down
from helpers.statuses import make_exchange
from lowcomm_node.cli import app
from lowcomm_node.errors import ConfigError, RetryLater
from lowcomm_node.journal.reader import Journal
from lowcomm_node.node.messages import Evaluated
from lowcomm_node.storage.paths import Paths
from lowcomm_node.tracking import sink as sinks
from lowcomm_node.tracking.follow import Tracker, Waits
from lowcomm_node.tracking.home import tracked_of
from lowcomm_node.tracking.names import HELD_OUT, TRAINING_LOSS
from lowcomm_node.tracking.position import PositionFile
from lowcomm_node.tracking.sink import Batch, Kept, Tracked
from lowcomm_node.tracking.sinks.otlp import Collector as CollectorSink
from lowcomm_node.tracking.spans import spans_of
from lowcomm_protocol.errors import SpecError
from lowcomm_protocol.exchange.events import Outcome

KILLED = """
import os, signal, sys
from lowcomm_node.cli import app
from lowcomm_node.tracking import batches
from lowcomm_node.tracking.position import PositionFile
batches.MOST, save, told = 4, PositionFile.save, []
def killed(self, position):
    told.append(position)
    if len(told) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    save(self, position)
PositionFile.save = killed
app(sys.argv[1:])
"""


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def track(*arguments: object) -> dict[str, Any]:
    ended = call("track", *arguments, "--json")
    assert ended.exit_code == 0, ended
    return json.loads(ended.output)


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Steps and values of a tag, as TensorBoard reads them."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [(one.step, pytest.approx(one.value)) for one in events.Scalars(tag)]  # type: ignore[misc]


def test_tensorboard_reads_what_the_journal_tells_and_the_settings(tmp_path: Path) -> None:
    home, logs = tmp_path / "home", tmp_path / "logs"
    notices = [(NOW + 31, Evaluated(loss=3.5, tokens=9, swarm_step=30, steps=30))]
    write_down(home, notices, [sample(place) for place in range(1, 5)])
    told = track("tensorboard", "--to", logs, "--home", home, "--name", "../Ada")
    assert (told["points"], told["node"]) == (5, "../Ada")
    [folder] = {path.parent for path in logs.rglob("events.*")}
    assert folder.relative_to(logs).parts == (f"tea-{RUN.fingerprint}", "___Ada")
    losses = [(10 * place, 5.0 / (1 + place)) for place in range(1, 5)]
    assert scalars(folder, TRAINING_LOSS) == losses
    assert scalars(folder, HELD_OUT) == [(30, 3.5)]
    by_tokens = scalars(folder, f"by_tokens/{TRAINING_LOSS}")
    assert by_tokens == [(512 * step, loss) for step, loss in losses]
    events = EventAccumulator(str(folder)).Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    found = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert found["sync.method"].string_value == "lowcomm"
    assert [one.wall_time for one in events.Scalars(TRAINING_LOSS)] == [
        NOW + 10 * place for place in range(1, 5)
    ]


def test_a_tracker_that_was_killed_goes_on_without_gaps_and_doubles(tmp_path: Path) -> None:
    home, logs = tmp_path / "home", tmp_path / "logs"
    write_down(home, [], [sample(place) for place in range(1, 20)])
    command = ("track", "tensorboard", "--to", str(logs), "--home", str(home))
    ended = subprocess.run(
        (sys.executable, "-c", KILLED, *command), timeout=120, capture_output=True
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    [file] = logs.rglob("events.*")
    assert len(scalars(file.parent, TRAINING_LOSS)) == 12, "more than was noted down"
    assert track(*command[1:])["points"] == 11
    assert track(*command[1:])["points"] == 0
    write_down(home, [], [sample(20)])
    assert track(*command[1:])["points"] == 1
    assert scalars(file.parent, TRAINING_LOSS) == [
        (10 * place, 5.0 / (1 + place)) for place in range(1, 21)
    ]
    assert len(list(logs.rglob("events.*"))) == 1


async def homes_of_a_pair(folder: Path) -> list[Path]:
    """The homes of two nodes after three exchanges, which are real but for the trainers."""
    async with swarm(2) as one:
        for number in (1, 2, 3):
            for node in one.nodes:
                node.step(number * INTERVAL)
            for node in one.nodes:
                await node.ended(number)
                await node.at_rest()
        for place, node in enumerate(one.nodes):
            home = folder / f"node-{place}"
            write_down(home, [(entry.time, entry) for entry in node.news])
            Paths(home).identity.write_bytes(node.identity.to_libp2p())
    return [folder / "node-0", folder / "node-1"]


async def test_both_ends_of_an_exchange_are_one_trace(tmp_path: Path) -> None:
    homes = await homes_of_a_pair(tmp_path)
    with collector() as there:
        for home in homes:
            assert track("otlp", "--to", there.address, "--home", home)["exchanges"] == 3
            assert track("otlp", "--to", there.address, "--home", home)["exchanges"] == 0
    traces = Counter(one.trace for one in there.spans)
    assert len(traces) == 3
    ids = [one.span.span_id for one in there.spans]
    assert len(set(ids)) == len(ids)
    for trace in traces:
        spans = [one for one in there.spans if one.trace == trace]
        ends = {one.resource["service.instance.id"] for one in spans}
        assert ends == {tracked_of(home, RUN.fingerprint).peer_id for home in homes}
        for peer in ends:
            own = [one for one in spans if one.resource["service.instance.id"] == peer]
            check_one_end(own, ends - {peer})


def check_one_end(own: list[Any], others: set[str]) -> None:
    """The spans of one member of an applied exchange."""
    spans = {one.span.name: one.span for one in own}
    whole = spans.pop("exchange")
    assert {"gather", "capture", "send", "receive", "decode", "confirm", "merge"} <= spans.keys()
    assert all(one.parent_span_id == whole.span_id for one in spans.values())
    slack = 2_000_000  # moments are told in milliseconds
    for one in spans.values():
        assert whole.start_time_unix_nano - slack <= one.start_time_unix_nano
        assert one.start_time_unix_nano <= one.end_time_unix_nano
        assert one.end_time_unix_nano <= whole.end_time_unix_nano + slack
    assert own[0].resource["service.name"] == "lowcomm-node"
    assert own[0].resource["lowcomm.run.id"] == RUN.run_id
    [told] = [one.attributes for one in own if one.span.name == "exchange"]
    assert told["lowcomm.outcome"] == "applied"
    assert told["lowcomm.partners"] == ",".join(others)
    assert whole.status.code == 1


def test_an_exchange_that_was_not_applied_says_why_and_how_far_it_came() -> None:
    failed = make_exchange(
        outcome=Outcome.FAILED,
        reason="the line was lost",
        code="link-lost",
        moments={"met": 0.1, "captured": 0.2},
        stages={},
        id="ab" * 16,
    )
    whole, *stages = spans_of(failed, "me")
    assert (whole.trace, whole.error) == (int("ab" * 16, 16), "link-lost: the line was lost")
    assert [one.name for one in stages] == ["gather", "capture"]
    alone = make_exchange(outcome=Outcome.NO_PARTNER, reason="all are busy")
    first, second = (spans_of(alone, peer)[0] for peer in ("me", "you"))
    assert first.trace != second.trace, "nobody met anybody"


def test_what_a_killed_tracker_sends_again_is_the_same_span() -> None:
    event = make_exchange(moments={"met": 0.1}, id="ab" * 16)
    assert spans_of(event, "me") == spans_of(event, "me")
    later = replace(event, time=event.time + 60)
    ids = [one.id for told in (event, later) for one in spans_of(told, "me")]
    assert len(set(ids)) == 4, "a second attempt is another one"


def test_a_collector_that_does_not_answer_loses_nothing(tmp_path: Path) -> None:
    write_down(tmp_path, [exchanged(k, round=k) for k in range(3)])
    with collector() as there:
        there.answer = 403
        error = call("track", "otlp", "--to", there.address, "--home", tmp_path).exception
        assert isinstance(error, RetryLater)
        assert "does not take the spans" in str(error)
        assert "403" in str(error)
        follow_until_it_answers(tmp_path, there)
    assert sorted({one.attributes["lowcomm.round"] for one in there.spans}) == [0, 1, 2]


def follow_until_it_answers(home: Path, there: Collector) -> None:
    """A tracker that stays is refused twice, tells it once, and goes on; Ctrl-C ends it."""
    warnings: list[str] = []
    naps = [0]

    def sleep(seconds: float) -> None:
        naps[0] += 1
        if naps[0] == 2:
            there.answer = 200
        if naps[0] == 3:
            raise KeyboardInterrupt

    sink = CollectorSink(there.address)
    file = PositionFile(Paths(home).tracked(RUN.fingerprint), "otlp", sink.target)
    journal = Journal(Paths(home).journal(RUN.fingerprint))
    tracker = Tracker(journal, sink, tracked_of(home, RUN.fingerprint), file)
    with pytest.raises(KeyboardInterrupt):
        tracker.run(Waits(sleep=sleep, warn=warnings.append))
    assert tracker.delivered.exchanges == 3
    assert len(warnings) == 2
    assert "It is tried again by itself" in warnings[0]
    assert "answers again" in warnings[1]


class Forgetful:
    """A sink that takes everything."""

    target, takes = "nowhere", "points"

    def open(self, tracked: Tracked, kept: Kept) -> None: ...

    def write(self, batch: Batch) -> Kept:
        return {}

    def close(self) -> None: ...


def test_two_trackers_do_not_write_to_one_place(tmp_path: Path) -> None:
    path = write_down(tmp_path, [], [sample(1)])
    file = PositionFile(tmp_path / "tracked", "x", "nowhere")
    tracker = Tracker(Journal(path), Forgetful(), tracked_of(tmp_path, RUN.fingerprint), file)
    held = PositionFile(tmp_path / "tracked", "x", "nowhere").held()
    with held, pytest.raises(RetryLater, match="name another place with --to"):
        tracker.run()
    tracker.run()
    assert tracker.delivered.points == 1


@pytest.mark.parametrize(
    ("sink", "extra"),
    [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("trackio", "trackio"), ("otlp", "otel")],
)
def test_a_missing_extra_is_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: str, extra: str
) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sinks, "import_module", missing)
    write_down(tmp_path, [])
    error = call("track", sink, "--home", tmp_path).exception
    assert isinstance(error, ConfigError)
    assert f"pip install 'lowcomm-node[{extra}]'" in str(error)


def test_what_can_be_no_sink_or_target_is_refused_with_what_can(tmp_path: Path) -> None:
    write_down(tmp_path, [])
    for arguments, kind, told in (
        (("tensorbord",), SpecError, "did you mean 'tensorboard'"),
        (("otlp", "--to", "localhost:4318"), ConfigError, "is no address of a collector"),
        (("otlp", "--to", "http://a:b@host"), ConfigError, "OTEL_EXPORTER_OTLP_HEADERS"),
    ):
        error = call("track", *arguments, "--home", tmp_path).exception
        assert isinstance(error, kind)
        assert told in str(error)
        assert "a:b" not in str(error)
