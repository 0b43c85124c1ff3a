"""What must hold for the arithmetic of exchanges: weights are the same to the bit on every
processor, with any number of threads, and in every release."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "helpers" / "merged_bits.py"
RECORDED = {
    "lowcomm": "8069f7dcfd74c0c6",
    "lowcomm, bf16": "ab36a1704a049149",
    "noloco": "39bf82f961829f7d",
    "gossip": "e0aa7e85efd88d2d",
    "diloco in pairs": "37a441fd27ad41a1",
    "diloco": "37f927d8c5ae3af3",
    "streaming-diloco": "775d80c540425b68",
    "streaming-diloco, bf16": "2145decc261829dd",
    "realigned": "b4f4e00c202598a4",
    "odd numbers": "8f452e50a2367e66",
    "remembering": "f4944d231a93f681",
}
"""Of version 0.1, without the instructions that round a product and a sum at once. A momentum of 0
was kept then, and does not count. 0.1 did not know ``remembering``: it is of the release that
brought it."""


KNOWN = ["default", "avx2", "avx512"]


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "threads"), [("default", 2), ("avx2", 1), ("avx512", 2)])
def test_weights_are_those_that_were_recorded(capability: str, threads: int):
    ours = torch.backends.cpu.get_cpu_capability().lower()
    most = KNOWN.index(ours) if ours in KNOWN else 0
    capability = KNOWN[min(most, KNOWN.index(capability))]  # more would be an illegal instruction
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(threads)],
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert json.loads(done.stdout) == RECORDED
