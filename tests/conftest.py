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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Swarms first: they take longest."""
    items.sort(key=lambda item: item.get_closest_marker("swarm") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One swarm at a time, for each fills a machine with processes; all else runs beside them, file by file."""
    from xdist.scheduler import LoadScopeScheduling

    class OneSwarmAtATime(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return "swarm" if file.startswith("tests/swarm/") else file

    config.option.loadscopereorder = False
    return OneSwarmAtATime(config, log)
