"""The trainer's part of exchanges: requests on captures, carried out beside the inner steps.

    capture ──► contributions come in, and are decoded ──► outer step ──► pending ──► merged
       └──────────────────────────── drop ───────────────────────────────────────────────┘

Coding, decoding and outer steps run one after the other on one thread. A capture and a merge touch
the fast weights, so they happen between two inner steps.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import accumulate
from time import monotonic
from typing import Any

from blake3 import blake3

from lowcomm_node.errors import TrainerError
from lowcomm_node.node import messages
from lowcomm_node.node.ipc import A, Answer, Arena, Request
from lowcomm_node.node.messages import Done, refusal_of
from lowcomm_node.trainer.capture import CapturedFragment
from lowcomm_node.trainer.replica import Replica

Handlers = Mapping[type[Request[Any]], Callable[[Any], Answer | Future[Any]]]
"""What carries out each request: it answers at once, or with a future."""


@dataclass(frozen=True, eq=False)  # captures hold tensors, which have no one answer to ==
class PendingMerge:
    """A merge that waits for the inner steps that it overlaps with."""

    steps: int
    """Own inner steps from which on it may be merged."""
    capture: CapturedFragment
    request: messages.Merge
    merged: Future[messages.OuterStepApplied]


class ExchangeWork:
    """Exchanges of one replica."""

    def __init__(
        self,
        replica: Replica,
        arena: Arena,
        coder: Executor,
        at_boundary: Callable[[Callable[[], None]], None],
    ) -> None:
        """``coder`` must have one thread; ``at_boundary`` runs something between two steps."""
        self._replica = replica
        self._arena = arena
        self._coder = coder
        self._at_boundary = at_boundary
        self._pending: list[PendingMerge] = []

    @property
    def handlers(self) -> Handlers:
        """The requests that it carries out."""
        return {
            messages.CaptureContribution: self._capture,
            messages.Receive: self._receive,
            messages.Resend: self._resend,
            messages.AverageShard: self._reduce,
            messages.WriteOuterSteps: self._missed,
            messages.TakeOver: self._take_over,
            messages.Merge: self._merge,
            messages.Drop: self._drop,
        }

    def merge_pending(self, can_step: Callable[[], bool]) -> bool:
        """Merge what has waited long enough, at a step boundary; whether anything was merged.

        A merge waits for ``overlap`` steps after its capture, or until no step will be taken.
        """
        steps = self._replica.steps
        due = [one for one in self._pending if one.steps <= steps or not can_step()]
        self._pending = [one for one in self._pending if one not in due]
        for one in due:
            self._apply(one)
        return bool(due)

    # Each handler finds the capture at once. Its work on the coding thread is void if the capture
    # was dropped meanwhile, or a state was copied: nobody is blamed for that.

    def _capture(self, request: messages.CaptureContribution) -> Future[messages.Shared]:
        fragment, slot = request.fragment, request.slot
        began = monotonic()
        self._replica.copy(fragment, request.realign, request.members, request.ahead, request.apart)
        capture = self._replica.capture_of(fragment)
        capture.stages.add("capture", monotonic() - began)

        def work() -> messages.Shared:
            with capture.stages.during("capture"):
                self._replica.contribute(fragment)
            with capture.stages.during("encode"):
                sizes = capture.code(self._slot(slot))
            with capture.stages.during("hash"):
                places = zip(accumulate(sizes[:-1], initial=0), sizes, strict=True)
                digests = tuple(self._digest(slot, *place) for place in places)
            return messages.Shared(sizes=sizes, digests=digests, steps=capture.steps)

        return self._work_on(fragment, capture, work)

    def _receive(self, request: messages.Receive) -> Future[messages.Received]:
        capture = self._replica.capture_of(request.fragment)
        data = self._slot(request.slot, request.offset, request.size)

        def work() -> messages.Received:
            with capture.stages.during("decode"):
                return messages.Received(again=capture.take(request.part, request.peer, data))

        return self._work_on(request.fragment, capture, work)

    def _resend(self, request: messages.Resend) -> Future[messages.Resent]:
        capture = self._replica.capture_of(request.fragment)

        def work() -> messages.Resent:
            with capture.stages.during("encode"):
                size = capture.resend(request.blocks, self._slot(request.slot))
            return messages.Resent(size=size, digest=self._digest(request.slot, 0, size))

        return self._work_on(request.fragment, capture, work)

    def _reduce(self, request: messages.AverageShard) -> Future[messages.ShardAveraged]:
        capture = self._replica.capture_of(request.fragment)

        def work() -> messages.ShardAveraged:
            with capture.stages.during("outer"):
                size = capture.reduce(request.tokens, self._slot(request.slot, request.offset))
            digest = self._digest(request.slot, request.offset, size)
            refused = {peer: refusal_of(error) for peer, error in capture.left_out.items()}
            return messages.ShardAveraged(size=size, digest=digest, refused=refused)

        return self._work_on(request.fragment, capture, work)

    def _missed(self, request: messages.WriteOuterSteps) -> Future[messages.Resent]:
        fragment, capture = request.fragment, self._replica.capture_of(request.fragment)

        def work() -> messages.Resent:
            steps = self._replica.missed(fragment, request.steps)
            self._slot(request.slot, request.offset, len(steps))[:] = steps
            digest = self._digest(request.slot, request.offset, len(steps))
            return messages.Resent(size=len(steps), digest=digest)

        return self._work_on(fragment, capture, work)

    def _take_over(self, request: messages.TakeOver) -> Future[Done]:
        fragment, capture = request.fragment, self._replica.capture_of(request.fragment)
        data = self._slot(request.slot, request.offset, request.size)

        def work() -> Done:
            with capture.stages.during("outer"):
                digests = request.slow_digest, request.momentum_digest
                self._replica.take_over(fragment, data, request.steps, digests)
            return Done()

        return self._work_on(fragment, capture, work)

    def _merge(self, request: messages.Merge) -> Future[messages.OuterStepApplied]:
        fragment, replica = request.fragment, self._replica
        capture = replica.capture_of(fragment)
        merged: Future[messages.OuterStepApplied] = Future()

        def work() -> None:
            self._check_captured(fragment, capture)
            capture.keep_momentum = request.keep_momentum
            with capture.stages.during("outer"):
                capture.pool(request.over)
                replica.outer(fragment)
            steps = capture.steps + replica.spec.sync.overlap
            pending = PendingMerge(steps, capture, request, merged)
            self._at_boundary(lambda: self._pending.append(pending))

        def give_up(worked: Future[None]) -> None:
            if (error := worked.exception()) is not None:
                merged.set_exception(error)

        self._coder.submit(work).add_done_callback(give_up)
        return merged

    def _apply(self, one: PendingMerge) -> None:
        """Merge into the fast weights."""
        fragment, replica = one.request.fragment, self._replica
        try:
            self._check_captured(fragment, one.capture)
            with one.capture.stages.during("merge"):
                replica.merge(fragment, one.request.swarm_step, self._coder)
        except TrainerError as error:
            one.merged.set_exception(error)
            return
        progress = replica.schedule[fragment]
        slow_digest, momentum_digest = one.capture.digests
        one.merged.set_result(
            messages.OuterStepApplied(
                swarm_step=replica.clock.step,
                merged_steps=progress.merged_steps,
                merged_tokens=progress.merged_tokens,
                slow_digest=slow_digest,
                momentum_digest=momentum_digest,
                worst_block=one.capture.worst_block,
                stages=one.capture.stages.seconds,
            )
        )

    def _drop(self, request: messages.Drop) -> Future[Done]:
        captures = self._replica.captures
        capture = captures.get(request.fragment)

        def work() -> Done:
            # On the coding thread, after all that was asked before: once this is answered, nothing
            # is written to the slots of the exchange any more.
            if capture is not None and captures.get(request.fragment) is capture:
                self._replica.drop(request.fragment)
            return Done()

        return self._coder.submit(work)

    def _work_on(
        self, fragment: int, capture: CapturedFragment, work: Callable[[], A]
    ) -> Future[A]:
        """Do ``work`` on the coding thread, unless its exchange is void by then."""

        def checked() -> A:
            self._check_captured(fragment, capture)
            return work()

        return self._coder.submit(checked)

    def _check_captured(self, fragment: int, capture: CapturedFragment) -> None:
        if self._replica.captures.get(fragment) is not capture:
            raise TrainerError(
                f"Fragment {fragment} is not captured any more: the exchange is void."
            )

    def _slot(self, slot: int, offset: int = 0, size: int | None = None) -> memoryview:
        """``size`` bytes of a slot from ``offset`` on; without a size all of them."""
        end = self._arena.slot_bytes if size is None else offset + size
        return self._arena.view(slot, end)[offset:]

    def _digest(self, slot: int, offset: int, size: int) -> bytes:
        return blake3(self._slot(slot, offset, size)).digest()
