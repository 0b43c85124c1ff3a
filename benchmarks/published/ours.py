"""The same timeline for what this project sends: fragments and bytes of the protocol's own objects.

A peer captures a fragment between two inner steps and merges it between two others. It never waits:
an exchange that takes longer than ``overlap`` steps merges when it is done. So a line that is too
slow costs no utilization, but makes the interval longer. Two answers follow, for two peers:

    needed    Gbit/s, if it waited for the merge after ``overlap`` steps, as the paper's methods do
    interval  steps between two exchanges of a fragment that a line carries
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from published.figures import GRID, TARGETS, Shape
from published.timeline import Vector

from lowcomm_protocol.codecs import codec, coder
from lowcomm_protocol.plan import FragmentPlan, TensorSpec, offset, plan_fragments
from lowcomm_protocol.spec.run import parse_toml
from lowcomm_protocol.spec.sections import SyncSettings

SAMPLE = 1 << 16
"""Values that are asked for their bytes: sizes are proportional, and nothing large is allocated."""


def settings(method: str, layers: int) -> SyncSettings:
    """Those of a preset, for a model of so many layers."""
    spec = parse_toml(f'run.name = "papers"\nsync.method = "{method}"\nmodel.layers = {layers}')
    return spec.sync


def bits(sync: SyncSettings) -> float:
    """Of a value, scales included."""
    if sync.group > 2:
        return 8 * codec(sync.codec).most_size(SAMPLE) / SAMPLE
    # What is sent again comes on top: of a modulo codec a block now and then.
    return 8 * coder(sync.codec, SAMPLE).min_size / SAMPLE


@lru_cache(maxsize=64)
def plan(shape: Shape, fragments: int, pattern: str) -> FragmentPlan:
    """How the protocol cuts a model of this shape, whose parameters lie evenly in its layers."""
    width = 1024
    rows = round(shape.parameters / shape.layers / width)
    tensors = [TensorSpec(f"layers.{k}", (rows, width), k, "block") for k in range(shape.layers)]
    return plan_fragments(tensors, fragments, pattern)


def utilization(shape: Shape, sync: SyncSettings, gbits: Sequence[float] = GRID) -> Vector:
    """Share of the time that would compute if training waited for each merge."""
    cut = plan(shape, sync.fragments, sync.pattern).fragments
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


def needed(shape: Shape, sync: SyncSettings) -> tuple[float, ...]:
    """Gbit/s for each target, read from the grid as for the paper's methods."""
    reached = utilization(shape, sync)
    return tuple(GRID[max(0, int(np.sum(reached < target)) - 1)] for target in TARGETS)


def interval(shape: Shape, sync: SyncSettings, gbits: float) -> int:
    """Steps between two exchanges of a fragment: as written, or as many as the line needs for
    all."""
    return max(sync.interval, int(np.ceil(seconds_of_all(shape, sync, gbits) / shape.step)))


def seconds_of_all(shape: Shape, sync: SyncSettings, gbits: float) -> float:
    """On the line, for all fragments once."""
    values = plan(shape, sync.fragments, sync.pattern).numel
    return values * bits(sync) / (1e9 * gbits)


def ratio_of_data(sync: SyncSettings) -> float:
    """Bytes of data-parallel training in bf16 by ours, of two peers."""
    return 16 * sync.interval / bits(sync)
