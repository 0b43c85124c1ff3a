"""Bytes and seconds of an exchange on a line, and how often a fragment is really exchanged. Pure.

A fragment that is due at a step is captured at the end of the next, then coded, sent, received,
decoded and confirmed, and merged at the first boundary of a step at least ``overlap`` steps later.
Training waits for none of it: an exchange that takes longer than line or interval allow is made
more rarely.
"""

from dataclasses import dataclass
from math import ceil

from lowcomm_node.planner.line import Line
from lowcomm_protocol.codecs import codec, coder
from lowcomm_protocol.codecs.shards import shard_bounds
from lowcomm_protocol.spec.sections import SyncSettings

FRAMING = 1.045
"""Bytes on the line for each of contents: TCP and IP 3 to 5 %, TLS and HTTP/2 0.2 %."""
CONTROL_IN_PAIR, CONTROL_OF_GROUP, CONTROL_OF_MEMBER = 200, 250, 5
"""Bytes of frames that agree on an exchange: of a pair; to each member of a group, and more with
each that there is."""
ROUND_TRIPS_IN_PAIR, ROUND_TRIPS_IN_GROUP = 2.0, 4.5
"""Waits for an answer: hello and confirmations; in groups the lists of members, too."""
VALUES_A_SECOND = 5e7
"""Values that one core codes, decodes and averages a second (docs/measurements.md)."""
START_TRIPS = 3.0
"""Round trips that contents lose while TCP finds the line's rate: it starts again after a pause."""
FILLED = 0.87
"""Share of a line's time that real nodes fill if they have more to send (docs/run.md)."""


def contents(sync: SyncSettings, numel: int, members: int) -> int:
    """Bytes of coded values that a member sends for a fragment, and receives; in a group, the most.

    Blocks of modulo codecs that wrap are sent again, and not counted.
    """
    if sync.group == 2:
        return coder(sync.codec, numel).min_size
    coded = codec(sync.codec).coded_size
    sizes = [coded(stop - start) for start, stop in shard_bounds(numel, members)]
    # To each owner its shard, and to each member the mean of ours.
    return max(sum(sizes) - mine + (members - 1) * mine for mine in sizes)


@dataclass(frozen=True, kw_only=True)
class LinePace:
    """Exchanges of fragments of mean size on a line."""

    coded: float
    """Bytes of contents that a member sends in an exchange, and receives."""
    sent: float
    """The same with the frames that agree on them."""
    line_seconds: float
    """Seconds for which an exchange fills the line."""
    shortest: int
    """The shortest interval, in steps, whose exchanges the line carries."""
    interval: float
    """Steps between two exchanges of a fragment that result: ``sync.interval``, or more."""


def pace_on(line: Line, sync: SyncSettings, coded: float, values: float) -> LinePace:
    """The pace of exchanges of ``coded`` bytes each, for fragments of ``values`` values."""
    members = min(sync.group, line.peers)
    of_group = (members - 1) * (CONTROL_OF_GROUP + CONTROL_OF_MEMBER * members)
    sent = coded + (CONTROL_IN_PAIR if sync.group == 2 else of_group)
    line_seconds = FRAMING * sent / line.slower
    # Steps in which a line that is never done exchanges every fragment once.
    cycle = sync.fragments * line_seconds / FILLED / line.step_seconds
    # Seconds from a capture until both ends know that it is applied, alone on the line.
    trips = START_TRIPS + (ROUND_TRIPS_IN_PAIR if sync.group == 2 else ROUND_TRIPS_IN_GROUP)
    ready = line_seconds + trips * line.latency / 1000 + values / VALUES_A_SECOND
    # Steps of an exchange that nothing else disturbs, from due to merged.
    alone = 1 + max(sync.overlap, ceil(ready / line.step_seconds))
    # A fragment that merges late is next due at a multiple of the interval.
    due = sync.interval * ceil(alone / sync.interval)
    return LinePace(
        coded=coded,
        sent=sent,
        line_seconds=line_seconds,
        shortest=max(sync.fragments, alone, ceil(cycle)),
        interval=max(float(due), cycle),
    )
