"""What must hold for kernels: all that exchanges of a run need are there before its first inner
step."""

import subprocess
import sys
from pathlib import Path

import pytest

from lowcomm_node.trainer import rehearsal

EXCHANGES = """
import sys
from pathlib import Path
from lowcomm_node.data import open_data
from lowcomm_node.simulation.swarm import Member, simulate
from lowcomm_node.trainer.rehearsal import rehearse
import torch
from lowcomm_protocol.codecs import kernels
from lowcomm_protocol.exchange.outer import worst_block_spread
from lowcomm_protocol.spec.run import parse_toml

def known():
    return {(str(one), str(each)) for one in kernels._kept for each in one.signatures}

spec = parse_toml(sys.argv[1])
rehearse(spec.sync)
worst_block_spread([torch.zeros(256), torch.zeros(256)])  # what a simulation measures with
rehearsed = known()
folder = Path(sys.argv[2])
for name in ("a.txt", "b.txt"):
    (folder / name).write_text("A short text, and again a short text. " * 300)
dataset = open_data(f"text:{folder}", "bytes", folder / "cache")
came = simulate(spec, dataset, [Member(), Member(speed=0.7), Member(), Member(speed=0.3)])
print(len(rehearsed), came.applied, *sorted(known() - rehearsed), sep="\\n")
"""
RUN = """
[run]
name = "test"
steps = 24
[model]
layers = 1
width = 32
heads = 2
feed_forward = 32
context = 16
[train]
batch = 2
[sync]
method = "{method}"
interval = 4
fragments = 2
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        "streaming-diloco",
        *(pytest.param(one, marks=pytest.mark.soak) for one in ("lowcomm", "noloco")),
    ],
)
def test_exchanges_call_no_kernel_that_was_not_rehearsed(method: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXCHANGES, RUN.format(method=method), str(tmp_path)]
    told = subprocess.run(command, check=True, timeout=170, capture_output=True, text=True).stdout
    rehearsed, applied, *new = told.splitlines()
    assert int(rehearsed) > 0 and int(applied) > 0
    assert new == []


def test_of_trainers_that_start_together_one_compiles_and_the_others_wait(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with rehearsal.alone(folder) as first:
        assert first
        with rehearsal.alone(folder, patience=0.0) as second:
            assert not second
    with rehearsal.alone(folder, patience=0.0) as third:
        assert third
