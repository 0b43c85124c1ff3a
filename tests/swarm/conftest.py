"""Fixtures of the tests with real processes."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from kit import Swarm


@pytest.fixture
def swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Swarm]:
    """An empty swarm; whatever it starts is ended, also when the test fails."""
    # Sockets of a folder of our own (a short one, as sockets need): other swarms on this machine do not disturb.
    with tempfile.TemporaryDirectory(prefix="lc-", dir="/tmp") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        swarm = Swarm(tmp_path)
        try:
            yield swarm
        finally:
            swarm.close()
