"""A slice of ``make soak``: a swarm of which a peer is killed, stopped or started every few
seconds."""

from pathlib import Path

import pytest
from soak import INTERVAL, soak

pytestmark = [pytest.mark.chaos, pytest.mark.swarm, pytest.mark.timeout(700)]


def test_a_swarm_whose_peers_die_all_the_time_stays_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    result = soak(tmp_path / "soak", minutes=0.1, nodes=3, seed=1, kills=1, pause=(1.0, 3.0))
    assert result["violations"] == []
    assert result["private_mib"] > 0, "the memory of some node was looked at"
    assert result["swarm_steps_apart"] <= 2 * INTERVAL
    assert result["happened"]["killed"] >= 1
    assert all(survivor["completed"] > 0 for survivor in result["survivors"])
