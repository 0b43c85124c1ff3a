"""Compiles the kernels that exchanges of a run call, by exchanges of toy replicas.

numba compiles a kernel where it is first called. Where none is on the disk yet, that takes half a
minute in all: first exchanges would wait for it while training goes on, and replicas would part.
"""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
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
MOVES = (1e-3, 1e-3, 1.0, 0.0)
"""How far weights move before each exchange: the third leaves the ranges of modulo codecs, the
last realigns."""
PATIENCE = 120.0
"""Seconds to wait for another process that compiles; then both do."""
LOOK = 0.1
"""Seconds between two tries to get the lock."""

_rehearsed: list[SyncSettings] = []
"""By this process."""


def rehearse(sync: SyncSettings) -> None:
    """Exchange as a run with these settings does: kind of exchange, codec, outer step."""
    kind = kinds.kind_of(sync)
    if kind is None or kind.name not in MEMBERS or sync in _rehearsed:
        return
    folder = kept_in()
    with alone(Path(folder)) if folder else nullcontext():
        replicas = [_toy(sync, str(name)) for name in range(MEMBERS[kind.name])]
        for far in MOVES:
            for place, replica in enumerate(replicas, start=1):
                chance = torch.Generator().manual_seed(place)
                for weights in replica.weights.values():
                    weights.data.add_(torch.randn(weights.shape, generator=chance), alpha=far)
                replica.clock.tick()
            _exchange(replicas, realign=far == 0.0)
    _rehearsed.append(sync)


@contextmanager
def alone(folder: Path, patience: float = PATIENCE) -> Iterator[bool]:
    """One process after the other: of trainers that start together the first compiles, and the
    others find the result in ``folder``.

    False where this process goes on beside others: after ``patience`` seconds, or where nothing can
    be kept or locked.
    """
    is_alone, give_up = False, monotonic() + patience
    with ExitStack() as stack:
        with suppress(OSError, ConfigError):  # a file system without locks
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            while not (is_alone := lock(descriptor, fcntl.LOCK_EX, wait=False)):
                if monotonic() >= give_up:
                    break
                sleep(LOOK)
        yield is_alone


def _toy(sync: SyncSettings, name: str) -> Replica:
    whole = sync.model_copy(update={"fragments": 1})
    spec = RunSpec(run=RunSettings(name="toy"), model=TOY, sync=whole)
    tokens = Split(np.zeros(TOY.context + 1, dtype=np.uint16), TOY.vocab)
    text = Dataset("toy", open_tokenizer("bytes"), tokens, tokens)
    return Replica(spec, name, text, torch.device("cpu"))


def _exchange(replicas: Sequence[Replica], realign: bool) -> None:
    members, first, is_group = [one.peer_id for one in replicas], replicas[0], len(replicas) > 2
    over, coded, means = dict.fromkeys(members, 1), dict[str, list[memoryview]](), {}
    room = 2 * first.exchanged.slack + 8 * first.plan.fragments[0].numel
    for replica in replicas:
        replica.capture(0, realign, members if is_group else ())
        out = memoryview(bytearray(room))
        ends = [0, *accumulate(replica.captures[0].encode(out))]
        coded[replica.peer_id] = [out[start:stop] for start, stop in pairwise(ends)]
    for here, there in permutations(replicas, 2):
        capture, other = here.captures[0], there.peer_id
        place, part = (members.index(here.peer_id), Part.SHARE) if is_group else (0, Part.WHOLE)
        with suppress(ImplausibleError):  # weights moved far; the contribution is decoded by then
            again = capture.take(part, other, coded[other][place])
            if again is not None:
                out = memoryview(bytearray(room))
                size = there.captures[0].resend(again.blocks, out)
                capture.take(Part.AGAIN, other, out[:size])
    if is_group:
        for replica in replicas:
            out = memoryview(bytearray(room))
            means[replica.peer_id] = out[: replica.captures[0].reduce(over, out)]
        for here, there in permutations(replicas, 2):
            with suppress(ImplausibleError):
                here.captures[0].take(Part.MEAN, there.peer_id, means[there.peer_id])
    for replica in replicas:
        replica.captures[0].pool(over)
        replica.outer(0)
        replica.merge(0, replica.clock.step)
