"""Bytes and seconds of an exchange on a line, and how often a fragment is really exchanged. Pure.

A fragment that is due at a step is captured at the end of the next, then coded, sent, received,
decoded and confirmed, and merged at the first boundary of a step at least ``overlap`` steps later.
Training waits for none of it: an exchange that takes longer than line or interval allow is made
more rarely.
"""

from dataclasses import dataclass
from math import ceil

import torch

from lowcomm_node.models.base import family_of, tensor_specs
from lowcomm_node.planner.question import Line
from lowcomm_protocol.codecs import codec, coder
from lowcomm_protocol.codecs.shards import shard_bounds
from lowcomm_protocol.plan import plan_fragments
from lowcomm_protocol.spec.run import RunSpec
from lowcomm_protocol.spec.sections import SyncSettings

FRAMING = 1.045
"""Bytes on the line for each of contents: TCP and IP 3 to 5 %, TLS and HTTP/2 0.2 %."""
CONTROL_IN_PAIR, CONTROL_OF_GROUP, CONTROL_OF_MEMBER, CONTROL_SHARE = 200, 250, 5, 1e-5
"""Bytes of frames that agree on an exchange: of a pair; to each member of a group, and more with
each that there is; heads of chunks, by bytes of contents."""
ROUND_TRIPS_IN_PAIR, ROUND_TRIPS_IN_GROUP = 2.0, 4.5
"""Waits for an answer: hello and confirmations; in groups the lists of members, too."""
VALUES_A_SECOND = 5e7
"""Values that one core codes, decodes and averages a second (docs/measurements.md)."""
START_TRIPS = 3.0
"""Round trips that contents lose while TCP finds the line's rate: it starts again after a pause."""
FILLED = 0.87
"""Share of a line's time that real nodes fill if they have more to send (docs/run.md)."""


def fragment_sizes(spec: RunSpec) -> tuple[int, ...]:
    """Values of each fragment, by the plan that peers make."""
    with torch.device("meta"):
        model = family_of(spec.model).blank(spec.model)
    plan = plan_fragments(tensor_specs(model), spec.sync.fragments, spec.sync.pattern)
    return tuple(fragment.numel for fragment in plan.fragments)


def contents(sync: SyncSettings, numel: int, members: int) -> int:
    """Bytes of coded values that a member sends for a fragment, and receives; in a group, the most.

    Blocks of modulo codecs that wrap are sent again, and not counted.
    """
    if members < 2:
        return 0
    if sync.group == 2:
        return coder(sync.codec, numel).min_size
    coded = codec(sync.codec).coded_size
    sizes = [coded(stop - start) for start, stop in shard_bounds(numel, members)]
    # To each owner its shard, and to each member the mean of ours.
    return max(sum(sizes) - mine + (members - 1) * mine for mine in sizes)


def control(sync: SyncSettings, sent: float, members: int) -> int:
    """Bytes of the frames that a member sends beside ``sent`` bytes of contents."""
    if members < 2:
        return 0
    group = (members - 1) * (CONTROL_OF_GROUP + CONTROL_OF_MEMBER * members)
    return round((CONTROL_IN_PAIR if sync.group == 2 else group) + CONTROL_SHARE * sent)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Exchanges of fragments of mean size on a line."""

    bytes: float
    """Bytes that a member sends, and receives: contents and the frames that agree on them."""
    values: float
    """Values of the fragment."""
    sync: SyncSettings
    line: Line
    step: float
    """Seconds of an inner step."""

    @property
    def line_seconds(self) -> float:
        """Seconds for which an exchange fills the line."""
        return FRAMING * self.bytes / self.line.slower

    @property
    def cycle_seconds(self) -> float:
        """Seconds in which a line that is never done exchanges every fragment once."""
        return self.sync.fragments * self.line_seconds / FILLED

    @property
    def ready_seconds(self) -> float:
        """Seconds from a capture until both ends know that it is applied, alone on the line."""
        trips = START_TRIPS
        if self.sync.group > 1:
            trips += ROUND_TRIPS_IN_PAIR if self.sync.group == 2 else ROUND_TRIPS_IN_GROUP
        return self.line_seconds + trips * self.line.latency + self.values / VALUES_A_SECOND

    @property
    def steps(self) -> int:
        """Inner steps of an exchange that nothing else disturbs, from due to merged."""
        return 1 + max(self.sync.overlap, ceil(self.ready_seconds / self.step))

    @property
    def interval(self) -> float:
        """Steps between two exchanges of a fragment that result: ``sync.interval``, or more.

        A fragment that merges late is next due at a multiple of ``sync.interval``.
        """
        alone = self.sync.interval * ceil(self.steps / self.sync.interval)
        return max(float(alone), self.cycle_seconds / self.step)

    @property
    def fitting_interval(self) -> int:
        """The shortest interval, at least ``sync.interval``, whose exchanges the line carries."""
        filled = ceil(self.cycle_seconds / self.step)
        return max(self.sync.interval, self.sync.fragments, self.steps, filled)

    @property
    def merged_seconds(self) -> float:
        """Seconds from when an exchange is due until it is merged; the mean of both ends."""
        step, takes, every = self.step, self.line_seconds, self.cycle_seconds
        # The partner is called within a step, and captures at its end, before the caller does.
        partner = max(self.sync.overlap + 0.5, 1.5 + self.ready_seconds / step) * step
        alone = (step * self.steps + partner) / 2
        if (busy := every / (self.sync.interval * step)) < 1:
            # The schedule spreads exchanges: half of the wait at random (Pollaczek, Khinchine).
            return alone + takes * min(1.0, busy / (2 * (1 - busy))) / 2
        # The line is always full: one other is ahead of each, or more on a slower line, until a
        # fragment waits half an interval to be due again. `Budget` bounds those begun at once.
        at_once = 1 + ceil((takes + 2 * (step + self.values / VALUES_A_SECOND)) / takes)
        longest = min(every - self.sync.interval * step / 2, at_once * takes / FILLED)
        return max(alone + takes, longest)
