"""The trainer's part of exchanges: requests on captures, carried out beside the inner steps.

    capture ──► contributions come in, and are decoded ──► outer step ──► pending ──► merged
       └──────────────────────────── drop ───────────────────────────────────────────────┘

Coding, decoding and outer steps run one after the other on one thread. A capture and a merge touch
the fast weights, so they happen between two inner steps.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from functools import partial
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
"""Function that carries out each request: it answers at once, or with a future."""
Capture = CapturedFragment[Any]


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
        self._pending: list[tuple[int, Callable[[], None]]] = []
        """Merges that wait, and the own inner steps from which on they may be done."""
        self.handlers: Handlers = {
            messages.CaptureContribution: self._capture,
            messages.Receive: partial(self._submit, self._receive),
            messages.Resend: partial(self._submit, self._resend),
            messages.AverageShard: partial(self._submit, self._reduce),
            messages.GiveSlow: lambda request: self._coder.submit(self._give_slow, request),
            messages.TakeSlow: partial(self._submit, self._take_slow),
            messages.WriteOuterSteps: partial(self._submit, self._missed),
            messages.TakeOver: partial(self._submit, self._take_over),
            messages.Merge: self._merge,
            messages.Drop: self._drop,
        }

    def merge_pending(self, can_step: Callable[[], bool]) -> bool:
        """Merge what has waited long enough, at a step boundary; whether anything was merged.

        A merge waits for ``overlap`` steps after its capture, or until no step will be taken.
        """
        steps, pending, self._pending = self._replica.steps, self._pending, []
        for from_step, apply in pending:
            if from_step <= steps or not can_step():
                apply()
            else:
                self._pending.append((from_step, apply))
        return len(self._pending) < len(pending)

    def _capture(self, request: messages.CaptureContribution) -> Future[messages.Shared]:
        fragment, began = request.fragment, monotonic()
        self._replica.copy(fragment, request.realign, request.members, request.ahead, request.apart)
        self._replica.captures[fragment].stages.add("capture", monotonic() - began)
        return self._submit(self._contribute, request)

    def _submit(self, work: Callable[[Any, Capture], A], request: Any) -> Future[A]:
        """Work on the capture of a request's fragment, on the coding thread. It is void, without
        blame, if the capture was dropped meanwhile, or a state was copied."""
        capture = self._replica.capture_of(request.fragment)

        def checked() -> A:
            return work(request, self._replica.capture_of(request.fragment, capture))

        return self._coder.submit(checked)

    def _contribute(
        self, request: messages.CaptureContribution, capture: Capture
    ) -> messages.Shared:
        with capture.stages.during("capture"):
            self._replica.contribute(request.fragment)
        with capture.stages.during("encode"):
            sizes = tuple(capture.encode(self._slot(request.slot)))
        with capture.stages.during("hash"):
            places = zip(accumulate(sizes[:-1], initial=0), sizes, strict=True)
            digests = tuple(self._digest(request.slot, *place) for place in places)
        near = self._replica.codes_to_ask(request.fragment)
        return messages.Shared(sizes=sizes, digests=digests, steps=capture.steps, near=near)

    def _receive(self, request: messages.Receive, capture: Capture) -> messages.Received:
        data = self._slot(request.slot, request.offset, request.size)
        with capture.stages.during("decode"):
            return messages.Received(again=capture.take(request.part, request.peer, data))

    def _resend(self, request: messages.Resend, capture: Capture) -> messages.Resent:
        with capture.stages.during("encode"):
            size = capture.resend(request.blocks, self._slot(request.slot))
        return messages.Resent(size=size, digest=self._digest(request.slot, 0, size))

    def _reduce(self, request: messages.AverageShard, capture: Capture) -> messages.ShardAveraged:
        with capture.stages.during("outer"):
            size = capture.reduce(request.tokens, self._slot(request.slot, request.offset))
        digest = self._digest(request.slot, request.offset, size)
        refused = {peer: refusal_of(error) for peer, error in capture.left_out.items()}
        return messages.ShardAveraged(size=size, digest=digest, refused=refused)

    def _give_slow(self, request: messages.GiveSlow) -> messages.Resent:
        out = self._slot(request.slot)
        size = self._replica.give_slow(request.fragment, request.start, request.codes, out)
        return messages.Resent(size=size, digest=self._digest(request.slot, 0, size))

    def _take_slow(self, request: messages.TakeSlow, capture: Capture) -> Done:
        data = self._slot(request.slot, request.offset, request.size)
        with capture.stages.during("decode"):
            self._replica.take_slow(request.fragment, data)
        return Done()

    def _missed(self, request: messages.WriteOuterSteps, _: Capture) -> messages.Resent:
        steps = self._replica.missed(request.fragment, request.steps)
        self._slot(request.slot, request.offset, len(steps))[:] = steps
        digest = self._digest(request.slot, request.offset, len(steps))
        return messages.Resent(size=len(steps), digest=digest)

    def _take_over(self, request: messages.TakeOver, capture: Capture) -> Done:
        data = self._slot(request.slot, request.offset, request.size)
        digests = request.slow_digest, request.momentum_digest
        with capture.stages.during("outer"):
            self._replica.take_over(request.fragment, data, request.steps, digests)
        return Done()

    def _merge(self, request: messages.Merge) -> Future[messages.OuterStepApplied]:
        replica, merged = self._replica, Future[messages.OuterStepApplied]()

        def work(_: messages.Merge, capture: Capture) -> Done:
            capture.keep_momentum = request.keep_momentum
            with capture.stages.during("outer"):
                capture.pool(request.over)
                replica.outer(request.fragment)
            apply = partial(self._apply, capture, request, merged)
            pending = capture.steps + replica.spec.sync.overlap, apply
            self._at_boundary(lambda: self._pending.append(pending))
            return Done()

        def give_up(worked: Future[Done]) -> None:
            if (error := worked.exception()) is not None:
                merged.set_exception(error)

        self._submit(work, request).add_done_callback(give_up)
        return merged

    def _apply(
        self, capture: Capture, request: messages.Merge, merged: Future[messages.OuterStepApplied]
    ) -> None:
        """Merge into the fast weights."""
        fragment, replica = request.fragment, self._replica
        try:
            replica.capture_of(fragment, capture)
            with capture.stages.during("merge"):
                replica.merge(fragment, request.swarm_step, self._coder)
        except TrainerError as error:
            merged.set_exception(error)
            return
        progress = replica.schedule[fragment]
        merged.set_result(
            messages.OuterStepApplied(
                swarm_step=replica.clock.step,
                merged_steps=progress.merged_steps,
                merged_tokens=progress.merged_tokens,
                slow_digest=capture.digests[0],
                momentum_digest=capture.digests[1],
                worst_block=capture.worst_block,
                stages=capture.stages.seconds,
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

    def _slot(self, slot: int, offset: int = 0, size: int | None = None) -> memoryview:
        """``size`` bytes of a slot from ``offset`` on; without a size all of them."""
        end = self._arena.slot_bytes if size is None else offset + size
        return self._arena.view(slot, end)[offset:]

    def _digest(self, slot: int, offset: int, size: int) -> bytes:
        return blake3(self._slot(slot, offset, size)).digest()
