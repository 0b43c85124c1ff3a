"""Tests on a GPU: `make gpu` runs them all and writes what they measured.

Without a GPU they are deselected, not skipped, for CI takes a skip as a failure. Where Triton is
installed, those marked `gpu(interpreted=True)` run on a CPU under its interpreter.

    pip install triton
    TRITON_INTERPRET=1 python -m pytest tests/gpu
"""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from lowcomm_node.models.devices import choose_device

HERE = Path(__file__).parent


def _runs(item: pytest.Item) -> bool:
    if torch.cuda.is_available():
        return True
    mark = item.get_closest_marker("gpu")
    fits = mark is not None and mark.kwargs.get("interpreted", False)
    asked = os.environ.get("TRITON_INTERPRET") == "1"
    return fits and asked and importlib.util.find_spec("triton") is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what can't run here."""
    ours = [item for item in items if HERE in item.path.parents]
    left_out = [item for item in ours if not _runs(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def device() -> torch.device:
    """The GPU, or what the interpreter computes on."""
    return choose_device("auto")
