"""Scripts of benchmarks/ as modules, for tests of what they count."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load_benchmark(name: str) -> Any:
    """The module benchmarks/``name``.py, and through it those that it imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        return import_module(name)
