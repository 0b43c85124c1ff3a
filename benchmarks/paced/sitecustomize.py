"""Gives every inner step a fixed time: a folder of PYTHONPATH, of the nodes of `slow_lines.py`.

A step waits until its time is over, as for an accelerator, so that trainers that share cores train
equally fast and the line alone limits exchanges.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

MODULE = "lowcomm_node.trainer.replica"
SECONDS = float(os.environ.get("STEP_SECONDS", "0"))


class Pacing(importlib.abc.MetaPathFinder):
    """Lets the module be found as ever, and wraps its step when it has been loaded."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """See MetaPathFinder."""
        if fullname != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            module.Replica.take_step = paced(module.Replica.take_step)

        spec.loader.exec_module = exec_module
        return spec


def paced(step: Callable[[Any], None]) -> Callable[[Any], None]:
    """The same step, which takes ``SECONDS`` at least."""

    def take_step(replica: Any) -> None:
        ends = monotonic() + SECONDS
        step(replica)
        sleep(max(0.0, ends - monotonic()))

    return take_step


if SECONDS:
    sys.meta_path.insert(0, Pacing())
