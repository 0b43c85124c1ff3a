"""How often fragments are really exchanged, beside how often the run says, and why. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median

from lowcomm_node.sync.records import ExchangeEnded, IntervalCause, IntervalStatus
from lowcomm_protocol.exchange.events import Outcome

LEAST_ROUNDS = 16
"""Of the last exchanges so many count, or two of each fragment."""
LEAST_APPLIED = 3
NEAR = 1.25
"""Times the interval of the run up to which all is as it should be."""
FULL = 0.75
"""Share of an interval that its exchanges fill the line for, from which on the line is why."""
MANY = 0.25
"""Share of exchanges that are not applied, from which on they are why."""


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What may keep a node from exchanging as often as its run says."""

    written: int
    """Swarm steps, as the run says."""
    fragments: int
    hindrance: str | None
    """Why no exchange can begin within the owner's limits."""
    line_seconds: float | None
    """That the contents of an exchange take."""
    step_seconds: float
    """Of an inner step."""


def interval_of(
    rounds: Sequence[ExchangeEnded], swarm_step: int, around: Circumstances
) -> IntervalStatus:
    """What becomes of the interval, by the last exchanges; ``swarm_step``: of this node now."""
    recent = list(islice(reversed(rounds), max(LEAST_ROUNDS, 2 * around.fragments)))
    applied = [one for one in recent if one.outcome is Outcome.APPLIED]
    effective = None
    if len(applied) >= LEAST_APPLIED:
        since = swarm_step - applied[-1].swarm_step
        effective = around.fragments * since / (len(applied) - 1)
    is_near = effective is not None and effective <= NEAR * around.written
    late = effective is not None and not is_near
    if not late and around.hindrance is None:
        return IntervalStatus(written=around.written, effective=effective)
    cause, text = _cause(recent, around)
    return IntervalStatus(written=around.written, effective=effective, cause=cause, reason=text)


def _cause(recent: Sequence[ExchangeEnded], around: Circumstances) -> tuple[IntervalCause, str]:
    line, step, count = around.line_seconds, around.step_seconds, around.fragments
    if around.hindrance is not None:
        return IntervalCause.BUDGET, around.hindrance
    if line is not None and line * count >= FULL * around.written * step:
        each = f"contents of an exchange take {line:.1f} s on the line"
        return IntervalCause.LINE, f"{each}, and there are {count} in an interval"
    outcomes = Counter(one.outcome for one in recent)
    if outcomes[Outcome.FAILED] >= MANY * len(recent):
        return IntervalCause.FAILED, f"{outcomes[Outcome.FAILED]} of {len(recent)} failed"
    if outcomes[Outcome.NO_PARTNER] < MANY * len(recent):
        took = median(one.seconds for one in recent if one.outcome is Outcome.APPLIED)
        if took >= FULL * around.written * step:
            return IntervalCause.EXCHANGE, f"an exchange takes {took:.1f} s until it is merged"
    partners = f"{outcomes[Outcome.NO_PARTNER]} of {len(recent)} found no partner"
    return IntervalCause.PARTNER, partners
