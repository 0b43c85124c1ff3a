"""One replica: fast weights that the inner optimizer moves, slow weights that outer steps move.

    copy         between two inner steps: fast weights as of now
    contribute   our contribution, from these and the slow weights
    ...          contributions of others come in (``capture.py``)
    outer        the outer step: new slow weights from the mean, beside inner steps
    merge        between two inner steps: new slow weights into the fast weights

Symbols are those of docs/design.md: ``theta`` fast weights, ``phi`` slow weights, ``delta`` outer
momentum, ``D = theta - phi`` progress, ``c`` contribution. ``phi`` and ``delta`` are flat float32
vectors in host memory.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowcomm_node.data import Dataset
from lowcomm_node.errors import NotFinite, TrainerError
from lowcomm_node.models.base import family_of, trained
from lowcomm_node.models.devices import copies_beside
from lowcomm_node.models.open_weights import load_weights
from lowcomm_node.storage.state_file import mapped_vector, sweep
from lowcomm_node.trainer import gpu, judging
from lowcomm_node.trainer.capture import (
    FP32_BYTES,
    CapturedFragment,
    GroupCapture,
    PastStep,
    Scratch,
    Slow,
    capture_for,
    read_steps,
)
from lowcomm_node.trainer.inner import InnerReplica
from lowcomm_node.trainer.judging import Judge
from lowcomm_node.trainer.memory import FEWEST, keeps_momentum
from lowcomm_node.trainer.optimizer import learning_rate
from lowcomm_node.trainer.pipeline import Pipeline
from lowcomm_node.trainer.team import Team
from lowcomm_node.trainer.world import ALONE, World
from lowcomm_protocol.codecs import BLOCK, Coder, ShardCoder, nearby
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.exchange import outer
from lowcomm_protocol.exchange.outer import are_finite, contribution, outer_step
from lowcomm_protocol.exchange.underway import kept
from lowcomm_protocol.plan import FragmentProgress, SyncSchedule, largest_jump
from lowcomm_protocol.rows import copy_flat, gather, paired, scatter
from lowcomm_protocol.spec.amendments import SpecTimeline
from lowcomm_protocol.spec.names import MAX_GROUP
from lowcomm_protocol.spec.run import RunSpec

SCRATCH = 8
"""Free vectors that are kept for each fragment."""
PIECE = 131_072
"""Values that an outer step computes at once: its vectors stay in the cache."""


@dataclass
class FragmentHistory:
    """What past exchanges of one fragment leave, beside its slow weights."""

    repeats: judging.Repeats
    past: deque[PastStep]
    """The last outer steps, for members that miss them."""
    usual: judging.UsualNorm


class Replica(InnerReplica):
    """An inner replica with the slow weights of every fragment, and the exchanges under way."""

    def __init__(
        self,
        spec: RunSpec,
        peer_id: str,
        dataset: Dataset,
        device: torch.device,
        compiled: bool | None = None,
        run_id: str | None = None,
        course: SpecTimeline | None = None,
        base: Sequence[Path] = (),
        moments: str = "fp32",
        team: Team | None = None,
        world: World = ALONE,
    ) -> None:
        """Build it with the weights of the run's seed; arguments are those of InnerReplica."""
        super().__init__(
            spec, peer_id, dataset, device, compiled, run_id, course, base, moments, team, world
        )
        numels = [fragment.numel for fragment in self.plan.fragments]
        self.schedule = SyncSchedule(spec.sync.interval, [FragmentProgress() for _ in numels])
        self.phi = [self.fast(p) for p in range(len(numels))]
        self._own_rule = type(self).outer_step is not Replica.outer_step
        self.keeps_momentum = self._own_rule or keeps_momentum(spec.sync)
        """Whether outer steps need the ``delta`` of those before."""
        self.delta = [torch.zeros_like(phi) for phi in self.phi] if self.keeps_momentum else []
        """Outer momentum by fragment; empty where none is kept."""
        self.captures: dict[int, CapturedFragment[Any]] = {}
        self.exchanged = capture_for(spec.sync)
        """The class of captures."""
        # Shards are cut at blocks: those of all members, as long as ours, may be longer together.
        self.scratch = Scratch(max(numels) + MAX_GROUP * BLOCK, SCRATCH * len(numels))
        self._slow = self.scratch
        """Lends vectors for new slow weights and momenta."""
        self._coders: list[Coder | ShardCoder] = [
            self.exchanged.new_coder(spec.sync.codec, numel, spec.sync.error_feedback)
            for numel in numels
        ]
        self._committing: dict[int, Future[None]] = {}
        """Work of coders on the last merge of a fragment, on the thread that codes."""
        self.history = [
            FragmentHistory(
                judging.Repeats(coder.numel),
                deque(maxlen=kept(coder.max_size, FP32_BYTES * coder.numel)),
                judging.UsualNorm(),
            )
            for coder in self._coders
        ]
        self.nearby = [nearby.NearbyReader(numel) for numel in numels]
        """Reads slow weights of other cells, by fragment."""
        self.directions = judging.Directions()
        """Whether the progress of others points along ours."""
        self._outer = spec.sync.outer_settings
        self.copies = gpu.Copies(device) if team is None and copies_beside(device) else None
        """Copies that no inner step waits for; None where the device has none beside its work."""
        self.merges_there = self.copies is not None and gpu.merges_alike(device, self._outer)
        """Whether the device merges; else the host does while training waits."""

    def begin_with(self, files: Sequence[Path]) -> None:
        """Take the weights of files. Raises ConfigError if they hold another model."""
        if isinstance(self.team, Pipeline):
            self.team.read_files(files)
        elif self.world.shards:
            whole = family_of(self.spec.model).blank(self.spec.model)
            load_weights(whole, files)
            self.load_weights(dict(trained(whole)))
        else:
            load_weights(self.model, files)
        self.phi = [self.fast(p, self.slow(p)) for p in range(len(self.plan.fragments))]

    @property
    def coders(self) -> Sequence[Coder | ShardCoder]:
        """The coders, once they have learned from all merges."""
        while self._committing:
            self._committing.popitem()[1].result()
        return self._coders

    # vectors of a fragment

    def fast(self, fragment: int, out: Tensor | None = None) -> Tensor:
        """A copy of one fragment of the fast weights: flat, float32, in ``out`` or host memory."""
        if out is None:
            out = torch.empty(self.plan.fragments[fragment].numel, dtype=torch.float32)
        if self.team is not None:
            self.team.gather(self.plan.fragments[fragment], out)
        else:
            gather(self.plan.fragments[fragment], self.weights, out)
        return out

    def slow(self, fragment: int) -> Tensor:
        """A new vector for slow weights or momentum of a fragment; it may hold anything."""
        return self._slow.take(self.plan.fragments[fragment].numel)

    def keep_in_files(self, folder: Path) -> None:
        """Keep slow weights and momentum in mapped files of a folder: they need no memory between
        the outer steps of their fragment. Raises DiskFull."""
        sweep(folder)
        largest = max(fragment.numel for fragment in self.plan.fragments)
        spare = FEWEST * (2 if self.keeps_momentum else 1)  # of all that may be under way
        self._slow = Scratch(largest, spare, partial(mapped_vector, folder))
        for vectors in (self.phi, self.delta):
            for p, held in enumerate(vectors):
                vectors[p] = self.slow(p).copy_(held)

    def codes_to_ask(self, fragment: int) -> bytes:
        """Steps of the blocks of our shard that a peer of another cell is asked for; empty where
        there is none, or nothing to mix."""
        capture = self.capture_of(fragment)
        if not isinstance(capture, GroupCapture) or capture.realign:
            return b""
        if self.course.at(self.clock.step).sync.cells == 1:
            return b""
        return self.nearby[fragment].codes(*capture.bounds[capture.mine])

    def give_slow(self, fragment: int, start: int, codes: bytes, out: memoryview) -> int:
        """Code slow weights from ``start`` on for another cell, in as many blocks as there are
        step codes; bytes. Raises CodecError."""
        slow = self.phi[fragment][start : start + len(codes) * BLOCK]
        return nearby.give(slow.numpy(), codes, out)

    def take_slow(self, fragment: int, data: memoryview) -> None:
        """Take in another cell's slow weights in our shard. Raises CodecError."""
        capture = self.capture_of(fragment)
        assert isinstance(capture, GroupCapture), "pairs have no shards"
        start, stop = capture.bounds[capture.mine]
        own = capture.phi[start:stop].numpy()
        capture.beyond = torch.from_numpy(self.nearby[fragment].read(start, own, data))

    def slow_digest(self, fragment: int) -> str:
        """SHA-256 of one fragment's slow weights, hexadecimal."""
        return _digest(self.phi[fragment])

    def momentum_digest(self, fragment: int) -> str:
        """SHA-256 of its outer momentum, hexadecimal; empty where none is kept."""
        return _digest(self.delta[fragment] if self.keeps_momentum else None)

    # capture

    def capture(self, fragment: int, *rest: Any, **named: Any) -> None:
        """``copy``, then ``contribute``. Raises NotFinite if our weights are not finite."""
        self.copy(fragment, *rest, **named)
        self.contribute(fragment)

    def copy(
        self,
        fragment: int,
        realign: bool = False,
        members: Sequence[str] = (),
        ahead: int = 0,
        apart: int = 0,
    ) -> None:
        """Capture what an exchange of ``fragment`` begins with, between two inner steps.

        ``members``: the whole group, sorted; empty in a pair. ``realign`` makes slow weights equal
        again that should be equal and are not: everybody sends fast weights in full precision, and
        their mean becomes the slow weights of all. ``ahead``: how many inner steps longer than we
        the others claim to have trained; ``apart``: for how many slow weights have parted.
        """
        numel = self.plan.fragments[fragment].numel
        theta, phi = self.scratch.take(numel), self.phi[fragment]
        landing = None
        if self.copies is not None:
            landing = self.copies.snapshot(self.plan.fragments[fragment], self.weights)
        if landing is None:
            self.fast(fragment, theta)
        pull = 1.0 if realign else self.spec.sync.consensus
        heavy = self.exchanged.heavy if pull else judging.HEAVY
        judge = Judge(
            theta=theta,
            phi=phi,
            pull=pull,
            gain=1.0 if realign else self._outer.gain,
            bound=replace(self._bound(fragment, ahead, apart), heavy=heavy, realigns=realign),
            usual=self.history[fragment].usual,
            directions=self.directions,
        )
        capture = self.exchanged(
            me=self.peer_id,
            members=members,
            averaging=self.spec.sync.mean,
            coder=self.exchanged.new_coder("fp32", numel, False)
            if realign
            else self._coders[fragment],
            judge=judge,
            scratch=self.scratch,
            realign=realign,
            steps=self.steps,
            tokens=self.tokens,
            landing=landing,
        )
        history = self.history[fragment]
        if not realign and history.repeats.numel != capture.due:  # nothing is known of others
            history.repeats = judging.Repeats(capture.due)
        judge.repeats = judging.Repeats(capture.due) if realign else history.repeats
        self.captures[fragment] = capture

    def contribute(self, fragment: int) -> None:
        """Compute our contribution, on any thread. Raises NotFinite, and forgets the capture."""
        capture = self.capture_of(fragment)
        if self.copies is not None and capture.landing is not None:
            self.copies.to_host(capture.landing, capture.theta)
            capture.landing = None
        own = capture.judge.own_norm()
        if not math.isfinite(own):
            self.drop(fragment)
            raise NotFinite(
                f"Our weights in fragment {fragment} are not finite: they are not sent."
            )
        capture.judge.bound = replace(capture.judge.bound, own=own)
        if capture.realign:
            capture.sent = self.scratch.take(capture.numel).copy_(capture.theta)
        else:
            capture.sent = self.contribution(capture.phi, capture.theta)

    def contribution(self, phi: Tensor, theta: Tensor) -> Tensor:
        """Our contribution: a new vector; may be overridden."""
        return contribution(self._outer, phi, theta, self.scratch.take(phi.numel()))

    def _bound(self, fragment: int, ahead: int, apart: int) -> judging.Bound:
        """The largest plausible progress of peers that claim ``ahead`` more steps than we and whose
        slow weights have parted for ``apart`` steps; our own is not known yet."""
        usual, interval = self.history[fragment].usual.value, self.spec.sync.interval
        since = max(1, self.steps - self.schedule[fragment].merged_steps)
        little_known = not usual and self.steps < interval
        steps = (
            judging.believed_steps(since, ahead, interval, little_known),
            judging.believed_steps(since, ahead, interval, little_known, largest_jump(interval)),
            # A liar gains nothing by it: no more is believed than a claim alone reaches.
            judging.believed_steps(since, max(0, ahead) + apart, interval, little_known),
        )
        ours = self._rates(since, since)
        believed, claimed, parted = (judging.growth(ours, self._rates(since, n)) for n in steps)
        return judging.Bound(0.0, usual, believed, claimed, parted)

    def _rates(self, since: int, count: int) -> float:
        """Sum of the learning rates of ``count`` steps from the first of our last ``since`` on."""
        start = max(0, self.clock.step - since)
        holding = ((step, self.course.at(step)) for step in range(start, start + count))
        return sum(learning_rate(spec.train, step, spec.run.steps) for step, spec in holding)

    def capture_of(
        self, fragment: int, same: CapturedFragment[Any] | None = None
    ) -> CapturedFragment[Any]:
        """The capture of an exchange that is under way; ``same``: the only one that is meant."""
        capture = self.captures.get(fragment)
        if capture is None or (same is not None and capture is not same):
            raise TrainerError(
                f"Fragment {fragment} is not captured any more: the exchange is void."
            )
        return capture

    def drop(self, fragment: int) -> None:
        """Forget a capture that will not be merged."""
        capture = self.captures.pop(fragment, None)
        if capture is not None:
            capture.coder.forget()

    # outer step

    def outer(self, fragment: int) -> None:
        """Compute the outer step from the mean of the capture; ``merge`` applies it.

        Slow weights are replaced, never changed in place: inner steps and snapshots go on. Raises
        NotFinite, and keeps nothing, if the outcome is not finite.
        """
        capture = self.capture_of(fragment)
        before, momentum = capture.begins or (self.phi[fragment], None)
        if self.keeps_momentum and capture.begins is None:
            momentum = self.delta[fragment]
        phi, delta = self._new(fragment)
        if sum(stop - start for start, stop in capture.ranges) < capture.numel:
            copy_flat(before, phi)
            if delta is not None and momentum is not None:
                copy_flat(momentum, delta)
        settings = self._outer
        if self.spec.sync.consensus:
            # Without consensus all members must take the same step, so theirs do not follow from
            # the steps of one.
            settings = settings.after(self.schedule.intervals_since(fragment, capture.steps))
        for start, stop in _pieces(capture.ranges):
            here = slice(start, stop)
            mean, slow = capture.mean_of(start, stop), phi[here]
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
            elif self._own_rule:
                self.outer_step(slow, moved, mean, *capture.ours(here))
            else:
                outer_step(settings, slow, moved, mean, *capture.ours(here))
            if not are_finite(slow, moved):
                raise NotFinite(
                    f"The outer step of fragment {fragment} gives values that are not finite: it "
                    "is not applied."
                )
        capture.outcome = (phi, delta)
        if self.spec.sync.consensus == 0:
            capture.digests = (_digest(phi), _digest(delta))
        capture.release()
        if self.copies is not None and self.merges_there:
            capture.landing = self.copies.to_device(phi, capture.theta)

    def outer_step(
        self,
        phi: Tensor,
        delta: Tensor,
        mean: Tensor,
        progress: Tensor | None = None,
        sent: Tensor | None = None,
    ) -> None:
        """One outer step of a piece, in place on ``phi`` and ``delta``; may be overridden."""
        outer_step(self._outer, phi, delta, mean, progress, sent)

    def _new(self, fragment: int) -> Slow:
        """Vectors of arbitrary values for slow weights and momentum."""
        return self.slow(fragment), self.slow(fragment) if self.keeps_momentum else None

    # outer steps that were missed

    def missed(self, fragment: int, steps: int) -> bytes:
        """The last outer steps, packed. Raises TrainerError if fewer are kept."""
        past = list(self.history[fragment].past)
        if len(past) < steps:
            raise TrainerError(f"Of fragment {fragment} {len(past)} outer steps are kept.")
        return b"".join(step.pack() for step in past[len(past) - steps :])

    def take_over(
        self, fragment: int, data: memoryview, steps: int, digests: tuple[str, str]
    ) -> None:
        """Let the outer step of the capture follow ``steps`` that we had missed.

        ``digests``: SHA-256 of the resulting slow weights and momentum, hexadecimal. Raises
        CodecError, and the capture is as before, if they differ.
        """
        capture = self.capture_of(fragment)
        phi, delta = self._new(fragment)
        phi.copy_(self.phi[fragment])
        if delta is not None:
            delta.copy_(self.delta[fragment])
        for moved, mean in read_steps(data, capture.coder, capture.numel, steps):
            for start, stop in _pieces(moved):
                here = slice(start, stop)
                beside = torch.zeros(stop - start) if delta is None else delta[here]
                self.outer_step(phi[here], beside, mean[here])
        if (_digest(phi), _digest(delta)) != digests:
            raise CodecError("The outer steps that were handed over do not lead to what most hold.")
        capture.begins = phi, delta

    def forget_past(self) -> None:
        """Keep no outer steps: slow weights are others now."""
        for history in self.history:
            history.past.clear()

    # merge

    def merge(self, fragment: int, swarm_step: int, coder: Executor | None = None) -> None:
        """Bring the new slow weights into the fast weights, and take over a partner's swarm step.

        ``coder``: the thread that codes, for what coders keep; None does it now. Raises NotFinite,
        and changes nothing, if the outcome is not finite.
        """
        capture = self.capture_of(fragment)
        assert capture.outcome is not None
        (phi, delta), history, step = capture.outcome, self.history[fragment], capture.step()
        self.readings.wait()
        if not self._merge_into_weights(fragment, capture, phi):
            raise NotFinite(
                f"The merge of fragment {fragment} gives weights that are not finite: it is not "
                "applied."
            )
        del self.captures[fragment]
        if step is None or capture.begins is not None:
            history.past.clear()
        if step is not None:
            history.past.append(step)
        self.phi[fragment] = phi
        if delta is not None:
            self.delta[fragment] = delta
        capture.judge.learn()
        if coder is None:
            capture.commit()
        else:
            self._committing[fragment] = coder.submit(capture.commit)
        self.clock.observe(swarm_step)
        self.schedule.merged(fragment, self.clock.step, capture.steps, capture.tokens)

    def _merge_into_weights(
        self, fragment: int, capture: CapturedFragment[Any], phi: Tensor
    ) -> bool:
        """Bring new slow weights into the fast ones; False if not finite: they are as before."""
        part = self.plan.fragments[fragment]
        if self.team is not None:
            return self.team.merge(part, capture.merged, phi, capture.theta)
        in_host = self.device.type == "cpu" and self.copies is None
        if in_host and list(capture.merged) == [(0, capture.numel)]:
            pairs = paired(part, self.weights, capture.theta)
            if all(rows.is_contiguous() for rows, _ in pairs):
                return self._merge_in_place(pairs, phi)
        landing, captured, theta = capture.landing, capture.theta, None
        if self.copies is not None and landing is not None:
            theta = self.copies.room(capture.numel)
        merge = outer.merge if theta is None else gpu.merge
        if theta is None or landing is None:
            theta = self.scratch.take(capture.numel)
        else:
            phi, captured = landing.wait()
        self.fast(fragment, theta)
        for here in (slice(*one) for one in capture.merged):
            if not merge(self._outer, theta[here], phi[here], captured[here]):
                return False
        scatter(part, theta, self.weights)
        return True

    def _merge_in_place(self, pairs: Sequence[tuple[Tensor, Tensor]], phi: Tensor) -> bool:
        """Merge each of the weights, beside its captured values, in one pass: training waits."""
        start = 0
        for place, (rows, captured) in enumerate(pairs):
            here = slice(start, start + rows.numel())
            start += rows.numel()
            flat = rows.detach().view(-1)
            if not outer.merge(self._outer, flat, phi[here], captured.view(-1)):
                for merged, before in pairs[: place + 1]:
                    copy_flat(before, merged.detach())
                return False
        return True


def _pieces(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Ranges cut into pieces."""
    for start, stop in ranges:
        for begin in range(start, stop, PIECE):
            yield begin, min(stop, begin + PIECE)


def _digest(vector: Tensor | None) -> str:
    return "" if vector is None else sha256(vector.numpy().data).hexdigest()
