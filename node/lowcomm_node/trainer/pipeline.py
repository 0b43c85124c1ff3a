"""The head's side of stages: a model that no machine holds whole, as one replica (1F1B).

    head     embedding, blocks 0 to k ─►           ◄─ last norm, head, loss
    lenders                          blocks k to n

The head has what is outside of the blocks, so lenders see neither text nor loss, and a tied head
lies in one place. Each of a few micro-batches is on its way through all machines: one computes here
while one does elsewhere. Machines take them in order, so gradients add up as in one process.

A lender that is gone ends the trainer, which waits for it, and goes on from its checkpoint.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Queue
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor

from lowcomm_node.errors import ConfigError, LinkLost, TrainerError
from lowcomm_node.models.adapters import UNDER_WAY, footprint_of, shapes_of, take_weight
from lowcomm_node.models.base import Stage, computing, staged
from lowcomm_node.models.cross_entropy import count_learned
from lowcomm_node.models.open_weights import read_weights
from lowcomm_node.models.stages import require_stages, shell_of, split
from lowcomm_node.node.ipc import FailureKind
from lowcomm_node.node.messages import LenderAwaited, LenderFigures
from lowcomm_node.storage.state_file import mapped_vector
from lowcomm_node.trainer import memory
from lowcomm_node.trainer.holder import Holder, Offer, PipelineSettings
from lowcomm_node.trainer.memory import MemoryEstimate
from lowcomm_node.trainer.micro_batch import Cut
from lowcomm_node.trainer.ranks import try_out
from lowcomm_node.trainer.shard import Shard, Step
from lowcomm_node.trainer.stage import most_blocks, norms_of, places_of, update
from lowcomm_node.trainer.team import Team
from lowcomm_node.trainer.wire import connect

PARTS = 4
"""Micro-batches of a step, at least, where the batch has as many windows."""
GRACE, RETRY = 20.0, 5.0
"""Seconds for all lenders to come, where fewer would do, and between two tries of one."""
UNUSED = "it has no memory for a block, or others compute all of them sooner"
RETURN_EVERY = 600.0
"""Seconds between two tries of a lender that we do without."""


class _Batch:
    """One step on its way."""

    def __init__(self, tokens: Tensor, targets: Tensor, step: Step, cut: Cut) -> None:
        self.step, size = step, cut.parts(len(tokens))
        self.parts = list(zip(tokens.split(size), targets.split(size), strict=True))
        self.sent = deque[Tensor]()
        """States that were sent and whose gradient has not come back."""
        self.starts = list[Tensor | None]()
        """Beginnings of documents, by micro-batch."""
        self.ended = 0
        """Micro-batches that are through."""
        self.loss = torch.zeros(())

    @property
    def entered(self) -> int:
        """Micro-batches that are under way or through."""
        return len(self.starts)


class Pipeline(Team):
    """All machines that hold stages of one replica."""

    def __init__(
        self,
        settings: PipelineSettings,
        stage: Stage,
        estimate: MemoryEstimate,
        cut: Cut,
        holders: Sequence[Holder],
        away: Sequence[str],
    ) -> None:
        """``stage``: ours, and the ``estimate`` of its memory; ``cut``: how a batch is cut;
        ``away``: lenders that could not be reached."""
        super().__init__()
        self.stage, self.estimate, self.cut = stage, estimate, cut
        self.whole = shell_of(settings.spec)
        self._settings, self._holders = settings, tuple(holders)
        self._away = [one for one in settings.lenders if one[0] in away]
        self._next_try = monotonic() + RETURN_EVERY
        self._back = ""
        self._events: Queue[tuple[int, int, str, Tensor, Future[Any]]] = Queue()

    def begin(self, shard: Shard) -> None:
        super().begin(shard)
        for one in self._holders:
            one.on_lost = self._settings.on_lost
            if one.lost:
                one.on_lost(FailureKind.LENDER, f"{one.name} is gone: {one.lost}")
        self._model = staged(shard.model)
        self._model.elsewhere = self._through
        shard.gradient.cut, shard.gradient.is_alone = self.cut, False
        self._names = [
            [name for name in shard.shapes if self._home_of(name) is one] for one in self._holders
        ]
        self._rows = [
            {name: (0, shape[0] if name in names else 0) for name, shape in shard.shapes.items()}
            for names in map(set, self._names)
        ]

    def read_files(self, files: Sequence[Path]) -> None:
        """Set weights from files. Raises ConfigError if they hold another model."""
        spec = self._settings.spec
        for name, tensor in read_weights(spec.model, shapes_of(spec.model), files):
            holder = self._home_of(name)
            if holder is None:
                take_weight(self._model, name, tensor)
            else:
                shape, kind = list(tensor.shape), kind_of(tensor)
                order = {"do": "load", "name": name, "shape": shape, "dtype": kind}
                holder.ask(order, [tensor]).result()

    def _home_of(self, name: str) -> Holder | None:
        """The lender that holds a weight of the unadapted model; None for this machine."""
        layer = self.whole.place_of(name).layer
        for one in self._holders:
            if layer is not None and one.stage.start <= layer < one.stage.stop:
                return one
        return None

    def returned(self) -> str:
        if self._away and not self._back and monotonic() >= self._next_try:
            self._next_try = monotonic() + RETURN_EVERY
            threading.Thread(target=self._try_those_away, daemon=True).start()
        return self._back

    def _try_those_away(self) -> None:
        for name, path in self._away:
            with suppress(OSError, LinkLost), connect(path):
                self._back = name

    def stop(self) -> None:
        for one in self._holders:
            one.stop()
        super().stop()

    def figures(self) -> tuple[LenderFigures, ...]:
        holding = {
            one.name: LenderFigures(
                name=one.name,
                away=one.lost,
                blocks=(one.stage.start, one.stage.stop),
                computing=round(one.computed, 4),
                moving=round(one.waited, 4),
                moved=one.moved,
            )
            for one in self._holders
        }
        gone = {name: LenderFigures(name=name, away="it was not here") for name, _ in self._away}
        rest = (LenderFigures(name=name, away=UNUSED) for name, _ in self._settings.lenders)
        return tuple(holding.get(one.name) or gone.get(one.name, one) for one in rest)

    # a step

    def train(self, tokens: Tensor, targets: Tensor, step: Step) -> Callable[[], list[float]]:
        for one in self._holders:
            one.computed = one.waited = 0.0
        shard = self._shard
        if shard.model.draws:
            torch.manual_seed(step.seed)
        loss = self._gradients(tokens, targets, step)
        norm = self._norm()
        shard.before_update()
        fine = bool(torch.isfinite(loss) and torch.isfinite(norm))
        clip_to = float(norm) if fine else None
        order = {"norm": clip_to, "rate": step.rate, "swarm_step": step.swarm_step}
        for one in self._holders:
            one.ask({"do": "update", **order})
        update(shard, clip_to, step.rate, step.swarm_step)
        return partial(list, [float(loss), float(norm)])

    def _gradients(self, tokens: Tensor, targets: Tensor, step: Step) -> Tensor:
        """The loss of a batch; its gradient is in the weights, wherever they are."""
        batch = _Batch(tokens, targets, step, self._shard.gradient.cut)
        self._model.train()
        while batch.ended < len(batch.parts):
            if batch.entered < len(batch.parts) and batch.entered - batch.ended < UNDER_WAY:
                self._enter(batch)
            else:
                place, number, kind, came = self._next()
                if kind == "forward":
                    self._forward(batch, number, place + 1, came)
                else:
                    self._backward(batch, number, place - 1, came)
        return batch.loss

    def _enter(self, batch: _Batch) -> None:
        """Send the next micro-batch on its way."""
        device, number = self._shard.device, batch.entered
        if number:
            self._shard.gradient.rest()
        with computing(device):
            x, starts = self._model.enter(batch.parts[number][0].to(device))
        batch.sent.append(x)
        batch.starts.append(starts)
        self._forward(batch, number, 0, x.detach())

    def _forward(self, batch: _Batch, number: int, place: int, x: Tensor) -> None:
        """Have the next lender compute states of a micro-batch; after the last one, the loss."""
        if place < len(self._holders):
            begins = self._model.draws and number == 0
            seed = batch.step.seed if begins else None
            self._pass(place, number, *forward_order(x, batch.starts[number], True, seed))
            return
        device = self._shard.device
        states, targets = x.to(device).requires_grad_(), batch.parts[number][1].to(device)
        with computing(device):
            loss = self._model.leave(states, targets)
            loss = loss * (count_learned(targets) / batch.step.learned)
        loss.backward()
        batch.loss += loss.detach().cpu()
        assert states.grad is not None
        self._backward(batch, number, place - 1, states.grad)

    def _backward(self, batch: _Batch, number: int, place: int, slopes: Tensor) -> None:
        """Have the lender before compute gradients of a micro-batch, or do so before the first."""
        if place >= 0:
            order = {"do": "backward", "shape": list(slopes.shape), "dtype": kind_of(slopes)}
            self._pass(place, number, order, [slopes])
            return
        torch.autograd.backward(batch.sent.popleft(), slopes.to(self._shard.device))
        batch.ended += 1

    def _next(self) -> tuple[int, int, str, Tensor]:
        """The next states or slopes that came back, and from where. Raises TrainerError."""
        began = monotonic()
        place, number, kind, into, answered = self._events.get()
        self._holders[place].waited += monotonic() - began
        answered.result()
        return place, number, kind, into

    def _pass(self, place: int, number: int, order: dict[str, Any], tensors: list[Tensor]) -> None:
        into = torch.empty(tensors[0].shape, dtype=tensors[0].dtype)

        def then(answered: Future[Any]) -> None:
            self._events.put((place, number, order["do"], into, answered))

        self._holders[place].ask(order, tensors, [into], then)

    def _norm(self) -> Tensor:
        """The norm of the whole gradient, of the norms of all weights in the order of one
        process."""
        found = [torch.empty(len(names)) for names in self._names]
        asked = [
            one.ask({"do": "norms"}, into=[into])
            for one, into in zip(self._holders, found, strict=True)
        ]
        norms = dict(zip(self._shard.weights, norms_of(self._shard), strict=True))
        for names, into, answered in zip(self._names, found, asked, strict=True):
            answered.result()
            norms.update(zip(names, into, strict=True))
        return torch.linalg.vector_norm(torch.stack([norms[name] for name in self._shard.shapes]))

    def total_loss(self, tokens: Tensor, targets: Tensor) -> float:
        return self._shard.loss_here(tokens, targets)

    def _through(self, states: Tensor, starts: Tensor | None) -> Tensor:
        """States after the blocks of all lenders, without gradients."""
        x = states
        for one in self._holders:
            order, tensors = forward_order(x, starts, learns=False)
            came = torch.empty(x.shape, dtype=x.dtype)
            one.ask(order, tensors, [came]).result()
            x = came
        return x.to(states.device)

    # what all do between steps

    def _all(self, order: dict[str, Any]) -> list[Any]:
        name, asked = order["do"], list[Future[Any]]()
        answers = [self._rank.take(order)]
        for one, rows in zip(self._holders, self._rows, strict=True):
            places = places_of(order, self._shard, rows, self._board)
            if places or name in ("keep", "restore", "moments"):
                sent, into = ([], places) if name == "write out" else (places, [])
                asked.append(one.ask(order, sent, into))
        return [*answers, *(one.result() for one in asked)]

    def _room(self, numel: int) -> Tensor:
        folder = self._settings.folder
        if folder is not None:
            return torch.from_numpy(mapped_vector(folder, numel))
        return super()._room(numel)


def kind_of(tensor: Tensor) -> str:
    """The name of its type."""
    return str(tensor.dtype).removeprefix("torch.")


def forward_order(
    x: Tensor, starts: Tensor | None, learns: bool, seed: int | None = None
) -> tuple[dict[str, Any], list[Tensor]]:
    """The order to compute states from these, and its tensors."""
    order = {"do": "forward", "shape": list(x.shape), "dtype": kind_of(x), "learns": learns}
    order |= {"starts": starts is not None, "seed": seed}
    return order, [x] if starts is None else [x, starts.to(torch.int32)]


def form(settings: PipelineSettings) -> Pipeline:
    """Wait for lenders until all together have room for the model, and share its blocks out.

    Raises ConfigError where they have not though all are here.
    """
    require_stages(settings.spec)
    own, began, waited = _own_offer(settings), monotonic(), False
    layers = footprint_of(settings.spec).blocks
    while True:
        holders, away = _introduced(settings)
        counts = _counts(layers, [own, *(one.offer for one in holders)])
        if counts is not None and (not away or monotonic() > began + GRACE):
            try:
                formed = _formed(settings, holders, counts, list(away))
            except TrainerError as error:
                away = {"a lender": str(error)}
            else:
                if waited:
                    settings.tell(LenderAwaited(why=""))
                return formed
        for one in holders:
            one.stop()
        if not away:
            room = ", ".join(f"{one.name} for {one.offer.blocks}" for one in holders)
            raise ConfigError(
                f"The model has {layers} blocks. This machine has memory for {own.blocks}, {room}: "
                "raise --max-memory there or here, or lend another machine."
            )
        waited = True
        why = "; ".join(f"{name}: {reason}" for name, reason in away.items())
        settings.tell(LenderAwaited(why=f"waiting for {why}"))
        sleep(RETRY)


def _own_offer(settings: PipelineSettings) -> Offer:
    spec, device = settings.spec, settings.device
    how = settings.limits, settings.exchanges, settings.choices
    blocks = most_blocks(spec, device, *how, outside=True)
    if blocks < 0:
        limits, exchanges, choices = how
        outside = Stage(0, 0, outside=True)
        memory.check_memory(spec, device, *limits, exchanges, choices, stage=outside)
    return Offer(max(0, blocks), try_out(str(device)).seconds or 1.0)


def _introduced(settings: PipelineSettings) -> tuple[list[Holder], dict[str, str]]:
    """The lenders that are here, and why others are not."""
    here, away = list[Holder](), dict[str, str]()
    for name, path in settings.lenders:
        try:
            here.append(Holder(name, path, settings))
        except (OSError, LinkLost, TrainerError) as error:
            away[name] = str(error) or type(error).__name__
    return here, away


def _counts(layers: int, offers: Sequence[Offer]) -> list[int] | None:
    seconds, most = [one.seconds for one in offers], [one.blocks for one in offers]
    counts = split(layers, seconds, most)
    lenders = range(1, len(offers))
    if counts is not None and not any(counts[1:]) and any(most[1:]):  # else nobody helps
        fastest = min((one for one in lenders if most[one]), key=seconds.__getitem__)
        counts[0], counts[fastest] = counts[0] - 1, 1
    return counts


def _formed(
    settings: PipelineSettings, here: Sequence[Holder], counts: Sequence[int], away: Sequence[str]
) -> Pipeline:
    """Raises TrainerError if a lender is gone meanwhile."""
    spec, start, holders = settings.spec, counts[0], list[Holder]()
    stage = Stage(0, start, outside=True)
    for one, count in zip(here, counts[1:], strict=True):
        if not count:
            one.stop()
            continue
        one.stage, start = Stage(start, start + count), start + count
        holders.append(one)
    estimate, cut = memory.check_memory(
        spec,
        settings.device,
        *settings.limits,
        settings.exchanges,
        settings.choices,
        stage=stage,
    )
    asked = [one.ask({"stage": [one.stage.start, one.stage.stop]}) for one in holders]
    windows = min([cut.windows, *(one.result()["windows"] for one in asked)])
    if settings.choices.micro_batch is None:
        windows = min(windows, -(-spec.train.batch // PARTS))
    return Pipeline(settings, stage, estimate, Cut(windows, cut.recompute), holders, away)
