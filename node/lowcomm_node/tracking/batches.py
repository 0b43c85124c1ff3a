"""Reads a journal from a position on, a batch at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from lowcomm_node.journal.reader import Entry, Journal
from lowcomm_node.journal.sample import Sample
from lowcomm_node.node.messages import Evaluated
from lowcomm_node.sync.records import ExchangeEnded
from lowcomm_node.tracking.names import (
    COMPUTING,
    HELD_OUT,
    SAMPLED,
    SWARM_STEP,
    TOKENS,
    WAITED,
    WAITING,
    WORST_BLOCK,
)
from lowcomm_node.tracking.position import Position
from lowcomm_node.tracking.sink import Batch, Point

MOST = 500
"""Notices, and samples, of one batch."""


def next_batch(
    journal: Journal, position: Position, step_tokens: int | None = None
) -> tuple[Batch, Position]:
    """What comes behind a position, and the position behind that.

    ``step_tokens``: tokens of an inner step, where that is known.
    """
    entries, position = _notices(journal, position)
    samples = journal.samples_after(position.time, MOST)
    entries, samples = _up_to_one_time(entries, samples)
    reading = _Reading(position, step_tokens)
    told = [(one.notice.time, one) for one in entries] + [(one.time, one) for one in samples]
    for _, one in sorted(told, key=lambda item: item[0]):
        reading.take(one)
    return Batch(reading.points, reading.exchanges), reading.position


def _notices(journal: Journal, position: Position) -> tuple[list[Entry], Position]:
    last = journal.last_notices(1)
    if position.notice <= (last[-1].number if last else 0):
        return journal.notices(position.notice, MOST), position
    # The journal was damaged or removed, and the node has begun a new one, which counts from 1.
    entries = [one for one in journal.notices(0, MOST) if one.notice.time > position.newest]
    return entries, replace(position, notice=0) if last else position


def _up_to_one_time(
    entries: Sequence[Entry], samples: Sequence[Sample]
) -> tuple[Sequence[Entry], Sequence[Sample]]:
    """Both up to the same time, where one of them was cut off: in a later batch the rest of it
    would come too late."""
    ends = [
        *([entries[-1].notice.time] if len(entries) == MOST else []),
        *([samples[-1].time] if len(samples) == MOST else []),
    ]
    if not ends:
        return entries, samples
    end = min(ends)
    early = list(takewhile(lambda one: one.notice.time <= end, entries))
    kept = [one for one in samples if one.time <= end]
    return (early, kept) if early or kept else (entries, samples)


@dataclass
class _Reading:
    """Makes points of what a journal tells."""

    position: Position
    step_tokens: int | None

    def __post_init__(self) -> None:
        self.points: list[Point] = []
        self.exchanges: list[ExchangeEnded] = []

    def take(self, one: Entry | Sample) -> None:
        """Take in what comes next."""
        if isinstance(one, Sample):
            self._take_sample(one)
            return
        time, event = one.notice.time, one.notice.event
        self.position = replace(self.position, notice=one.number, newest=time)
        if isinstance(event, Evaluated) and event.loss is not None:
            tokens = event.steps * self.step_tokens if self.step_tokens else None
            self._add(time, event.swarm_step, tokens, {HELD_OUT: event.loss})
        elif isinstance(event, ExchangeEnded):
            self.exchanges.append(event)
            if event.worst_block is not None:
                self._add(time, event.swarm_step, None, {WORST_BLOCK: event.worst_block})

    def _take_sample(self, one: Sample) -> None:
        counts = dict(self.position.counts)
        values = {name: value for name, value in _figures(one, counts) if value is not None}
        ratio = _waiting(self.position.counts, counts)
        if ratio is not None:
            values[WAITING] = ratio
        seen = _telling(one)
        news = one.swarm_step is not None and seen != self.position.seen
        self.position = replace(self.position, time=one.time, counts=counts, seen=seen)
        if news and one.swarm_step is not None:
            self._add(one.time, one.swarm_step, one.tokens, values)

    def _add(self, time: float, step: int, tokens: int | None, values: Mapping[str, float]) -> None:
        number = self.position.points
        self.position = replace(self.position, points=number + 1)
        axes = {SWARM_STEP: float(step)}
        if tokens is not None:
            axes[TOKENS] = float(tokens)
        self.points.append(
            Point(
                time=time,
                number=number,
                step=step,
                tokens=tokens,
                values={**axes, **values},
            )
        )


def _figures(one: Sample, counts: dict[str, tuple[float, float]]) -> list[tuple[str, float | None]]:
    """By name; what is counted goes on from ``counts``, which are brought up to date."""
    told: list[tuple[str, float | None]] = []
    for series in SAMPLED:
        value = series.read(one)
        if value is not None and series.counts:
            last, total = counts.get(series.name, (0.0, 0.0))
            total += value - last if value >= last else value
            counts[series.name] = (float(value), total)
            value = total
        told.append((series.name, None if value is None else float(value)))
    return told


def _waiting(
    before: Mapping[str, tuple[float, float]], now: Mapping[str, tuple[float, float]]
) -> float | None:
    waited, computing = (
        now.get(name, (0.0, 0.0))[1] - before.get(name, (0.0, 0.0))[1]
        for name in (WAITED, COMPUTING)
    )
    return waited / (waited + computing) if waited + computing > 0 else None


def _telling(one: Sample) -> tuple[float | None, ...]:
    """What makes a sample worth a point: not that a finished node still serves its state."""
    return (
        one.swarm_step,
        one.tokens,
        one.loss,
        one.completed,
        one.failed,
        one.bytes_sent,
        one.bytes_received,
    )
