"""What must hold for the tracker that is too large for the lock: installed for these tests, they
take a journal as it is."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.journals import sample, write_down

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]


class Installed:
    """Libraries in a folder of their own, which shadow nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = {
            "PYTHONPATH": str(folder / "libraries"),
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
    subprocess.run((*pip, "--target", libraries, "wandb"), check=True, timeout=600)
    yield Installed(folder)


def test_weights_and_biases_offline_gets_every_point(installed: Installed, tmp_path: Path) -> None:
    write_down(tmp_path, [], [sample(place) for place in range(1, 13)])
    assert installed.track("wandb", tmp_path)["points"] == 12
    assert installed.track("wandb", tmp_path)["points"] == 0
    [file] = installed.folder.glob("wandb/offline-run-*/run-*.wandb")
    told = file.read_bytes()
    # The name is told once with each point, and once where it is made an axis.
    assert told.count(b"lowcomm_tokens_per_second") >= 12
    assert b"sync.method" in told
