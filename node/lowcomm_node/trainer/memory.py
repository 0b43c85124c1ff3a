"""The memory that a run needs, estimated before anything is allocated, and whether the owner's
machine has it.

The estimate counts float32 values a token or a parameter, which the model's family gives (its
``Footprint``).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lowcomm_node.errors import ConfigError
from lowcomm_node.models.base import Footprint, family_of
from lowcomm_node.models.cross_entropy import chunk_tokens
from lowcomm_node.system.machine import memory_of_machine
from lowcomm_node.trainer.micro_batch import Cut, choose
from lowcomm_node.trainer.optimizer import together
from lowcomm_protocol.codecs import coder, shard_coder
from lowcomm_protocol.exchange.kinds import kind_of
from lowcomm_protocol.exchange.underway import kept
from lowcomm_protocol.spec.run import RunSpec
from lowcomm_protocol.spec.sections import ModelSettings, SyncSettings, TrainSettings

FLOAT = 4
MIB, GIB = 1024**2, 1024**3
DAEMON = 120 * MIB
"""The daemon."""
TRAINER = 230 * MIB
"""The trainer with its libraries and the kernels that they load, without a model."""
COMPILING = 90 * MIB
"""What numba and LLVM keep of compiling the kernels of a codec and of exchanges, which a start does
that finds none on the disk. They give none of it back while the process lives."""
CUDA_TRAINER = 2000 * MIB
"""The same where torch brings up a GPU."""
CUDA_DEVICE = 600 * MIB
"""What CUDA and its libraries take of a GPU."""
EVALUATION_TOKENS = 8_192
"""Tokens of held-out text that are looked at together (evaluation.py)."""
PAIR_VECTORS, GROUP_VECTORS = 3, 4
"""Vectors of each fragment under way (capture.py): weights, what is sent and what came; in groups
the mean, too."""
UNCODED_VECTORS = 1
"""The same of coders that hold our contribution as it was before coding, or what coding lost."""
PASSING_VECTORS = 1
"""Of the one fragment that is coded or averaged now."""
AT_ONCE = 128 * MIB
"""Of so many bytes, counting one vector of each, fragments are under way at once; of larger ones"""
FEWEST = 2
"""so many: one that is due here, and one that is due elsewhere."""
MAPPED = 64 * MIB
"""Slow weights and momentum of more bytes are kept in files of the home."""
COPIED = 256 * MIB
"""Bytes of weights and moments that are copied to be written, so that no disk holds up training.
More of them would take too much memory twice: they are written from where they are."""
ON_GPU = 2
"""Bytes of a value that a step keeps or passes on a GPU, where products are in bf16 and norms in
fp32: 2.0 on the mean, and 1.5 where blocks are compiled (docs/measurements.md)."""
DEVICE_VECTORS = 4
"""Of a fragment on a GPU: one that is captured, and three of a merge (device/copies.py)."""
MUON_VECTORS = 5
"""Copies of all matrices of one shape while Muon moves them (muon.py)."""
BETWEEN = 1.1
"""What the C library keeps in gaps between pieces of memory."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by what takes them."""

    host: dict[str, int]
    device: dict[str, int]
    """Of a GPU; empty where training runs on the processor."""

    @property
    def host_bytes(self) -> int:
        """Of the machine's memory."""
        return sum(self.host.values())

    @property
    def device_bytes(self) -> int:
        """Of the GPU's."""
        return sum(self.device.values())


def estimate_memory(
    spec: RunSpec,
    gpu: bool,
    exchanges: int = 4,
    cut: Cut | None = None,
    compiled: bool = False,
) -> MemoryEstimate:
    """What training takes with at most so many ``exchanges`` under way at once.

    ``cut``: how a step goes through the model; None for the whole batch at once. ``compiled``:
    whether this process compiles kernels that later ones find on the disk.
    """
    cut = cut or Cut(spec.train.batch)
    model = family_of(spec.model).footprint(spec.model)
    numel = model.parameters
    moments, states = _moments(model, spec.train), _states(spec, model, gpu)
    # An optimizer moves weights when the activations are gone.
    moving = _muon_scratch(model, spec.train, gpu)
    activations = max(0, _activations(spec, model, gpu, states, cut) - moving)
    training = {
        "weights and gradients": 2 * FLOAT * numel,
        "optimizer": moments + moving,
        f"activations and logits ({cut.windows} x context {spec.model.context} at once)": (
            activations
        ),
    }
    keeping = {
        "slow weights and momentum": 0 if is_mapped(spec) else slow_bytes(spec),
        "checkpoint and state for joiners": states,
    }
    # Vectors of fragments and slots are mapped one by one: there are no gaps between them.
    mapped = {"exchanges": _exchanges(spec, model, exchanges)}
    programs = DAEMON + (COMPILING if compiled else 0)
    if gpu:
        return MemoryEstimate(
            host={"programs": programs + CUDA_TRAINER, **_with_gaps(keeping), **mapped},
            device={
                "programs": CUDA_DEVICE,
                **_with_gaps(training | {"captures and merges": _beside(spec, numel)}),
            },
        )
    return MemoryEstimate(
        host={"programs": programs + TRAINER, **_with_gaps(training | keeping), **mapped},
        device={},
    )


def keeps_momentum(sync: SyncSettings) -> bool:
    """Whether outer steps need the momentum of those before."""
    # Where slow weights must be equal, offers carry the digest of the momentum, too: it stays what
    # peers of earlier releases have, though it moves nothing.
    return sync.momentum > 0 or sync.consensus == 0


def slow_bytes(spec: RunSpec) -> int:
    """Bytes of slow weights and momentum."""
    return (2 if keeps_momentum(spec.sync) else 1) * FLOAT * count_parameters(spec.model)


def is_mapped(spec: RunSpec) -> bool:
    """Whether slow weights and momentum are kept in files of the home."""
    return slow_bytes(spec) > MAPPED


def at_once(exchanges: int, fragments: int, largest: int) -> int:
    """How many fragments may be under way at once, where ``exchanges`` are wanted.

    ``largest``: values of the largest fragment.
    """
    return min(exchanges, fragments, max(FEWEST, AT_ONCE // (FLOAT * largest)))


def count_parameters(model: ModelSettings) -> int:
    """Parameters of a model."""
    return family_of(model).footprint(model).parameters


def explain(parts: Mapping[str, int]) -> str:
    """The largest parts first, in GiB."""
    largest = sorted(
        (part for part in parts.items() if part[1] >= GIB / 20), key=lambda part: -part[1]
    )[:4]
    return ", ".join(f"{name} {amount / GIB:.1f}" for name, amount in largest)


def moments_bytes(spec: RunSpec) -> int:
    """Of the inner optimizer."""
    return _moments(family_of(spec.model).footprint(spec.model), spec.train)


def _moments(model: Footprint, train: TrainSettings) -> int:
    return FLOAT * (2 * model.others + (1 if train.optimizer == "muon" else 2) * model.in_matrices)


def _states(spec: RunSpec, model: Footprint, gpu: bool) -> int:
    """Copies of weights and moments for a checkpoint and for joiners, and the slow weights that
    merges replace meanwhile; of a GPU's pieces alone where they are many."""
    volatile = FLOAT * model.parameters + _moments(model, spec.train)
    replaced = 0 if is_mapped(spec) else slow_bytes(spec)
    return (2 * volatile if gpu or volatile <= COPIED else 0) + replaced


def _muon_scratch(model: Footprint, train: TrainSettings, gpu: bool) -> int:
    """Matrices of one shape are moved together, on a GPU as many as keep it busy."""
    if train.optimizer != "muon":
        return 0
    most = max(
        rows * columns * min(count, together(rows * columns, gpu) or count)
        for (rows, columns), count in model.matrices.items()
    )
    return MUON_VECTORS * FLOAT * most


def step_values(model: Footprint, tokens: int, again: bool = False, gpu: bool = False) -> int:
    """Values that one forward and backward pass over so many tokens takes, beside weights and
    gradients.

    ``again``: whether blocks are computed again in the backward pass.
    """
    saved = model.blocks * (model.in_block - model.between) - model.in_block if again else 0
    kept, passing = tokens * (model.kept - max(0, saved)), tokens * model.passing
    held = chunk_tokens(tokens, model.vocab, gpu)
    if held is not None:
        return kept + max(passing, 2 * held * model.vocab)
    # One copy of the logits is kept, two more pass with the loss.
    return kept + tokens * model.vocab + max(passing, 2 * tokens * model.vocab)


def _look(model: Footprint, tokens: int, gpu: bool) -> int:
    """Values of a forward pass without gradients."""
    held = chunk_tokens(tokens, model.vocab, gpu) or tokens
    # On a GPU more is alive: what autocast has cast.
    alive = model.passing if gpu or model.looking is None else model.looking
    return tokens * alive + 2 * held * model.vocab


def _activations(spec: RunSpec, model: Footprint, gpu: bool, states: int, cut: Cut) -> int:
    """The larger of what a step and a look at held-out text take.

    A processor's look takes the place of gradients, and of ``states``, which are written after it.
    """
    context = spec.model.context
    tokens = min(cut.windows, spec.train.batch) * context
    looked_at = max(context, EVALUATION_TOKENS)
    value = ON_GPU if gpu else FLOAT
    # A GPU keeps a copy of the weights in bf16.
    copies = FLOAT // 2 * model.parameters if gpu else 0
    look = value * _look(model, looked_at, gpu) - (0 if gpu else states)
    look -= FLOAT * model.parameters  # there are no gradients then
    return max(value * step_values(model, tokens, cut.recompute, gpu), look) + copies


def _exchanges(spec: RunSpec, model: Footprint, exchanges: int) -> int:
    """Captures and slots of the exchanges under way, and what coders owe of each fragment."""
    sync, kind = spec.sync, kind_of(spec.sync)
    if kind is None:
        return 0
    fragment = largest_fragment(model, spec)
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
    debts = 2 * model.parameters if sync.error_feedback else 0
    return count * each + FLOAT * (passing * fragment + debts) + _kept_steps(spec, model)


def _kept_steps(spec: RunSpec, model: Footprint) -> int:
    """Outer steps of all fragments, as they travelled, for members that miss them."""
    if spec.sync.group == 2 or spec.sync.consensus:
        return 0
    coded = shard_coder(spec.sync.codec, model.parameters, False).max_size
    return kept(coded, FLOAT * model.parameters) * coded


def largest_fragment(model: Footprint, spec: RunSpec) -> int:
    """Values of the largest fragment, about: plans are even but for rows and layers."""
    return -(-model.parameters // spec.sync.fragments)


def _beside(spec: RunSpec, numel: int) -> int:
    """Copies of a fragment on a GPU; where they do not fit, training waits for slower ones."""
    if kind_of(spec.sync) is None:
        return 0
    return FLOAT * DEVICE_VECTORS * -(-numel // spec.sync.fragments)


def _with_gaps(parts: Mapping[str, int]) -> dict[str, int]:
    return {name: int(BETWEEN * amount) for name, amount in parts.items()}


@dataclass(frozen=True)
class StepChoices:
    """What the owner says of how steps are cut; None to choose."""

    micro_batch: int | None = None
    recompute: bool | None = None


@dataclass(frozen=True)
class Fit:
    """What training needs, and how steps are cut for that."""

    reckoned: MemoryEstimate
    cut: Cut


def limit_vram(device: torch.device, max_vram: float | None) -> None:
    """Limit torch to so many GiB of a GPU's memory: beyond them it runs out of memory.

    CUDA itself takes a few hundred MiB a process on top.
    """
    if max_vram is None or device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, max_vram * GIB / total), device)


def check_memory(
    spec: RunSpec,
    device: torch.device,
    max_memory: float | None,
    max_vram: float | None = None,
    exchanges: int = 4,
    wanted: StepChoices = StepChoices(),
    compiled: bool = False,
) -> Fit:
    """What training needs, and the largest micro-batch that is reckoned to fit. Raises ConfigError
    if even the smallest takes more memory than is free, or than the owner allows.

    Limits are in GiB. ``exchanges``: how many may be under way at once; ``compiled``: whether this
    process has compiled kernels.
    """
    gpu = device.type == "cuda"
    # Without a limit: what is free, and what daemon and trainer have taken already.
    free = memory_of_machine()[1] + DAEMON + TRAINER + (COMPILING if compiled else 0)
    allowed = free if max_memory is None else int(max_memory * GIB)
    vram = 0
    if gpu:
        vram = torch.cuda.mem_get_info(device)[0]
        vram = vram if max_vram is None else min(vram, int(max_vram * GIB))

    def fits(cut: Cut) -> bool:
        needed = estimate_memory(spec, gpu, exchanges, cut, compiled)
        return needed.host_bytes <= allowed and needed.device_bytes <= vram

    cut = choose(spec.train.batch, wanted.micro_batch, wanted.recompute, fits)
    if cut is None:
        smallest = Cut(wanted.micro_batch or 1, wanted.recompute is not False)
        least = estimate_memory(spec, gpu, exchanges, smallest, compiled)
        _require(spec, least.host, allowed, "memory", "--max-memory", wanted)
        _require(spec, least.device, vram, "memory of the GPU", "--max-vram", wanted)
    cut = cut or Cut(1)
    return Fit(estimate_memory(spec, gpu, exchanges, cut, compiled), cut)


def _require(
    spec: RunSpec, parts: dict[str, int], allowed: int, what: str, option: str, wanted: StepChoices
) -> None:
    needed = sum(parts.values())
    if needed <= allowed:
        return
    local = "leave --activation-checkpointing at auto, " if wanted.recompute is False else ""
    if (wanted.micro_batch or 1) > 1:
        local += "choose a smaller --micro-batch, "
    raise ConfigError(
        f"This run needs about {needed / GIB:.1f} GiB of {what}, {allowed / GIB:.1f} GiB are "
        f"allowed here (GiB: {explain(parts)}; {count_parameters(spec.model):,} parameters): "
        f"{local}join from a larger machine, raise {option}, or ask the run's creator for a "
        "smaller model or context."
    )
