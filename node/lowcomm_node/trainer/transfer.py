"""A replica's state as pieces for joiners, and a joiner's replica from the pieces of others.

The state holds neither our own steps, nor data, nor what our coders owe: a joiner keeps its own.
"""

from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lowcomm_node.errors import NotFinite
from lowcomm_node.storage.snapshots import write_snapshot
from lowcomm_node.storage.state_file import is_finite
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.exchange.plausible import UsualNorm
from lowcomm_protocol.plan.fragments import Fragment
from lowcomm_protocol.plan.rows import gather, scatter
from lowcomm_protocol.plan.schedule import FragmentProgress, SyncSchedule
from lowcomm_protocol.state.pieces import Piece
from lowcomm_protocol.state.snapshot import Manifest, StateForm, read_manifest
from lowcomm_protocol.state.values import Values, empty_fragment, read_piece

Read = Callable[[Piece], bytes]
RANGE = "range"
"""The one thing that coders pass on: what modulo codecs have learned."""


def form_of(replica: Replica) -> StateForm:
    """What a snapshot of this replica looks like."""
    second = replica.optimizer.has_second
    runs = [
        tuple((part.numel, second(part.tensor)) for part in one.slices)
        for one in replica.plan.fragments
    ]
    ranges = RANGE in replica.coders[0].lessons()
    return StateForm.of(
        replica.run_id, replica.plan.digest, replica.course.longest, tuple(runs), ranges
    )


class Snapshot:
    """A copy of a replica's state in host memory, made at a step boundary; usable on any thread."""

    def __init__(self, replica: Replica) -> None:
        self.form = form_of(replica)
        fragments = replica.plan.fragments
        first, second = replica.optimizer.moment_vectors()
        self._values = [
            Values(
                theta=replica.fast(p).numpy(),
                phi=replica.phi[p].numpy(),  # replaced by merges, never changed in place
                delta=_momentum(replica, p),
                first=_flat(fragment, first),
                second=_flat(_with_second(replica, fragment), second),
                ranges=replica.coders[p].lessons().get(RANGE, np.zeros(0, dtype=np.float32)),
            )
            for p, fragment in enumerate(fragments)
        ]
        self._told = {
            "swarm_step": replica.clock.step,
            "moments": replica.optimizer.steps,
            "versions": tuple(replica.schedule[p].version for p in range(len(fragments))),
            "usual": tuple(usual.learned for usual in replica.usual),
        }

    @property
    def swarm_step(self) -> int:
        """When it was taken."""
        return self._told["swarm_step"]

    def piece(self, piece: Piece) -> bytes:
        """One piece as it travels."""
        return self._values[piece.fragment].cut(piece).to_bytes()

    def pieces(self) -> Iterator[bytes]:
        """All of them."""
        return map(self.piece, self.form.pieces)

    def manifest(self, digests: list[bytes]) -> Manifest:
        """Its manifest; ``digests`` are those of its pieces."""
        slow = tuple(sha256(values.phi.data).digest() for values in self._values)
        return Manifest(**self._told, slow_digests=slow, digests=tuple(digests))

    def write(self, folder: Path) -> str:
        """Write it for joiners; its name. Raises DiskFull, NotFinite."""
        for p, values in enumerate(self._values):
            if not all(is_finite(torch.from_numpy(vector)) for vector in values.vectors):
                raise NotFinite(
                    f"Fragment {p} of our state is not finite: it is not handed to joiners."
                )
        return write_snapshot(
            folder, self.form.size, self.pieces(), lambda d: self.manifest(d).to_bytes(self.form)
        )


def adopt(replica: Replica, manifest: Manifest, read: Read, back: bool = False) -> None:
    """Take over the weights, slow weights, momenta and swarm step of others; keep our steps and
    data.

    ``read`` gives each piece. ``back``: their swarm step holds even if ours is ahead of it.
    Exchanges under way become void, so no other thread may work on a capture meanwhile. Raises
    ProtocolViolation, and changes nothing, for values that no training reaches.
    """
    form = form_of(replica)
    values = [empty_fragment(runs, form.ranges) for runs in form.fragments]
    for piece in form.pieces:
        taken, into = read_piece(piece, read(piece)), values[piece.fragment].cut(piece)
        for source, target in zip(taken.vectors, into.vectors, strict=True):
            target[:] = source
    _load(replica, values, manifest.moments)
    for fragment in tuple(replica.captures):
        replica.drop(fragment)
    replica.usual = [UsualNorm(one) for one in manifest.usual]
    if back:
        replica.clock.step = 0
    replica.clock.observe(manifest.swarm_step)
    synced = replica.schedule
    progress = [
        FragmentProgress(
            version=version,
            merged_steps=replica.steps,
            merged_tokens=replica.tokens,
            synced=synced.round_of(p, replica.clock.step),
        )
        for p, version in enumerate(manifest.versions)
    ]
    replica.schedule = SyncSchedule(replica.spec.sync.interval, progress)


def adopt_folder(replica: Replica, folder: Path, back: bool = False) -> None:
    """``adopt`` a download: a folder with ``manifest``, and ``state`` with all pieces in order."""
    form = form_of(replica)
    manifest = read_manifest((folder / "manifest").read_bytes(), form)
    with (folder / "state").open("rb") as file:
        adopt(replica, manifest, lambda piece: file.read(piece.size), back)


def _load(replica: Replica, values: list[Values], moments: int) -> None:
    first = {name: torch.empty(weight.shape) for name, weight in replica.weights.items()}
    second = {
        name: torch.empty_like(one)
        for name, one in first.items()
        if replica.optimizer.has_second(name)
    }
    for fragment, one in zip(replica.plan.fragments, values, strict=True):
        scatter(fragment, torch.from_numpy(one.theta), replica.weights)
        scatter(fragment, torch.from_numpy(one.first), first)
        scatter(_with_second(replica, fragment), torch.from_numpy(one.second), second)
    # Slow weights are replaced, never changed in place: a snapshot under way keeps the old ones.
    replica.phi = [torch.from_numpy(one.phi) for one in values]
    if replica.keeps_momentum:
        replica.delta = [torch.from_numpy(one.delta) for one in values]
    for coder, one in zip(replica.coders, values, strict=True):
        coder.inherit({RANGE: one.ranges} if RANGE in coder.lessons() else {})
    if moments:  # a donor that has not taken a step has none: we warm up anew
        replica.optimizer.adopt(first, second, moments)


def _with_second(replica: Replica, fragment: Fragment) -> Fragment:
    """A fragment without the slices that have no second moment."""
    kept = tuple(part for part in fragment.slices if replica.optimizer.has_second(part.tensor))
    return Fragment(fragment.index, kept)


def _momentum(replica: Replica, fragment: int) -> np.ndarray:
    """Zeros where none is kept, which take no memory until they are read."""
    if replica.keeps_momentum:
        return replica.delta[fragment].numpy()
    return np.zeros(replica.plan.fragments[fragment].numel, dtype=np.float32)


def _flat(fragment: Fragment, tensors: dict[str, Tensor]) -> np.ndarray:
    """A fragment of moments, which may not be there yet."""
    out = torch.zeros(fragment.numel, dtype=torch.float32)
    if tensors:
        gather(fragment, tensors, out)
    return out.numpy()
