"""Exchanges between replicas of a toy model: they compile the kernels that exchanges of a run need.

numba compiles a kernel where it is first called. Where none is on the disk yet, that takes half a
minute in all: first exchanges would wait for it while training goes on, and replicas would part.
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import permutations
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
SMALL, LARGE = 1e-3, 1.0
"""How far weights move: ``LARGE`` leaves the ranges that a modulo codec has learned."""
MOVES = (SMALL, SMALL, LARGE)
"""How far they move before each exchange."""

PATIENCE = 120.0
"""Seconds to wait for another process that compiles; then both do."""
LOOK = 0.1
"""Seconds between two looks at whether it is done: the kernel tells nobody."""

_rehearsed: list[SyncSettings] = []
"""By this process."""


def rehearse(sync: SyncSettings) -> None:
    """Exchange as a run with these settings does: kind of exchange, codec, outer step."""
    kind = kinds.kind_of(sync)
    if kind is None or kind.name not in EXCHANGES or sync in _rehearsed:
        return
    count, exchange = EXCHANGES[kind.name]
    folder = kept_in()
    with alone(Path(folder) if folder else None):
        replicas = _replicas(sync, count)
        for move in MOVES:
            _move(replicas, move)
            exchange(replicas, False)
        exchange(replicas, True)
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
    """Weights of each move, as in an inner step, those of later ones further."""
    for place, replica in enumerate(replicas, start=1):
        chance = torch.Generator().manual_seed(place)
        for weights in replica.weights.values():
            noise = torch.randn(weights.shape, generator=chance)
            weights.data.add_(noise, alpha=far * place)
        replica.clock.tick()


def _room(replica: Replica) -> memoryview:
    """Room for what it codes, more than enough."""
    return memoryview(bytearray(2 * replica.exchanged.slack + 8 * replica.plan.fragments[0].numel))


def _in_a_pair(replicas: Sequence[Replica], realign: bool) -> None:
    sent = dict[str, memoryview]()
    for replica in replicas:
        replica.capture(0, realign)
        room = _room(replica)
        (size,) = replica.capture_of(0).code(room)
        sent[replica.peer_id] = room[:size]
    for here, there in permutations(replicas):
        capture, other = here.capture_of(0), there.peer_id
        with suppress(ImplausibleError):  # it moved far; what it brings has been decoded by then
            again = capture.take(Part.WHOLE, other, sent[other])
            if again is not None:
                room = _room(there)
                size = there.capture_of(0).resend(again.blocks, room)
                capture.take(Part.AGAIN, other, room[:size])
    _apply(replicas, dict.fromkeys(sent, 1))


def _in_a_group(replicas: Sequence[Replica], realign: bool) -> None:
    members = [replica.peer_id for replica in replicas]
    shards = dict[tuple[str, str], memoryview]()
    for replica in replicas:
        replica.capture(0, realign, members)
        _catch_up(replica, replicas[0])
        room, start = _room(replica), 0
        for owner, size in zip(members, replica.capture_of(0).code(room), strict=True):
            shards[replica.peer_id, owner] = room[start : start + size]
            start += size
    means = dict[str, memoryview]()
    for here in replicas:
        capture, owner, room = here.capture_of(0), here.peer_id, _room(here)
        for other in members:
            if other != owner:
                with suppress(ImplausibleError):
                    capture.take(Part.SHARE, other, shards[other, owner])
        means[owner] = room[: capture.reduce(dict.fromkeys(members, 1), room)]
    for here, there in permutations(replicas, 2):
        with suppress(ImplausibleError):
            here.capture_of(0).take(Part.MEAN, there.peer_id, means[there.peer_id])
    late, over = replicas[-1], dict.fromkeys(members, 1)
    if late.clock.step == 1 and not late.spec.sync.consensus:
        late.drop(0)  # it misses the first exchange
        _apply(replicas[:-1], over)
    else:
        _apply(replicas, over)


def _catch_up(late: Replica, donor: Replica) -> None:
    """Take over what was missed, where slow weights should be equal and are not."""
    if donor.history[0].past and late.slow_digest(0) != donor.slow_digest(0):
        digests = donor.slow_digest(0), donor.momentum_digest(0)
        late.take_over(0, memoryview(donor.missed(0, 1)), 1, digests)


def _apply(replicas: Sequence[Replica], over: Mapping[str, int]) -> None:
    for replica in replicas:
        replica.capture_of(0).pool(over)
        replica.outer(0)
        replica.merge(0, replica.clock.step)


Exchange = Callable[[Sequence[Replica], bool], None]
EXCHANGES: Mapping[str, tuple[int, Exchange]] = {
    kinds.PAIR.name: (2, _in_a_pair),
    kinds.GROUP.name: (3, _in_a_group),
}
"""How many members of each kind exchange, and how. A group of two would compute no mean of more."""
