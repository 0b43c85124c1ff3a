"""What must hold for the memory of a run: what is reckoned is what a real trainer takes, within a
factor of two."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "reckoning.py"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_real_trainers_take_what_is_reckoned():
    done = subprocess.run(
        [sys.executable, str(BENCHMARK)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
