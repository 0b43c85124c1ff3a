"""What was measured of each method: the share of all-reduce's gain over one replica alone, by the
interval. ``measured.json`` has it; ``benchmarks/measured_shares.py`` writes that from results.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from math import log
from statistics import mean
from typing import Any

FURTHER = 1.1
"""Times the longest interval that was measured, up to which its share still counts."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A method that was measured at one interval, with one number of peers."""

    method: str
    """Name of the preset."""
    optimizer: str
    """The inner one."""
    peers: int
    """Of the swarm."""
    interval: int
    """Steps between two exchanges of a fragment."""
    sync: Mapping[str, Any] = field(default_factory=dict)
    """Its other settings of `[sync]` that are not those of the preset."""
    steps: int
    """Of each run that was measured."""
    shares: tuple[float, ...]
    """Share of all-reduce's gain over one replica, seed by seed."""
    resent: float
    """Bytes that were sent, for each of coded values: blocks of modulo codecs wrap."""

    @property
    def share(self) -> float:
        """The mean over the seeds."""
        return mean(self.shares)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All of it, and on what."""

    parameters: int
    """Of the model."""
    points: tuple[Point, ...]
    """Each method at each interval."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What the measurements give for one interval."""

    share: float | None
    """Of all-reduce's gain over one replica alone; null beyond the longest interval that was
    measured."""
    measured: tuple[Point, ...]
    """The figures that it comes from: with the nearest number of peers, the nearest intervals."""
    longest: int
    """The longest interval that was measured."""


@cache
def measured() -> Measured:
    """The figures that this release brings."""
    text = (
        resources.files("lowcomm_node.planner")
        .joinpath("measured.json")
        .read_text(encoding="utf-8")
    )
    found = json.loads(text)
    points = tuple(Point(**one | {"shares": tuple(one["shares"])}) for one in found["points"])
    return Measured(parameters=found["parameters"], points=points)


def points_of(method: str, optimizer: str, peers: int, interval: float = 0.0) -> tuple[Point, ...]:
    """What was measured of a method, by interval, with the number of peers nearest to ``peers``.

    Numbers with which intervals as long as ``interval`` were measured come first: with more peers
    fewer intervals were.
    """
    all_ = [p for p in measured().points if (p.method, p.optimizer) == (method, optimizer)]
    if not all_:
        return ()
    reaching = {p.peers for p in all_ if interval <= FURTHER * p.interval}
    counts = reaching or {p.peers for p in all_}
    nearest = min(counts, key=lambda count: abs(log(count / peers)))
    return tuple(sorted((p for p in all_ if p.peers == nearest), key=lambda p: p.interval))


def nearest_point(method: str, optimizer: str, peers: int, interval: float) -> Point | None:
    """What was measured nearest to an interval; None if nothing was."""
    points = points_of(method, optimizer, peers, interval)
    return min(points, key=lambda p: abs(log(p.interval / interval)), default=None)


def keeps_most(method: str, optimizer: str, peers: int, usual: int) -> int:
    """The interval that keeps most with so many peers: ``usual``, or a shorter one that was
    measured."""
    points = points_of(method, optimizer, peers, usual)
    shorter = [point for point in points if point.interval <= usual]
    best = max(shorter, key=lambda point: point.share, default=None)
    return usual if best is None else best.interval


def estimate(method: str, optimizer: str, peers: int, interval: float) -> Estimate | None:
    """The share at an interval, between those that were measured; None if nothing was."""
    points = points_of(method, optimizer, peers, interval)
    if not points:
        return None
    longest = points[-1].interval
    below = [p for p in points if p.interval <= interval][-1:]
    above = [p for p in points if p.interval > interval][:1]
    if not above:
        share = points[-1].share if interval <= FURTHER * longest else None
        return Estimate(share=share, measured=tuple(below), longest=longest)
    if not below:
        return Estimate(share=above[0].share, measured=tuple(above), longest=longest)
    [left], [right] = below, above
    way = log(interval / left.interval) / log(right.interval / left.interval)
    share = left.share + way * (right.share - left.share)
    return Estimate(share=share, measured=(left, right), longest=longest)
