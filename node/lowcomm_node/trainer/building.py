"""Builds or resumes what a trainer works with: text, replica, checkpoint store, shared memory."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from lowcomm_node.data import Dataset, Tokenized, open_data, open_tokenizer
from lowcomm_node.data.tokenizer import Tokenizer, check_tokenizer, keep_tokenizer, use_threads
from lowcomm_node.errors import ConfigError
from lowcomm_node.models.base import family_of
from lowcomm_node.node.ipc import Arena, TrainerEvent
from lowcomm_node.node.messages import MicroBatch, Ready, Tokenizing, TrainerSettings
from lowcomm_node.storage.checkpoint import CheckpointStore
from lowcomm_node.storage.files import DiskQuota
from lowcomm_node.storage.paths import Paths
from lowcomm_node.system.machine import cores_allowed
from lowcomm_node.trainer import state, transfer
from lowcomm_node.trainer.capture import CapturedFragment
from lowcomm_node.trainer.gpu import prepare, use
from lowcomm_node.trainer.inner import choose_device
from lowcomm_node.trainer.memory import (
    StepChoices,
    at_once,
    check_memory,
    is_mapped,
    limit_vram,
    moments_bytes,
    slow_bytes,
)
from lowcomm_node.trainer.micro_batch import RECOMPUTE, Cut, Remembered, describe, find
from lowcomm_node.trainer.rehearsal import rehearse
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.codecs import coder
from lowcomm_protocol.codecs.kernels import compiled_here
from lowcomm_protocol.exchange.kinds import kind_of
from lowcomm_protocol.spec.amendments import newest
from lowcomm_protocol.spec.run import RunSpec, parse_canonical, run_id_of

TELL_EVERY = 1.0
"""Seconds between two reports of progress."""


def open_text(
    spec: RunSpec,
    settings: TrainerSettings,
    disk_quota: DiskQuota,
    tell: Callable[[Tokenizing], None],
) -> Dataset:
    """Open the text and the tokenizer that a run asks for; ``tell`` is told the progress.

    Raises ConfigError if the owner must name one, or the tokenizer does not fit the run; DataError,
    DiskFull.
    """
    use_threads(settings.threads)
    tokenizer = _tokenizer_of(spec, settings)
    source = spec.data.source if spec.data.source != "local" else settings.data
    if source is None:
        raise ConfigError("This run trains on text of your own: name it with --data PATH.")
    progress = Telling(tell)
    return open_data(
        source, tokenizer, Path(settings.data_cache), settings.field, disk_quota, progress
    )


def _tokenizer_of(spec: RunSpec, settings: TrainerSettings) -> Tokenizer:
    name = spec.data.tokenizer if spec.data.tokenizer != "local" else settings.tokenizer
    if name is None:
        raise ConfigError("This run needs its tokenizer file: name it with --tokenizer PATH.")
    data = spec.data
    tokenizer = open_tokenizer(name, data.begin_tokens, data.end_token)
    check_tokenizer(tokenizer, data.tokenizer_sha256, spec.model.vocab, data.tokenizer_check)
    keep_tokenizer(tokenizer, Path(settings.checkpoints).parent)
    return tokenizer


class Telling:
    """Turns what is tokenized into events with a rate and the time that remains."""

    def __init__(
        self, tell: Callable[[Tokenizing], None], clock: Callable[[], float] = monotonic
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._began = self._told = clock()

    def __call__(self, tokenized: Tokenized) -> None:
        """Take in how far it is."""
        now = self._clock()
        if now < self._told + TELL_EVERY:
            return
        self._told = now
        rate = tokenized.done / (now - self._began)
        self._tell(
            Tokenizing(
                done=tokenized.done,
                total=tokenized.total,
                tokens=tokenized.tokens,
                rate=rate,
                remaining=(tokenized.total - tokenized.done) / rate if rate else None,
            )
        )


PAGE_BYTES = 4096
TRIED = "found by trying"


@dataclass(frozen=True)
class Built:
    """What the trainer works with."""

    replica: Replica
    store: CheckpointStore
    arena: Arena
    ready: Ready


def build(settings: TrainerSettings, memory: int, tell: Callable[[TrainerEvent], None]) -> Built:
    """Build the replica, and resume it from the newest usable checkpoint.

    ``memory`` is the descriptor of the shared memory file. Raises ConfigError, DataError, DiskFull.
    """
    spec = parse_canonical(settings.spec)
    cores = cores_allowed()
    if settings.threads or cores < torch.get_num_threads():
        # Torch counts the machine's cores; threads beyond a limit on them only slow each other.
        torch.set_num_threads(settings.threads or ceil(cores))
    family_of(spec.model).check(spec.model)
    device = choose_device(settings.device)
    prepare(device, Paths(Path(settings.home)).compiled)
    use(device)
    limits = (settings.max_memory, settings.max_vram)
    wanted = StepChoices(settings.micro_batch, RECOMPUTE[settings.activation_checkpointing])
    rehearse(spec.sync)  # first, as what compiling takes counts
    compiled = compiled_here() > 0
    fit = check_memory(spec, device, *limits, settings.exchanges, wanted, compiled)
    limit_vram(device, settings.max_vram)
    disk_quota = DiskQuota(Path(settings.home), settings.max_disk)
    dataset = open_text(spec, settings, disk_quota, tell)
    run_id = run_id_of(settings.spec.encode())
    course = newest(spec, run_id, [settings.amendments.encode()])
    replica = Replica(spec, settings.peer_id, dataset, device, run_id=run_id, course=course)
    if settings.slow and is_mapped(spec):
        disk_quota.require(slow_bytes(spec), "Slow weights")
        replica.keep_in_files(Path(settings.slow))
    store = CheckpointStore(Path(settings.checkpoints), settings.keep, disk_quota)
    found = store.load_newest_usable()
    if found.checkpoint is not None:
        state.restore(replica, found.checkpoint.tensors, found.checkpoint.meta)
        state.skip_text(replica, found.diverged)
    elif spec.start.files:
        _begin(replica, settings)
    _cut_steps(replica, settings, wanted, fit.cut, tell)
    arena = _make_arena(replica, settings.exchanges, memory)
    resumed = found.checkpoint.info.step if found.checkpoint else None
    skipped = tuple(f"step {skipped.step}: {skipped.problem}" for skipped in found.skipped)
    ready = ready_of(replica, arena, resumed, skipped)
    return Built(replica, store, arena, replace(ready, reckoned=fit.reckoned.host_bytes))


def _begin(replica: Replica, settings: TrainerSettings) -> None:
    if not settings.start:
        raise ConfigError(
            f"No checkpoint in {settings.checkpoints} can be used, and the weights that this run "
            "begins with are not here: move that folder away and join again, and peers send them."
        )
    replica.begin_with([Path(file) for file in settings.start])


def _cut_steps(
    replica: Replica,
    settings: TrainerSettings,
    wanted: StepChoices,
    reckoned: Cut,
    tell: Callable[[TrainerEvent], None],
) -> None:
    """Cut steps as the owner says, as a GPU takes them, or as is reckoned.

    A processor is not tried: Linux promises more memory than there is, and ends who takes it.
    """
    gradient, train = replica.gradient, replica.spec.train
    gradient.cut = reckoned
    gradient.may_recompute = wanted.recompute is None and bool(
        family_of(replica.spec.model).footprint(replica.spec.model).blocks
    )
    if replica.device.type != "cuda" or wanted.micro_batch is not None:
        return
    to_come = 0 if replica.optimizer.steps else moments_bytes(replica.spec)
    file = Remembered(Path(settings.checkpoints).parent / "micro_batch.json")
    name = describe(replica.device, settings.max_vram)
    cut, is_new = find(gradient, train.batch, wanted.recompute, to_come, file, name)
    gradient.cut = cut
    if is_new:
        tell(MicroBatch(micro_batch=cut.windows, activation_checkpointing=cut.recompute, why=TRIED))


def ready_of(
    replica: Replica, arena: Arena, resumed: int | None = None, skipped: tuple[str, ...] = ()
) -> Ready:
    """What the daemon must know of a replica that was built, resumed or adopted."""
    numels = tuple(fragment.numel for fragment in replica.plan.fragments)
    form = transfer.form_of(replica)
    return Ready(
        device=str(replica.device),
        parameters=sum(numels),
        plan=replica.plan.digest,
        numels=numels,
        sizes=tuple((one.min_size, one.max_size) for one in replica.coders),
        realign_sizes=tuple(coder("fp32", numel).max_size for numel in numels),
        slots=arena.slots,
        slot_bytes=arena.slot_bytes,
        swarm_step=replica.clock.step,
        steps=replica.steps,
        tokens=replica.tokens,
        progress=tuple(asdict(replica.schedule[p]) for p in range(len(numels))),
        slow_digests=tuple(replica.slow_digest(p) for p in range(len(numels))),
        momentum_digests=tuple(replica.momentum_digest(p) for p in range(len(numels))),
        resumed=resumed,
        skipped=skipped,
        runs=tuple(map(tuple, form.fragments)),
        ranges=form.ranges,
        gpu=gpu_of(replica.device),
    )


def gpu_of(device: torch.device) -> str:
    """The UUID of a GPU, as NVIDIA's driver writes it; empty for a processor."""
    if device.type != "cuda":
        return ""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return f"GPU-{uuid}" if uuid else ""


def slot_bytes(exchanged: type[CapturedFragment[Any]], codec_name: str, numel: int) -> int:
    """Bytes of a slot, whole pages, for fragments of up to ``numel`` values."""
    codings = (exchanged.new_coder(name, numel, False) for name in (codec_name, "fp32"))
    largest = exchanged.slack + max(coding.max_size for coding in codings)  # fp32: to realign
    return -(-largest // PAGE_BYTES) * PAGE_BYTES


def _make_arena(replica: Replica, exchanges: int, memory: int) -> Arena:
    fragments, sync = replica.plan.fragments, replica.spec.sync
    largest = max(fragment.numel for fragment in fragments)
    kind = kind_of(sync)
    slots = at_once(exchanges, len(fragments), largest) * kind.slots if kind else 0
    return Arena(memory, slots, slot_bytes(replica.exchanged, sync.codec, largest))
