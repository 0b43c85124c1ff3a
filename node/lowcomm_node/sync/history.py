"""What became of exchanges: counters, the last rounds, and how each peer has behaved."""

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any

from lowcomm_node.errors import NodeError
from lowcomm_node.sync.driver import ExchangeDriver
from lowcomm_node.sync.records import ExchangeEnded
from lowcomm_protocol.exchange.base import Cause
from lowcomm_protocol.exchange.events import Outcome
from lowcomm_protocol.exchange.underway import Story
from lowcomm_protocol.matching import REFUSAL_TEXT, Refusal

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
MAX_ROUNDS = 200
MAX_STORIES = 50
MAX_STORY_EVENTS = 5000
"""Of all stories together: at most 8 MB."""
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
    rounds: deque[ExchangeEnded] = field(default_factory=lambda: deque(maxlen=MAX_ROUNDS))
    stories: deque[Story] = field(default_factory=deque)
    """Of the last exchanges."""
    worst_block: dict[int, float] = field(default_factory=dict)
    """Of each fragment at its last merge: how far contributions were apart in the block of 256
    values that was worst."""
    last_reason: str = ""
    """Why the last exchange was not applied; empty after one that was."""
    applied_at: float | None = None
    """When the last one was applied (monotonic seconds)."""
    _peers: OrderedDict[str, PeerHistory] = field(default_factory=OrderedDict)

    def record(
        self, driver: ExchangeDriver, outcome: Outcome, reason: str, swarm_step: int
    ) -> ExchangeEnded:
        """Count an exchange that is over; its entry in the list of rounds."""
        now = monotonic()
        self.outcomes[outcome] += 1
        self.in_doubt += driver.one.machine.in_doubt
        self.bytes_sent += driver.bytes_sent
        self.bytes_received += driver.bytes_received
        partners = driver.one.partners
        if outcome is Outcome.APPLIED:
            self.applied_at = now
            self.realigned += driver.one.realign
            self.worst_block[driver.fragment] = driver.worst_block or 0.0
            for peer in partners:
                self.of(peer).completed += 1
        self.last_reason = reason if outcome is not Outcome.APPLIED else ""
        entry = ExchangeEnded(
            id=driver.one.id,
            time=time(),
            fragment=driver.fragment,
            round=driver.one.offer.round,
            outcome=outcome,
            reason=reason,
            code=None if outcome is Outcome.APPLIED else _code(driver),
            partners=partners,
            in_doubt=driver.one.machine.in_doubt,
            left_out=driver.one.machine.refusals,
            left_out_codes=driver.one.machine.causes,
            swarm_step=swarm_step,
            bytes_sent=driver.bytes_sent,
            bytes_received=driver.bytes_received,
            seconds=now - driver.one.began,
            worst_block=driver.worst_block,
            stages=dict(driver.stages.seconds),
            moments=driver.moments,
        )
        self.rounds.append(entry)
        self._keep(driver.one.story)
        return entry

    def _keep(self, story: Story) -> None:
        self.stories.append(story)
        events = sum(len(kept.told) for kept in self.stories)
        while len(self.stories) > MAX_STORIES or events > MAX_STORY_EVENTS:
            events -= len(self.stories.popleft().told)

    def story(self, last: int) -> dict[str, Any]:
        """How the ``last``-th exchange from the end went, for ``underway.replay``. Raises
        NodeError."""
        kept = len(self.stories)
        if not 1 <= last <= kept:
            remedy = (
                f"choose 1 (the last one) to {kept}" if kept else "wait until an exchange has ended"
            )
            raise NodeError(f"There is no story of exchange {last} from the end: {remedy}.")
        return self.stories[-last].to_json()

    def of(self, peer: str) -> PeerHistory:
        """The history of one peer; the one not met for longest is forgotten first."""
        if peer not in self._peers:
            self._peers[peer] = PeerHistory()
            if len(self._peers) > MAX_PEERS:
                self._peers.popitem(last=False)
        self._peers.move_to_end(peer)
        return self._peers[peer]

    def they_refused(self, peer: str, refusal: Refusal) -> None:
        """Count an offer of ours that a peer refused; not where its own call to us goes on
        instead."""
        if refusal is Refusal.CROSSED:
            return
        self.refusals += 1
        history = self.of(peer)
        history.refused += 1
        history.last_reason, history.last_code = REFUSAL_TEXT[refusal], refusal

    def we_refused(self, peer: str, refusal: Refusal) -> None:
        """Count an offer of a peer that we refused; not where our own call to it goes on
        instead."""
        if refusal is Refusal.CROSSED:
            return
        self.refusals += 1
        history = self.of(peer)
        history.last_reason = f"we refused it: {WE_REFUSED[refusal]}"
        history.last_code = refusal

    def lost(self, peer: str, reason: str, cause: Cause | Refusal) -> None:
        """Count a stream that was lost."""
        history = self.of(peer)
        history.failed += 1
        history.last_reason, history.last_code = reason, cause


def _code(driver: ExchangeDriver) -> Cause | Refusal:
    """Why it was not applied; where everybody had agreed, our own outer step has failed."""
    return driver.one.machine.cause or Cause.OWN_FAULT
