"""Where a peer stands in the run, what it offers of that, and whose claims it supports. Pure."""

from collections import Counter

from lowcomm_protocol import PROTOCOL_VERSION
from lowcomm_protocol.exchange.events import Merged, Stepped, Surroundings, TrainerReady
from lowcomm_protocol.exchange.missed import TRIES, UNKNOWN, Lacking, kept, state_mark
from lowcomm_protocol.matching import Offer
from lowcomm_protocol.plan import SyncSchedule, is_supported, largest_jump
from lowcomm_protocol.spec.names import codec_in_offer
from lowcomm_protocol.spec.run import RunSpec


class Position:
    """The counters of this peer."""

    def __init__(self, me: str, spec: RunSpec, run_id: str, surroundings: Surroundings) -> None:
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
        """Marks of what we held before each of the last outer steps, by fragment."""
        self._failed_to_take_over: Counter[int] = Counter()

    def take_over(self, ready: TrainerReady) -> None:
        """Begin with the counters of a trainer that has built, resumed or adopted its state."""
        self.ready = ready
        self.swarm_step = ready.swarm_step
        self.steps = ready.steps
        self.tokens = ready.tokens
        self.schedule = SyncSchedule(self.interval, ready.progress)
        self._slow_digests = list(ready.slow_digests)
        self._momentum_digests = list(ready.momentum_digests)
        self._previous = [()] * len(ready.progress)
        self._failed_to_take_over.clear()

    def stepped(self, step: Stepped) -> None:
        """Count an inner step."""
        self.swarm_step = step.swarm_step
        self.steps = step.steps
        self.tokens = step.tokens

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
        self._previous[fragment] = marks[len(marks) - min(len(marks), self._kept(fragment)) :]
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

    def _kept(self, fragment: int) -> int:
        assert self.ready is not None
        return kept(self.ready.sizes[fragment][1], self.ready.realign_sizes[fragment])

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
            stage=0,
            round=number,
            swarm_step=self.swarm_step,
            steps=self.steps - progress.merged_steps,
            tokens=self.tokens - progress.merged_tokens,
            version=progress.version,
            slow_digest=slow_digest,
            momentum_digest=momentum_digest,
            seconds=seconds,
            blake3=True,
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
