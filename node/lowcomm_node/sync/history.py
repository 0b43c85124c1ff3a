"""What became of exchanges, with all peers and with each, and how often a fragment is exchanged."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from statistics import median
from time import monotonic, time
from typing import TYPE_CHECKING

from cachetools import LRUCache

from lowcomm_node.system.logs import Event
from lowcomm_protocol.exchange.budget import Needs
from lowcomm_protocol.exchange.events import Cause, Outcome
from lowcomm_protocol.matching import REFUSAL_TEXT, Refusal

if TYPE_CHECKING:
    from lowcomm_node.sync.driver import ExchangeDriver


@dataclass(frozen=True, kw_only=True)
class ExchangeStatus:
    """An exchange under way."""

    fragment: int
    """Which fragment is exchanged."""
    round: int
    """Number of the exchange of this fragment, the same at all members."""
    stage: str
    """The stage that it has reached."""
    partners: tuple[str, ...]
    """Peer ids of the other members, as far as they are known."""
    bytes_sent: int
    """Bytes of contents that this node has sent."""
    bytes_received: int
    """Bytes of contents that this node has received."""
    bytes_expected: int
    """Bytes that both directions will carry, as far as that is known."""
    seconds: float
    """Seconds since it began."""


class IntervalCause(StrEnum):
    """What makes exchanges rarer than the run says."""

    LINE = "line"
    PARTNER = "partner"
    BUDGET = "budget"
    FAILED = "failed"
    EXCHANGE = "exchange"


@dataclass(frozen=True, kw_only=True)
class IntervalStatus:
    """How often a fragment is exchanged."""

    written: int
    """Swarm steps between two exchanges of a fragment, as the run says."""
    effective: float | None = None
    """The same as the last exchanges went; null until three were applied."""
    cause: IntervalCause | None = None
    """The cause of a longer interval: the line, missing partners, the owner's budget, failed
    exchanges, or the length of an exchange; null where it is no longer."""
    reason: str = ""
    """The same in words."""


class ExchangeEnded(Event, name="exchange"):
    """An exchange has ended."""

    time: float
    """When it ended (Unix seconds)."""
    fragment: int
    """Which fragment was exchanged."""
    round: int
    """Number of the exchange of this fragment, the same at all members."""
    outcome: Outcome
    """How it ended."""
    reason: str
    """Why it was not applied, or what was special about it; empty where there is nothing to
    tell."""
    code: str | None = None
    """Code of the reason in the catalogue; null where it was applied."""
    partners: tuple[str, ...]
    """Peer ids of the other members."""
    in_doubt: bool = False
    """Whether the last word was lost, so that another member may have applied what we have not."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Peers that refused or were lost, by peer id, each with the reason."""
    left_out_codes: Mapping[str, str] = field(default_factory=dict)
    """Codes of these reasons in the catalogue."""
    swarm_step: int
    """Swarm step at which it ended."""
    bytes_sent: int
    """Bytes of contents that this node sent."""
    bytes_received: int
    """Bytes of contents that this node received."""
    seconds: float
    """Seconds that it took."""
    worst_block: float | None = None
    """Spread of the contributions in the block of 256 values where it was largest; null unless it
    was applied."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each stage took: of our trainer where it was applied, of our line always. Stages
    overlap, so their sum is not that of the exchange."""

    moments: Mapping[str, float] = field(default_factory=dict)
    """Seconds from its beginning until the members were known (`met`), our contribution was
    `captured` and `sent`, those of the others were `received` and `decoded`, and all had confirmed
    (`decided`), as far as it came."""
    id: str = ""
    """The same at all members, 32 hexadecimal digits: of run, fragment, round and members; empty
    where they were not known."""

    @property
    def name(self) -> str:
        """Such as ``exchange.applied``."""
        return f"{self.wire_name}.{self.outcome}"

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """One for each outcome."""
        return tuple(f"{cls.wire_name}.{outcome}" for outcome in Outcome)


WE_REFUSED: dict[Refusal, str] = {
    Refusal.BUSY: "an exchange of this fragment was under way",
    Refusal.CROSSED: "our own call goes on",
    Refusal.TOO_SOON: "we had merged this fragment a few steps before",
    Refusal.FULL: "there was no room for another contribution",
    Refusal.TOO_SLOW: "it would take longer than --exchange-deadline",
    Refusal.NOT_TRAINING: "we did not train",
    Refusal.OTHER_PROTOCOL: "it speaks another protocol version",
    Refusal.OTHER_RUN: "it takes part in another run",
    Refusal.OTHER_PLAN: "it cuts the model in another way",
    Refusal.OTHER_CODEC: "it uses another codec",
    Refusal.UNKNOWN_FRAGMENT: "there is no such fragment",
    Refusal.IMPLAUSIBLE_STEP: "nobody confirms its swarm step",
    Refusal.NOT_ALLOWED: "we did not know it yet",
    Refusal.NOT_TRUSTED: "it is left out for a while",
}
"""Why we refused an offer, for our owner; ``REFUSAL_TEXT`` says the same of a peer that refused
ours."""
MAX_EXCHANGES = 200
MAX_PEERS = 1024


@dataclass
class PeerHistory:
    """Exchanges with one peer."""

    completed: int = 0
    refused: int = 0
    failed: int = 0
    last_reason: str = ""
    last_code: str | None = None


@dataclass
class History:
    """Bounded memory of exchanges."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    in_doubt: int = 0
    realigned: int = 0
    """Exchanges that were applied and carried whole slow weights in fp32, because those of the
    members differed."""
    refusals: int = 0
    """Offers that were refused, by others and by us."""
    bytes_sent: int = 0
    bytes_received: int = 0
    exchanges: deque[ExchangeEnded] = field(default_factory=lambda: deque(maxlen=MAX_EXCHANGES))
    worst_block: dict[int, float] = field(default_factory=dict)
    """Of each fragment at its last merge: how far contributions were apart in the block of 256
    values that was worst."""
    applied_at: float | None = None
    """When the last one was applied (monotonic seconds)."""
    _peers: LRUCache[str, PeerHistory] = field(default_factory=lambda: LRUCache(MAX_PEERS))

    def record(
        self, driver: "ExchangeDriver", outcome: Outcome, reason: str, swarm_step: int
    ) -> ExchangeEnded:
        """Count an exchange that is over; its entry in the list."""
        now, one, machine = monotonic(), driver.one, driver.one.machine
        is_applied = outcome is Outcome.APPLIED
        self.outcomes[outcome] += 1
        self.in_doubt += machine.in_doubt
        self.bytes_sent += driver.bytes_sent
        self.bytes_received += driver.bytes_received
        if is_applied:
            self.applied_at = now
            self.realigned += one.realign
            self.worst_block[one.fragment] = driver.worst_block or 0.0
            for peer in one.partners:
                self.of(peer).completed += 1
        entry = ExchangeEnded(
            id=one.id,
            time=time(),
            fragment=one.fragment,
            round=one.offer.round,
            outcome=outcome,
            reason=reason,
            # Where everybody had agreed, our own outer step has failed.
            code=None if is_applied else machine.cause or Cause.OWN_FAULT,
            partners=one.partners,
            in_doubt=machine.in_doubt,
            left_out=machine.refusals,
            left_out_codes=machine.causes,
            swarm_step=swarm_step,
            bytes_sent=driver.bytes_sent,
            bytes_received=driver.bytes_received,
            seconds=now - one.began,
            worst_block=driver.worst_block,
            stages=dict(driver.stages.seconds),
            moments=driver.moments,
        )
        self.exchanges.append(entry)
        return entry

    def of(self, peer: str) -> PeerHistory:
        """The history of one peer; the one not met for longest is forgotten first."""
        return self._peers.setdefault(peer, PeerHistory())

    def refused(self, peer: str, refusal: Refusal, by_us: bool = False) -> None:
        """Count an offer of ours that a peer refused, or one of a peer that we refused."""
        if refusal is Refusal.CROSSED:  # of two calls that cross one goes on
            return
        history = self.of(peer)
        self.refusals += 1
        history.refused += not by_us
        reason = f"we refused it: {WE_REFUSED[refusal]}" if by_us else REFUSAL_TEXT[refusal]
        history.last_reason, history.last_code = reason, refusal

    def lost(self, peer: str, reason: str, cause: Cause | Refusal) -> None:
        """Count a stream that was lost."""
        history = self.of(peer)
        history.failed += 1
        history.last_reason, history.last_code = reason, cause


LEAST_EXCHANGES = 16
"""The last exchanges that count; more where two of each fragment are more."""
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
    """Seconds of an inner step."""


def hindrance_in_words(needs: Needs, longest: float) -> str:
    """Why an exchange can't be begun where it may take ``longest`` seconds, and what to do."""
    shared = f", which {needs.streams} share," if needs.streams > 1 else ""
    causes = [f"at the limits on traffic{shared}"] if needs.limits else []
    causes += [f"with steps of {needs.step:.0f} s"] if needs.step >= 1 else []
    remedy = "--max-up and --max-down, or that" if needs.limits else "that"
    return (
        f"{' and '.join(causes)} an exchange may take {needs.least} s, and --exchange-deadline "
        f"allows {longest:.0f}: raise {remedy}"
    )


def interval_of(
    exchanges: Sequence[ExchangeEnded], swarm_step: int, around: Circumstances
) -> IntervalStatus:
    """What becomes of the interval, by the last exchanges; ``swarm_step``: of this node now."""
    recent = list(islice(reversed(exchanges), max(LEAST_EXCHANGES, 2 * around.fragments)))
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
