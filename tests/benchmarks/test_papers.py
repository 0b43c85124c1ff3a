"""What must hold beside the papers: the tables in docs/ are those of the committed results, and
the claims hold."""

import json
from pathlib import Path

import pytest

from helpers.scripts import load_benchmark

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "papers.json"


@pytest.fixture(scope="module")
def results() -> dict[str, object]:
    return json.loads(RESULTS.read_text())


def test_every_claim_about_the_papers_holds(results):
    claims = dict(load_benchmark("papers").checks(results))
    assert len(claims) >= 8
    assert [claim for claim, holds in claims.items() if not holds] == []


def test_the_timeline_gives_the_compute_utilization_of_the_paper():
    apart = load_benchmark("published.timeline").distances()
    assert len(apart) == 75
    assert max(apart) == 1 and apart.count(0) >= 60


def test_pages_have_the_tables_of_what_was_measured(results):
    papers = load_benchmark("papers")
    made = {name: make(results) for name, make in papers.TABLES.items()}
    held: set[str] = set()
    for page in papers.PAGES:
        held |= {found["name"] for found in papers.BLOCK.finditer(page.read_text())}
        assert page.read_text() == papers.filled(page.read_text(), made), (
            f"run: python benchmarks/papers.py --write, and commit {page.name}"
        )
    assert held == set(made)
