"""Gives every inner step a fixed time, see `pacing.py`.

A step waits until its time is over, as for an accelerator, so that trainers that share cores train
equally fast. A look at held-out text takes its time from no step, and few windows where these are
told.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

SECONDS = float(os.environ.get("STEP_SECONDS", "0"))
WINDOWS = int(os.environ.get("LOOK_WINDOWS", "0"))
"""Of held-out text, for each look; 0: as many as the run says."""

looked: list[float] = []
"""Seconds of the looks since the last step."""


class Pacing(importlib.abc.MetaPathFinder):
    """Lets modules be found as ever, and wraps a function of theirs when they have been loaded."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """See MetaPathFinder."""
        if fullname not in WRAPPED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            WRAPPED[fullname](module)

        spec.loader.exec_module = exec_module
        return spec


def pace(module: Any) -> None:
    """Every step takes ``SECONDS`` at least."""
    step: Callable[[Any], None] = module.Replica.take_step

    def take_step(replica: Any) -> None:
        ends = monotonic() + SECONDS - sum(looked)
        looked.clear()
        step(replica)
        sleep(max(0.0, ends - monotonic()))

    module.Replica.take_step = take_step


def shorten(module: Any) -> None:
    """Every look takes ``WINDOWS`` at most, if that says any, and is remembered."""
    evaluate: Callable[..., Any] = module.evaluate

    def short(*given: Any, **options: Any) -> Any:
        began = monotonic()
        if WINDOWS:
            options["like"] = module.Evaluation(0.0, WINDOWS, WINDOWS * given[2])
        found = evaluate(*given, **options)
        looked.append(monotonic() - began)
        return found

    module.evaluate = short


WRAPPED = {
    "lowcomm_node.trainer.replica": pace,
    "lowcomm_node.models.evaluation": shorten,
}

if SECONDS:
    sys.meta_path.insert(0, Pacing())
