"""What must hold for trackers: they get all of a journal once, also where they were killed or could
not be reached, and both ends of an exchange make one trace."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from typer.testing import CliRunner, Result

from helpers.journals import NOW, RUN, sample, write_down
from lowcomm_node.cli import app
from lowcomm_node.errors import ConfigError
from lowcomm_node.status.figures import HELD_OUT, TRAINING_LOSS
from lowcomm_node.system import command
from lowcomm_protocol.errors import SpecError

KILLED = """
import os, signal, sys
from lowcomm_node.cli import app
from lowcomm_node.status import track
track.MOST, write, told = 4, track.write_atomic, []
def killed(path, content, mode):
    told.append(path)
    if len(told) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, content, mode)
track.write_atomic = killed
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
    losses = [None, None, 3.5, 3.5]
    write_down(home, [], [sample(n, val_loss=one) for n, one in enumerate(losses, start=1)])
    told = track("tensorboard", "--to", logs, "--home", home, "--name", "../Ada")
    assert (told["points"], told["node"]) == (4, "../Ada")
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


@pytest.mark.parametrize(
    "sink",
    ["tensorboard", "wandb"],
)
def test_a_missing_extra_is_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: str
) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(command, "import_module", missing)
    write_down(tmp_path, [])
    error = call("track", sink, "--home", tmp_path).exception
    assert isinstance(error, ConfigError)
    assert f"pip install 'lowcomm-node[{sink}]'" in str(error)


def test_what_can_be_no_sink_or_target_is_refused_with_what_can(tmp_path: Path) -> None:
    write_down(tmp_path, [])
    for arguments, kind, told in (
        (("tensorbord",), SpecError, "did you mean 'tensorboard'"),
        (("wandb", "--to", "a/b/c"), ConfigError, "give PROJECT or ENTITY/PROJECT"),
    ):
        error = call("track", *arguments, "--home", tmp_path).exception
        assert isinstance(error, kind)
        assert told in str(error)
