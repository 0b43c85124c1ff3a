"""Figures of each run over time, kept over restarts.

A series has a bounded number of points: once it is full, every second one goes, and points come
half as often. So it always spans the whole life of a run.
"""

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lowcomm_node.storage.files import write_atomic

MOST_POINTS = 480
FIRST_SPACING = 30.0
"""Seconds between two points of a young run."""
MOST_BYTES = 16 * 1024**2
FIGURES = ("time", "peers", "tokens", "tokens_per_second", "held_out_loss", "exchanges_per_minute")
"""What a point has, in this order."""

Point = list[float | None]


class Series:
    """The points of one run."""

    def __init__(self, points: list[Point] | None = None, spacing: float = FIRST_SPACING) -> None:
        self.points = points or []
        self.spacing = spacing

    def add(self, view: dict[str, Any], now: float) -> bool:
        """Take in what is told at a Unix time; whether it made a point."""
        if self.points and now - (self.points[-1][0] or 0.0) < self.spacing:
            return False
        loss = view["held_out_loss"]
        figures = [float(view[name]) for name in FIGURES[1:4]]
        self.points.append([now, *figures, loss, view["exchanges_per_minute"]])
        if len(self.points) > MOST_POINTS:
            del self.points[1::2]
            self.spacing *= 2
        return True


class History:
    """The series of all runs, in one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._series: dict[str, Series] = {}
        self.damaged = False
        """Whether there was a file that could not be read: it was set aside."""
        if path.exists():
            try:
                self._series = _read(path)
            except (OSError, ValueError, TypeError, KeyError, RecursionError):
                self.damaged = True
                path.replace(path.with_suffix(".damaged"))

    def of(self, run_id: str) -> Series:
        """The series of a run."""
        return self._series.setdefault(run_id, Series())

    def keep_only(self, run_ids: Collection[str]) -> None:
        """Forget all other runs."""
        self._series = {run: one for run, one in self._series.items() if run in run_ids}

    def save(self) -> None:
        """Write it. Raises DiskFull, OSError."""
        told = {
            run: {"spacing": one.spacing, "points": one.points} for run, one in self._series.items()
        }
        write_atomic(self._path, json.dumps({"figures": FIGURES, "runs": told}).encode())


def _read(path: Path) -> dict[str, Series]:
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path}: larger than {MOST_BYTES} bytes")
    told = json.loads(path.read_bytes())
    if told["figures"] != list(FIGURES):
        raise ValueError(f"{path}: other figures than {FIGURES}")
    return {run: _series(one) for run, one in told["runs"].items()}


def _series(told: dict[str, Any]) -> Series:
    points, spacing = told["points"][:MOST_POINTS], float(told["spacing"])
    if not FIRST_SPACING <= spacing < math.inf:
        raise ValueError(f"a spacing of {spacing} s")
    for point in points:
        if len(point) != len(FIGURES) or not all(
            one is None or (isinstance(one, int | float) and math.isfinite(one)) for one in point
        ):
            raise ValueError(f"a point {point}")
    return Series(points, spacing)
