"""Each method on a line, and which one to take. Pure.

Measurements of each method (measured.json, by ``benchmarks/measured_shares.py``) say which share of
all-reduce's gain over one replica alone is left at an interval.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import inf, log
from statistics import mean
from typing import Any

import numpy as np

from lowcomm_node.models.stages import halves_of
from lowcomm_node.planner.line import Line
from lowcomm_node.planner.pace import FRAMING, LinePace, contents, pace_on
from lowcomm_node.system.units import seconds
from lowcomm_node.trainer.memory import count_trained, estimate_memory
from lowcomm_node.trainer.micro_batch import Cut
from lowcomm_protocol.spec.presets import PRESETS
from lowcomm_protocol.spec.run import MOST_VALUES, RunSpec, fragment_count

OPTIMIZER = "muon"
"""Inner optimizer for comparing methods, unless a run has its own: all gain most by it."""
LONGEST = 1_000_000
"""Longest interval that a run can have."""
TRIES = 8
"""Codec and fragments follow the interval, and it follows them."""
FURTHER = 1.1
"""Factor beyond the longest measured interval up to which its share still counts."""


@dataclass(frozen=True, kw_only=True)
class MeasuredPoint:
    """A method that was measured at one interval, with one number of peers."""

    method: str
    """Name of the preset."""
    optimizer: str
    """Inner optimizer."""
    peers: int
    interval: int
    """Steps between two exchanges of a fragment."""
    sync: Mapping[str, Any]
    """Its other settings of `[sync]` that are not those of the preset."""
    steps: int
    """Steps of each measured run."""
    shares: tuple[float, ...]
    """Share of all-reduce's gain over one replica, seed by seed."""
    resent: float
    """Bytes that were sent, for each of coded values: blocks of modulo codecs wrap."""

    @property
    def share(self) -> float:
        """The mean over the seeds."""
        return mean(self.shares)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One method on the line. Memory is the least that a peer needs: one window of text at a time,
    and activations computed again."""

    method: str
    """Name of the preset."""
    settings: Mapping[str, Any]
    """Settings of `[sync]` that differ from the preset."""
    codec: str
    fragments: int
    """Pieces that the model is cut into."""
    written: int
    """The interval of the settings."""
    interval: float
    """Steps between two exchanges of a fragment that result: longer where the line doesn't carry
    the written interval."""
    contents: int
    """Bytes of coded values that a peer sends in an exchange of a fragment of mean size, blocks
    that are sent again included; as many are received."""
    line_seconds: float
    """Seconds for which an exchange fills the line."""
    host_bytes: int
    """Memory of a machine that trains on its processor."""
    gpu_host_bytes: int
    """Memory of a machine that trains on a GPU."""
    gpu_bytes: int
    """Memory of the GPU."""
    stage_bytes: tuple[int, ...]
    """Memory of two machines that hold half of the blocks each, the head first; empty where the
    model can't be cut."""
    run_bytes: int
    """Bytes that a peer sends over the whole run."""
    share: float | None
    """Share of all-reduce's gain over one replica alone; null beyond the longest interval that was
    measured."""
    measured: tuple[MeasuredPoint, ...]
    """The figures that the share comes from, by interval: with the nearest number of peers."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The costs of a run on a line, by method."""

    parameters: int
    steps: int
    tokens: int
    """Tokens that all peers train on together."""
    hours: float
    """Hours of the run with any method: training waits for no exchange."""
    line: Line
    as_written: Choice | None
    """The run as its file has it; null without a file."""
    choices: tuple[Choice, ...]
    """Each method with the shortest interval that fits, the best first."""
    allreduce_bytes: int
    """Bytes that a peer sends for a step if gradients are averaged at every step instead."""
    allreduce_seconds: float
    """Seconds of such a step, with its gradients on the line."""
    reason: str
    """Why the first is the best."""


def plan(spec: RunSpec, line: Line, from_file: bool) -> Plan:
    """The costs of a run; ``from_file``: its settings of ``[sync]`` are its creator's choice."""
    optimizer = spec.train.optimizer if from_file else OPTIMIZER
    parameters = count_trained(spec)
    known = {point.method for point in measured()[1] if point.optimizer == optimizer}
    presets = [with_method(spec, method, optimizer, {}) for method in PRESETS if method in known]
    fitting = [_fit(one, line) for one in presets if not one.sync.realigns_among(line.peers)]
    choices = sorted((choice_of(fitted, line) for fitted in fitting), key=_rank)
    # A ring sends every fp32 gradient to all but one.
    sent = 8 * parameters * (line.peers - 1) / line.peers
    return Plan(
        parameters=parameters,
        steps=spec.run.steps,
        tokens=spec.run.steps * spec.tokens_per_step * line.peers,
        hours=spec.run.steps * line.step_seconds / 3600,
        line=line,
        as_written=choice_of(spec, line) if from_file and spec.sync.group > 1 else None,
        choices=tuple(choices),
        allreduce_bytes=round(sent),
        allreduce_seconds=line.step_seconds + FRAMING * sent / line.slower,
        reason=_reason(choices, line.step_seconds),
    )


def with_method(spec: RunSpec, method: str, optimizer: str, changes: Mapping[str, Any]) -> RunSpec:
    """The same run with another method, and ``changes`` of its settings."""
    content = spec.model_dump()
    content["train"]["optimizer"] = optimizer
    return RunSpec.model_validate(content | {"sync": {"method": method, **changes}})


def choice_of(spec: RunSpec, line: Line) -> Choice:
    """The costs of a run as it is written."""
    sync, pace = spec.sync, _pace(spec, line)
    points = _points(spec, line, pace.interval)
    share = None
    if points and pace.interval <= FURTHER * points[-1].interval:
        intervals, shares = [log(p.interval) for p in points], [p.share for p in points]
        share = float(np.interp(log(pace.interval), intervals, shares))
    usual = with_method(spec, sync.method, spec.train.optimizer, {}).sync.model_dump()
    own = {name: value for name, value in sync.model_dump().items() if value != usual[name]}
    host, gpu = (estimate_memory(spec, gpu=gpu, cut=Cut(1, True)) for gpu in (False, True))
    stages = (
        estimate_memory(spec, False, cut=Cut(1, True), stage=one).host_bytes
        for one in halves_of(spec)
    )
    return Choice(
        method=sync.method,
        settings={name: value for name, value in own.items() if name != "min_steps"},  # it follows
        codec=sync.codec,
        fragments=sync.fragments,
        written=sync.interval,
        interval=pace.interval,
        contents=round(pace.coded),
        line_seconds=pace.line_seconds,
        host_bytes=host.host_bytes,
        gpu_host_bytes=gpu.host_bytes,
        gpu_bytes=gpu.device_bytes,
        stage_bytes=tuple(stages),
        run_bytes=round(spec.run.steps / pace.interval * sync.fragments * pace.sent),
        share=share,
        measured=tuple(points),
    )


def _fit(spec: RunSpec, line: Line) -> RunSpec:
    """A preset at the shortest interval that the line carries and that pays, with the settings that
    were measured nearest to it."""
    parameters, usual = count_trained(spec), PRESETS[spec.sync.method].sync
    shortest = usual["interval"]
    shorter = [p for p in _points(spec, line, shortest) if p.interval <= shortest]
    if shorter:
        shortest = max(shorter, key=lambda p: p.share).interval
    if usual["fragments"] > 1:  # of which there is one a step at most
        shortest = max(shortest, -(-parameters // MOST_VALUES))
    for _ in range(TRIES):
        interval = min(LONGEST, max(shortest, _pace(spec, line).shortest))
        near = _nearest(spec, line, interval)
        changes = {**(near.sync if near else {}), "interval": interval}
        if usual["fragments"] > 1:
            changes["fragments"] = fragment_count(parameters, interval, usual["fragments"])
        fitted = with_method(spec, spec.sync.method, spec.train.optimizer, changes)
        if fitted == spec:
            break
        spec = fitted
    return spec


def _pace(spec: RunSpec, line: Line) -> LinePace:
    sync, values = spec.sync, round(count_trained(spec) / spec.sync.fragments)
    near, resent = _nearest(spec, line, sync.interval), 1.0
    if near is not None:
        # The less weights move between two exchanges, the fewer blocks wrap.
        resent += (near.resent - 1) * min(1.0, sync.interval / near.interval)
    coded = resent * contents(sync, values, min(sync.group, line.peers))
    return pace_on(line, sync, coded, values)


# measurements


@cache
def measured() -> tuple[int, tuple[MeasuredPoint, ...]]:
    """Parameters of the measured model, and the figures that this release brings."""
    file = resources.files("lowcomm_node.planner").joinpath("measured.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    points = (MeasuredPoint(**one | {"shares": tuple(one["shares"])}) for one in content["points"])
    return content["parameters"], tuple(points)


def _points(spec: RunSpec, line: Line, interval: float) -> list[MeasuredPoint]:
    """The measurements of a method by interval, with the nearest number of peers.

    Numbers with which intervals as long as ``interval`` were measured come first: with more peers
    fewer intervals were.
    """
    asked = spec.sync.method, spec.train.optimizer
    known = [p for p in measured()[1] if (p.method, p.optimizer) == asked]
    reaching = [p for p in known if interval <= FURTHER * p.interval]
    counts = [p.peers for p in reaching or known]
    nearest = min(counts, key=lambda count: abs(log(count / line.peers)), default=0)
    return sorted((p for p in known if p.peers == nearest), key=lambda p: p.interval)


def _nearest(spec: RunSpec, line: Line, interval: float) -> MeasuredPoint | None:
    points = _points(spec, line, interval)
    return min(points, key=lambda p: abs(log(p.interval / interval)), default=None)


# the best


def _rank(choice: Choice) -> tuple[float, float, int]:
    """The largest share first; where none is known, what is nearest to what was measured."""
    if choice.share is not None:
        return -choice.share, 0.0, choice.run_bytes
    return inf, choice.interval / choice.measured[-1].interval, choice.run_bytes


def _reason(choices: list[Choice], step_seconds: float) -> str:
    best = choices[0]
    every = f"every {best.interval:.0f} steps"
    if best.share is None:
        longest = best.measured[-1].interval
        longer = seconds(step_seconds * best.interval / longest)
        return (
            f"{best.method}: {every} is nearest to what was measured (up to every {longest}), but "
            f"nobody knows what is left of the gain there. With steps of {longer}, of a larger "
            f"batch, it would be every {longest}"
        )
    known = [f"{other.method} {other.share:.0%}" for other in choices[1:] if other.share]
    beside = f" ({', '.join(known[:2])})" if known else ""
    return (
        f"{best.method}: it keeps {best.share:.0%} of all-reduce's gain {every}, which this "
        f"line carries, more than any other{beside}"
    )
