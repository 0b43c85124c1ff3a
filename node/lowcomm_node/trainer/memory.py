"""The memory that a run needs, estimated before anything is allocated, and whether the owner's
machine has it.

The estimate counts float32 values a token or a parameter, which the model's family gives (its
``Footprint``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from lowcomm_node.errors import ConfigError
from lowcomm_node.models.adapters import footprint_of
from lowcomm_node.models.base import Footprint, Stage, family_of
from lowcomm_node.models.cross_entropy import chunk_tokens
from lowcomm_node.models.devices import memory_on, module_of, shares_memory
from lowcomm_node.system.machine import can_compile, memory_of_machine
from lowcomm_node.trainer.micro_batch import Cut, choose
from lowcomm_node.trainer.moments import BITS, SLICE, VECTORS
from lowcomm_node.trainer.optimizer import together
from lowcomm_protocol.codecs import coder, shard_coder
from lowcomm_protocol.exchange.kinds import kind_of
from lowcomm_protocol.exchange.underway import kept
from lowcomm_protocol.spec.run import RunSpec
from lowcomm_protocol.spec.sections import ModelSettings, SyncSettings, TrainSettings

FLOAT = 4
MIB, GIB = 1024**2, 1024**3
DAEMON, TRAINER, CUDA_TRAINER, CUDA_DEVICE = 120 * MIB, 230 * MIB, 2000 * MIB, 600 * MIB
"""The daemon; the trainer with its libraries and their kernels; the trainer where torch brings up a
GPU, and what CUDA takes of the GPU."""
RANK = 450 * MIB
"""Another process of a trainer on the processor; torch's own sharding imports its compiler."""
COMPILING = 90 * MIB
"""What numba and LLVM keep of compiling kernels, in a start that finds none on the disk."""
EVALUATION_TOKENS = 8_192
"""Tokens of held-out text that go through the model together (evaluation.py)."""
PAIR_VECTORS, GROUP_VECTORS, UNCODED_VECTORS = 3, 4, 1
"""Vectors of each fragment under way (capture.py): weights, our contribution, a received one; in
groups the mean, too. Some coders hold our contribution before coding, or what coding lost."""
PASSING_VECTORS = 1
"""Vectors of the single fragment that is being coded or averaged."""
AT_ONCE, FEWEST = 128 * MIB, 2
"""Fragments under way at once: as many as have this many bytes, counting one vector of each, and at
least one that is due here and one that is due elsewhere."""
MAPPED = 64 * MIB
"""Slow weights and momentum of more bytes are kept in files of the home."""
COPIED = 256 * MIB
"""Bytes of weights and moments that are copied to be written, so that no disk holds up training.
More of them would take too much memory twice: they are written from where they are."""
ON_GPU = 2
"""Bytes of a value that a step keeps or passes on a GPU, where products are in bf16 and norms in
fp32: 2.0 on the mean, and 1.5 where blocks are compiled (docs/measurements.md)."""
DEVICE_VECTORS = 4
"""Vectors of a fragment on a GPU: the captured one, and three of a merge (gpu.py)."""
GATHERED_BLOCKS, GATHERED_OTHERS = 3, 2
"""What each of several GPUs has of a sharded model beside its rows: a block that computes, the next
one, and its gradient; embedding and head, and their gradient."""
STAGE_VECTORS = 4
"""Vectors of a stage for what comes and goes: slow weights and captured ones of a merge, and a copy
of each on its way."""
MUON_VECTORS = 5
"""Copies of all matrices of one shape while Muon moves them (optimizer.py)."""
BETWEEN = 1.1
"""Factor for the gaps that the C library keeps between pieces of memory."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by part, of the machine's memory and of a GPU's."""

    host: dict[str, int]
    device: dict[str, int]

    @property
    def host_bytes(self) -> int:
        """Sum of the parts in the machine's memory."""
        return sum(self.host.values())

    @property
    def device_bytes(self) -> int:
        """Sum of the parts on the GPU."""
        return sum(self.device.values())


def estimate_memory(
    spec: RunSpec,
    gpu: bool,
    exchanges: int = 4,
    cut: Cut | None = None,
    compiled: bool = False,
    form: str = "fp32",
    ranks: int = 1,
    stage: Stage | None = None,
) -> MemoryEstimate:
    """Memory of training with at most ``exchanges`` under way at once.

    ``cut``: how a step goes through the model; None for the whole batch at once. ``compiled``:
    whether this process compiles kernels that later ones find on the disk. ``form``: of moments.
    ``ranks``: GPUs that share the work; the outcome is of the fullest of them. ``stage``: what this
    machine holds where several hold the model; the one with what is outside of the blocks
    exchanges.
    """
    cut = cut or Cut(spec.train.batch)
    model, whole = _with_masks(footprint_of(spec, stage), spec, gpu), footprint_of(spec)
    fragment, context = -(-whole.parameters // spec.sync.fragments), spec.model.context
    moments = _moments_of(model, spec.train, form)
    exchanging = stage is None or stage.outside
    slow = slow_bytes(spec) if exchanging and not is_mapped(spec) else 0
    # Copies of weights and moments for a checkpoint and for joiners, and the slow weights that
    # merges replace meanwhile; of a GPU's pieces alone where they are many. Those of stages are in
    # files where slow weights are.
    volatile = volatile_bytes(spec)
    unpacked = 0 if form == "fp32" else moments_bytes(spec)
    if stage is None:
        states = (2 * volatile if gpu or volatile <= COPIED else unpacked) + slow
    else:
        states = 2 * volatile + slow if exchanging and not is_mapped(spec) else 0
    # An optimizer moves weights when the activations are gone.
    moving = _muon_scratch(model, spec.train, gpu)
    if form != "fp32":
        moving += VECTORS * FLOAT * min(SLICE, _largest(model))
    activations = max(0, _activations(spec, model, gpu, states, cut) - moving)
    frozen = model.packed_bytes + (FLOAT // 2 if gpu else FLOAT) * model.frozen
    shards, gathered = ranks if spec.adapter is None else 1, 0
    if shards > 1:
        block = model.in_matrices // max(1, model.blocks)
        gathered = FLOAT * (GATHERED_BLOCKS * block + GATHERED_OTHERS * model.others)
    training = {
        "frozen weights": frozen + FLOAT * model.unpacked,
        "weights and gradients": 2 * FLOAT * model.parameters // shards + gathered,
        "optimizer": moments // shards + moving,
        f"activations and logits ({cut.windows} x context {context} at once)": activations,
    }
    keeping = {"slow weights and momentum": slow, "checkpoint and state for joiners": states}
    # Vectors of fragments and slots are mapped one by one: there are no gaps between them.
    mapped = {"exchanges": _exchanges(spec, whole, exchanges) if exchanging else 0}
    if stage is not None:
        mapped["vectors on their way"] = STAGE_VECTORS * FLOAT * max(fragment, _largest(model))
    programs = (DAEMON if exchanging else 0) + (COMPILING if compiled else 0)
    if not gpu:
        training = {name: ranks * size for name, size in training.items()}
        programs += TRAINER + (ranks - 1) * RANK
        host = {"programs": programs, **_with_gaps(training | keeping), **mapped}
        return MemoryEstimate(host, device={})
    # Where the copies of a fragment do not fit, training waits for slower ones.
    # Several GPUs merge through host memory.
    several = ranks > 1 or stage is not None
    copies = DEVICE_VECTORS * FLOAT * fragment if kind_of(spec.sync) and not several else 0
    return MemoryEstimate(
        host={"programs": programs + ranks * CUDA_TRAINER, **_with_gaps(keeping), **mapped},
        device={"programs": CUDA_DEVICE, **_with_gaps(training | {"captures and merges": copies})},
    )


def keeps_momentum(sync: SyncSettings) -> bool:
    """Whether outer steps need the momentum of those before."""
    # Where slow weights must be equal, offers carry the digest of the momentum, too: it stays what
    # peers of earlier releases have, though it moves nothing.
    return sync.momentum > 0 or sync.consensus == 0


def slow_bytes(spec: RunSpec) -> int:
    """Bytes of slow weights and momentum."""
    return (2 if keeps_momentum(spec.sync) else 1) * FLOAT * count_trained(spec)


def is_mapped(spec: RunSpec) -> bool:
    """Whether slow weights and momentum are kept in files of the home."""
    return slow_bytes(spec) > MAPPED


def at_once(exchanges: int, fragments: int, largest: int) -> int:
    """How many of the ``exchanges`` asked for may be under way at once; ``largest``: values of the
    largest fragment."""
    return min(exchanges, fragments, max(FEWEST, AT_ONCE // (FLOAT * largest)))


def count_parameters(model: ModelSettings) -> int:
    """Parameters of a model."""
    return family_of(model).footprint(model).parameters


def count_trained(spec: RunSpec) -> int:
    """Parameters that a run trains: all of its model, or those of its adapter."""
    return footprint_of(spec).parameters


def volatile_bytes(spec: RunSpec) -> int:
    """Bytes of weights and moments as they are written."""
    return FLOAT * count_trained(spec) + moments_bytes(spec)


def moments_bytes(spec: RunSpec, form: str = "fp32") -> int:
    """Bytes of the moments of the inner optimizer, kept in this form."""
    return _moments_of(footprint_of(spec), spec.train, form)


def _moments_of(model: Footprint, train: TrainSettings, form: str) -> int:
    moments = 2
    of_matrices = 1 if train.optimizer == "muon" else moments
    values = moments * model.others + of_matrices * model.in_matrices
    return int(BITS[form] / 8 * values)


def _largest(model: Footprint) -> int:
    """Values of the largest tensor, at most."""
    return max(model.others, *(rows * columns for rows, columns in model.matrices), 1)


def _with_masks(model: Footprint, spec: RunSpec, gpu: bool) -> Footprint:
    """The same with masks of documents. Blocks that are compiled for a GPU need none."""
    if not spec.train.document_mask or (gpu and model.masks == 1 and can_compile()):
        return model
    row = spec.model.context
    looking = model.passing if model.looking is None else model.looking
    return replace(
        model,
        kept=model.kept + model.masks * row,
        passing=model.passing + row,
        looking=looking + row,
    )


def _muon_scratch(model: Footprint, train: TrainSettings, gpu: bool) -> int:
    """Matrices of one shape are moved together, on a GPU as many as keep it busy."""
    if train.optimizer != "muon":
        return 0
    most = (
        max(
            rows * columns * min(count, together(rows * columns, gpu) or count)
            for (rows, columns), count in model.matrices.items()
        )
        if model.matrices
        else 0
    )
    return MUON_VECTORS * FLOAT * most


def step_values(model: Footprint, tokens: int, again: bool = False, gpu: bool = False) -> int:
    """Values that one forward and backward pass takes beside weights and gradients; ``again``:
    whether blocks are computed again in the backward pass."""
    saved = model.blocks * (model.in_block - model.between) - model.in_block if again else 0
    kept, passing = tokens * (model.kept - max(0, saved)), tokens * model.passing
    held = chunk_tokens(tokens, model.vocab, gpu)
    if held is not None:
        return kept + max(passing, 2 * held * model.vocab)
    # One copy of the logits is kept, two more pass with the loss.
    return kept + tokens * model.vocab + max(passing, 2 * tokens * model.vocab)


def _activations(spec: RunSpec, model: Footprint, gpu: bool, states: int, cut: Cut) -> int:
    """The larger of what a step and an evaluation take.

    A processor's evaluation takes the place of gradients, and of ``states``, which are written
    after it.
    """
    context = spec.model.context
    step = step_values(model, min(cut.windows, spec.train.batch) * context, cut.recompute, gpu)
    tokens = max(context, EVALUATION_TOKENS)
    # On a GPU more is alive: what autocast has cast, and a copy of the weights in bf16.
    alive = model.passing if model.looking is None else model.looking
    alive = max(alive, model.passing) if gpu else alive
    logits = 2 * (chunk_tokens(tokens, model.vocab, gpu) or tokens) * model.vocab
    value, copies = (ON_GPU, FLOAT // 2 * model.parameters) if gpu else (FLOAT, 0)
    evaluation = value * (tokens * alive + logits) - (0 if gpu else states)
    return max(value * step, evaluation - FLOAT * model.parameters) + copies


def _exchanges(spec: RunSpec, model: Footprint, exchanges: int) -> int:
    """Captures and slots of the exchanges under way, and the residuals of coders."""
    sync, kind = spec.sync, kind_of(spec.sync)
    if kind is None:
        return 0
    fragment = -(-model.parameters // spec.sync.fragments)
    coding = coder(sync.codec, fragment) if sync.group == 2 else None
    vectors = PAIR_VECTORS if sync.group == 2 else GROUP_VECTORS
    holds_uncoded = sync.error_feedback if coding is None else coding.holds_uncoded
    vectors += UNCODED_VECTORS * holds_uncoded
    outcome = 0 if is_mapped(spec) else (2 if keeps_momentum(sync) else 1)
    # A slot holds the fragment in fp32, but of its pages only those are taken that were written.
    # Slow weights that may come apart are sent in fp32 then.
    slot = FLOAT * fragment if coding is None or sync.consensus == 0 else coding.max_size
    count = at_once(exchanges, sync.fragments, fragment)
    each = FLOAT * fragment * (vectors + min(1, outcome)) + kind.slots * slot
    passing = PASSING_VECTORS + max(0, outcome - 1)
    passing += sync.cells > 1  # slow weights for another cell
    residuals = 2 * model.parameters if sync.error_feedback else 0
    past = 0  # outer steps as they travelled, for members that miss them
    if sync.group > 2 and not sync.consensus:
        coded = shard_coder(sync.codec, model.parameters, False).max_size
        past = kept(coded, FLOAT * model.parameters) * coded
    return count * each + FLOAT * (passing * fragment + residuals) + past


def _with_gaps(parts: Mapping[str, int]) -> dict[str, int]:
    return {name: int(BETWEEN * amount) for name, amount in parts.items()}


@dataclass(frozen=True)
class StepChoices:
    """The owner's choices of how steps are cut, None to choose, and of the form of moments."""

    micro_batch: int | None = None
    recompute: bool | None = None
    moments: str = "fp32"


def limit_vram(device: torch.device, max_vram: float | None) -> None:
    """Limit torch to ``max_vram`` GiB of a GPU's memory: beyond them it runs out of memory.

    CUDA itself takes a few hundred MiB a process on top.
    """
    if max_vram is not None and device.type != "cpu":
        fraction = min(1.0, max_vram * GIB / memory_on(device)[1])
        module_of(device).set_per_process_memory_fraction(fraction)  # of the device in use


def check_memory(
    spec: RunSpec,
    device: torch.device,
    max_memory: float | None,
    max_vram: float | None = None,
    exchanges: int = 4,
    choices: StepChoices = StepChoices(),
    compiled: bool = False,
    ranks: int = 1,
    stage: Stage | None = None,
) -> tuple[MemoryEstimate, Cut]:
    """Memory of training, with the largest micro-batch that is estimated to fit.

    Limits are in GiB. ``exchanges``: how many may be under way at once; ``compiled``: whether this
    process has compiled kernels; ``ranks``: GPUs that share the work; ``stage``: what this machine
    holds. Raises ConfigError if even the smallest micro-batch takes more memory than is free, or
    than the owner allows.
    """
    gpu = device.type != "cpu"
    shared = gpu and shares_memory(device)
    # Without a limit: what is free, and what daemon and trainer have taken already.
    free = memory_of_machine()[1] + DAEMON + TRAINER + (COMPILING if compiled else 0)
    allowed = free if max_memory is None else int(max_memory * GIB)
    vram = 0
    if gpu:
        vram = memory_on(device)[0]
        vram = vram if max_vram is None else min(vram, int(max_vram * GIB))

    estimated = partial(
        estimate_memory,
        spec,
        gpu,
        exchanges,
        compiled=compiled,
        form=choices.moments,
        ranks=ranks,
        stage=stage,
    )

    def fits(cut: Cut) -> bool:
        needed = estimated(cut)
        both = needed.host_bytes + shared * needed.device_bytes
        return both <= allowed and needed.device_bytes <= vram

    windows = -(-spec.train.batch // ranks)
    cut = choose(windows, choices.micro_batch, choices.recompute, fits)
    if cut is None:
        least = estimated(Cut(choices.micro_batch or 1, choices.recompute is not False))
        allowed -= shared * least.device_bytes
        _require(spec, least.host, allowed, "memory", "--max-memory", choices)
        _require(spec, least.device, vram, "memory of the GPU", "--max-vram", choices)
        cut = Cut(1)
    return estimated(cut), cut


def _require(
    spec: RunSpec, parts: dict[str, int], allowed: int, what: str, option: str, choices: StepChoices
) -> None:
    needed = sum(parts.values())
    if needed <= allowed:
        return
    local = "leave --activation-checkpointing at auto, " if choices.recompute is False else ""
    if (choices.micro_batch or 1) > 1:
        local += "choose a smaller --micro-batch, "
    if option == "--max-vram" and choices.moments != "int8":
        local += "choose --moments int8, "
    largest = sorted(parts.items(), key=lambda part: -part[1])[:4]
    takes = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest if size >= GIB / 20)
    raise ConfigError(
        f"This run needs about {needed / GIB:.1f} GiB of {what}, {allowed / GIB:.1f} GiB are "
        f"allowed here (GiB: {takes}; {count_parameters(spec.model):,} parameters): {local}join "
        f"from a larger machine or with a second one (--with), raise {option}, or ask the run's "
        "creator for a smaller model or context."
    )
