"""How long an exchange takes on a line, and how often a fragment is really exchanged there. Pure.

    due       the trainer reports a step: the fragment is due
    capture   at the end of the next step
    ready     coded, sent, received, decoded and confirmed
    merge     at the first boundary of a step after that, ``overlap`` steps after the capture or
              later

Training waits for none of it. An exchange that takes longer than the line or the interval allows
is made more rarely: a node begins as many as its line carries, and a fragment waits for the next
step at which it is due.
"""

from dataclasses import dataclass
from math import ceil

from lowcomm_node.planner.question import Line
from lowcomm_protocol.exchange import kinds
from lowcomm_protocol.spec.sections import SyncSettings

FRAMING = 1.045
"""Bytes on the line for each of contents: TCP and IP 3 to 5 %, TLS and HTTP/2 0.2 %
(docs/limits.md)."""
ROUND_TRIPS = {kinds.PAIR.name: 2.0, kinds.GROUP.name: 4.5}
"""Waits for an answer: hello and confirmations; in groups the lists of members, too."""
VALUES_A_SECOND = 5e7
"""That one core codes, decodes and averages in all (docs/performance.md)."""
START_TRIPS = 3.0
"""Round trips that contents lose while TCP finds the line's rate: after a pause it begins anew."""
FILLED = 0.87
"""Of a line's time, as much as real nodes fill that have more to send: 79 % at 5/20 Mbit/s, 88 at
2/10, 94 at 5/5 (docs/planning.md)."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one exchange of a fragment of mean size puts on the line."""

    bytes: float
    """That a member sends, and receives as many: contents and what agrees on them."""
    values: float
    """Of the fragment."""


def line_seconds(load: Load, line: Line) -> float:
    """Seconds for which an exchange fills the line."""
    return FRAMING * load.bytes / line.slower


def contents_seconds(load: Load, line: Line) -> float:
    """Seconds that contents take to come, if nothing else is on the line."""
    return line_seconds(load, line) + START_TRIPS * line.latency


def steps_of(load: Load, sync: SyncSettings, line: Line, step: float) -> int:
    """Inner steps of an exchange that nothing else disturbs, from when it is due until it is
    merged."""
    return 1 + max(sync.overlap, ceil(_ready(load, sync, line) / step))


def _ready(load: Load, sync: SyncSettings, line: Line) -> float:
    """Seconds from a capture until both ends know that the exchange is applied, if nothing else is
    on the line."""
    kind = kinds.kind_of(sync)
    waits = ROUND_TRIPS[kind.name] * line.latency if kind else 0.0
    return contents_seconds(load, line) + waits + load.values / VALUES_A_SECOND


def merged_seconds(load: Load, sync: SyncSettings, line: Line, step: float) -> float:
    """Seconds from when an exchange is due until it is merged: the mean of both ends, as they come
    one after the other."""
    ready = _ready(load, sync, line)
    caller = step * steps_of(load, sync, line, step)
    # The partner is called in the middle of a step. It captures at that step's end, before the
    # caller does, and the contents that it waits for come as late.
    partner = max(sync.overlap + 0.5, 1.5 + ready / step) * step
    alone = (caller + partner) / 2
    takes = line_seconds(load, line)
    turn = _turn_seconds(load, line)
    every = sync.fragments * turn
    if (busy := every / (sync.interval * step)) < 1:
        # Half of what contents of one size wait that come at random (Pollaczek and Khinchine): the
        # schedule spreads them.
        return alone + takes * min(1.0, busy / (2 * (1 - busy))) / 2
    # The line is always full: one other is ahead of each. The slower the line, the more, until a
    # fragment waits only half an interval to be due again. A peer begins no more than fill the
    # line while others are coded and wait for steps (`Budget`).
    at_once = 1 + ceil((takes + 2 * (step + load.values / VALUES_A_SECOND)) / takes)
    return max(alone + takes, min(every - sync.interval * step / 2, at_once * turn))


def interval_on(load: Load, sync: SyncSettings, line: Line, step: float) -> float:
    """Steps between two exchanges of a fragment that result: ``sync.interval``, or more."""
    # A fragment that merges late is next due where its schedule says, at a multiple of the
    # interval.
    alone = sync.interval * ceil(steps_of(load, sync, line, step) / sync.interval)
    return max(float(alone), sync.fragments * _turn_seconds(load, line) / step)


def _turn_seconds(load: Load, line: Line) -> float:
    """Seconds between two exchanges on a line that is never done."""
    return line_seconds(load, line) / FILLED


def fitting_interval(load: Load, sync: SyncSettings, line: Line, step: float) -> int:
    """The shortest interval, of ``sync.interval`` at least, whose exchanges the line carries one
    beside the other."""
    alone = steps_of(load, sync, line, step)
    filled = sync.fragments * _turn_seconds(load, line) / step
    return max(sync.interval, sync.fragments, alone, ceil(filled))
