"""What must hold for the cost of an exchange: it allocates, copies, reads, hashes and sends no more
than the benchmark allows."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "exchange.py"


@pytest.mark.timeout(120)
def test_an_exchange_of_a_small_fragment_keeps_to_its_counts():
    command = [sys.executable, str(BENCHMARK), "--counts", "--size", "2", "--only"]
    done = subprocess.run(
        [*command, "lowcomm", "noloco"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
