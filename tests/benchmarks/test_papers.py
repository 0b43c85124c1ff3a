"""What must hold for the page about papers: its tables are those of the committed results, and the
claims hold."""

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
    claims = dict(load_benchmark("published.report").checks(results))
    assert len(claims) >= 8
    assert [claim for claim, holds in claims.items() if not holds] == []


def test_the_timeline_gives_the_compute_utilization_of_the_paper():
    apart = load_benchmark("published.timeline").distances()
    assert len(apart) == 75
    assert max(apart) == 1 and apart.count(0) >= 60


def test_the_timeline_slows_down_with_a_layer_that_waits():
    timeline = load_benchmark("published.timeline")
    shape = timeline.SHAPES[0]
    for method in timeline.METHODS.values():
        share = timeline.utilization(shape, method)
        assert (share[1:] >= share[:-1] - 1e-9).all(), "a faster line never costs time"
        assert share[0] < 0.5 < 0.9 < share[-1] <= 1 + 1e-9


def test_pages_have_the_tables_of_what_was_measured(results):
    papers, tables = load_benchmark("papers"), load_benchmark("published.tables")
    made = {name: make(results) for name, make in papers.report.TABLES.items()}
    held: set[str] = set()
    for page in papers.PAGES:
        held |= tables.names(page.read_text())
        assert page.read_text() == tables.filled(page.read_text(), made), (
            f"run: python benchmarks/papers.py --write, and commit {page.name}"
        )
    assert held == set(made)


def test_what_was_not_measured_is_told_in_its_table():
    report = load_benchmark("published.report")
    assert "not measured" in report.tree({}) and "not measured" in report.barrier({})


@pytest.mark.parametrize("method", ["streaming-diloco", "lowcomm"])
def test_the_engine_without_tensors_merges_what_members_learn_and_loses_what_fails(method):
    hollow, runs = load_benchmark("published.hollow"), load_benchmark("lowcomm_protocol.spec.run")
    network = load_benchmark("lowcomm_node.simulation.network")
    spec = runs.RunSpec.model_validate(
        {"run": {"name": "papers", "steps": 10**6}, "sync": {"method": method, "interval": 8}}
    )

    def run(failures):
        world = hollow.World(
            spec, 10**6, 4, network.Conditions(), lambda random: 1.0, failures, 120.0
        )
        return world.run()

    calm, failing = run(None), run(hollow.Failures(between=60.0, restart=20.0))
    assert calm.steps == 4 * 119 and calm.failed == 0
    assert calm.merged > 0.9 * calm.steps, "but for those since the last exchange"
    assert 0 < failing.merged < 0.9 * calm.merged
    assert failing.steps < calm.steps


def test_a_barrier_loses_what_came_since_the_last_one():
    goodput = load_benchmark("published.goodput")
    often, rarely = goodput.barrier(1, 0.0, 1.0), goodput.barrier(30, 70.0, 1.0)
    assert rarely < often < 1
    assert goodput.barrier(1, 0.0, goodput.hours_at(0.27)) == pytest.approx(0.27)
    assert goodput.barrier(30, 70.0, float("inf")) == pytest.approx(0.945, abs=5e-4)
