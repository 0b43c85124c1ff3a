"""Each method on a line, and which one to take. Pure.

Measurements of each method (measured.json, by ``benchmarks/measured_shares.py``) say which share of
all-reduce's gain over one replica alone is left at an interval.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from math import inf, log
from statistics import mean
from typing import Any

from lowcomm_node.errors import ConfigError
from lowcomm_node.planner import pace
from lowcomm_node.planner.question import Line, Question
from lowcomm_node.trainer.memory import count_parameters, estimate_memory
from lowcomm_node.trainer.micro_batch import Cut
from lowcomm_protocol.spec.presets import PRESETS
from lowcomm_protocol.spec.run import MOST_VALUES, RunSpec, fragment_count

OPTIMIZER = "muon"
"""Inner optimizer for comparing methods, unless a run has its own: all gain most by it."""
OF_PAPERS = "-paper"
"""Ending of presets with the settings of papers, whatever the line: for comparison alone."""
FOLLOWING = ("method", "min_steps")
"""Settings of ``[sync]`` that follow from the rest, so no plan writes them."""
LONGEST = 1_000_000
"""Longest interval that a run can have."""
TRIES = 8
"""Codec and fragments follow the interval, and it follows them."""
NEAR = 1.15
"""Largest factor between the written interval and the resulting one that counts as the same."""
FURTHER = 1.1
"""Factor beyond the longest measured interval up to which its share still counts."""


# records


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
    sync: Mapping[str, Any] = field(default_factory=dict)
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
class Estimate:
    """The share at one interval, from measurements."""

    share: float | None
    """Share of all-reduce's gain over one replica alone; null beyond the longest interval that was
    measured."""
    measured: tuple[MeasuredPoint, ...]
    """The figures that it comes from: with the nearest number of peers, the nearest intervals."""
    longest: int
    """The longest interval that was measured."""


@dataclass(frozen=True, kw_only=True)
class ExchangeCost:
    """One exchange of a fragment of mean size, at one member."""

    members: int
    """Number of peers that take part."""
    contents: int
    """Bytes of coded values sent, blocks that are sent again included; as many are received."""
    control: int
    """Bytes of the frames that agree on it."""
    line_seconds: float
    """Seconds for which it fills the line."""
    seconds: float
    """Seconds from when it is due until it is merged, where the others are on the line, too."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Least memory of a peer: a window of text at a time, activations computed again."""

    host_bytes: int
    """Memory of a machine that trains on its processor."""
    gpu_host_bytes: int
    """Memory of a machine that trains on a GPU."""
    gpu_bytes: int


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One method on the line."""

    method: str
    """Name of the preset."""
    optimizer: str
    """The inner one."""
    settings: Mapping[str, Any]
    """Settings of `[sync]` that differ from the preset."""
    codec: str
    fragments: int
    """Pieces that the model is cut into."""
    written: int
    """The interval that the preset, or the run, has."""
    interval: float
    """Steps between two exchanges of a fragment: the shortest that fits the line, of a run as it is
    the one that results."""
    fits: bool
    """Whether the line carries the exchanges as they are written, one beside the other."""
    exchange: ExchangeCost
    memory: Memory
    run_bytes: int
    """Bytes that a peer sends over the whole run."""
    share: Estimate | None
    """Its share by measurements; null without any."""

    @property
    def as_written(self) -> bool:
        """Whether the interval that results is about the one that is written."""
        return self.interval <= NEAR * self.written


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """Data-parallel training that averages gradients at every step, on the same line."""

    bytes: int
    """Bytes that a peer sends for a step."""
    seconds: float
    """Seconds of a step with its gradients on the line."""
    hours: float
    """Hours of the run."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The costs of a run on a line, by method."""

    parameters: int
    peers: int
    steps: int
    tokens: int
    """Tokens that all peers train on together."""
    hours: float
    """Hours of the run with any method: training waits for no exchange."""
    line: Line
    step_seconds: float
    """Seconds of one inner step."""
    as_written: Choice | None
    """The run as its file has it; null without a file."""
    choices: tuple[Choice, ...]
    """Each method with the shortest interval that fits, the best first."""
    allreduce: AllReduce
    """All-reduce, which all of them replace."""
    reason: str
    """Why the first is the best."""
    beyond: tuple[str, ...]
    """How far this goes beyond what was measured, in words."""


# measurements


@cache
def measured() -> tuple[int, tuple[MeasuredPoint, ...]]:
    """Parameters of the measured model, and the figures that this release brings."""
    file = resources.files("lowcomm_node.planner").joinpath("measured.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    points = (MeasuredPoint(**one | {"shares": tuple(one["shares"])}) for one in content["points"])
    return content["parameters"], tuple(points)


def _points(question: Question, spec: RunSpec, interval: float) -> list[MeasuredPoint]:
    """The measurements of a method by interval, with the nearest number of peers.

    Numbers with which intervals as long as ``interval`` were measured come first: with more peers
    fewer intervals were.
    """
    asked = spec.sync.method, spec.train.optimizer
    known = [p for p in measured()[1] if (p.method, p.optimizer) == asked]
    reaching = {p.peers for p in known if interval <= FURTHER * p.interval}
    counts = reaching or {p.peers for p in known}
    nearest = min(counts, key=lambda count: abs(log(count / question.peers)), default=0)
    return sorted((p for p in known if p.peers == nearest), key=lambda p: p.interval)


def estimate(points: list[MeasuredPoint], interval: float) -> Estimate | None:
    """The share at an interval, between those that were measured; None without any."""
    if not points:
        return None
    longest = points[-1].interval
    below = [p for p in points if p.interval <= interval][-1:]
    above = [p for p in points if p.interval > interval][:1]
    share = (below or above)[0].share
    if not above and interval > FURTHER * longest:
        share = None
    elif above and below:
        [left], [right] = below, above
        way = log(interval / left.interval) / log(right.interval / left.interval)
        share = left.share + way * (right.share - left.share)
    return Estimate(share=share, measured=(*below, *above), longest=longest)


# plans


def plan(question: Question, from_file: bool) -> Plan:
    """The costs of a run; ``from_file``: its settings of ``[sync]`` are its creator's choice.

    Raises ConfigError if no method fits the line.
    """
    spec, line = question.spec, question.line
    optimizer = spec.train.optimizer if from_file else OPTIMIZER
    choices: list[Choice] = []
    for method, preset in PRESETS.items():
        if preset.sync["group"] > 1 and not method.endswith(OF_PAPERS):
            other = with_method(spec, method, optimizer, {})
            if other.sync.realigns_among(question.peers):
                continue
            if (fitted := _fitted(question, other)) is not None:
                choices.append(choice_of(question, fitted))
    choices.sort(key=_rank)
    parameters = count_parameters(spec.model)
    if not choices:
        raise ConfigError(
            f"No method exchanges {parameters:,} parameters on this line within {LONGEST:,} steps: "
            "plan for a faster line, longer steps, or a smaller model."
        )
    # A ring sends every fp32 gradient to all but one.
    sent = 8 * parameters * (question.peers - 1) / question.peers
    seconds = question.step_seconds + pace.FRAMING * sent / line.slower
    return Plan(
        parameters=parameters,
        peers=question.peers,
        steps=spec.run.steps,
        tokens=spec.run.steps * spec.tokens_per_step * question.peers,
        hours=spec.run.steps * question.step_seconds / 3600,
        line=line,
        step_seconds=question.step_seconds,
        as_written=choice_of(question) if from_file and spec.sync.group > 1 else None,
        choices=tuple(choices),
        allreduce=AllReduce(
            bytes=round(sent), seconds=seconds, hours=spec.run.steps * seconds / 3600
        ),
        reason=_reason(choices, question.step_seconds),
        beyond=tuple(_beyond(question, parameters, choices[0])),
    )


def with_method(spec: RunSpec, method: str, optimizer: str, changes: Mapping[str, Any]) -> RunSpec:
    """The same run with another method, and ``changes`` of its settings."""
    content = spec.model_dump()
    train = {name: content["train"][name] for name in ("batch", "warmup", "schedule")}
    train["optimizer"] = optimizer
    sync = {"method": method, **changes}
    return RunSpec.model_validate({**content, "train": train, "sync": sync})


def _nearest(question: Question, spec: RunSpec, interval: float) -> MeasuredPoint | None:
    points = _points(question, spec, interval)
    return min(points, key=lambda p: abs(log(p.interval / interval)), default=None)


def _fitted(question: Question, spec: RunSpec) -> RunSpec | None:
    """A method at the shortest interval that the line carries and that pays, with the settings that
    were measured nearest to it; None if no interval is long enough."""
    method, optimizer = spec.sync.method, spec.train.optimizer
    parameters, preset = count_parameters(spec.model), PRESETS[method].sync
    usual = preset["interval"]
    shorter = [p for p in _points(question, spec, usual) if p.interval <= usual]
    best = max(shorter, key=lambda point: point.share, default=None)
    least = -(-parameters // MOST_VALUES) if preset["fragments"] > 1 else 1
    shortest = max(usual if best is None else best.interval, least)
    for _ in range(TRIES):
        sync = spec.sync.model_copy(update={"interval": shortest})
        interval = replace(_pace(question, spec), sync=sync).fitting_interval
        if interval > LONGEST:
            return None
        near = _nearest(question, spec, interval)
        changes: dict[str, Any] = dict(near.sync) if near is not None else {}
        changes["interval"] = interval
        if preset["fragments"] > 1:
            changes["fragments"] = fragment_count(parameters, interval, preset["fragments"])
        fitted = with_method(spec, method, optimizer, changes)
        if fitted == spec:
            break
        spec = fitted
    return spec


def _pace(question: Question, spec: RunSpec) -> pace.Pace:
    sizes, members = pace.fragment_sizes(spec), min(spec.sync.group, question.peers)
    numel = round(sum(sizes) / len(sizes))
    near, resent = _nearest(question, spec, spec.sync.interval), 1.0
    if near is not None:
        # The less weights move between two exchanges, the fewer blocks wrap.
        resent += (near.resent - 1) * min(1.0, spec.sync.interval / near.interval)
    sent = resent * pace.contents(spec.sync, numel, members)
    return pace.Pace(
        bytes=sent + pace.control(spec.sync, sent, members),
        values=numel,
        sync=spec.sync,
        line=question.line,
        step=question.step_seconds,
    )


def choice_of(question: Question, fitted: RunSpec | None = None) -> Choice:
    """A run as it is written, or as ``fitted`` to the line."""
    spec = fitted or question.spec
    sync, exchange = spec.sync, _pace(question, spec)
    members = min(sync.group, question.peers)
    control = pace.control(sync, exchange.bytes, members)
    written = PRESETS[sync.method].sync["interval"] if fitted else sync.interval
    interval = float(sync.interval) if fitted else exchange.interval
    preset = with_method(spec, sync.method, spec.train.optimizer, {}).sync.model_dump()
    own = {name: value for name, value in sync.model_dump().items() if value != preset[name]}
    host, gpu = (estimate_memory(spec, gpu=gpu, cut=Cut(1, True)) for gpu in (False, True))
    return Choice(
        method=sync.method,
        optimizer=spec.train.optimizer,
        settings={name: value for name, value in own.items() if name not in FOLLOWING},
        codec=sync.codec,
        fragments=sync.fragments,
        written=written,
        interval=interval,
        fits=exchange.interval <= written,
        exchange=ExchangeCost(
            members=members,
            contents=round(exchange.bytes) - control,
            control=control,
            line_seconds=exchange.line_seconds,
            seconds=exchange.merged_seconds,
        ),
        memory=Memory(
            host_bytes=host.host_bytes, gpu_host_bytes=gpu.host_bytes, gpu_bytes=gpu.device_bytes
        ),
        run_bytes=round(spec.run.steps / interval * sync.fragments * exchange.bytes),
        share=estimate(_points(question, spec, interval), interval),
    )


# reasons


def _rank(choice: Choice) -> tuple[float, float, int]:
    """The largest share first; where none is known, what is nearest to what was measured."""
    known = choice.share
    if known is None:
        return inf, inf, choice.run_bytes
    if known.share is None:
        return 1.0, choice.interval / known.longest, choice.run_bytes
    return -known.share, 0.0, choice.run_bytes


def _reason(choices: list[Choice], step: float) -> str:
    best = choices[0]
    if best.share is None:
        return f"{best.method}: nothing was measured of any; it sends the fewest bytes"
    every = f"every {best.interval:.0f} steps"
    if best.share.share is None:
        longest = best.share.longest
        return (
            f"{best.method}: {every} is nearest to what was measured (up to every {longest}), but "
            "nobody knows what is left of the gain there. With steps of "
            f"{step * best.interval / longest:.2g} s, of a larger batch, it would be every "
            f"{longest}"
        )
    known = [
        f"{one.method} {one.share.share:.0%}"
        for one in choices[1:]
        if one.share is not None and one.share.share is not None
    ]
    beside = f" ({', '.join(known[:2])})" if known else ""
    return (
        f"{best.method}: it keeps {best.share.share:.0%} of all-reduce's gain {every}, which this "
        f"line carries, more than any other{beside}"
    )


def _beyond(question: Question, parameters: int, best: Choice) -> Iterator[str]:
    """The ways in which a plan goes beyond measurements."""
    known, all_points = measured()
    times = parameters / known
    if not 0.5 <= times <= 2:
        size = f"{times:.0f} times as many" if times > 1 else f"1/{1 / times:.0f} of them"
        yield f"model: shares were measured with {known:,} parameters, this one has {size}"
    if best.share is None:
        return
    first = best.share.measured[0]
    if question.peers != first.peers:
        peers = sorted({p.peers for p in all_points if p.method == best.method})
        yield (
            f"peers: measured with {', '.join(map(str, peers))}, asked for {question.peers}; "
            f"figures are those with {first.peers}"
        )
    if best.interval < first.interval:
        yield f"interval: measured from every {first.interval} steps on"
    longest = best.share.longest
    if best.interval > longest:
        yield f"interval: measured up to every {longest} steps, this is every {best.interval:.0f}"
    shortest, steps = min(point.steps for point in best.share.measured), question.spec.run.steps
    if steps > 2 * shortest:
        yield (
            f"length: measured over {shortest:,} steps, this run has {steps:,}; the longer a run, "
            "the more rare exchanges keep (docs/methods.md)"
        )
