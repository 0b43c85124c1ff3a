"""A replica's state as pieces for joiners, and a joiner's replica from the pieces of others.

The state holds neither our own steps, nor data, nor what our coders owe: a joiner keeps its own.
"""

from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lowcomm_node.errors import NotFinite
from lowcomm_node.storage.snapshots import write_snapshot
from lowcomm_node.storage.state_file import is_finite
from lowcomm_node.trainer.judging import UsualNorm
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol import state
from lowcomm_protocol.codecs import BLOCK
from lowcomm_protocol.codecs.base import Vector
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.plan import Fragment, FragmentProgress, SyncSchedule
from lowcomm_protocol.rows import between

Read = Callable[[state.Piece], bytes]
RANGE = "range"
"""The one thing that coders pass on: what modulo codecs have learned."""


def form_of(replica: Replica) -> state.StateForm:
    """What a snapshot of this replica looks like."""
    second = replica.optimizer.has_second
    runs = [
        tuple((part.numel, second(part.tensor)) for part in one.slices)
        for one in replica.plan.fragments
    ]
    ranges = RANGE in replica.coders[0].shared_state()
    return state.StateForm.of(
        replica.run_id, replica.plan.digest, replica.course.longest, tuple(runs), ranges
    )


class StateSnapshot:
    """A replica's state as of a step boundary; usable on any thread."""

    def __init__(self, replica: Replica, copied: bool = True) -> None:
        """Unless it is ``copied``, it holds until the replica changes."""
        self.form = form_of(replica)
        self._fragments = replica.plan.fragments
        self._seconds = [_with_second(replica, one) for one in self._fragments]
        self._weights = replica.all_weights(copied)
        moments = replica.all_moments(copied)
        self._first, self._second = replica.optimizer.vectors_of(moments)
        # Replaced by merges, never changed in place.
        self._phi, self._delta = list(replica.phi), list(replica.delta)
        self._ranges = [one.shared_state().get(RANGE) for one in replica.coders]
        self.swarm_step, self._moments = replica.clock.step, replica.optimizer.steps
        self._versions = tuple(replica.schedule[p].version for p in range(len(self._fragments)))

    def piece(self, piece: state.Piece) -> bytes:
        """One piece as it travels. Raises NotFinite."""
        p, these = piece.fragment, (piece.start, piece.stop)
        ranges = self._ranges[p]
        values = state.Values(
            theta=_flat(self._fragments[p], self._weights, these),
            phi=self._phi[p][slice(*these)].numpy(),
            delta=self._delta[p][slice(*these)].numpy() if self._delta else _zeros(these),
            first=_flat(self._fragments[p], self._first, these),
            second=_flat(self._seconds[p], self._second, piece.seconds),
            ranges=_zeros((0, 0)) if ranges is None else ranges[slice(*piece.blocks)],
        )
        if not all(is_finite(torch.from_numpy(vector)) for vector in values):
            raise NotFinite(
                f"Fragment {p} of our state is not finite: it is not handed to joiners."
            )
        return values.to_bytes()

    def manifest(self, digests: list[bytes]) -> pb.Manifest:
        """Its manifest; ``digests`` are those of its pieces."""
        return pb.Manifest(
            run_id=bytes.fromhex(self.form.run_id),
            plan=bytes.fromhex(self.form.plan),
            swarm_step=self.swarm_step,
            moments=self._moments,
            versions=self._versions,
            slow_digests=[sha256(phi.numpy().data).digest() for phi in self._phi],
            digests=digests,
        )

    def write(self, folder: Path, taken: Callable[[], None] = lambda: None) -> str:
        """Write it for joiners; its name. ``taken`` is called once it is read.

        Raises DiskFull, NotFinite.
        """

        def seal(digests: list[bytes]) -> bytes:
            return state.write_manifest(self.manifest(digests))

        pieces = map(self.piece, self.form.pieces)
        return write_snapshot(folder, self.form.size, pieces, seal, taken)


def adopt(replica: Replica, manifest: pb.Manifest, read: Read, back: bool = False) -> None:
    """Take over weights, slow weights, momenta and swarm step of others; keep our steps and data.

    ``read`` gives each piece, twice. ``back``: their swarm step holds even if ours is ahead of it.
    Exchanges under way become void, so no other thread may work on a capture meanwhile. Raises
    ProtocolViolation, and changes nothing, for values that no training reaches.
    """
    form = form_of(replica)
    for piece in form.pieces:
        state.read_piece(piece, read(piece))
    # Nothing that trains takes more outer steps, or counts more in its moments, than swarm steps.
    most = manifest.swarm_step
    _load(replica, form, read, min(manifest.moments, most))
    for fragment in tuple(replica.captures):
        replica.drop(fragment)
    # What is usual each peer learns itself: a donor could make any norm plausible.
    for history in replica.history:
        history.usual = UsualNorm(history.usual.learned)
    if back:
        replica.clock.step = 0
    replica.clock.observe(manifest.swarm_step)
    steps, tokens, step = replica.steps, replica.tokens, replica.clock.step
    progress = [
        FragmentProgress(min(version, most), steps, tokens, replica.schedule.round_of(p, step))
        for p, version in enumerate(manifest.versions)
    ]
    replica.schedule = SyncSchedule(replica.spec.sync.interval, progress)


def adopt_folder(replica: Replica, folder: Path, back: bool = False) -> None:
    """``adopt`` a download: a folder with ``manifest``, and ``state`` with all pieces in order."""
    form = form_of(replica)
    manifest = state.read_manifest((folder / "manifest").read_bytes(), form)
    with (folder / "state").open("rb") as file:

        def read(piece: state.Piece) -> bytes:
            file.seek(form.offsets[piece.index])
            return file.read(piece.size)

        adopt(replica, manifest, read, back)


def _load(replica: Replica, form: state.StateForm, read: Read, moments: int) -> None:
    """Piece by piece: what is not copied to its place at once would be in memory twice."""
    replica.readings.wait()
    fragments = replica.plan.fragments
    weights = replica.all_weights(copied=False)
    first, second = replica.optimizer.vectors_of(replica.all_moments(copied=False))
    if not moments or not first:
        has_second = replica.optimizer.has_second
        first = {name: torch.empty(one.shape) for name, one in weights.items()}
        second = {name: torch.empty_like(one) for name, one in first.items() if has_second(name)}
    # Slow weights are replaced, never changed in place: a snapshot under way keeps the old ones.
    phi = [replica.slow(p) for p in range(len(fragments))]
    delta = [replica.slow(p) for p in range(len(fragments))] if replica.keeps_momentum else []
    ranges = [np.zeros(-(-one.numel // BLOCK), dtype=np.float32) for one in fragments]
    for piece in form.pieces:
        p, these = piece.fragment, slice(piece.start, piece.stop)
        # In a bytearray, as torch warns of what it may not write.
        values, fragment = state.read_piece(piece, bytearray(read(piece))), fragments[p]
        _place(fragment, weights, piece.start, values.theta)
        _place(fragment, first, piece.start, values.first)
        _place(_with_second(replica, fragment), second, piece.seconds[0], values.second)
        phi[p][these] = torch.from_numpy(values.phi)
        if delta:
            delta[p][these] = torch.from_numpy(values.delta)
        ranges[p][slice(*piece.blocks)] = values.ranges
    replica.phi, replica.delta = phi, delta
    replica.forget_past()
    for coder, learned in zip(replica.coders, ranges, strict=True):
        coder.load_shared_state({RANGE: learned} if RANGE in coder.shared_state() else {})
    replica.load_weights(weights)
    if moments:  # a donor that has not taken a step has none: we warm up anew
        replica.load_moments(replica.optimizer.moments_of(first, second, moments))


def _place(fragment: Fragment, tensors: Mapping[str, Tensor], start: int, values: Vector) -> None:
    """Copy values that begin at ``start`` of a fragment's vector to the tensors, on any device."""
    at, source = 0, torch.from_numpy(values)
    for part in between(fragment, tensors, start, start + len(values)):
        part.copy_(source[at : at + part.numel()])
        at += part.numel()


def _with_second(replica: Replica, fragment: Fragment) -> Fragment:
    """A fragment without the slices that have no second moment."""
    kept = tuple(part for part in fragment.slices if replica.optimizer.has_second(part.tensor))
    return Fragment(fragment.index, kept)


def _flat(fragment: Fragment, tensors: Mapping[str, Tensor], these: tuple[int, int]) -> Vector:
    """A range of a fragment's values in host memory; zeros of moments that are not there yet."""
    if not tensors or these[0] == these[1]:
        return _zeros(these)
    return torch.cat(list(between(fragment, tensors, *these))).float().cpu().numpy()


def _zeros(these: tuple[int, int]) -> Vector:
    return np.zeros(these[1] - these[0], dtype=np.float32)
