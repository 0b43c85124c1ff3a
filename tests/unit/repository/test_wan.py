"""The programs of compose.wan.yaml: what they do to routes and firewalls is for containers
alone."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("program", ["behind.py", "router.py"])
def test_outside_a_container_nothing_is_changed(program: str) -> None:
    emulator = str(ROOT / "tests" / "net")
    began = subprocess.run(
        [sys.executable, str(ROOT / "docker" / "wan" / program), "not.to.be.looked.up.invalid",
            "true"],
        env={"PYTHONPATH": emulator}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert began.returncode == 1 and began.stderr.startswith("error: ")
    assert "compose.wan.yaml alone" in began.stderr and not began.stdout
