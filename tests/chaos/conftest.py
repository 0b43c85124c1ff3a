"""Fixtures of the tests that break things on purpose."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.processes import Swarm, lonely_swarm


@pytest.fixture
def swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Swarm]:
    """An empty swarm; whatever it starts is ended, also when the test fails."""
    with lonely_swarm(tmp_path, monkeypatch) as swarm:
        yield swarm
