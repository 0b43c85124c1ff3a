"""The quick slice of the convergence benchmark runs, resumes, and writes what it promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("methods", "wire", "attacks", "churn")


def run(out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/convergence.py", "--quick", "--out", str(out)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=840)


@pytest.mark.timeout(900)
def test_the_quick_slice_measures_every_part_and_resumes(tmp_path):
    out = tmp_path / "convergence.json"
    first = run(out)
    results = json.loads(out.read_text())
    assert {key.split("/")[0] for key in results} == set(PARTS)
    assert all(0.5 < one["loss"] < 5.0 for one in results.values())
    for part in PARTS:
        assert f"**{part}, " in first.stdout
    assert "% " in first.stdout and "of all-reduce's gain" in first.stdout
    assert first.stdout.strip() == out.with_suffix(".md").read_text().strip()
    for plot in ("loss-tokens.png", "loss-bytes.png"):
        assert (tmp_path / plot).read_bytes().startswith(b"\x89PNG")
    removed = next(key for key in results if "/single/" in key)
    out.write_text(json.dumps({key: one for key, one in results.items() if key != removed}))
    again = run(out)
    assert "1/1 " in again.stderr and "2/2" not in again.stderr, "only what is missing is measured"
    assert again.stdout == first.stdout, "and the same comes out"
