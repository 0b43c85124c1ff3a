"""What all tests share."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from helpers import keeping
from helpers.pacing import SHORT_LOOK, pace
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


LATER = ("test_life.py", "test_rejoining.py", "test_tunnels.py")
"""Files of tests/swarm that are left for the end, when every worker is free for one."""
LONG = ("test_fuzz.py", "test_soak.py")
"""Files that take minutes each. They run before the other real processes, for the last one would
end alone on one worker."""
FOLDERS = ("unit", "long", "net", "chaos", "images")
"""In this order, the fast ones first; ``LONG`` counts as a folder."""


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
    pace(0.05, SHORT_LOOK)


def _turn(file: str) -> int:
    path = Path(file)
    folder = path.parts[1] if len(path.parts) > 2 else ""  # tests/FOLDER/...
    if folder in ("swarm", "benchmarks"):
        return len(FOLDERS) + 1 if path.name in LATER else 0
    folder = "long" if path.name in LONG else folder
    return 1 + FOLDERS.index(folder) if folder in FOLDERS else 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Fast tests first. Where several workers share them, swarms first of all: one worker has all
    of them, and takes longest."""
    alone = not hasattr(config, "workerinput")

    def place(item: pytest.Item) -> tuple[int, str]:
        file = item.nodeid.split("::")[0]
        return _turn(file) or (len(FOLDERS) if alone else 0), file

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One swarm or benchmark at a time, for each fills a machine; unit tests run beside them, file
    by file."""
    from xdist.scheduler import LoadScopeScheduling

    class OneSwarmAtATime(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return file if _turn(file) else "swarm"

    config.option.loadscopereorder = False
    return OneSwarmAtATime(config, log)
