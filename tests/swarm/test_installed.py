"""What must hold for the wheel: installed by pip into an empty environment, without a compiler, it
trains a swarm."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

pytestmark = [pytest.mark.swarm, pytest.mark.soak, pytest.mark.timeout(5400)]
ROOT = Path(__file__).parents[2]
INSTALL, DEMO = 3600, 900


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Removed at once: pytest would keep gigabytes."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def test_the_wheel_in_an_empty_environment_without_a_compiler_trains_a_swarm(folder: Path) -> None:
    """Gigabytes are installed: torch as this Python's pip finds it, on Linux with CUDA's
    libraries."""
    wheel = next(WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"]))
    python = folder / "environment" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True, timeout=300)
    away, nothing = folder / "away", folder / "nothing"
    away.mkdir()
    nothing.mkdir()
    # Nothing but the environment's own programs: no cc, no git, no shell; and nothing of this
    # checkout.
    settings = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "SSL_"))}
    bare = {
        "PATH": f"{python.parent}:{nothing}",
        "CC": "/bin/false",
        "CXX": "/bin/false",
        "LANG": "C.UTF-8",
    }

    def run(*command: str, deadline: int, home: str) -> str:
        done = subprocess.run(
            command,
            cwd=away,
            env=settings | bare | {"HOME": home},
            capture_output=True,
            text=True,
            timeout=deadline,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    run(
        *pip, "install", "--quiet", wheel, deadline=INSTALL, home=str(Path.home())
    )  # whose settings of pip hold
    run(*pip, "check", deadline=120, home=str(away))
    command = str(python.parent / "lowcomm-node")
    assert "protocol" in run(command, "--version", deadline=120, home=str(away))
    told = run(
        command, "demo", "--nodes", "2", "--steps", "60", "--json", deadline=DEMO, home=str(away)
    )
    result = json.loads(told)
    assert len(result["nodes"]) == 2
    for node in result["nodes"]:
        assert node["exchanges_completed"] >= 1
        assert node["val_loss_last"] < node["val_loss_first"] - 1
    assert Path(result["checkpoint"]).is_relative_to(away)
    unit = python.parents[1] / "share" / "lowcomm" / "systemd" / "user" / "lowcomm-node.service"
    assert (
        unit.read_bytes()
        == (ROOT / "docker" / "systemd" / "user" / "lowcomm-node.service").read_bytes()
    )
