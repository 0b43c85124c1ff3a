"""What all tests share."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from helpers import keeping
from helpers.pacing import SHORT_LOOK, pace
from helpers.processes import Swarm, lonely_swarm
from helpers.skips import (  # noqa: F401 - hooks
    pytest_addoption,
    pytest_runtest_makereport,
    pytest_terminal_summary,
)

# Models of tests are no work for several threads, which spin while they wait for each other. Before
# torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No timed assertions: a first example compiles, and machines are noisy.
settings.register_profile("lowcomm", deadline=None)
settings.load_profile("lowcomm")


LONG = (
    "test_guides.py", "test_fuzz.py", "test_two_nodes.py", "test_amending.py",
    "test_models_page.py", "test_page_in_browser.py", "test_bootstrap.py", "test_soak.py",
    "test_packed.py", "test_discovery.py", "test_liars.py", "test_life.py", "test_door.py",
    "test_kills.py",
)  # fmt: skip
"""Files with real processes that take half a minute or more. They begin first: the last one would
end alone on one worker."""
PROCESSES = ("swarm", "benchmarks", "chaos", "fuzz", "net", "images", "llama")
"""Folders whose tests wait for other processes more than they compute."""
AT_ONCE = 2
"""Workers that run these while there are others to run: two swarms fill a machine."""


# Modules, test items and what they hold stay: nothing is searched for garbage until all are there.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    """Nothing outlives us."""
    keeping.start()
    _begin_elsewhere(config)


def _begin_elsewhere(config: pytest.Config) -> None:
    """Where several workers collect all tests, each begins with other files: pytest rewrites the
    asserts of a file where nobody has yet, which takes longer than all else."""
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    files = sorted(map(str, Path("tests").rglob("test_*.py")))
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    config.args[:] = files[first:] + files[:first]


def pytest_collection_finish() -> None:
    """See ``gc.disable``."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def paced() -> None:
    """Nodes leave cores to what their test waits for: a step of a tiny model takes a hundredth of a
    second, so two that train take both, and a look at held-out text a quarter of a second."""
    pace(0.1, SHORT_LOOK)


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    """An empty swarm; whatever it starts is ended, also when the test fails."""
    with lonely_swarm(tmp_path) as swarm:
        yield swarm


def _has_processes(nodeid: str) -> bool:
    path = nodeid.split("::")[0].split("/")  # tests/FOLDER/...
    return path[1] in PROCESSES


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Fast tests first. Where several workers share them, the longest first."""
    alone = not hasattr(config, "workerinput")
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def place(item: pytest.Item) -> tuple[bool, int, str]:
        name = item.path.name
        late = LONG.index(name) if name in LONG else len(LONG) + (item.path not in slow)
        return _has_processes(item.nodeid), -late if alone else late, str(item.path)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """File by file, and few swarms at a time."""
    from xdist.scheduler import LoadScopeScheduling

    class FewSwarmsAtATime(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.split("::")[0]

        def _assign_work_unit(self, node: Any) -> None:
            busy = sum(
                any(_has_processes(file) and not all(done.values()) for file, done in files.items())
                for other, files in self.assigned_work.items()
                if other is not node
            )
            fits = (file for file in self.workqueue if _has_processes(file) == (busy < AT_ONCE))
            self.workqueue.move_to_end(next(fits, next(iter(self.workqueue))), last=False)
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False
    return FewSwarmsAtATime(config, log)
