"""The benchmark of an exchange runs, and a node sends the bytes that its codec promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("method", "share"), [("lowcomm", 0.14), ("noloco", 1.01)])
def test_a_node_sends_what_its_codec_promises_and_no_more(tmp_path, method, share):
    out = tmp_path / "exchange.json"
    command = ["benchmarks/exchange.py", "--size", "1", "--runs", "1", "--alone"]
    command += ["--only", method, "--out", str(out)]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, timeout=300)
    row = json.loads(out.read_text())["1 MiB"]["rows"][method]
    assert 0 < row["bytes"] < share * 2**20 * 1.1, "the model has a few more values than asked for"
