"""The benchmark of what pairs and groups keep of all-reduce's gain: it runs, resumes, and tells
seeds that chose apart from those that confirm."""

import json
from pathlib import Path

from helpers.scripts import load_benchmark

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "benchmarks" / "results" / "shares.json"


def test_every_result_in_the_repository_is_of_a_run_that_would_be_measured():
    keys = [job.key for job in load_benchmark("shares").jobs()]
    assert len(keys) == len(set(keys)), "two runs of one name"
    assert set(json.loads(COMMITTED.read_text())) <= set(keys)
