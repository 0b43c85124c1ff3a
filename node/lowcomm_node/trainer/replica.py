"""One replica: fast weights that the inner optimizer moves, slow weights that outer steps move.

Signs and symbols are those of docs/design.md: ``theta`` fast weights, ``phi`` slow weights,
``delta`` outer momentum, ``D = theta - phi`` progress, ``c`` contribution. ``phi`` and ``delta``
are float32 in host memory, one flat vector a fragment; without momentum nothing is kept as
``delta``.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowcomm_node.data import Dataset
from lowcomm_node.data.stream import TrainStream
from lowcomm_node.errors import NotFinite, TrainerError
from lowcomm_node.models.base import Model, build_model, computing, family_of, tensor_specs
from lowcomm_node.models.open_weights import load_weights
from lowcomm_node.storage.state_file import mapped_vector, sweep
from lowcomm_node.system.machine import can_compile
from lowcomm_node.system.reading import Readings
from lowcomm_node.trainer.batches import Ahead, Outcome, Taken, read_later
from lowcomm_node.trainer.capture import FP32_BYTES, Capture, capture_for
from lowcomm_node.trainer.gpu import Copies, loss_of, merge, merges_alike
from lowcomm_node.trainer.memory import FEWEST, keeps_momentum
from lowcomm_node.trainer.micro_batch import Gradient
from lowcomm_node.trainer.missed import Step, read
from lowcomm_node.trainer.optimizer import InnerOptimizer, learning_rate
from lowcomm_node.trainer.scratch import Scratch
from lowcomm_protocol.codecs import BLOCK, Coder, ShardCoder
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.exchange.judging import (
    HEAVY,
    Bound,
    Directions,
    Repeats,
    UsualNorm,
    believed_steps,
    growth,
)
from lowcomm_protocol.exchange.outer import (
    are_finite,
    contribution,
    merge_in_place,
    outer_step,
)
from lowcomm_protocol.exchange.underway import kept
from lowcomm_protocol.plan import (
    FragmentProgress,
    SwarmClock,
    SyncSchedule,
    largest_jump,
    plan_fragments,
)
from lowcomm_protocol.rows import copy_flat, gather, paired, scatter
from lowcomm_protocol.spec.amendments import Course
from lowcomm_protocol.spec.names import MAX_GROUP
from lowcomm_protocol.spec.outer import OuterSettings
from lowcomm_protocol.spec.run import RunSpec

SCRATCH = 8
"""Free vectors that are kept for each fragment."""
PIECE = 131_072
"""Values that an outer step computes at once. Its vectors stay in the cache, and calls cost little
beside the arithmetic: with 17 million values 80 ms, where 32,768 at once took 165 ms."""


class Replica:
    """The model, its inner optimizer, and the slow weights of every fragment."""

    def __init__(
        self,
        spec: RunSpec,
        peer_id: str,
        dataset: Dataset,
        device: torch.device,
        compiled: bool | None = None,
        run_id: str | None = None,
        course: Course | None = None,
    ) -> None:
        """``run_id``: of the signed run; None in a simulation, where nobody has signed any.

        ``course``: how the run is amended.
        """
        self.spec = spec
        self.peer_id = peer_id
        self.dataset = dataset
        self.device = device
        self.run_id = run_id or spec.run_id
        self.course = course or Course(spec)
        """The settings of training over swarm steps; all else is ``spec``'s."""
        self.model = _built(spec).to(device)
        self.plan = plan_fragments(tensor_specs(self.model), spec.sync.fragments, spec.sync.pattern)
        self.optimizer = InnerOptimizer(self.model, spec.train, device)
        self.stream = TrainStream(
            dataset.train, spec.model.context, spec.train.batch, spec.run.seed, peer_id
        )
        self.clock = SwarmClock()
        self.steps = 0
        """Inner steps done, skipped ones included."""
        self.tokens = 0
        """Trained on: those of skipped steps do not count."""
        self.skipped = 0
        """Inner steps that were skipped, as loss or gradients were not finite."""
        self.skipped_in_a_row = 0
        self.schedule = SyncSchedule(
            spec.sync.interval, [FragmentProgress() for _ in self.plan.fragments]
        )
        self.weights = dict(self.model.named_parameters())
        self.readings = Readings()
        """Who reads weights and moments on another thread; whoever changes them waits for it."""
        self.phi = [self.fast(p) for p in range(len(self.plan.fragments))]
        self.keeps_momentum = keeps_momentum(spec.sync) or (
            type(self).outer_step is not Replica.outer_step
        )
        """Whether outer steps need the ``delta`` of those before."""
        self.delta = [torch.zeros_like(phi) for phi in self.phi] if self.keeps_momentum else []
        """Outer momentum by fragment; empty where none is kept."""
        self.usual = [UsualNorm() for _ in self.phi]
        """Usual norm of others' progress, by fragment."""
        self.repeats = [Repeats(phi.numel()) for phi in self.phi]
        self.directions = Directions()
        """Whether the progress of others points along ours."""
        self.worst_block = [0.0 for _ in self.phi]
        """Spread of the contributions in their worst block at the last merge, by fragment."""
        self.captures: dict[int, Capture[Any]] = {}
        self.exchanged = capture_for(spec.sync)
        """What exchanges are captured with."""
        largest = max(fragment.numel for fragment in self.plan.fragments)
        # Shards are cut at blocks: those of all members, as long as ours, may be longer together.
        self.scratch = Scratch(largest + MAX_GROUP * BLOCK, SCRATCH * len(self.phi))
        self._slow = self.scratch
        """Where new slow weights and momenta come from."""
        self._coders: list[Coder | ShardCoder] = [
            self.exchanged.new_coder(spec.sync.codec, fragment.numel, spec.sync.error_feedback)
            for fragment in self.plan.fragments
        ]
        self.past = [
            deque[Step](maxlen=kept(coder.max_size, FP32_BYTES * coder.numel))
            for coder in self._coders
        ]
        """The last outer steps, for members that miss them, by fragment."""
        self._committing: dict[int, Future[None]] = {}
        """What coders keep of the last merge of a fragment, on the thread that codes."""
        self._outer = spec.sync.outer_settings
        self.copies = Copies(device) if device.type == "cuda" else None
        """Copies that no inner step waits for; None where weights are in host memory."""
        self.merges_there = (
            self.copies is not None and can_compile() and merges_alike(device, self._outer)
        )
        """Whether the device merges; else the host does while training waits."""
        # Compiling pays on CUDA, where a step is many small kernels. On a CPU it needs a compiler
        # and a minute of start-up.
        worth_it = device.type == "cuda" and can_compile()
        self.loss = loss_of(self.model, worth_it if compiled is None else compiled)
        self.gradient = Gradient(self.model, self._loss_of, spec.train.batch)
        self.ahead: Ahead | None = None
        """What prepares batches beside the steps."""
        self.runs_ahead = device.type == "cuda"
        """Whether steps are queued before the outcome of those before is known."""
        self._unsettled: deque[Taken] = deque()

    @property
    def now(self) -> RunSpec:
        """The settings that hold at this swarm step."""
        return self.course.at(self.clock.step)

    def begin_with(self, files: Sequence[Path]) -> None:
        """Take the weights of the files that the run names, before the first step.

        Raises ConfigError if they hold another model.
        """
        load_weights(self.model, files)
        self.phi = [self.fast(p, self.slow(p)) for p in range(len(self.plan.fragments))]

    # inner steps

    def inner_step(self) -> float:
        """Train on one batch of our own stream; the loss in nats a token.

        If the loss or a gradient is not finite, the step is skipped: only counters, stream and
        clock go on.
        """
        self.take_step()
        while True:
            outcome = self.settle()
            if not self.unsettled:
                return outcome.loss

    def take_step(self) -> None:
        """The same without waiting for a GPU: ``settle`` tells what came of it."""
        batch = self.stream.next_batch() if self.ahead is None else self.ahead.next(self.stream)
        tokens, targets = (one.to(self.device, non_blocking=True) for one in batch)
        loss = self.gradient.of(tokens, targets)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.train.clip)
        both, now = torch.stack((loss.float(), norm.float())), self.now
        self.readings.wait()
        if self.runs_ahead:
            bad = both.isfinite().all().logical_not()
            self.optimizer.step(self.clock.step, now.run.steps, now.train, unless=bad)
            figures = read_later(both)
        else:
            known = both.tolist()
            if all(map(math.isfinite, known)):
                self.optimizer.step(self.clock.step, now.run.steps, now.train)
            else:
                self.model.zero_grad(set_to_none=True)
            figures = partial(list, known)
        self.steps += 1
        self.clock.tick()
        self._unsettled.append(Taken(steps=self.steps, swarm_step=self.clock.step, figures=figures))

    def settle(self) -> Outcome:
        """Count the oldest step that is not counted yet; waits for the device."""
        taken = self._unsettled.popleft()
        loss, norm = taken.figures()
        if math.isfinite(loss) and math.isfinite(norm):
            self.skipped_in_a_row = 0
            self.tokens += self.spec.tokens_per_step
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
        return Outcome(loss=loss, steps=taken.steps, swarm_step=taken.swarm_step)

    @property
    def unsettled(self) -> int:
        """Steps that were taken, and that ``tokens`` and ``skipped`` do not count yet."""
        return len(self._unsettled)

    def _loss_of(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with computing(self.device):
            return self.loss(tokens, targets)

    # exchanges

    @property
    def coders(self) -> Sequence[Coder | ShardCoder]:
        """The coders, once they have kept all of what was merged."""
        while self._committing:
            self._committing.popitem()[1].result()
        return self._coders

    def fast(self, fragment: int, out: Tensor | None = None) -> Tensor:
        """A copy of one fragment of the fast weights: flat, float32, in ``out`` or host memory."""
        if out is None:
            out = torch.empty(self.plan.fragments[fragment].numel, dtype=torch.float32)
        gather(self.plan.fragments[fragment], self.weights, out)
        return out

    def slow(self, fragment: int) -> Tensor:
        """A new vector for slow weights or momentum of a fragment; it may hold anything."""
        return self._slow.take(self.plan.fragments[fragment].numel)

    def keep_in_files(self, folder: Path) -> None:
        """Keep slow weights and momentum in mapped files of a folder. Raises DiskFull.

        An outer step reads and writes those of its fragment once, from first to last, and nothing
        else does: they need no memory in between.
        """
        sweep(folder)
        largest = max(fragment.numel for fragment in self.plan.fragments)
        spare = FEWEST * (2 if self.keeps_momentum else 1)  # of all that may be under way
        self._slow = Scratch(largest, spare, partial(mapped_vector, folder))
        for vectors in (self.phi, self.delta):
            for p, held in enumerate(vectors):
                vectors[p] = self.slow(p).copy_(held)

    def capture(
        self,
        fragment: int,
        realign: bool = False,
        members: Sequence[str] = (),
        ahead: int = 0,
        apart: int = 0,
    ) -> None:
        """Keep what this replica contributes to an exchange of ``fragment``, as of now.

        ``members``: the whole group, sorted; empty in a pair. ``realign`` makes slow weights equal
        again that should be equal and are not: everybody sends fast weights in full precision, and
        their mean becomes the slow weights of all. ``ahead``: how many inner steps longer than we
        the others claim to have trained; ``apart``: for how many slow weights have parted. Raises
        NotFinite if our weights are not finite.
        """
        self.copy(fragment, realign, members, ahead, apart)
        self.contribute(fragment)

    def copy(
        self,
        fragment: int,
        realign: bool = False,
        members: Sequence[str] = (),
        ahead: int = 0,
        apart: int = 0,
    ) -> None:
        """The part of ``capture`` that must happen between two inner steps."""
        numel = self.plan.fragments[fragment].numel
        theta, phi = self.scratch.take(numel), self.phi[fragment]
        landing = None
        if self.copies is not None:
            landing = self.copies.snapshot(self.plan.fragments[fragment], self.weights)
        if landing is None:
            self.fast(fragment, theta)
        pull = 1.0 if realign else self.spec.sync.consensus
        heavy = self.exchanged.heavy if pull else HEAVY
        coding = self._coders[fragment]
        capture = self.exchanged(
            me=self.peer_id,
            coder=self.exchanged.new_coder("fp32", numel, False) if realign else coding,
            members=members,
            averaging=self.spec.sync.mean,
            scratch=self.scratch,
            theta=theta,
            phi=phi,
            pull=pull,
            realign=realign,
            bound=replace(self._bound(fragment, ahead, apart), heavy=heavy, realigns=realign),
            gain=1.0 if realign else self._outer.gain,
            usual=self.usual[fragment],
            directions=self.directions,
            steps=self.steps,
            tokens=self.tokens,
            landing=landing,
        )
        capture.repeats = self._repeats(fragment, capture.due, realign)
        self.captures[fragment] = capture

    def contribute(self, fragment: int) -> None:
        """The rest of ``capture``, on any thread. Raises NotFinite, and forgets the capture."""
        capture = self.capture_of(fragment)
        if self.copies is not None and capture.landing is not None:
            self.copies.to_host(capture.landing, capture.theta)
            capture.landing = None
        own = capture.own_norm()
        if not math.isfinite(own):
            self.drop(fragment)
            raise NotFinite(
                f"Our weights in fragment {fragment} are not finite: they are not sent."
            )
        capture.bound = replace(capture.bound, own=own)
        if capture.realign:
            capture.sent = self.scratch.take(capture.numel).copy_(capture.theta)
        else:
            capture.sent = self.contribution(capture.phi, capture.theta)

    def _repeats(self, fragment: int, numel: int, realign: bool) -> Repeats:
        """What others brought last to these values; nothing is known if their number has
        changed."""
        if realign or self.repeats[fragment].numel != numel:
            known = Repeats(numel)
            if realign:
                return known
            self.repeats[fragment] = known
        return self.repeats[fragment]

    def _bound(self, fragment: int, ahead: int, apart: int) -> Bound:
        """The largest plausible progress of peers that claim ``ahead`` more steps than we and whose
        slow weights have parted for ``apart`` steps; our own is not known yet."""
        usual, interval = self.usual[fragment].value, self.spec.sync.interval
        since = max(1, self.steps - self.schedule[fragment].merged_steps)
        little_known = not usual and self.steps < interval
        believed = believed_steps(since, ahead, interval, little_known)
        claimed = believed_steps(since, ahead, interval, little_known, largest_jump(interval))
        # A liar gains nothing by it: no more is believed than a claim alone reaches.
        parted = believed_steps(since, max(0, ahead) + apart, interval, little_known)
        ours = self._rates(since, since)
        each = (growth(ours, self._rates(since, count)) for count in (believed, claimed, parted))
        grown, most, further = each
        return Bound(0.0, usual, grown, most, further)

    def _rates(self, since: int, count: int) -> float:
        """Sum of the learning rates of ``count`` steps from the first of our last ``since`` on."""
        start = max(0, self.clock.step - since)
        holding = ((step, self.course.at(step)) for step in range(start, start + count))
        return sum(learning_rate(spec.train, step, spec.run.steps) for step, spec in holding)

    def contribution(self, phi: Tensor, theta: Tensor) -> Tensor:
        """What we send of a fragment: a new vector. Override it for a method of your own."""
        return contribution(self._outer, phi, theta, self.scratch.take(phi.numel()))

    def capture_of(self, fragment: int) -> Capture[Any]:
        """The capture of an exchange that is under way."""
        capture = self.captures.get(fragment)
        if capture is None:
            raise TrainerError(
                f"Fragment {fragment} is not captured any more: the exchange is void."
            )
        return capture

    def drop(self, fragment: int) -> None:
        """Forget a capture that will not be merged."""
        capture = self.captures.pop(fragment, None)
        if capture is not None:
            capture.forget()

    def outer(self, fragment: int) -> None:
        """Compute the outer step from the mean of the capture; ``merge`` applies it.

        Slow weights are replaced, never changed in place, so that this can run beside inner steps
        and snapshots. Raises NotFinite, and keeps nothing, if the outcome is not finite.
        """
        capture = self.capture_of(fragment)
        before, momentum = self._begins(fragment, capture)
        phi = self.slow(fragment)
        delta = self.slow(fragment) if self.keeps_momentum else None
        if sum(stop - start for start, stop in capture.ranges) < capture.numel:
            copy_flat(before, phi)
            if delta is not None and momentum is not None:
                copy_flat(momentum, delta)
        settings = self._outer_of(fragment, capture)
        for start, stop in _pieces(capture.ranges):
            here = slice(start, stop)
            mean = capture.mean_of(start, stop)
            slow = phi[here]
            copy_flat(before[here], slow)
            if delta is None or momentum is None:
                moved = torch.zeros(stop - start)
            else:
                moved = delta[here]
                copy_flat(momentum[here], moved)
            if capture.realign:
                slow.copy_(mean)
                if not capture.keep_momentum:
                    moved.zero_()
            elif type(self).outer_step is Replica.outer_step:
                outer_step(settings, slow, moved, mean, *capture.ours(here))
            else:
                self.outer_step(slow, moved, mean, *capture.ours(here))
            if not are_finite(slow, moved):
                raise NotFinite(
                    f"The outer step of fragment {fragment} gives values that are not finite: it "
                    "is not applied."
                )
        capture.outcome = (phi, delta)
        if self.spec.sync.consensus == 0:
            capture.digests = (_digest(phi), "" if delta is None else _digest(delta))
        capture.release()
        if self.copies is not None and self.merges_there:
            capture.landing = self.copies.to_device(phi, capture.theta)

    def _begins(self, fragment: int, capture: Capture[Any]) -> tuple[Tensor, Tensor | None]:
        """Slow weights and momentum that an outer step begins with."""
        own = self.phi[fragment], self.delta[fragment] if self.keeps_momentum else None
        return capture.begins or own

    def missed(self, fragment: int, steps: int) -> bytes:
        """The last outer steps, for a member that has missed them (``underway.py``).

        Raises TrainerError if fewer are kept.
        """
        past = self.past[fragment]
        if len(past) < steps:
            raise TrainerError(f"Of fragment {fragment} {len(past)} outer steps are kept.")
        return b"".join(one.pack() for one in list(past)[len(past) - steps :])

    def take_over(
        self, fragment: int, data: memoryview, steps: int, digests: tuple[str, str]
    ) -> None:
        """Let the outer step of the capture follow ``steps`` that we had missed.

        ``digests``: SHA-256 of the slow weights and the momentum that these lead to, hexadecimal.
        Raises CodecError, and the capture is as before, if they do not.
        """
        capture = self.capture_of(fragment)
        phi = self.slow(fragment).copy_(self.phi[fragment])
        delta = self.slow(fragment).copy_(self.delta[fragment]) if self.keeps_momentum else None
        for moved, mean in read(data, capture.coder, capture.numel, steps):
            for start, stop in _pieces(moved):
                here = slice(start, stop)
                beside = torch.zeros(stop - start) if delta is None else delta[here]
                self.outer_step(phi[here], beside, mean[here])
        if (_digest(phi), "" if delta is None else _digest(delta)) != digests:
            raise CodecError("The outer steps that were handed over do not lead to what most hold.")
        capture.begins = phi, delta

    def _outer_of(self, fragment: int, capture: Capture[Any]) -> OuterSettings:
        """The settings of an outer step. Without a consensus term all members must take the same
        step, so theirs do not follow from the steps of one."""
        if not self.spec.sync.consensus:
            return self._outer
        return self._outer.after(self.schedule.intervals_since(fragment, capture.steps))

    def outer_step(
        self,
        phi: Tensor,
        delta: Tensor,
        mean: Tensor,
        progress: Tensor | None = None,
        sent: Tensor | None = None,
    ) -> None:
        """One outer step, in place on ``phi`` and ``delta``; override it for a method of your
        own. It is called for one piece of the fragment after the other."""
        outer_step(self._outer, phi, delta, mean, progress, sent)

    def merge(self, fragment: int, swarm_step: int, coder: Executor | None = None) -> None:
        """Bring the new slow weights into the fast weights, and take over a partner's swarm step.

        ``coder``: the thread that codes, for what coders keep; None does it now. Raises NotFinite,
        and changes nothing, if the outcome is not finite.
        """
        capture = self.capture_of(fragment)
        assert capture.outcome is not None
        phi, delta = capture.outcome
        self.readings.wait()
        if not self._merge_into_weights(fragment, capture, phi):
            raise NotFinite(
                f"The merge of fragment {fragment} gives weights that are not finite: it is not "
                "applied."
            )
        del self.captures[fragment]
        self._remember(fragment, capture)
        self.phi[fragment] = phi
        if delta is not None:
            self.delta[fragment] = delta
        capture.learn()
        if coder is None:
            capture.commit()
        else:
            self._committing[fragment] = coder.submit(capture.commit)
        self.worst_block[fragment] = capture.worst_block
        self.clock.observe(swarm_step)
        self.schedule.merged(fragment, self.clock.step, capture.steps, capture.tokens)

    def forget_past(self) -> None:
        """Keep no outer steps: slow weights are others now."""
        for past in self.past:
            past.clear()

    def _remember(self, fragment: int, capture: Capture[Any]) -> None:
        step = capture.step()
        if step is None or capture.begins is not None:
            self.past[fragment].clear()
        if step is not None:
            self.past[fragment].append(step)

    def _merge_into_weights(self, fragment: int, capture: Capture[Any], phi: Tensor) -> bool:
        """Bring new slow weights into the fast weights; False, and they are as before, if the
        outcome is not finite."""
        whole = list(capture.merged) == [(0, capture.numel)]
        if whole and self.copies is None:
            pairs = paired(self.plan.fragments[fragment], self.weights, capture.theta)
            if all(rows.is_contiguous() for rows, _ in pairs):
                return self._merge_in_place(pairs, phi)
        theta = self._merged(fragment, capture, phi)
        if theta is not None:
            scatter(self.plan.fragments[fragment], theta, self.weights)
        return theta is not None

    def _merge_in_place(self, pairs: Sequence[tuple[Tensor, Tensor]], phi: Tensor) -> bool:
        """Merge each of the weights, beside what was captured of it, in one pass: training
        waits."""
        start = 0
        for place, (rows, captured) in enumerate(pairs):
            here = slice(start, start + rows.numel())
            start += rows.numel()
            flat = rows.detach().view(-1)
            if not merge_in_place(self._outer, flat, phi[here], captured.view(-1)):
                for merged, before in pairs[: place + 1]:
                    copy_flat(before, merged.detach())
                return False
        return True

    def _merged(self, fragment: int, capture: Capture[Any], phi: Tensor) -> Tensor | None:
        """The new fast weights in a vector of their own; None if not finite."""
        out, theta = capture.theta, None
        if self.copies is not None and capture.landing is not None:
            theta = self.copies.room(capture.numel)
        if theta is None or capture.landing is None:
            theta = self.scratch.take(capture.numel)
        else:
            phi, out = capture.landing.wait()
        self.fast(fragment, theta)
        parts = (slice(*one) for one in capture.merged)
        merged = [merge(self._outer, theta[here], phi[here], out[here]) for here in parts]
        return theta if all(merged) else None

    def slow_digest(self, fragment: int) -> str:
        """SHA-256 of one fragment's slow weights, hexadecimal."""
        return _digest(self.phi[fragment])

    def momentum_digest(self, fragment: int) -> str:
        """The same of its outer momentum; empty where none is kept."""
        return _digest(self.delta[fragment]) if self.keeps_momentum else ""


def _pieces(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Ranges cut into pieces."""
    for start, stop in ranges:
        for begin in range(start, stop, PIECE):
            yield begin, min(stop, begin + PIECE)


def _digest(vector: Tensor) -> str:
    return sha256(vector.numpy().data).hexdigest()


def choose_device(name: str) -> torch.device:
    """``auto`` takes a GPU where there is one; ``cuda`` is the first one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    # torch limits the memory of a GPU only where it is told which.
    return torch.device("cuda:0" if name == "cuda" else name)


def _built(spec: RunSpec) -> Model:
    """The model of a run. Where it names files with weights, they or a checkpoint set them."""
    if spec.start.files:
        return family_of(spec.model).blank(spec.model)
    return build_model(spec.model, spec.run.seed)
