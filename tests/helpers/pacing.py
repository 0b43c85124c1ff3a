"""Gives the inner steps of nodes a fixed time, so that others get the cores that they share."""

import os
from pathlib import Path

HOOK = Path(__file__).parent / "paced"
"""Its `sitecustomize` is found by every Python that is started with it on the path."""
SHORT_LOOK = 64
"""Windows of held-out text that a look takes."""


def pace(seconds: float, windows: int | None = None) -> None:
    """Inner steps of nodes that are started from now on take so many seconds at least; ``windows``:
    of held-out text, the most that a look takes."""
    kept = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(HOOK), *kept]))
    os.environ["STEP_SECONDS"] = str(seconds)
    if windows is not None:
        os.environ["LOOK_WINDOWS"] = str(windows)
