"""Compiles the kernels that exchanges of a run call, by exchanges of a toy replica.

numba compiles a kernel where it is first called. Where none is on the disk yet, that takes half a
minute in all: first exchanges would wait for it while training goes on, and replicas would part.
"""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, pairwise, permutations
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import torch

from lowcomm_node.data import Dataset, Split, open_tokenizer
from lowcomm_node.errors import ConfigError
from lowcomm_node.node.messages import Part
from lowcomm_node.storage.files import lock
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.codecs.kernels import kept_in
from lowcomm_protocol.errors import ImplausibleError
from lowcomm_protocol.exchange import kinds
from lowcomm_protocol.spec.models import TransformerSettings
from lowcomm_protocol.spec.run import RunSpec
from lowcomm_protocol.spec.sections import RunSettings, SyncSettings

TOY = TransformerSettings(layers=1, width=16, heads=2, feed_forward=16, context=16)
MEMBERS = {kinds.PAIR.name: 2, kinds.GROUP.name: 3}
"""Members of an exchange of each kind. A group of two would compute no mean of more."""
MOVES = (1e-3, 1e-3, 1.0)
"""How far weights move before each exchange: the last leaves the ranges of modulo codecs."""
PATIENCE = 120.0
"""Seconds to wait for another process that compiles; then both do."""
LOOK = 0.1
"""Seconds between two looks at whether it is done: the kernel tells nobody."""

_rehearsed: list[SyncSettings] = []
"""By this process."""


def rehearse(sync: SyncSettings) -> None:
    """Exchange as a run with these settings does: kind of exchange, codec, outer step."""
    kind = kinds.kind_of(sync)
    if kind is None or kind.name not in MEMBERS or sync in _rehearsed:
        return
    folder = kept_in()
    with alone(Path(folder) if folder else None):
        replicas = _replicas(sync, MEMBERS[kind.name])
        exchange = _in_a_pair if kind is kinds.PAIR else _in_a_group
        for number, move in enumerate((*MOVES, 0.0)):
            _move(replicas, move)
            exchange(replicas, realign=number == len(MOVES))
    _rehearsed.append(sync)


@contextmanager
def alone(folder: Path | None, patience: float = PATIENCE) -> Iterator[bool]:
    """One process after the other: of trainers that start together the first compiles, and the
    others find it all in ``folder``. False where one goes on beside others: after ``patience``
    seconds, or where nothing can be kept or locked."""
    try:
        if folder is None:
            raise FileNotFoundError
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield False
        return
    try:
        yield _locked(descriptor, monotonic() + patience)
    finally:
        os.close(descriptor)


def _locked(descriptor: int, give_up: float) -> bool:
    try:
        while not lock(descriptor, fcntl.LOCK_EX, wait=False):
            if monotonic() >= give_up:
                return False
            sleep(LOOK)
    except (OSError, ConfigError):  # a file system without locks
        return False
    return True


def _replicas(sync: SyncSettings, count: int) -> Sequence[Replica]:
    whole = sync.model_copy(update={"fragments": 1})
    toy = RunSpec(run=RunSettings(name="toy"), model=TOY, sync=whole)
    tokens = Split((np.zeros(TOY.context + 1, dtype=np.uint16),), TOY.vocab)
    text = Dataset("toy", open_tokenizer("bytes"), tokens, tokens)
    return [Replica(toy, str(name), text, torch.device("cpu")) for name in range(count)]


def _move(replicas: Sequence[Replica], far: float) -> None:
    """Move the weights, those of later replicas further."""
    for place, replica in enumerate(replicas, start=1):
        chance = torch.Generator().manual_seed(place)
        for weights in replica.weights.values():
            weights.data.add_(torch.randn(weights.shape, generator=chance), alpha=far * place)
        replica.clock.tick()


def _room(replica: Replica) -> memoryview:
    """Room for what it codes, more than enough."""
    return memoryview(bytearray(2 * replica.exchanged.slack + 8 * replica.plan.fragments[0].numel))


def _coded(replica: Replica) -> list[memoryview]:
    """What it sends to each member."""
    room = _room(replica)
    ends = [0, *accumulate(replica.capture_of(0).code(room))]
    return [room[start:stop] for start, stop in pairwise(ends)]


def _in_a_pair(replicas: Sequence[Replica], realign: bool) -> None:
    for replica in replicas:
        replica.capture(0, realign)
    sent = {replica.peer_id: _coded(replica)[0] for replica in replicas}
    for here, there in permutations(replicas):
        capture, room = here.capture_of(0), _room(there)
        with suppress(ImplausibleError):  # it moved far; what it brings has been decoded by then
            again = capture.take(Part.WHOLE, there.peer_id, sent[there.peer_id])
            if again is not None:
                size = there.capture_of(0).resend(again.blocks, room)
                capture.take(Part.AGAIN, there.peer_id, room[:size])
    _apply(replicas, dict.fromkeys(sent, 1))


def _in_a_group(replicas: Sequence[Replica], realign: bool) -> None:
    members, first = [replica.peer_id for replica in replicas], replicas[0]
    for replica in replicas:
        replica.capture(0, realign, members)
        if first.history[0].past and replica.slow_digest(0) != first.slow_digest(0):
            digests = first.slow_digest(0), first.momentum_digest(0)
            replica.take_over(0, memoryview(first.missed(0, 1)), 1, digests)
    shards = {replica.peer_id: _coded(replica) for replica in replicas}
    over, means = dict.fromkeys(members, 1), dict[str, memoryview]()
    for place, here in enumerate(replicas):
        capture, room = here.capture_of(0), _room(here)
        for other in members:
            if other != here.peer_id:
                with suppress(ImplausibleError):
                    capture.take(Part.SHARE, other, shards[other][place])
        means[here.peer_id] = room[: capture.reduce(over, room)]
    for here, there in permutations(replicas, 2):
        with suppress(ImplausibleError):
            here.capture_of(0).take(Part.MEAN, there.peer_id, means[there.peer_id])
    late = replicas[-1]
    if late.clock.step == 1 and not late.spec.sync.consensus:
        late.drop(0)  # it misses the first exchange, and takes it over in the next one
        replicas = replicas[:-1]
    _apply(replicas, over)


def _apply(replicas: Sequence[Replica], over: dict[str, int]) -> None:
    for replica in replicas:
        replica.capture_of(0).pool(over)
        replica.outer(0)
        replica.merge(0, replica.clock.step)
