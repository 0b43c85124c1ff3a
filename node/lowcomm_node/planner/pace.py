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
from lowcomm_protocol.spec.settings import SyncSettings

FRAMING = 1.045
"""Bytes on the line for each of contents: TCP and IP 3 to 5 %, TLS and HTTP/2 0.2 %
(docs/limits.md)."""
ROUND_TRIPS = {kinds.PAIR.name: 2.0, kinds.GROUP.name: 4.5}
"""Waits for an answer: hello and confirmations; in groups the lists of members, too."""
VALUES_A_SECOND = 5e7
"""That one core codes, decodes and averages in all (docs/performance.md)."""
ROOM = 0.9
"""Of an interval's time on the line, as much as is to be filled: lines and steps are not even."""


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


def steps_of(load: Load, sync: SyncSettings, line: Line, step: float) -> int:
    """Inner steps of an exchange that nothing else disturbs, from when it is due until it is
    merged."""
    kind = kinds.kind_of(sync)
    waits = ROUND_TRIPS[kind.name] * line.latency if kind else 0.0
    ready = line_seconds(load, line) + waits + load.values / VALUES_A_SECOND
    return 1 + max(sync.overlap, ceil(ready / step))


def interval_on(load: Load, sync: SyncSettings, line: Line, step: float) -> float:
    """Steps between two exchanges of a fragment that result: ``sync.interval``, or more."""
    # A fragment that merges late is next due where its schedule says, at a multiple of the
    # interval.
    alone = sync.interval * ceil(steps_of(load, sync, line, step) / sync.interval)
    return max(float(alone), sync.fragments * line_seconds(load, line) / step)


def fitting_interval(load: Load, sync: SyncSettings, line: Line, step: float) -> int:
    """The shortest interval, of ``sync.interval`` at least, whose exchanges the line carries one
    beside the other, with some room."""
    alone = steps_of(load, sync, line, step)
    filled = sync.fragments * line_seconds(load, line) / step / ROOM
    return max(sync.interval, sync.fragments, alone, ceil(filled))
