"""How much of the time computes, by the bandwidth between two data centres: a timeline of layers
and of the line between them (Streaming DiLoCo, 2501.18512, table 4).

Of a step, a third is the forward and two thirds the backward pass, evenly by layer. A layer that is
due joins one queue, the line, after its backward pass, and takes ``bits / bandwidth`` on it. Its
forward pass waits for it in the next step, or one step later where exchanges overlap training.
All times and rates are vectors over the bandwidths, so one pass answers the whole grid.

The same for what this project sends, with fragments and bytes of the protocol's own objects, for
two peers. A peer never waits: an exchange that takes longer than ``overlap`` steps merges when it
is done. So a line that is too slow costs no utilization, but makes the interval longer.
`our_needed` is Gbit/s if a peer waited for the merge after ``overlap`` steps, as the paper's
methods do, and `our_interval` the steps between two exchanges of a fragment that a line carries.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lowcomm_protocol.codecs import codec, coder
from lowcomm_protocol.plan import FragmentPlan, TensorSpec, offset, plan_fragments
from lowcomm_protocol.spec.run import parse_toml
from lowcomm_protocol.spec.sections import SyncSettings

# What the paper prints

TARGETS = (0.50, 0.80, 0.90, 0.95, 0.99)
"""Shares of the time that computes: the columns of table 4 of Streaming DiLoCo."""
GRID = tuple(10.0 ** (-1 + 4 * k / 49) for k in range(50))
"""Gbit/s: the bandwidths that the paper simulates. Neighbours differ by 20.7 %."""


@dataclass(frozen=True)
class Shape:
    """A model of table 4."""

    name: str
    parameters: float
    layers: int
    step: float
    """Seconds of an inner step without communication."""


SHAPES = (
    Shape("1B", 1e9, 24, 0.1),
    Shape("10B", 10e9, 48, 0.8),
    Shape("100B", 100e9, 108, 4.9),
)

DP, DILOCO, STREAMING = "data-parallel", "DiLoCo", "Streaming DiLoCo"
OVERLAPPED, FP4 = "Streaming DiLoCo, overlapped", "Streaming DiLoCo, overlapped, FP4"

NEEDED: dict[str, dict[str, tuple[float, ...]]] = {
    "1B": {
        DP: (86.8, 152.6, 184.2, 222.3, 569.0),
        DILOCO: (1.4, 6.2, 13.3, 23.3, 86.8),
        STREAMING: (1.4, 5.2, 9.1, 16.0, 28.1),
        OVERLAPPED: (1.4, 4.3, 6.2, 9.1, 11.0),
        FP4: (0.4, 0.9, 1.7, 2.0, 3.0),
    },
    "10B": {
        DP: (104.8, 222.3, 222.3, 268.3, 471.5),
        DILOCO: (1.7, 7.5, 16.0, 33.9, 104.8),
        STREAMING: (1.7, 5.2, 9.1, 13.3, 19.3),
        OVERLAPPED: (1.7, 3.6, 5.2, 6.2, 7.5),
        FP4: (0.4, 0.9, 1.4, 1.4, 1.7),
    },
    "100B": {
        DP: (184.2, 323.8, 390.7, 390.7, 471.5),
        DILOCO: (3.0, 11.0, 23.3, 49.4, 184.2),
        STREAMING: (2.4, 6.2, 9.1, 11.0, 19.3),
        OVERLAPPED: (1.7, 3.6, 4.3, 5.2, 5.2),
        FP4: (0.5, 0.9, 1.1, 1.1, 1.4),
    },
}
"""Gbit/s between two data centres that reach each of `TARGETS` (table 4)."""

STEPS = {"25B": 24_000, "100B": 96_000, "250B": 240_000}
"""By the tokens of table 1, for 1B parameters: 0.67, 2.7 and 6.75 hours of 0.1 s a step, rounded to
the ratio of the tokens."""
GBITS = 1.0
"""The line of table 1."""
HOURS = {DP: (109.0, 438.0, 1097.0), FP4: (0.88, 3.5, 8.75)}
IDEAL_HOURS = (0.67, 2.7, 6.75)
RATIO_OF_DATA = 400.0
"""Bytes of data-parallel training by those of Streaming DiLoCo, with 4 bits and an interval of
100."""

# Its methods

Vector = npt.NDArray[np.float64]
INTERVAL = 100
LAYERS_A_FRAGMENT = 3
SETTLED = 4
"""Steps of data-parallel training, of which the first is left out: afterwards all are alike."""


@dataclass(frozen=True)
class Method:
    """What of a model is sent when."""

    due: Callable[[int, int], Sequence[int]]
    """The layers that are sent after a step, by step and number of layers."""
    steps: int
    """A period, after which the same layers are due again."""
    bits: float = 16.0
    """Of a parameter."""
    ahead: int = 1
    """Steps until a layer's forward pass waits for it."""


def _all(step: int, layers: int) -> Sequence[int]:
    return range(layers)


def _all_rarely(step: int, layers: int) -> Sequence[int]:
    return range(layers) if step % INTERVAL == 0 else ()


def _strided(step: int, layers: int) -> Sequence[int]:
    """Those of the fragment that is due, three layers each, by the protocol's timetable."""
    count = layers // LAYERS_A_FRAGMENT
    due = [p for p in range(count) if step % INTERVAL == offset(p, count, INTERVAL)]
    return [layer for p in due for layer in range(p, layers, count)]


METHODS = {
    DP: Method(_all, 1),
    DILOCO: Method(_all_rarely, INTERVAL),
    STREAMING: Method(_strided, INTERVAL),
    OVERLAPPED: Method(_strided, INTERVAL, ahead=2),
    FP4: Method(_strided, INTERVAL, bits=4.0, ahead=2),
}


class Timeline:
    """Steps of one data centre beside a line, at many bandwidths at once."""

    def __init__(self, shape: Shape, method: Method, gbits: Sequence[float]) -> None:
        self.shape = shape
        self.method = method
        self.seconds = shape.parameters * method.bits / shape.layers / (1e9 * np.array(gbits))
        """Of one layer on the line."""
        self.now = np.zeros(len(gbits))
        self.free: Vector = np.zeros(len(gbits))
        """When the line has carried all that has joined its queue."""
        self.arrives: dict[tuple[int, int], Vector] = {}
        """By the step whose forward pass waits, and the layer."""

    def step(self, number: int) -> None:
        """One inner step: forward, backward, and what is due then joins the queue."""
        layers = self.shape.layers
        forward, backward = self.shape.step / 3 / layers, self.shape.step * 2 / 3 / layers
        waits = sorted(layer for step, layer in self.arrives if step == number)
        passed = 0
        for layer in waits:
            self.now = self.now + (layer - passed) * forward
            self.now = np.maximum(self.now, self.arrives.pop((number, layer)))
            passed = layer
        self.now = self.now + (layers - passed) * forward
        passed = layers
        for layer in sorted(self.method.due(number, layers), reverse=True):
            self.now = self.now + (passed - layer) * backward
            self.free = np.maximum(self.free, self.now) + self.seconds
            self.arrives[number + self.method.ahead, layer] = self.free
            passed = layer
        self.now = self.now + passed * backward


def utilization(shape: Shape, method: Method, gbits: Sequence[float] = GRID) -> Vector:
    """Share of the time that computes, at each bandwidth, once the queue has settled."""
    line = Timeline(shape, method, gbits)
    period = max(method.steps, SETTLED)
    for step in range(period):
        line.step(step)
    begun = line.now
    for step in range(period, 2 * period):
        line.step(step)
    return period * shape.step / (line.now - begun)


def needed(shape: Shape, method: Method) -> tuple[float, ...]:
    """Gbit/s: for each target the last point of the grid below it, as the paper's figures fall."""
    reached = utilization(shape, method)
    return tuple(GRID[max(0, int(np.sum(reached < target)) - 1)] for target in TARGETS)


def points_apart(ours: float, theirs: float) -> int:
    """How many points of the grid lie between two bandwidths."""
    one, other = (round((math.log10(gbits) + 1) * 49 / 4) for gbits in (ours, theirs))
    return abs(one - other)


def cells() -> Iterator[tuple[Shape, str, tuple[float, ...], tuple[float, ...]]]:
    """Shape, method, and Gbit/s for each target, ours and the paper's: the 75 cells of table 4."""
    for shape in SHAPES:
        for name, method in METHODS.items():
            yield shape, name, needed(shape, method), NEEDED[shape.name][name]


def distances() -> list[int]:
    """Of all cells, in points of the grid."""
    return [
        points_apart(one, other)
        for _, _, ours, theirs in cells()
        for one, other in zip(ours, theirs, strict=True)
    ]


def hours(name: str) -> tuple[float, ...]:
    """For each budget of tokens, 1B parameters once over them, on the line of table 1."""
    share = float(utilization(SHAPES[0], METHODS[name], [GBITS])[0])
    return tuple(hour / share for hour in ideal_hours())


def ideal_hours() -> tuple[float, ...]:
    """The same without communication."""
    return tuple(steps * SHAPES[0].step / 3600 for steps in STEPS.values())


# What this project sends

SAMPLE = 1 << 16
"""Values that are asked for their bytes: sizes are proportional, and nothing large is allocated."""


def our_settings(method: str, layers: int) -> SyncSettings:
    """Those of a preset, for a model of ``layers`` layers."""
    spec = parse_toml(f'run.name = "papers"\nsync.method = "{method}"\nmodel.layers = {layers}')
    return spec.sync


def bits(sync: SyncSettings) -> float:
    """Of a value, scales included."""
    if sync.group > 2:
        return 8 * codec(sync.codec).coded_size(SAMPLE) / SAMPLE
    # What is sent again comes on top: of a modulo codec a block now and then.
    return 8 * coder(sync.codec, SAMPLE).min_size / SAMPLE


@lru_cache(maxsize=64)
def our_plan(shape: Shape, fragments: int, pattern: str) -> FragmentPlan:
    """How the protocol cuts a model of this shape, whose parameters lie evenly in its layers."""
    width = 1024
    rows = round(shape.parameters / shape.layers / width)
    tensors = [TensorSpec(f"layers.{k}", (rows, width), k, "block") for k in range(shape.layers)]
    return plan_fragments(tensors, fragments, pattern)


def our_utilization(shape: Shape, sync: SyncSettings, gbits: Sequence[float] = GRID) -> Vector:
    """Share of the time that would compute if training waited for each merge."""
    cut = our_plan(shape, sync.fragments, sync.pattern).fragments
    rates = 1e9 * np.array(gbits)
    seconds = [fragment.numel * bits(sync) / rates for fragment in cut]
    now, free, begun = np.zeros(len(gbits)), np.zeros(len(gbits)), np.zeros(len(gbits))
    merges: dict[int, list[Vector]] = {}
    for step in range(2 * sync.interval):
        if step == sync.interval:
            begun = now
        for arrived in merges.pop(step, ()):
            now = np.maximum(now, arrived)
        now = now + shape.step
        for p in range(len(cut)):
            if step % sync.interval == offset(p, len(cut), sync.interval):
                free = np.maximum(free, now) + seconds[p]
                merges.setdefault(step + 1 + sync.overlap, []).append(free)
    return sync.interval * shape.step / (now - begun)


def our_needed(shape: Shape, sync: SyncSettings) -> tuple[float, ...]:
    """Gbit/s for each target, read from the grid as for the paper's methods."""
    reached = our_utilization(shape, sync)
    return tuple(GRID[max(0, int(np.sum(reached < target)) - 1)] for target in TARGETS)


def our_interval(shape: Shape, sync: SyncSettings, gbits: float) -> int:
    """Steps between two exchanges of a fragment: as written, or as many as the line needs for
    all."""
    return max(sync.interval, int(np.ceil(seconds_of_all(shape, sync, gbits) / shape.step)))


def seconds_of_all(shape: Shape, sync: SyncSettings, gbits: float) -> float:
    """On the line, for all fragments once."""
    values = our_plan(shape, sync.fragments, sync.pattern).numel
    return values * bits(sync) / (1e9 * gbits)


def ratio_of_data(sync: SyncSettings) -> float:
    """Bytes of data-parallel training in bf16 by ours, of two peers."""
    return 16 * sync.interval / bits(sync)
