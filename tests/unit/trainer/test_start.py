"""What must hold for the start of a trainer: it loads nothing that a processor does not train
with."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys, tempfile
from pathlib import Path
from lowcomm_node.testing.driven_trainer import driven

with tempfile.TemporaryDirectory() as folder:
    with driven(Path(folder), "a", more='optimizer = "muon"') as (one,):
        one.steps(2)
print(*sys.modules)
"""


@pytest.mark.slow
def test_a_trainer_without_a_gpu_does_not_load_torchs_compiler():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True
    )
    loaded = set(run.stdout.split())
    assert "torch" in loaded and "lowcomm_node.trainer.loop" in loaded
    assert not loaded & {"torch._dynamo", "torch._inductor", "sympy"}
