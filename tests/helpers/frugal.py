"""Run a module where only the packages of a lock are installed:

python frugal.py LOCK MODULE ARGUMENTS...
"""

import re
import runpy
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

OURS = "lowcomm"


def name_of(distribution: str) -> str:
    """As the Python packaging index compares names."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def listed(lock: Path) -> dict[str, str]:
    """Name and version of each package in a lock."""
    lines = (
        line.partition(";")[0].partition("==")
        for line in lock.read_text().splitlines()
        if "==" in line
    )
    return {name_of(name.strip()): version.strip() for name, _, version in lines}


class Frugal:
    """Finds no module of any other installed package."""

    def __init__(self, lock: Path) -> None:
        allowed = listed(lock)
        self._refused = {
            module
            for module, distributions in packages_distributions().items()
            if not any(name_of(one) in allowed for one in distributions)
            and not module.startswith(OURS)
        }

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Raise ModuleNotFoundError for what is not listed."""
        if name.partition(".")[0] in self._refused:
            raise ModuleNotFoundError(f"no module named {name!r} is in the lock", name=name)


if __name__ == "__main__":
    sys.meta_path.insert(0, Frugal(Path(sys.argv[1])))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
