"""What all tests share."""

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

# No timed assertions: a first example compiles, and machines are noisy.
settings.register_profile("lowcomm", deadline=None)
settings.load_profile("lowcomm")


LATER = ("test_life.py", "test_rejoining.py", "test_tunnels.py")
"""Files of tests/swarm that are left for the end, when every worker is free for one."""


def _turn(file: str) -> int:
    path = Path(file)
    if path.parent.name == "swarm":
        return 3 if path.name in LATER else 0
    return 2 if path.parent.name == "benchmarks" else 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Most swarms first, which take longest; benchmarks late, which take every core."""
    items.sort(key=lambda item: _turn(item.nodeid.split("::")[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One swarm at a time, for each fills a machine with processes; unit tests run beside them, file by file."""
    from xdist.scheduler import LoadScopeScheduling

    class OneSwarmAtATime(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return file if _turn(file) else "swarm"

    config.option.loadscopereorder = False
    return OneSwarmAtATime(config, log)
