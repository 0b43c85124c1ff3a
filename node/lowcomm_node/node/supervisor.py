"""Starts the trainer, follows its news, sees when it has died or hangs, and ends it.

    start ──► built ──► steps, evaluations, checkpoints ──► stop
      │         │                   │
      └─────────┴───────────────────┴─► lost: it died, failed, hangs, or takes too much memory

The daemon decides what follows a loss: it first ends the exchanges, which use the trainer's memory.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic

import psutil

from lowcomm_node.errors import TrainerError, TrainerLost
from lowcomm_node.node.ipc import TrainerEvent
from lowcomm_node.node.messages import (
    Cooling,
    Ended,
    FailureKind,
    Finished,
    InnerStepTaken,
    LenderAwaited,
    Ready,
    TextAwaited,
    Train,
    TrainerFailed,
    TrainerSettings,
    TrainingDevice,
)
from lowcomm_node.node.process import STEP_DEADLINE, Trainer
from lowcomm_node.system.accelerator import Accelerator, Meter, meter_of
from lowcomm_node.system.machine import NodeMemory, memory_of, too_much, waited
from lowcomm_node.system.tasks import Enduring, Tasks, Warn, endure

TICK = 1.0
FATE_DEADLINE = 10.0
"""Seconds to learn how a trainer ended that does not answer any more."""
MOST = 5
"""Failures in a row after which the node leaves."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before the trainer is started again; twice as long each time."""
LEAST = 60.0
"""Seconds of silence between steps that are never too long."""
FACTOR = 20
"""Times the longest usual silence; evaluation and saving are part of that."""
FIRST_STEP = 3600.0
"""Seconds: it may have to compile the model."""
_UNFIT = (5, 78)
"""Exit codes of errors that another try would meet again."""
_LONGEST_TICK = 5.0
"""Seconds between two ticks that count; whatever is longer, the daemon slept through."""
_REMEDIES = {
    FailureKind.DIED: "see its last lines in the log above",
    FailureKind.HUNG: "see whether the GPU's driver still answers (nvidia-smi), "
    "or restart the machine",
    FailureKind.MEMORY: "free memory of that device, "
    "raise --max-memory or --max-vram where you set it, "
    "choose another --device, or take part from a larger machine",
    FailureKind.DIVERGED: "the run's learning rate is too high for it: tell its creator",
    FailureKind.UNFIT: "correct that",
    FailureKind.LENDER: "see that machine",
    FailureKind.ERROR: "see the log above",
}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Unrequested end of a trainer."""

    kind: FailureKind
    """`died`, `hung`, `memory`, `diverged`, `unfit`, `lender` or `error`."""
    reason: str
    """A sentence."""
    step: int
    """Inner steps that this node had done."""


class Failures:
    """Failures in a row; all are forgiven once training has got further than they did."""

    def __init__(self, margin: int) -> None:
        """``margin``: steps between two checkpoints."""
        self._margin = margin
        self._unforgiven: list[Failure] = []
        self._lost_lenders = 0
        self._has_stepped = False

    @property
    def count(self) -> int:
        """Failures in a row."""
        return len(self._unforgiven)

    def stepped(self, steps: int) -> None:
        """Take in the count of inner steps that are done."""
        self._has_stepped, self._lost_lenders = True, 0
        furthest = max((failure.step for failure in self._unforgiven), default=0)
        if steps >= furthest + self._margin:
            self._unforgiven.clear()

    def failed(self, failure: Failure) -> float | None:
        """Count a failure; the seconds until the next try, or None where no try could help."""
        if failure.kind is FailureKind.LENDER:  # no node leaves as another machine has gone
            self._lost_lenders += 1
            return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (self._lost_lenders - 1))
        self._unforgiven.append(failure)
        # To diverge once can be bad luck with text or partners; twice, the second time from one
        # checkpoint back, is the run's fault. A trainer that never stepped never fitted; otherwise
        # another program may have taken memory.
        most = {FailureKind.UNFIT: 1, FailureKind.DIVERGED: 2}
        if not self._has_stepped:
            most[FailureKind.MEMORY] = 2
        same = sum(one.kind is failure.kind for one in self._unforgiven)
        if self.count >= MOST or same >= most.get(failure.kind, MOST):
            return None
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (self.count - 1))

    def farewell(self) -> str:
        """Why the node leaves, and what its owner can do."""
        last = self._unforgiven[-1]
        times = f"{self.count} times in a row, the last time " if self.count > 1 else ""
        diverged = last.kind is FailureKind.DIVERGED
        newest = "one before those that it diverged from" if diverged else "newest"
        return (
            f"The trainer failed {times}at step {last.step}: {last.reason.rstrip('.')}; "
            f"{_REMEDIES[last.kind]}. The checkpoints are intact: `lowcomm-node join` goes on from "
            f"the {newest}."
        )


class TrainerPace:
    """The pace of one life of a trainer. Needs a tick each second or so."""

    def __init__(self, now: float, least: float = LEAST) -> None:
        self._least = least
        self._awake = 0.0
        """Seconds in which the machine was awake and the trainer could run, up to the last tick."""
        self._ticked, self._waited = now, 0.0
        self._since: float | None = None
        """Start of its silence, by ``_awake``; None while nothing is due from it."""
        self._learns = False
        """Whether the silence is between two steps."""
        self._silences: deque[float] = deque(maxlen=256)

    def hold(self, now: float) -> None:
        """Expect nothing: it may not step, or is busy with what takes its time."""
        self._ticked, self._since = now, None
        self._learns = False

    def tick(self, now: float, waited: float = 0.0) -> None:
        """Let time pass while it may step.

        ``waited``: seconds in all for which other programs kept it from running.
        """
        passed = min(now - self._ticked, _LONGEST_TICK)
        self._awake += max(0.0, passed - max(0.0, waited - self._waited))
        self._ticked, self._waited = now, max(waited, self._waited)
        if self._since is None:
            self._since = self._awake

    def stepped(self) -> None:
        """Take in that it has taken a step."""
        if self._since is not None and self._learns:
            self._silences.append(self._awake - self._since)
        self._since = self._awake
        self._learns = True

    @property
    def deadline(self) -> float:
        """Seconds of silence after which it hangs."""
        return max(self._least, FACTOR * max(self._silences)) if self._silences else FIRST_STEP

    @property
    def silence(self) -> float:
        """Seconds since it was heard, while something is due from it."""
        return 0.0 if self._since is None else self._awake - self._since


class Supervisor:
    """Runs one trainer after the other; at most one at a time."""

    def __init__(
        self,
        make: Callable[[], Trainer],
        on_news: Callable[[TrainerEvent], None] = lambda event: None,
        first: Trainer | None = None,
        least_silence: float = LEAST,
        warn: Warn = lambda text: None,
    ) -> None:
        """``first``: one that is launched already."""
        self._warn = warn
        self._make = make
        self.on_news = on_news
        """Gets each event of the trainer."""
        self._least_silence = least_silence
        self._trainer = first
        self._built = self._training = self._lacks_text = self._cools = False
        self._lacks_lender = False
        self._lost = asyncio.Event()
        self._failure: Failure | None = None
        self._tasks = Tasks()
        self._steps = self._reckoned = 0
        self._pace = TrainerPace(monotonic(), least_silence)
        self._meters: list[tuple[Accelerator, Meter]] = []
        """What is known of each device that trains, and its meter."""
        self._others: list[int] = []
        """Ids of the trainer's other processes, one for each further device."""
        self.accelerators: tuple[Accelerator, ...] = ()
        """Devices that train; empty until the first look."""
        self.memory: NodeMemory | None = None
        """Memory of daemon and trainer; None until the first look."""
        self.last_failure: Failure | None = None
        self.restarts = 0

    @property
    def runs(self) -> bool:
        """Whether there is a trainer that has built its replica, and is not lost."""
        return self._built and not self._lost.is_set()

    @property
    def trainer(self) -> Trainer:
        """The current one. Raises TrainerError if there is none, or it is not ready yet."""
        if self._trainer is None or not self._built:
            raise TrainerError("The trainer does not run now: `lowcomm-node status` tells why.")
        return self._trainer

    @property
    def pid(self) -> int | None:
        """Its process, where it has one of its own."""
        return self._trainer.pid if self._trainer is not None else None

    async def start(self, settings: TrainerSettings) -> Ready:
        """Start a trainer, which builds or resumes its replica.

        Raises TrainerLost if it dies, TrainerError if it can't.
        """
        trainer = self._trainer = self._trainer or self._make()
        self._pace = TrainerPace(monotonic(), self._least_silence)
        self.memory, self._reckoned, self._others = None, 0, []
        self._tasks.start(self._follow(trainer))
        trouble = "nobody sees whether the trainer hangs"
        watch = partial(self._watch, trainer, settings.max_memory)
        self._tasks.start(endure(trouble, watch, self._warn))
        ready = await trainer.start(settings)
        self._built = True
        self._look_at(ready.devices)
        self._reckoned = ready.reckoned
        self._steps = ready.steps
        return ready

    def _look_at(self, devices: Sequence[TrainingDevice]) -> None:
        """Look at these devices, and at the memory of their processes, from now on."""
        self._others = [one.pid for one in devices[1:]]
        fastest = min((one.seconds for one in devices if one.seconds), default=0.0)
        with suppress(psutil.Error):  # it has ended already
            for one in devices:
                speed = fastest / one.seconds if one.seconds else None
                meter = meter_of(one.name, one.gpu, one.pid)
                known = Accelerator(device=one.name, kind="", name="", speed=speed)
                self._meters.append((known, meter))

    async def train(self, on: bool) -> None:
        """Let it step, or hold it. Raises TrainerError."""
        await self.trainer.ask(Train(on=on))
        self._training = on

    async def wait_lost(self) -> None:
        """Wait until the trainer is lost, and raise TrainerLost with the reason."""
        await self._lost.wait()
        assert self._failure is not None
        raise TrainerLost(self._failure.reason)

    async def explain(self, error: TrainerError) -> Failure:
        """The failure behind the ``error`` of a request. It kills the trainer; call ``stop``
        then."""
        kind = kind_of(str(error), error.exit_code)
        if isinstance(error, TrainerLost):
            kind = FailureKind.HUNG
            with suppress(TimeoutError):
                async with asyncio.timeout(FATE_DEADLINE):
                    await self._lost.wait()
        self.last_failure = self._lose(kind, str(error))
        self.restarts += 1
        if self._trainer is not None:
            self._trainer.kill()
        return self.last_failure

    async def stop(self) -> None:
        """End the trainer and give back its memory. One that has built finishes its writes
        first."""
        if self._trainer is None:
            return
        if not self.runs:
            self._trainer.kill()
        self._built = self._training = self._lacks_text = self._cools = False
        self._lacks_lender = False
        self._meters, self.accelerators = [], ()
        await self._tasks.cancel()
        await self._trainer.stop()
        self._trainer = None
        self._failure = None
        self._lost.clear()

    async def _follow(self, trainer: Trainer) -> None:
        enduring = Enduring("news of the trainer is lost", self._warn)
        while True:
            event = await trainer.news.get()
            match event:
                case InnerStepTaken():
                    self._steps = event.steps
                    self._pace.stepped()
                    trainer.patience = max(STEP_DEADLINE, self._pace.deadline)
                case Finished():
                    self._training = False
                case TextAwaited():
                    self._lacks_text = event.waits
                case Cooling():
                    self._cools = bool(event.why)
                case LenderAwaited():
                    self._lacks_lender = bool(event.why)
                case TrainerFailed():
                    self._lose(kind_of(event.reason, event.exit_code, event.kind), event.reason)
                case Ended():
                    self._lose(FailureKind.DIED, event.reason)
                    return
                case _:
                    pass
            with enduring:
                self.on_news(event)

    async def _watch(self, trainer: Trainer, max_memory: float | None) -> None:
        while not self._lost.is_set():
            await asyncio.sleep(TICK)
            now = monotonic()
            if trainer.pid is not None:
                # What processes share counts once.
                others = (os.getpid(), *self._others)
                taken = memory_of(trainer.pid)
                taken += sum(memory_of(pid, shared=False) for pid in others)
                most = max(taken, self.memory.most if self.memory else 0)
                self.memory = NodeMemory(reckoned=self._reckoned, taken=taken, most=most)
                if (reason := too_much(taken, max_memory)) is not None:
                    self._lose(FailureKind.MEMORY, reason)
                    trainer.kill()
            self.accelerators = tuple(
                replace(meter.look(now), device=known.device, speed=known.speed)
                for known, meter in self._meters
            )
            waits = self._lacks_text or self._lacks_lender or self._cools or trainer.occupied
            if self._training and not waits:
                # Of several processes all wait for the slowest.
                pids = () if trainer.pid is None else (trainer.pid, *self._others)
                self._pace.tick(now, max(map(waited, pids), default=0.0))
            else:
                self._pace.hold(now)
            if (silence := self._pace.silence) > self._pace.deadline:
                self._lose(FailureKind.HUNG, f"The trainer hangs: no step for {silence:.0f} s")
                trainer.kill()

    def _lose(self, kind: FailureKind, reason: str) -> Failure:
        # Its own report explains more than how its process ended.
        if self._failure is None:
            self._failure = Failure(kind=kind, reason=reason, step=self._steps)
            self._lost.set()
        return self._failure


def kind_of(reason: str, exit_code: int, reported: FailureKind | None = None) -> FailureKind:
    """Kind of a failure, from the report of a trainer."""
    if reported == FailureKind.MEMORY or "out of memory" in reason.lower():
        return FailureKind.MEMORY
    if reported is FailureKind.DIVERGED or reported is FailureKind.LENDER:
        return reported
    return FailureKind.UNFIT if exit_code in _UNFIT else FailureKind.ERROR
