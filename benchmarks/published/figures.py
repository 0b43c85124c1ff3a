"""What the papers print: facts from the tables of Streaming DiLoCo (2501.18512) and NoLoCo
(2506.10911)."""

from dataclasses import dataclass

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

TREE_TO_PAIR = {
    0.1: {8: 5.7, 16: 7.6, 64: 11.3, 256: 15.1, 1024: 18.9},
    0.5: {8: 5.0, 16: 6.8, 64: 10.7, 256: 14.8, 1024: 19.1},
    1.0: {8: 5.1, 16: 7.7, 64: 13.7, 256: 21.7, 1024: 31.0},
}
"""By sigma of the log-normal hops, and by peers: a tree all-reduce takes so many times as long as a
pair with one hop."""
BARRIER_TO_PAIRS = {16: 1.078, 64: 1.111, 256: 1.157, 1024: 1.198}
"""Time of a run in which all wait for all by one in which pairs wait for each other."""
