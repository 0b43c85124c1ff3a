"""The benchmark of what pairs and groups keep of all-reduce's gain: it runs, resumes, and tells
seeds that chose apart from those that confirm."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.scripts import load_benchmark

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "benchmarks" / "results" / "shares.json"
BYTES = 1000.0


def run(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/shares.py", *options, "--out", str(out)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_the_quick_slice_counts_contents_and_control_and_resumes(tmp_path):
    out = tmp_path / "shares.json"
    options = ("--quick", "--processes", "1", "--only", "^(all-reduce, 0.02|pairs, mod3)")
    run(out, *options)
    results = json.loads(out.read_text())
    by_row = {key.split("/")[0].split(",")[0]: one for key, one in results.items()}
    assert set(by_row) == {"all-reduce", "pairs"}
    assert by_row["pairs"]["bytes_sent"] > 20 * by_row["pairs"]["control_sent"] > 0
    assert by_row["all-reduce"]["control_sent"] == 0
    removed = next(key for key in results if key.startswith("all-reduce"))
    out.write_text(json.dumps({key: one for key, one in results.items() if key != removed}))
    again = run(out, *options)
    assert "1/1 all-reduce" in again.stderr, "only what is missing is measured"
    assert json.loads(out.read_text())[removed]["loss"] == results[removed]["loss"]


def test_every_result_in_the_repository_is_of_a_run_that_would_be_measured():
    keys = [job.key for job in load_benchmark("shares_jobs").jobs()]
    assert len(keys) == len(set(keys)), "two runs of one name"
    assert set(json.loads(COMMITTED.read_text())) <= set(keys)


def told(loss: float, sent: float = BYTES, **more: float) -> dict[str, float]:
    return {"loss": loss, "average_loss": loss, "spread": 0.0, "bytes_sent": sent, **more}


def test_tables_tell_seeds_that_chose_apart_from_those_that_confirm():
    table, report = load_benchmark("shares_jobs"), load_benchmark("shares_report")
    slow, fast = (row for row in table.BASELINES if row.name != table.SINGLE)
    single = next(row for row in table.BASELINES if row.name == table.SINGLE)
    row = table.Row("pairs of a test", 60, "lowcomm", peers=(8,))
    every = list(table.jobs((single, slow, fast, row)))
    # With eight peers the second rate ended lower on seed 0, so it is the baseline there.
    losses = {single.name: 2.0, slow.name: 1.2, fast.name: 1.0}
    results = {
        job.key: told(losses[job.row.name])
        for job in every
        if job.row.name in losses and (job.row != fast or job.seed == 0)
    }
    kept = {0: told(1.25, 10.0, control_sent=10.0), 4: told(1.5, 10.0, control_sent=10.0)}
    results |= {job.key: kept[job.seed] for job in every if job.row == row and job.seed in kept}
    lines = report.tables(every, results).splitlines()
    assert [line for line in lines if "of a test" in line] == [
        "| pairs of a test | 8 | 75.0 (75) |  | 75.0 | 0.0e+00 | 1/100 | 1/50 |"
    ], "seed 4 has no baseline of that rate"
    later = list(table.jobs((table.Row(fast.name, train=fast.train, peers=(8,), seeds=(4,)),)))
    results |= {job.key: told(1.0) for job in later}
    line = next(
        one for one in report.tables([*every, *later], results).splitlines() if "of a test" in one
    )
    assert "| 75.0 (75) | 50.0 (50) | 62.5 |" in line
