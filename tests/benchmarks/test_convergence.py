"""The quick slice of the convergence benchmark runs, resumes, and writes what it promises; so does
a report of a part."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.scripts import load_benchmark

ROOT = Path(__file__).parents[2]
PARTS = ("methods", "wire", "attacks", "churn", "pairing")
COMMITTED = ROOT / "benchmarks" / "results" / "convergence.json"


def run(out: Path, *options: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/convergence.py", *options, "--out", str(out)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=check, timeout=840
    )


@pytest.mark.soak  # minutes; test_shares_benchmark.py has a slice of a benchmark of its kind
@pytest.mark.timeout(900)
def test_the_quick_slice_measures_every_part_and_resumes(tmp_path):
    out = tmp_path / "convergence.json"
    first = run(out, "--quick")
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
    again = run(out, "--quick")
    assert "1/1 " in again.stderr and "2/2 " not in again.stderr, "only what is missing is run"
    assert again.stdout == first.stdout, "and the same comes out"


def test_every_result_in_the_repository_is_of_a_run_that_would_be_measured():
    parts = load_benchmark("convergence_jobs").PARTS
    jobs = [job.key for part in parts.values() for job in part(quick=False)]
    assert len(jobs) == len(set(jobs))
    assert set(json.loads(COMMITTED.read_text())) <= set(jobs)


def test_a_report_is_of_what_has_been_measured_and_runs_nothing(tmp_path):
    out = tmp_path / "convergence.json"
    committed = json.loads(COMMITTED.read_text())
    # One seed of one row is missing, and all of another part.
    less = {key: one for key, one in committed.items() if not key.startswith("churn/")}
    del less[next(key for key in less if key.startswith("wire/calm/lowcomm, 1/50/muon/4/"))]
    out.write_text(json.dumps(less))
    report = run(out, "--report", check=False)
    assert "| lowcomm, 1/50 (2 of 3 seeds) |" in report.stdout
    assert "4 peers, lowcomm, 1/50 (2 of 3 seeds): " in report.stdout, "shares tell it, too"
    assert "churn" not in report.stdout
    assert "holds  4 peers, lowcomm, 1/50: share of all-reduce's bytes" in report.stdout
    assert not report.stderr
    assert json.loads(out.read_text()) == less


def test_of_what_is_claimed_only_that_does_not_hold_which_the_documentation_tells(tmp_path):
    out = tmp_path / "convergence.json"
    out.write_text(COMMITTED.read_text())
    report = run(out, "--report", check=False)
    # docs/measurements.md: 3 bits in pairs of 8 peers with Muon.
    failing = [line for line in report.stdout.splitlines() if line.startswith("FAILS")]
    assert [line.split(",")[0] for line in failing] == ["FAILS  lowcomm mod3: weight spread"]
    assert report.returncode == 1, "who runs the benchmark sees it"
    assert report.stdout.count("\nholds ") > 60
