"""What must hold for the trackers that are too large for the lock: installed for these tests, they
take a journal as it is, also where the tracker was killed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.journals import sample, write_down

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]
KILLED = """
import os, signal, sys
from lowcomm_node.cli import app
from lowcomm_node.tracking import batches
from lowcomm_node.tracking.position import PositionFile
batches.MOST, save, told = 4, PositionFile.save, []
def killed(self, position):
    told.append(position)
    if len(told) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    save(self, position)
PositionFile.save = killed
app(sys.argv[1:])
"""
READ = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
[run] = trackio.Api().runs("tea")
print(json.dumps(SQLiteStorage.get_logs("tea", run.name)))
"""


class Installed:
    """Libraries in a folder of their own, which shadow nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = {
            "PYTHONPATH": str(folder / "libraries"),
            "TRACKIO_DIR": str(folder / "trackio"),
            "WANDB_DIR": str(folder),
            "WANDB_MODE": "offline",
        }

    def run(self, *command: str, code: int = 0) -> str:
        """Run Python with them; what it prints."""
        done = subprocess.run(
            (sys.executable, *command),
            env=os.environ | self.variables,
            capture_output=True,
            text=True,
            timeout=600,
            cwd=self.folder,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def track(self, sink: str, home: Path) -> dict[str, Any]:
        """What the command tells."""
        command = ("-m", "lowcomm_node", "track", sink, "--home", str(home), "--to", "tea")
        return json.loads(self.run(*command, "--json"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("trackers")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    libraries = str(folder / "libraries")
    subprocess.run((*pip, "--target", libraries, "wandb", "trackio"), check=True, timeout=600)
    yield Installed(folder)


def test_trackio_gets_every_point_once_also_where_its_tracker_was_killed(
    installed: Installed, tmp_path: Path
) -> None:
    write_down(tmp_path, [], [sample(place) for place in range(1, 13)])
    command = ("track", "trackio", "--to", "tea", "--home", str(tmp_path))
    installed.run("-c", KILLED, *command, code=-signal.SIGKILL)
    assert installed.track("trackio", tmp_path)["points"] == 8
    assert installed.track("trackio", tmp_path)["points"] == 0
    found = json.loads(installed.run("-c", READ).splitlines()[-1])
    steps = sorted(one["lowcomm_swarm_step"] for one in found)
    assert steps == [10 * place for place in range(1, 13)]


def test_weights_and_biases_offline_gets_every_point(installed: Installed, tmp_path: Path) -> None:
    write_down(tmp_path, [], [sample(place) for place in range(1, 13)])
    assert installed.track("wandb", tmp_path)["points"] == 12
    assert installed.track("wandb", tmp_path)["points"] == 0
    [file] = installed.folder.glob("wandb/offline-run-*/run-*.wandb")
    told = file.read_bytes()
    # The name is told once with each point, and once where it is made an axis.
    assert told.count(b"lowcomm_tokens_per_second") >= 12
    assert b"sync.method" in told
