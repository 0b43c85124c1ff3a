"""Scripts of benchmarks/ as modules, for tests of what they count."""

import importlib.util
from pathlib import Path
from typing import Any


def load_benchmark(name: str) -> Any:
    """The module benchmarks/``name``.py, under a name that none of ours has."""
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
