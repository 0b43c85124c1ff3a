"""Where a peer stands in the run: its counters and offers, its last partners, whether its own line
is to blame for stalls, and when it has drifted so far that it copies a state. Pure."""

from collections import Counter, deque
from math import ceil

from lowcomm_protocol import PROTOCOL_VERSION
from lowcomm_protocol.exchange.events import Merged, PeerView, Stepped, TrainerReady
from lowcomm_protocol.exchange.underway import TRIES, UNKNOWN, Lacking, kept, state_mark
from lowcomm_protocol.matching import Offer
from lowcomm_protocol.plan import SyncSchedule, is_supported, largest_jump
from lowcomm_protocol.spec.names import codec_in_offer
from lowcomm_protocol.spec.run import RunSpec


class Position:
    """The counters of this peer."""

    def __init__(self, me: str, spec: RunSpec, run_id: str, surroundings: PeerView) -> None:
        self.me = me
        self.interval = spec.sync.interval
        self.ready: TrainerReady | None = None
        """The trainer, once there is one."""
        self.schedule = SyncSchedule(self.interval, [])
        self.swarm_step = 0
        self.steps = 0
        self.tokens = 0
        self._sync = spec.sync
        self._run_id = run_id
        self._around = surroundings
        self._slow_digests: list[bytes] = []
        self._momentum_digests: list[bytes] = []
        self._previous: list[tuple[bytes, ...]] = []
        """State marks before each of the last outer steps, by fragment."""
        self._failed_to_take_over: Counter[int] = Counter()

    def take_over(self, ready: TrainerReady) -> None:
        """Begin with the counters of a trainer that has built, resumed or adopted its state."""
        self.ready = ready
        self.stepped(ready)
        self.schedule = SyncSchedule(self.interval, ready.progress)
        self._slow_digests = list(ready.slow_digests)
        self._momentum_digests = list(ready.momentum_digests)
        self._previous = [()] * len(ready.progress)
        self._failed_to_take_over.clear()

    def stepped(self, step: Stepped | TrainerReady) -> None:
        """Count an inner step."""
        self.swarm_step, self.steps, self.tokens = step.swarm_step, step.steps, step.tokens

    def merged(
        self, fragment: int, merged: Merged, realigned: bool = False, took: Lacking | None = None
    ) -> None:
        """Count an outer step of a fragment; ``took``: what we had missed was taken over before."""
        self.swarm_step = max(self.swarm_step, merged.swarm_step)
        self.schedule.merged(fragment, merged.swarm_step, merged.steps, merged.tokens)
        held, known = self._held(fragment), self._previous[fragment]
        if took is not None:
            held, known = (took.slow_digest, took.momentum_digest), ()
        moved = (merged.slow_digest, merged.momentum_digest) != held
        marks = () if realigned else (*known, state_mark(*held)) if moved else known
        assert self.ready is not None
        most = kept(self.ready.sizes[fragment][1], self.ready.realign_sizes[fragment])
        self._previous[fragment] = marks[max(0, len(marks) - most) :]
        del self._failed_to_take_over[fragment]
        self._slow_digests[fragment] = merged.slow_digest
        self._momentum_digests[fragment] = merged.momentum_digest

    def failed_to_take_over(self, fragment: int) -> None:
        """Count an exchange that ended before we had what we lack."""
        self._failed_to_take_over[fragment] += 1

    def _held(self, fragment: int) -> tuple[bytes, bytes]:
        known = self._failed_to_take_over[fragment] < TRIES
        slow = self._slow_digests[fragment] if known else UNKNOWN
        return slow, self._momentum_digests[fragment]

    def offer(self, fragment: int, number: int, seconds: int) -> Offer:
        """What we bring to the ``number``-th exchange of a fragment, and the seconds we need."""
        assert self.ready is not None
        progress, by_digest = self.schedule[fragment], self._sync.consensus == 0
        slow_digest, momentum_digest = self._held(fragment) if by_digest else (b"", b"")
        return Offer(
            protocol=PROTOCOL_VERSION,
            run_id=self._run_id,
            plan=self.ready.plan,
            codec=codec_in_offer(self._sync.codec),
            fragment=fragment,
            round=number,
            swarm_step=self.swarm_step,
            steps=self.steps - progress.merged_steps,
            tokens=self.tokens - progress.merged_tokens,
            version=progress.version,
            slow_digest=slow_digest,
            momentum_digest=momentum_digest,
            seconds=seconds,
            previous=self._previous[fragment] if by_digest else (),
        )

    def supports(self, peer: str, swarm_step: int) -> bool:
        """Whether what we and others know makes a swarm step plausible that a peer claims."""
        most = largest_jump(self.interval, self.steps_alone)
        return is_supported(swarm_step, self.swarm_step, [self._around.furthest(but=peer)], most)

    @property
    def steps_alone(self) -> int:
        """Own inner steps since the last merge of any fragment."""
        return self.schedule.steps_alone(self.steps)


class RecentPartners:
    """The last partner of each fragment in pairs."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[str, int, int]] = {}
        """By fragment: the partner of the last row of merges, own inner steps when its first
        contribution was captured, and its last."""

    def merged(self, fragment: int, partner: str, steps: int) -> None:
        """Count a merge with a partner, of what was captured after ``steps`` own inner steps."""
        last, first, _ = self._rows.get(fragment, (partner, steps, steps))
        self._rows[fragment] = partner, first if last == partner else steps, steps

    def apart(self, fragment: int, peer: str) -> int:
        """For how many own inner steps we have merged a fragment with one other alone, who is not
        ``peer``."""
        partner, first, last = self._rows.get(fragment, (peer, 0, 0))
        return 0 if partner == peer else last - first


STALLED_PEERS = 64
"""Peers that are remembered."""


class OwnLine:
    """What has come and what has stalled, as far as it speaks of our own line."""

    def __init__(self) -> None:
        self.stalled_peers = set[str]()
        """Peers whose contents have stalled since one came whole."""

    def stalled(self, peer: str) -> bool:
        """A peer's content has not come; whether that is its fault, as far as we know."""
        is_its_fault = not self.stalled_peers - {peer}
        if len(self.stalled_peers) < STALLED_PEERS:
            self.stalled_peers.add(peer)
        return is_its_fault

    @property
    def trouble(self) -> str | None:
        """What is wrong with our line; None if nothing is known to be."""
        count = len(self.stalled_peers)
        if count < 2:
            return None
        return f"contents of {count} peers in a row did not come, so it is this machine's line"


FIRST_REST = 10.0
"""Seconds after the first copy, in which exchanges show whether it has helped."""
REST_SHARE = 4.0
"""The wait in durations of the copy, if that is longer: at most a fifth of the time goes into
copies."""
LONGEST_REST = 3600.0
"""Seconds that a rest lasts at most."""
COPY_COUNTS_SECONDS = 24 * 3600.0
"""Seconds for which a copy counts."""
COPIES = 16


class Rest:
    """The rest after copies of a state, in seconds of one clock. Each copy of a day doubles it."""

    def __init__(self) -> None:
        self._copies: deque[float] = deque(maxlen=COPIES)
        self._until = float("-inf")

    def copied(self, took: float, now: float) -> None:
        """A copy that took ``took`` seconds is done."""
        doublings = sum(now - before < COPY_COUNTS_SECONDS for before in self._copies)
        self._copies.append(now)
        self._until = now + min(LONGEST_REST, max(FIRST_REST, REST_SHARE * took) * 2**doublings)

    def left(self, now: float) -> float:
        """Seconds until the next copy may begin."""
        return max(0.0, self._until - now)


WITNESSES = 2
"""Peers that must leave us out before we believe that we are wrong: one alone could be a liar, or
as wrong as we."""
DRIFTED = 2
"""Intervals without an exchange after which peers that leave us out are believed."""
ENDURED = 50
"""Intervals of training before we look again, where nobody could hand over a state."""
MAX_PEERS = 1024


class Drift:
    """Whether exchanges can still bring us back to the others."""

    def __init__(self, position: Position, surroundings: PeerView) -> None:
        self.rest = Rest()
        """After a copy that was to bring us back."""
        self.stranded = False
        """Whether our slow weights are others than those of most, and nobody can hand over the
        steps between."""
        self._position = position
        self._around = surroundings
        self.left_out_by: set[str] = set()
        """Peers that have left us out, or did not believe our swarm step, since the last exchange
        that was applied."""
        self._endured_until = 0

    def left_out(self, peer: str) -> None:
        """A peer leaves us out."""
        if len(self.left_out_by) < MAX_PEERS:
            self.left_out_by.add(peer)

    def restart(self) -> None:
        """Forget the past of a state that was replaced."""
        self.left_out_by.clear()
        self.stranded, self._endured_until = False, 0

    def endure(self) -> None:
        """Nobody could hand over a state: train on, rather than ask again and again."""
        self._endured_until = self._position.steps + ENDURED * self._position.interval

    def must_copy(self, now: float) -> bool:
        """Whether to copy the state of others now: exchanges can't bring us back to them."""
        position = self._position
        if position.ready is None or position.steps < self._endured_until or self.rest.left(now):
            return False
        return self._is_far()

    def resting(self, now: float) -> str | None:
        """Why we train on though we are far from most peers; None if we aren't, or copy soon."""
        seconds = self.rest.left(now)
        if self._position.ready is None or not seconds or not self._is_far():
            return None
        return (
            "still far from most peers, whose state was copied lately: it is copied again in "
            f"{ceil(seconds)} s at the earliest"
        )

    def _is_far(self) -> bool:
        if self.stranded:
            return True
        position = self._position
        # This is asked at each step where an exchange is due. A look at the furthest peer is cheap,
        # one at all peers of a large swarm is not.
        far = position.swarm_step + largest_jump(position.interval)
        if not self.left_out_by and self._around.furthest(but=position.me) <= far:
            return False
        training = self._around.training()
        # Others must support the step that a peer claims: a single liar is not ahead.
        ahead = sum(step > far and position.supports(peer, step) for peer, step in training)
        left_out = sum(peer in self.left_out_by for peer, _ in training)
        # As long as exchanges are applied, those that leave us out are the ones that err.
        if position.steps_alone < DRIFTED * position.interval or left_out < WITNESSES:
            left_out = 0
        # Not their sum: a peer that is ahead and leaves us out is one peer.
        return 2 * max(ahead, left_out) > len(training)
