"""What became of exchanges: counters, the last rounds, and how each peer has behaved."""

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from statistics import median
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from lowcomm_node.sync.needs import Recent
from lowcomm_node.sync.records import Outcome
from lowcomm_protocol.plan.matching import REFUSAL_TEXT, Refusal

if TYPE_CHECKING:
    from lowcomm_node.sync.driver import Round

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
"""Why we refused an offer, for our owner; ``REFUSAL_TEXT`` says the same of a peer that refused ours."""
_LEFT_OUT = (Refusal.NOT_TRUSTED, Refusal.IMPLAUSIBLE_STEP)
MAX_ROUNDS = 200
MAX_PEERS = 1024


@dataclass
class PeerHistory:
    """Exchanges with one peer."""

    completed: int = 0
    refused: int = 0
    failed: int = 0
    last_reason: str = ""


@dataclass
class History:
    """Bounded memory of exchanges."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    in_doubt: int = 0
    realigned: int = 0
    """Exchanges that were applied and carried whole slow weights in fp32, because those of the members differed."""
    refusals: int = 0
    """Offers that were refused, by others and by us."""
    bytes_sent: int = 0
    bytes_received: int = 0
    rounds: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_ROUNDS))
    worst_block: dict[int, float] = field(default_factory=dict)
    """Of each fragment at its last merge: how far contributions were apart in the block of 256 values that was worst."""
    last_reason: str = ""
    """Why the last exchange was not applied; empty after one that was."""
    left_out_by: set[str] = field(default_factory=set)
    """Peers that have left us out, or did not believe our swarm step, since the last exchange that was applied."""
    work: Recent = field(default_factory=Recent)
    """Seconds that our trainer took for an exchange, waiting for a step included."""
    rates: Recent = field(default_factory=Recent)
    """Bytes a second at which contents came, the slowest of each exchange."""
    _peers: OrderedDict[str, PeerHistory] = field(default_factory=OrderedDict)
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=16))

    def record(self, round_: "Round", outcome: Outcome, reason: str, swarm_step: int) -> dict[str, Any]:
        """Count an exchange that is over; its entry in the list of rounds."""
        now = monotonic()
        seconds = now - round_.began
        self.outcomes[outcome] += 1
        self.in_doubt += round_.exchange.in_doubt
        self.bytes_sent += round_.bytes_sent
        self.bytes_received += round_.bytes_received
        partners = round_.exchange.partners
        self._measure(round_, now)
        if outcome is Outcome.APPLIED:
            self.realigned += round_.realign
            self.worst_block[round_.fragment] = round_.worst_block or 0.0
            self._seconds.append((round_.decided or now) - round_.began)
            self.left_out_by.clear()
            for peer in partners:
                self.of(peer).completed += 1
        self.last_reason = reason if outcome is not Outcome.APPLIED else ""
        entry = {
            "time": time(),
            "fragment": round_.fragment,
            "round": round_.offer.round,
            "outcome": outcome.value,
            "reason": reason,
            "partners": list(partners),
            "in_doubt": round_.exchange.in_doubt,
            "left_out": round_.exchange.refusals,
            "swarm_step": swarm_step,
            "bytes_sent": round_.bytes_sent,
            "bytes_received": round_.bytes_received,
            "seconds": seconds,
            "worst_block": round_.worst_block,
        }
        self.rounds.append(entry)
        return entry

    def _measure(self, round_: "Round", now: float) -> None:
        """Learn what exchanges need, from those that failed, too: the next ones then get as long as it takes."""
        if round_.worked:
            self.work.add(round_.worked, now)
        if rates := [rate for link in round_.links.values() if (rate := link.rate(now)) is not None]:
            self.rates.add(min(rates), now)

    def of(self, peer: str) -> PeerHistory:
        """The history of one peer; the one not met for longest is forgotten first."""
        if peer not in self._peers:
            self._peers[peer] = PeerHistory()
            if len(self._peers) > MAX_PEERS:
                self._peers.popitem(last=False)
        self._peers.move_to_end(peer)
        return self._peers[peer]

    def they_refused(self, peer: str, refusal: Refusal) -> None:
        """Count an offer of ours that a peer refused; not where its own call to us goes on instead."""
        if refusal is Refusal.CROSSED:
            return
        self.refusals += 1
        history = self.of(peer)
        history.refused += 1
        history.last_reason = REFUSAL_TEXT[refusal]
        if refusal in _LEFT_OUT and len(self.left_out_by) < MAX_PEERS:
            self.left_out_by.add(peer)

    def we_refused(self, peer: str, refusal: Refusal) -> None:
        """Count an offer of a peer that we refused; not where our own call to it goes on instead."""
        if refusal is Refusal.CROSSED:
            return
        self.refusals += 1
        self.of(peer).last_reason = f"we refused it: {WE_REFUSED[refusal]}"

    def lost(self, peer: str, reason: str) -> None:
        """Count a stream that was lost."""
        history = self.of(peer)
        history.failed += 1
        history.last_reason = reason

    def usual_seconds(self) -> float | None:
        """Median of the seconds after which the last exchanges that were applied had all they needed; None if none was."""
        return median(self._seconds) if self._seconds else None
