"""Builds or resumes what a trainer works with: text, replica, checkpoint store, shared memory."""

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from math import ceil
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from lowcomm_node.data import Dataset, open_data, open_tokenizer
from lowcomm_node.data.packed import PackedHeldOut, PackedTraining, PartFile
from lowcomm_node.data.tokenizer import check_tokenizer, keep_tokenizer, use_threads
from lowcomm_node.errors import ConfigError
from lowcomm_node.models.adapters import footprint_of
from lowcomm_node.models.base import family_of
from lowcomm_node.models.devices import card_of, choose_device, devices_of
from lowcomm_node.node.ipc import Arena, FailureKind, TrainerEvent
from lowcomm_node.node.messages import Ready, Tokenizing, TrainerSettings, TrainingDevice
from lowcomm_node.storage.checkpoint import CheckpointStore
from lowcomm_node.storage.files import DiskQuota
from lowcomm_node.storage.paths import Paths
from lowcomm_node.system.machine import cores_allowed
from lowcomm_node.trainer import memory, state, transfer
from lowcomm_node.trainer.capture import CapturedFragment
from lowcomm_node.trainer.gpu import prepare, use
from lowcomm_node.trainer.holder import PipelineSettings
from lowcomm_node.trainer.lent import Lenders
from lowcomm_node.trainer.micro_batch import RECOMPUTE
from lowcomm_node.trainer.pipeline import form
from lowcomm_node.trainer.ranks import Orders, Ranks
from lowcomm_node.trainer.rehearsal import rehearse
from lowcomm_node.trainer.replica import Replica
from lowcomm_node.trainer.world import ALONE, World
from lowcomm_protocol.codecs import coder
from lowcomm_protocol.codecs.kernels import compiled_here
from lowcomm_protocol.exchange.kinds import GROUP, kind_of
from lowcomm_protocol.reading import deals_of
from lowcomm_protocol.spec.amendments import newest
from lowcomm_protocol.spec.run import RunSpec, parse_canonical, run_id_of

TELL_EVERY = 1.0
"""Seconds between two reports of progress."""
PAGE_BYTES = 4096


def build(
    settings: TrainerSettings,
    shared: int,
    tell: Callable[[TrainerEvent], None],
    on_lost: Callable[[FailureKind, str], None],
) -> tuple[Replica, CheckpointStore, Arena, Ready]:
    """Build the replica, and resume it from the newest usable checkpoint.

    ``shared`` is the descriptor of the memory file; ``on_lost`` is called, on another thread, if
    another process of the replica ends. Raises ConfigError, DataError, DiskFull.
    """
    spec, home = parse_canonical(settings.spec), Path(settings.home)
    cores = cores_allowed()
    if settings.threads or cores < torch.get_num_threads():
        # Torch counts the machine's cores; threads beyond a limit on them only slow each other.
        torch.set_num_threads(settings.threads or ceil(cores))
    family_of(spec.model).check(spec.model)
    names = devices_of(settings.device)
    ranks = None
    if len(names) > 1:
        if settings.workers:
            raise ConfigError(
                "Other machines can't compute beside several devices of this one: leave --with "
                "away, or name one --device."
            )
        folder = Path(settings.checkpoints).parent
        ranks = Ranks(names, folder, partial(on_lost, FailureKind.DIED))
    device, size = choose_device(names[0] if ranks is None else ranks.devices[0].name), 1
    if ranks is not None:
        size = ranks.size
    prepare(device, Paths(home).compiled)
    use(device)
    limits = (settings.max_memory, settings.max_vram)
    recompute, moments = RECOMPUTE[settings.activation_checkpointing], settings.moments
    choices = memory.StepChoices(settings.micro_batch, recompute, moments)
    rehearse(spec.sync)  # first, as what compiling takes counts
    compiled = compiled_here() > 0
    found, mapped = None, bool(settings.slow) and memory.is_mapped(spec)
    if not settings.workers or settings.household != "stages":
        try:
            found = memory.check_memory(
                spec, device, *limits, settings.exchanges, choices, compiled, size
            )
        except ConfigError:
            may_stage = settings.workers and settings.household == "auto"
            if not may_stage or not family_of(spec.model).can_stage(spec.model):
                raise
    memory.limit_vram(device, settings.max_vram)
    disk_quota = DiskQuota(home, settings.max_disk)
    dataset = open_text(spec, settings, disk_quota, tell)
    run_id = run_id_of(settings.spec.encode())
    course = newest(spec, run_id, [settings.amendments.encode()])
    files = [Path(file) for file in settings.start]
    if spec.start.files and not files and spec.adapter:
        raise ConfigError(
            "The weights that this run adapts are not here: name them with --weights."
        )
    separator = dataset.tokenizer.separator if spec.train.document_mask else None
    world, pipeline = ALONE, None
    if found is None:
        wanted = PipelineSettings(
            spec=spec,
            device=device,
            lenders=settings.workers,
            separator=separator,
            limits=limits,
            exchanges=settings.exchanges,
            choices=choices,
            folder=Path(settings.slow) if mapped else None,
            tell=tell,
            on_lost=on_lost,
        )
        pipeline = form(wanted)
        found = pipeline.estimate, pipeline.cut
    estimate, cut = found
    if ranks is not None:
        orders = Orders(
            spec=settings.spec,
            world=World(shards=spec.adapter is None and size > 1),
            home=settings.home.as_posix(),
            separator=separator,
            start=settings.start,
            moments=moments,
            threads=max(1, torch.get_num_threads() // size),
            max_vram=settings.max_vram,
        )
        world = ranks.meet(device, orders)
    team, peer = pipeline or ranks, settings.peer_id
    replica = Replica(
        spec, peer, dataset, device, None, run_id, course, files, moments, team, world
    )
    if pipeline is not None and spec.adapter is not None:
        pipeline.read_files(files)
    if settings.workers and pipeline is None:
        replica.lenders = Lenders(settings.workers, spec, replica.model)
    if mapped:
        disk_quota.require(memory.slow_bytes(spec), "Slow weights")
        replica.keep_in_files(Path(settings.slow))
    store = CheckpointStore(Path(settings.checkpoints), settings.keep, disk_quota)
    newest_usable = store.load_newest_usable()
    checkpoint = newest_usable.checkpoint
    if checkpoint is not None:
        state.restore(replica, checkpoint.tensors, checkpoint.meta)
        state.skip_text(replica, newest_usable.diverged)
    elif spec.start.files and spec.adapter is None:
        if not files:
            raise ConfigError(
                f"No checkpoint in {settings.checkpoints} can be used, and the weights that this "
                "run begins with are not here: move that folder away and join again, and peers "
                "send them."
            )
        replica.begin_with(files)
    replica.duty.share = settings.duty / 100
    gradient, footprint = replica.gradient, footprint_of(spec)
    gradient.cut = cut
    gradient.may_recompute = choices.recompute is None and footprint.blocks > 0
    if device.type != "cpu" and not replica.optimizer.steps:
        gradient.reserved_bytes = memory.moments_bytes(spec, moments)
    arena = _make_arena(replica, settings.exchanges, shared)
    ready = replace(
        ready_of(replica, arena),
        resumed=checkpoint.info.step if checkpoint else None,
        skipped=tuple(f"step {step}: {why}" for step, why in newest_usable.skipped.items()),
        reckoned=estimate.host_bytes,
    )
    return replica, store, arena, ready


def open_text(
    spec: RunSpec,
    settings: TrainerSettings,
    disk_quota: DiskQuota,
    tell: Callable[[Tokenizing], None],
) -> Dataset:
    """Open the text and the tokenizer that a run asks for; ``tell`` takes the progress.

    Raises ConfigError if the owner must name one, or the tokenizer does not fit the run; DataError,
    DiskFull.
    """
    use_threads(settings.threads)
    data = spec.data
    name = data.tokenizer if data.tokenizer != "local" else settings.tokenizer
    if name is None:
        raise ConfigError("This run needs its tokenizer file: name it with --tokenizer PATH.")
    tokenizer = open_tokenizer(name, data.begin_tokens, data.end_token)
    check_tokenizer(tokenizer, data.tokenizer_sha256, spec.model.vocab, data.tokenizer_check)
    keep_tokenizer(tokenizer, Path(settings.checkpoints).parent)
    if data.source == "packed":
        files = zip(deals_of(spec), settings.packs, strict=True)
        parts = tuple(PartFile(deal, Path(path), tokenizer.vocab) for deal, path in files)
        held_out = tuple(part for part in parts if part.deal.text.share)
        named = "packed:" + ",".join(text.name for text in data.parts)
        return Dataset(named, tokenizer, PackedTraining(parts), PackedHeldOut(held_out))
    source = data.source if data.source != "local" else settings.data
    if source is None:
        raise ConfigError("This run trains on text of your own: name it with --data PATH.")
    cache, progress = Path(settings.data_cache), telling(tell)
    return open_data(source, tokenizer, cache, settings.field, disk_quota, progress)


def telling(tell: Callable[[Tokenizing], None]) -> Callable[[int, int, int], None]:
    """Takes how far it is, and reports that with a rate and the time that remains."""
    began = last = monotonic()

    def report(done: int, total: int, tokens: int) -> None:
        nonlocal last
        now = monotonic()
        if now >= last + TELL_EVERY:
            last, rate = now, done / (now - began)
            remaining = (total - done) / rate if rate else None
            tell(Tokenizing(done=done, total=total, tokens=tokens, rate=rate, remaining=remaining))

    return report


def ready_of(replica: Replica, arena: Arena) -> Ready:
    """What the daemon must know of a replica that was built, resumed or adopted."""
    numels, form = tuple(one.numel for one in replica.plan.fragments), transfer.form_of(replica)
    device, team = replica.device, replica.team
    alone = TrainingDevice(name=str(device), pid=os.getpid(), gpu=card_of(device))
    devices = team.devices if isinstance(team, Ranks) else (alone,)
    return Ready(
        device=",".join(one.name for one in devices),
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
        resumed=None,
        runs=tuple(map(tuple, form.fragments)),
        ranges=form.ranges,
        devices=devices,
        lost={} if team is None else team.lost,
        duty=replica.duty.share,
        text=replica.stream.pieces,
    )


def slot_bytes(exchanged: type[CapturedFragment[Any]], codec_name: str, numel: int) -> int:
    """Bytes of a slot, whole pages, for fragments of up to ``numel`` values."""
    codings = (exchanged.new_coder(name, numel, False) for name in (codec_name, "fp32"))
    largest = exchanged.slack + max(coding.max_size for coding in codings)  # fp32: to realign
    return -(-largest // PAGE_BYTES) * PAGE_BYTES


def _make_arena(replica: Replica, exchanges: int, shared: int) -> Arena:
    fragments, sync = replica.plan.fragments, replica.spec.sync
    largest = max(fragment.numel for fragment in fragments)
    kind = kind_of(sync)
    slots = memory.at_once(exchanges, len(fragments), largest) * kind.slots if kind else 0
    slots += kind is GROUP  # one to give slow weights to other cells
    return Arena(shared, slots, slot_bytes(replica.exchanged, sync.codec, largest))
