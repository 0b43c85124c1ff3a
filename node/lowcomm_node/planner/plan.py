"""Each method on a line, and which one to take. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from lowcomm_node.planner import pace, shares
from lowcomm_node.planner.question import Line, Question
from lowcomm_node.simulation.baselines import ring_bytes
from lowcomm_node.trainer.memory import count_parameters, reckon
from lowcomm_node.trainer.micro_batch import Cut
from lowcomm_protocol.spec.presets import PRESETS
from lowcomm_protocol.spec.run import MOST_VALUES, RunSpec, fragment_count

OPTIMIZER = "muon"
"""That methods are compared with, unless a run has its own: all of them gain most by it."""
OF_PAPERS = "-paper"
"""Presets for comparison alone: their settings are those of papers, whatever the line."""
FOLLOWING = ("method", "min_steps")
"""Of ``[sync]``: what need not be written, as it follows from the rest."""
TRIES = 8
"""Codec and fragments follow the interval, and it follows them."""
NEAR = 1.15
"""Times the interval that was written up to which the one that results counts as the same."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One exchange of a fragment of mean size, at one member."""

    members: int
    """How many take part."""
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
    """What it takes at least: a window of text at a time, activations computed again."""

    host_bytes: int
    """Of the machine, where it trains on the processor."""
    gpu_host_bytes: int
    """Of the machine, where it trains on a GPU."""
    gpu_bytes: int
    """Of that GPU."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One method on the line."""

    method: str
    """Name of the preset."""
    optimizer: str
    """The inner one."""
    settings: Mapping[str, Any]
    """Of `[sync]`: what is not as the preset has it."""
    codec: str
    """How values are coded."""
    fragments: int
    """Pieces that the model is cut into."""
    written: int
    """The interval that the preset, or the run, has."""
    interval: float
    """Steps between two exchanges of a fragment: the shortest that fits the line, of a run as it is
    the one that results."""
    fits: bool
    """Whether the line carries the exchanges as they are written, one beside the other."""
    exchange: Exchange
    """One exchange."""
    memory: Memory
    """Of a peer."""
    run_bytes: int
    """That a peer sends over the whole run."""
    share: shares.Estimate | None
    """What was measured of it; null if nothing was."""

    @property
    def as_written(self) -> bool:
        """Whether the interval that results is about the one that is written."""
        return self.interval <= NEAR * self.written


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """Data-parallel training that averages gradients at every step, on the same line."""

    bytes: int
    """That a peer sends for a step."""
    seconds: float
    """Of a step with its gradients on the line."""
    hours: float
    """Of the run."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run costs on a line, by method."""

    parameters: int
    """Of the model."""
    peers: int
    """Of the swarm."""
    steps: int
    """Of the run."""
    tokens: int
    """That all peers train on together."""
    hours: float
    """Of the run with any method: training waits for no exchange."""
    line: Line
    """Bytes a second, seconds there and back."""
    step_seconds: float
    """Of one inner step."""
    as_written: Choice | None
    """The run as its file has it; null without a file."""
    choices: tuple[Choice, ...]
    """Each method with the shortest interval that fits, the best first."""
    allreduce: AllReduce
    """What all of them replace."""
    reason: str
    """Why the first is the best."""
    beyond: tuple[str, ...]
    """How far this goes beyond what was measured, in words."""

    @property
    def best(self) -> Choice:
        """The choice to take."""
        return self.choices[0]


def plan(question: Question, from_file: bool) -> Plan:
    """What a run costs; ``from_file``: whether its settings of ``[sync]`` are somebody's choice."""
    spec, line = question.spec, question.line
    choices = tuple(sorted(_choices(question, from_file), key=_rank))
    parameters = count_parameters(spec.model)
    sent = ring_bytes(parameters, question.peers, 1)
    seconds = question.step_seconds + pace.FRAMING * sent / line.slower
    return Plan(
        parameters=parameters,
        peers=question.peers,
        steps=spec.run.steps,
        tokens=spec.run.steps * spec.tokens_per_step * question.peers,
        hours=spec.run.steps * question.step_seconds / 3600,
        line=line,
        step_seconds=question.step_seconds,
        as_written=as_written(question) if from_file and spec.sync.group > 1 else None,
        choices=choices,
        allreduce=AllReduce(
            bytes=round(sent), seconds=seconds, hours=spec.run.steps * seconds / 3600
        ),
        reason=_reason(choices, question.step_seconds),
        beyond=tuple(_beyond(question, parameters, choices[0])),
    )


def as_written(question: Question) -> Choice:
    """A run as it is, on this line."""
    return _choice(question, question.spec, fits_line=False)


def _choices(question: Question, from_file: bool) -> Iterator[Choice]:
    optimizer = question.spec.train.optimizer if from_file else OPTIMIZER
    for method, preset in PRESETS.items():
        if preset.sync["group"] < 2 or method.endswith(OF_PAPERS):
            continue
        spec = _with(question.spec, method, optimizer, {})
        if not spec.sync.realigns_among(question.peers):
            yield _choice(question, _fitted(question, spec), fits_line=True)


def _with(spec: RunSpec, method: str, optimizer: str, changes: Mapping[str, Any]) -> RunSpec:
    """The same run with another method."""
    content = spec.model_dump()
    train = {name: content["train"][name] for name in ("batch", "warmup", "schedule")}
    train["optimizer"] = optimizer
    sync = {"method": method, **changes}
    return RunSpec.model_validate({**content, "train": train, "sync": sync})


def _fitted(question: Question, spec: RunSpec) -> RunSpec:
    """A method at the shortest interval that the line carries and that pays, with the settings that
    were measured nearest to it."""
    method, optimizer = spec.sync.method, spec.train.optimizer
    parameters, preset = count_parameters(spec.model), PRESETS[method].sync
    shortest = shares.keeps_most(method, optimizer, question.peers, preset["interval"])
    least = -(-parameters // MOST_VALUES) if preset["fragments"] > 1 else 1
    for _ in range(TRIES):
        sync = spec.sync.model_copy(update={"interval": max(shortest, least)})
        interval = replace(_pace(question, spec), sync=sync).fitting_interval
        near = shares.nearest_point(method, optimizer, question.peers, interval)
        changes: dict[str, Any] = dict(near.sync) if near is not None else {}
        changes["interval"] = interval
        if preset["fragments"] > 1:
            changes["fragments"] = fragment_count(parameters, interval, preset["fragments"])
        fitted = _with(spec, method, optimizer, changes)
        if fitted == spec:
            break
        spec = fitted
    return spec


def _pace(question: Question, spec: RunSpec) -> pace.Pace:
    sizes, members = pace.fragment_sizes(spec), _members(question, spec)
    numel = round(sum(sizes) / len(sizes))
    sent = _resent(question, spec) * pace.contents(spec.sync, numel, members)
    return pace.Pace(
        bytes=sent + pace.control(spec.sync, sent, members),
        values=numel,
        sync=spec.sync,
        line=question.line,
        step=question.step_seconds,
    )


def _members(question: Question, spec: RunSpec) -> int:
    """Members of an exchange."""
    return min(spec.sync.group, question.peers)


def _resent(question: Question, spec: RunSpec) -> float:
    near = shares.nearest_point(
        spec.sync.method, spec.train.optimizer, question.peers, spec.sync.interval
    )
    if near is None:
        return 1.0
    # The less weights move between two exchanges, the fewer blocks wrap.
    return 1 + (near.resent - 1) * min(1.0, spec.sync.interval / near.interval)


def _choice(question: Question, spec: RunSpec, fits_line: bool) -> Choice:
    sync, members, one = spec.sync, _members(question, spec), _pace(question, spec)
    control = pace.control(sync, one.bytes, members)
    written = PRESETS[sync.method].sync["interval"] if fits_line else sync.interval
    interval = float(sync.interval) if fits_line else one.interval
    return Choice(
        method=sync.method,
        optimizer=spec.train.optimizer,
        settings=_changed(spec),
        codec=sync.codec,
        fragments=sync.fragments,
        written=written,
        interval=interval,
        fits=one.interval <= written,
        exchange=Exchange(
            members=members,
            contents=round(one.bytes) - control,
            control=control,
            line_seconds=one.line_seconds,
            seconds=one.merged_seconds,
        ),
        memory=_memory(spec),
        run_bytes=round(spec.run.steps / interval * sync.fragments * one.bytes),
        share=shares.estimate(sync.method, spec.train.optimizer, question.peers, interval),
    )


def _changed(spec: RunSpec) -> dict[str, Any]:
    """What of ``[sync]`` is not as the preset has it."""
    preset = _with(spec, spec.sync.method, spec.train.optimizer, {}).sync.model_dump()
    return {
        name: value
        for name, value in spec.sync.model_dump().items()
        if name not in FOLLOWING and value != preset[name]
    }


def _memory(spec: RunSpec) -> Memory:
    host, gpu = (reckon(spec, gpu=gpu, cut=Cut(1, True)) for gpu in (False, True))
    return Memory(
        host_bytes=host.host_bytes, gpu_host_bytes=gpu.host_bytes, gpu_bytes=gpu.device_bytes
    )


def _rank(choice: Choice) -> tuple[float, float, int]:
    """The largest share first; where none is known, what is nearest to what was measured."""
    known = choice.share
    if known is None:
        return inf, inf, choice.run_bytes
    if known.share is None:
        return 1.0, choice.interval / known.longest, choice.run_bytes
    return -known.share, 0.0, choice.run_bytes


def _reason(choices: tuple[Choice, ...], step: float) -> str:
    best = choices[0]
    if best.share is None:
        return f"{best.method}: nothing was measured of any; it sends the fewest bytes"
    every = f"every {best.interval:.0f} steps"
    if best.share.share is None:
        longest = best.share.longest
        slower = step * best.interval / longest
        return (
            f"{best.method}: {every} is nearest to what was measured (up to every {longest}), but "
            "nobody knows what is left of the gain there. With steps of "
            f"{slower:.2g} s, of a larger batch, it would be every {longest}"
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
    """What of a plan is no measurement."""
    found = shares.measured()
    times = parameters / found.parameters
    if not 0.5 <= times <= 2:
        size = f"{times:.0f} times as many" if times > 1 else f"1/{1 / times:.0f} of them"
        yield (
            f"model: shares were measured with {found.parameters:,} parameters, this one has {size}"
        )
    if best.share is None:
        return
    points = shares.points_of(best.method, best.optimizer, question.peers, best.interval)
    peers = sorted({p.peers for p in found.points if p.method == best.method})
    if question.peers != points[0].peers:
        yield (
            f"peers: measured with {', '.join(map(str, peers))}, asked for {question.peers}; "
            f"figures are those with {points[0].peers}"
        )
    if best.interval < points[0].interval:
        yield f"interval: measured from every {points[0].interval} steps on"
    if best.interval > best.share.longest:
        yield (
            f"interval: measured up to every {best.share.longest} steps, this is every "
            f"{best.interval:.0f}"
        )
    shortest = min(point.steps for point in best.share.measured)
    if question.spec.run.steps > 2 * shortest:
        yield (
            f"length: measured over {shortest:,} steps, this run has "
            f"{question.spec.run.steps:,}; the longer a run, the more rare exchanges keep "
            "(docs/methods.md)"
        )


def with_choice(spec: RunSpec, choice: Choice) -> RunSpec:
    """A run with what a plan chose."""
    return _with(spec, choice.method, choice.optimizer, choice.settings)
