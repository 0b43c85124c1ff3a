"""How much of the time computes, by the bandwidth between two data centres: a timeline of layers
and of the line between them (Streaming DiLoCo, table 4).

Of a step, a third is the forward and two thirds the backward pass, evenly by layer. A layer that is
due joins one queue, the line, after its backward pass, and takes ``bits / bandwidth`` on it. Its
forward pass waits for it in the next step, or one step later where exchanges overlap training.
All times and rates are vectors over the bandwidths, so one pass answers the whole grid.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from published.figures import (
    DILOCO,
    DP,
    FP4,
    GBITS,
    GRID,
    NEEDED,
    OVERLAPPED,
    SHAPES,
    STEPS,
    STREAMING,
    TARGETS,
    Shape,
)

from lowcomm_protocol.plan import offset

Vector = npt.NDArray[np.float64]
INTERVAL = 100
LAYERS_A_FRAGMENT = 3
SETTLED = 4
"""Steps of data-parallel training, of which the first is left out: afterwards all are alike."""


@dataclass(frozen=True)
class Method:
    """What of a model is sent when."""

    due: Callable[[int, int], Sequence[int]]
    """The layers that are sent after a step, of so many."""
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
