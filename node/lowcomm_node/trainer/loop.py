"""The training loop: inner steps, and between two of them whatever the daemon asks for.

    while not told to stop:
        carry out requests that need a step boundary      capture, save, snapshot, adopt, generate
        merge what is ripe
        take one inner step                               unless held, or the run is over

Coding, decoding, outer steps and writing run on two threads beside the loop, so that the
accelerator does not wait for them. Requests that only decode or average do not wait for a step
boundary: where a step takes half a minute, an exchange would wait for several of them.

On a GPU the loss of a step is read once the next one is queued, and before anything else is done
between two steps.
"""

import math
import queue
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from lowcomm_node.data.packed import PackedStream
from lowcomm_node.errors import Diverged, TrainerError
from lowcomm_node.models.adapters import unadapted
from lowcomm_node.models.evaluation import Evaluation, evaluate
from lowcomm_node.models.writing import Writer
from lowcomm_node.node import messages
from lowcomm_node.node.ipc import Answer, FailureKind, Request, TrainerPipe
from lowcomm_node.node.messages import Done, refusal_of
from lowcomm_node.system.tasks import Stages
from lowcomm_node.trainer import transfer
from lowcomm_node.trainer.building import build, ready_of
from lowcomm_node.trainer.exchanges import ExchangeWork, Handlers
from lowcomm_node.trainer.gpu import use
from lowcomm_node.trainer.inner import StepOutcome
from lowcomm_node.trainer.optimizer import learning_rate
from lowcomm_node.trainer.rest import CardLimits
from lowcomm_node.trainer.saving import Saving, StateWriter
from lowcomm_protocol.spec.amendments import newest

MAX_GENERATED = 4096
LOOK = 1.0
"""Seconds between two looks at whether a disk that hangs has held training long enough. A write
that ends wakes training at once."""
MOST_SKIPPED = 10
"""Inner steps in a row that may be skipped. Each has a batch of its own, so the text is not to
blame. Even if every second batch overflows, ten in a row come once in a thousand steps."""


class TrainerLoop:
    """One replica at work."""

    def __init__(self, pipe: TrainerPipe, memory: int) -> None:
        """``memory``: descriptor of the file that is shared with the daemon."""
        self._pipe = pipe
        self._memory = memory
        self._boundary: queue.Queue[Callable[[], object]] = queue.Queue()
        # One thread each: work on captures keeps its order, and states are written one by one.
        self._coder = ThreadPoolExecutor(1, "coder")
        self._writer = ThreadPoolExecutor(1, "writer")
        self._handlers: Handlers = {messages.Build: self._build, messages.Stop: self._stop}
        self._exchanges: ExchangeWork | None = None
        self._training = False
        self._stopping = False
        self._reported_finished = self._waits_for_text = False
        self.limits = CardLimits()
        self._reported_heat = ""
        self._tokens_per_second = 0.0
        """Smoothed."""
        self._began = deque[float]()
        """When the steps began whose outcome is not reported yet."""
        self._reported = 0.0
        """When the outcome of a step was last reported."""
        self._waits = Stages()
        """Why steps did not follow one another at once."""
        self._computing = 0.0
        """Seconds in inner steps."""
        self._first_evaluation: Evaluation | None = None
        """Later ones take no more tokens, so that all compare."""

    def run(self) -> None:
        """Serve requests and train until the daemon says stop or is gone."""
        self._pipe.start_reading(self._take, lambda: self._boundary.put(self._stop))
        try:
            while not self._stopping:
                self._serve(wait=not self._can_step())
                self._report_held()
                if self._can_step():
                    self._step()
        except Diverged as error:
            self._writer.shutdown()  # what is being written now is the newest checkpoint then
            # The next start goes back one checkpoint, and trains on other text.
            stream, steps = self.replica.stream.state(), self.replica.steps
            with suppress(OSError, ValueError):  # the reason why training ends matters more
                self.store.note_divergence({"reason": str(error), "steps": steps, "stream": stream})
            raise
        finally:
            self.end_threads()
            self.limits.free()

    def end_threads(self) -> None:
        """End the threads beside the loop, once their work is done, and other ranks."""
        for executor in (self._coder, self._writer):
            executor.shutdown()
        if self._exchanges is not None and self.replica.team is not None:
            self.replica.team.stop()
        if self._exchanges is not None and self.replica.lenders is not None:
            self.replica.lenders.stop()

    # requests

    def _take(self, request: Request[Any], number: int) -> None:
        """On the thread that reads: begin a request, now or at the next step boundary."""
        if not request.at_boundary:
            self._carry_out(request, number)
            return

        def work() -> None:
            with self._waits.during(request.wire_name) if self._training else nullcontext():
                self._carry_out(request, number)

        self._boundary.put(work)

    def _serve(self, wait: bool) -> None:
        """Carry out what waits for a step boundary; with ``wait`` until training can go on."""
        while not self._stopping:
            if self._exchanges is not None:
                with self._waits.during("merge"):
                    merged = self._exchanges.merge_pending(self._can_step)
                if merged:
                    self._report_if_finished()
            if wait:
                self._settle()
            why = self._why_held() if wait else ""
            self._report_held()
            try:
                with self._waits.during(why) if why else nullcontext():
                    work = self._boundary.get(block=wait, timeout=LOOK)
            except queue.Empty:
                return
            self._settle()
            work()
            wait = not self._can_step()

    def _carry_out(self, request: Request[Any], number: int) -> None:
        try:
            handler = self._handlers.get(type(request))
            if handler is None:
                raise TrainerError(f"There is no replica to {request.wire_name}: build one first.")
            answer = handler(request)
        except (Diverged, MemoryError):
            raise  # nothing that is asked next would go better
        except Exception as error:
            self._pipe.tell(refusal_of(error), number)
            return
        if isinstance(answer, Future):
            answer.add_done_callback(lambda future: self._pipe.tell(answer_of(future), number))
        else:
            self._pipe.tell(answer, number)

    def _build(self, request: messages.Build) -> messages.Ready:
        settings, at_boundary = request.settings, self._boundary.put
        replica, self.store, self.arena, ready = build(
            settings, self._memory, self._pipe.tell, self._report_lost
        )
        self.replica = replica
        self.limits = CardLimits(settings, ready.devices)
        replica.duty.share = min(replica.duty.share, self.limits.share)
        for executor in (self._coder, self._writer):
            executor.submit(use, replica.device)
        self._exchanges = ExchangeWork(replica, self.arena, self._coder, at_boundary)
        saving = Saving(settings.checkpoint_every, replica.steps)
        self._states = StateWriter(
            replica, self.store, saving, self._writer, self._pipe.tell, at_boundary
        )
        self._handlers = {
            **self._handlers,
            messages.Train: self._train,
            messages.AddText: self._add_text,
            messages.ReadAgain: self._read_again,
            messages.Amend: self._amend,
            messages.Evaluate: self._measure,
            messages.Generate: self._generate,
            messages.Adopt: self._adopt,
            **self._exchanges.handlers,
            **self._states.handlers,
        }
        return replace(ready, duty=replica.duty.share, unlimited=self.limits.unlimited)

    def _train(self, request: messages.Train) -> Done:
        self._training = request.on
        self._report_if_finished()
        return Done()

    def _add_text(self, request: messages.AddText) -> Done:
        if isinstance(self.replica.stream, PackedStream):
            self.replica.stream.add(request.pieces)
        return Done()

    def _read_again(self, request: messages.ReadAgain) -> Done:
        if isinstance(self.replica.stream, PackedStream):
            self.replica.stream.read_again(request.part, request.pieces)
        return Done()

    def _amend(self, request: messages.Amend) -> Done:
        """A run that was over may go on."""
        replica = self.replica
        known = [replica.course.chain.data, request.amendments.encode()]
        replica.course = newest(replica.spec, replica.run_id, known)
        self._reported_finished = self._reported_finished and self._finished
        self._report_if_finished()
        return Done()

    def _measure(self, _: messages.Evaluate) -> Done:
        self._evaluate()
        return Done()

    def _generate(self, request: messages.Generate) -> messages.Generated:
        replica = self.replica
        model = replica.whole_model()
        writer = Writer(model, replica.dataset.tokenizer, replica.spec.export)
        count = min(MAX_GENERATED, request.tokens)
        asked = request.chat or request.prompt
        with unadapted(model) if request.before else nullcontext():
            text = writer.text(asked, count, request.temperature, request.seed)
        return messages.Generated(text=text)

    def _adopt(self, request: messages.Adopt) -> messages.Ready:
        self._coder.submit(lambda: None).result()  # until nothing works on a capture any more
        transfer.adopt_folder(self.replica, Path(request.folder), request.back)
        return ready_of(self.replica, self.arena)

    def _stop(self, _: messages.Stop | None = None) -> Done:
        self._stopping = True
        return Done()

    # steps

    def _can_step(self) -> bool:
        return self._training and not self._finished and not self._why_held()

    def _why_held(self) -> str:
        """Why no step is taken though training is on: `disk`, `heat` or `text`; else empty."""
        if not self._training or self._finished:
            return ""
        if self._states.holds_training():
            return "disk"
        if self.limits.is_hot(monotonic()):
            return "heat"
        return "" if self.replica.stream.is_ready() else "text"

    def _report_held(self) -> None:
        why = self._why_held()
        heat = self.limits.why_hot if why == "heat" else ""
        if heat != self._reported_heat:
            self._reported_heat = heat
            self._pipe.tell(messages.Cooling(why=heat))
        waits = why == "text"
        if waits != self._waits_for_text:
            self._waits_for_text = waits
            self._pipe.tell(messages.TextAwaited(waits=waits))

    @property
    def _finished(self) -> bool:
        return self.replica.course.is_over(self.replica.clock.step)

    def _step(self) -> None:
        replica, cut = self.replica, self.replica.gradient.cut
        self._began.append(monotonic())
        replica.take_step()
        for piece, windows in replica.stream.take_ended():
            self._pipe.tell(messages.PieceRead(**vars(piece), windows=windows))
        if replica.gradient.cut != cut:
            cut = replica.gradient.cut
            self._pipe.tell(
                messages.MicroBatch(micro_batch=cut.windows, activation_checkpointing=cut.recompute)
            )
        self._settle(but=1 if replica.runs_ahead else 0)
        if replica.steps % replica.spec.train.evaluate_every == 0 and not self._finished:
            self._settle()
            with self._waits.during("evaluate"):
                self._evaluate()
        if self._states.saving.is_due(replica.steps, monotonic()):
            self._settle()
            with self._waits.during("save"):
                self._states.save()
            if replica.team is not None and (device := replica.team.returned()):
                raise TrainerError(f"{device} can be used again: the trainer starts anew with it.")
        self._report_if_finished()

    def _settle(self, but: int = 0) -> None:
        """Report the outcome of all steps taken, except the last ``but``."""
        while len(self._began) > but:
            outcome, began = self.replica.settle(), self._began.popleft()
            if self.replica.skipped_in_a_row:
                self._report_skipped(outcome)
            now = monotonic()
            # Steps that were queued behind one another began when the one before them ended.
            seconds, self._reported = now - max(began, self._reported), now
            rested, self.replica.duty.rested = self.replica.duty.rested, 0.0
            self._computing += max(0.0, seconds - rested)
            if rested:
                self._waits.add("duty", rested)
            rate = self.replica.spec.tokens_per_step / max(1e-9, seconds)
            self._tokens_per_second += (0.1 if self._tokens_per_second else 1.0) * (
                rate - self._tokens_per_second
            )
            self._report_step(outcome, seconds)

    def _evaluate(self) -> None:
        replica = self.replica
        self._pipe.tell(messages.Evaluating())
        context, first = replica.spec.model.context, self._first_evaluation
        evaluation = evaluate(replica.total_loss, replica.dataset, context, like=first)
        self._first_evaluation = first or evaluation
        self._pipe.tell(
            messages.Evaluated(
                loss=if_finite(evaluation.loss),
                tokens=evaluation.tokens,
                swarm_step=replica.clock.step,
                steps=replica.steps,
                epochs=round(replica.tokens / replica.dataset.train.tokens, 2),
            )
        )

    # events

    def _report_step(self, outcome: StepOutcome, seconds: float) -> None:
        replica, swarm_step = self.replica, outcome.swarm_step
        now, cut = replica.course.at(swarm_step), replica.gradient.cut
        helpers = replica.lenders or replica.team
        self._pipe.tell(
            messages.InnerStepTaken(
                swarm_step=swarm_step,
                steps=outcome.steps,
                tokens=replica.tokens,
                loss=if_finite(outcome.loss),
                skipped_steps=replica.skipped,
                seconds=seconds,
                learning_rate=learning_rate(now.train, swarm_step, now.run.steps),
                tokens_per_second=self._tokens_per_second,
                micro_batch=cut.windows,
                activation_checkpointing=cut.recompute,
                computing=round(self._computing, 3),
                lenders=() if helpers is None else helpers.figures(),
                waited={why: round(spent, 3) for why, spent in self._waits.seconds.items()},
            )
        )

    def _report_lost(self, kind: FailureKind, reason: str) -> None:
        """Another process has died; the daemon ends this one, which may wait for it."""
        self._pipe.tell(messages.TrainerFailed(reason=reason, kind=kind))

    def _report_skipped(self, outcome: StepOutcome) -> None:
        row, steps = self.replica.skipped_in_a_row, outcome.steps
        if row >= MOST_SKIPPED:
            raise Diverged(
                f"{row} inner steps in a row were skipped by step {steps}, as loss "
                f"({outcome.loss:.4g}) or gradients were not finite: train.learning_rate is too "
                "high."
            )
        if row == 1:
            skipped = self.replica.skipped
            self._pipe.tell(messages.Skipped(steps=steps, skipped_steps=skipped))

    def _report_if_finished(self) -> None:
        """A merge with a partner that is ahead can end the run as well as a step."""
        if self._training and self._finished and not self._reported_finished:
            self._reported_finished = True
            swarm_step, steps = self.replica.clock.step, self.replica.steps
            self._pipe.tell(messages.Finished(swarm_step=swarm_step, steps=steps))


def answer_of(future: Future[Answer]) -> Answer:
    """Outcome of work on another thread; any error, or nobody else would answer."""
    error = future.exception()
    return refusal_of(error) if isinstance(error, Exception) else future.result()


def if_finite(loss: float) -> float | None:
    """The loss as it is reported: None for NaN and infinity, which JSON lacks."""
    return loss if math.isfinite(loss) else None
