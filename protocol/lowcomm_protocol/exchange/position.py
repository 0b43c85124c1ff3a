"""Where a peer stands in the run, what it offers of that, and whose claims it supports. Pure."""

from lowcomm_protocol import PROTOCOL_VERSION
from lowcomm_protocol.exchange.events import Merged, Stepped, Surroundings, TrainerReady
from lowcomm_protocol.plan.clock import is_supported, largest_jump
from lowcomm_protocol.plan.matching import Offer
from lowcomm_protocol.plan.schedule import SyncSchedule
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

    def take_over(self, ready: TrainerReady) -> None:
        """Begin with the counters of a trainer that has built, resumed or adopted its state."""
        self.ready = ready
        self.swarm_step = ready.swarm_step
        self.steps = ready.steps
        self.tokens = ready.tokens
        self.schedule = SyncSchedule(self.interval, ready.progress)
        self._slow_digests = list(ready.slow_digests)
        self._momentum_digests = list(ready.momentum_digests)

    def stepped(self, step: Stepped) -> None:
        """Count an inner step."""
        self.swarm_step = step.swarm_step
        self.steps = step.steps
        self.tokens = step.tokens

    def merged(self, fragment: int, merged: Merged) -> None:
        """Count an outer step of a fragment."""
        self.swarm_step = max(self.swarm_step, merged.swarm_step)
        self.schedule.merged(fragment, merged.swarm_step, merged.steps, merged.tokens)
        self._slow_digests[fragment] = merged.slow_digest
        self._momentum_digests[fragment] = merged.momentum_digest

    def offer(self, fragment: int, number: int, seconds: int) -> Offer:
        """What we bring to the ``number``-th exchange of a fragment, and the seconds we need."""
        assert self.ready is not None
        progress, by_digest = self.schedule[fragment], self._sync.consensus == 0
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
            slow_digest=self._slow_digests[fragment] if by_digest else b"",
            momentum_digest=self._momentum_digests[fragment] if by_digest else b"",
            seconds=seconds,
            blake3=True,
        )

    def supports(self, peer: str, swarm_step: int) -> bool:
        """Whether what we and others know makes a swarm step plausible that a peer claims."""
        most = largest_jump(self.interval, self.steps_alone)
        return is_supported(swarm_step, self.swarm_step, [self._around.furthest(but=peer)], most)

    @property
    def steps_alone(self) -> int:
        """Own inner steps since the last merge of any fragment."""
        return self.schedule.steps_alone(self.steps)
