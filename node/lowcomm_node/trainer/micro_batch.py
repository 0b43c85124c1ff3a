"""The inner step's gradient, cut to what the device holds.

Each peer cuts the ``batch`` of the specification into micro-batches as its memory asks for.
Gradients of the parts weigh by their tokens, so their sum is the gradient of the batch. A GPU finds
the largest micro-batch by trying, once for a device and a run.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lowcomm_node.errors import ConfigError, DiskFull
from lowcomm_node.models.base import Model
from lowcomm_node.node.messages import is_out_of_memory
from lowcomm_node.storage.files import read_small, write_atomic


@dataclass(frozen=True)
class Cut:
    """How a step goes through the model: ``windows`` at once; with ``recompute`` the backward pass
    computes blocks again instead of keeping them."""

    windows: int
    recompute: bool = False

    def parts(self, batch: int) -> int:
        """Windows of each part of a batch but the last, so that all are about as large."""
        count = -(-batch // min(batch, self.windows))
        return -(-batch // count)

    def smaller(self, batch: int, may_recompute: bool) -> "Cut | None":
        """The next smaller cut; None where nothing is left."""
        if self.windows > 1:
            return Cut(max(1, min(self.windows, batch) // 2), self.recompute)
        return Cut(1, True) if may_recompute and not self.recompute else None


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number of windows up to ``most`` that fits, by bisection; 0 if none does."""
    if fits(most):
        return most
    fitting, too_many = 0, most
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if fits(middle):
            fitting = middle
        else:
            too_many = middle
    return fitting


def choose(
    batch: int, windows: int | None, recompute: bool | None, fits: Callable[[Cut], bool]
) -> Cut | None:
    """The largest micro-batch that fits; blocks are computed again only where none does otherwise.

    ``windows``, ``recompute``: choices of the owner, None to choose. None if nothing fits.
    """
    for again in (False, True) if recompute is None else (recompute,):
        if windows is not None:
            cut = Cut(min(windows, batch), again)
            if fits(cut):
                return cut
        elif count := largest(batch, lambda count, again=again: fits(Cut(count, again))):
            return Cut(count, again)
    return None


class Gradient:
    """Computes gradients of one model, in smaller parts once memory is short."""

    def __init__(self, model: Model, loss: Callable[[Tensor, Tensor], Tensor], batch: int) -> None:
        """``loss``: mean of tokens and targets; ``batch``: windows of a step, all at once at
        first."""
        self._model = model
        self._loss = loss
        self._batch = batch
        self.may_recompute = False
        """Whether blocks may be computed again where one window does not fit otherwise."""
        self.cut = Cut(batch)

    def of(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch, detached; its gradient is in the weights."""
        while True:
            try:
                return self._pass(tokens, targets)
            except (RuntimeError, MemoryError) as error:
                smaller = self.cut.smaller(len(tokens), self.may_recompute)
                if smaller is None or not is_out_of_memory(error):
                    raise
            # Only here, where the error is gone, are the tensors of the pass gone with it.
            self._forget()
            self.cut = smaller

    def fits(self, cut: Cut, ballast: int = 0) -> bool:
        """Whether a step cut so fits beside ``ballast`` bytes, by a forward and a backward pass."""
        weights = list(self._model.parameters())
        device, before = weights[0].device, self.cut
        shape = cut.windows, self._model.settings.context
        self.cut = cut
        try:
            held = torch.empty(ballast, dtype=torch.uint8, device=device)
            if cut.windows < self._batch:  # gradients of the parts before are there already
                for weight in weights:
                    weight.grad = torch.zeros_like(weight)
            tokens = torch.zeros(shape, dtype=torch.long, device=device)
            self._pass(tokens, tokens)
            del held
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            self.cut = before
            self._forget()
        return True

    def _pass(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self._model.recompute != self.cut.recompute:
            self._model.recompute_blocks(self.cut.recompute)
        size = self.cut.parts(len(tokens))
        if size == len(tokens):
            loss = self._loss(tokens, targets)
            loss.backward()
            return loss.detach()
        total = torch.zeros((), device=tokens.device)
        for some, theirs in zip(tokens.split(size), targets.split(size), strict=True):
            loss = self._loss(some, theirs) * (len(some) / len(tokens))
            loss.backward()
            total += loss.detach()
        return total

    def _forget(self) -> None:
        self._model.zero_grad(set_to_none=True)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


MOST_BYTES = 64_000
RECOMPUTE = {"auto": None, "on": True, "off": False}
"""Values of ``--activation-checkpointing``; None to choose."""


def find(
    gradient: Gradient, batch: int, recompute: bool | None, ballast: int, file: Path, device: str
) -> tuple[Cut, bool]:
    """The largest micro-batch that fits beside ``ballast`` bytes, and whether it was not in
    ``file`` yet.

    ``recompute``: choice of the owner, None to choose; ``device``: name in the file. Raises
    ConfigError if not one window fits.
    """
    known = remembered(file, device, batch)
    if known is not None and recompute in (None, known.recompute):
        return known, False
    cut = choose(batch, None, recompute, lambda cut: gradient.fits(cut, ballast))
    if cut is None:
        leave = "" if recompute is not False else "leave --activation-checkpointing at auto, "
        raise ConfigError(
            f"Not one window of the run's context fits into the memory of {device}: {leave}free "
            "that memory, raise --max-vram where you set it, or join from a larger GPU."
        )
    remember(file, device, cut)
    return cut, True


def remembered(file: Path, device: str, batch: int) -> Cut | None:
    """The cut that a file holds for a device; None if it is damaged, or of another batch."""
    try:
        known = json.loads(read_small(file, MOST_BYTES))[device]
        windows, recompute = known["micro_batch"], known["activation_checkpointing"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return None
    if type(windows) is not int or not 1 <= windows <= batch or type(recompute) is not bool:
        return None
    return Cut(windows, recompute)


def remember(file: Path, device: str, cut: Cut) -> None:
    """Keep the cut of a device for the next start. A full disk costs another search, no more."""
    known = {"micro_batch": cut.windows, "activation_checkpointing": cut.recompute}
    with suppress(OSError, DiskFull):
        write_atomic(file, json.dumps({device: known}, indent=1).encode())


def describe(device: torch.device, max_vram: float | None) -> str:
    """Name of a GPU in the file."""
    card = torch.cuda.get_device_properties(device)
    limit = "" if max_vram is None else f", at most {max_vram:g} GiB"
    return f"{card.name} of {card.total_memory >> 20} MiB{limit}, torch {torch.__version__}"
