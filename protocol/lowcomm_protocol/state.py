"""A replica's state for peers that copy it: pieces, each with its digest, and the manifest that
lists them (docs/protocol.md).

What one value of the model needs must come from one peer, so a piece is a range of values of one
fragment with all their vectors, one after the other, as little-endian float32: fast weights, slow
weights, outer momentum, first moments, second moments (left out for values that Muon moves), and
for modulo codecs the range of each block of 256.

Pieces of several snapshots make one state if these are of one version: their swarm steps are close
enough for merges to heal the difference, and where slow weights are equal in the whole swarm, they
are equal here too, fragment by fragment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Self

from google.protobuf.message import DecodeError

from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.spec.names import BLOCK
from lowcomm_protocol.spec.sections import SyncSettings

if TYPE_CHECKING:  # the daemon plans and reads manifests without NumPy
    from lowcomm_protocol.codecs.base import Vector

PIECES = 256
"""A state is cut into about so many pieces, within these bounds:"""
LEAST_VALUES, MOST_VALUES = 3 * 1024, 192 * 1024
"""values: 60 KiB and 4 MiB with AdamW."""
Runs = Sequence[tuple[int, bool]]
"""Slices of a fragment: number of values, and whether they have a second moment."""


@dataclass(frozen=True)
class Piece:
    """Values ``[start, stop)`` of a fragment; ``seconds``: the range of their second moments."""

    index: int
    fragment: int
    start: int
    stop: int
    seconds: tuple[int, int]
    blocks: tuple[int, int]
    """Blocks of 256 that have a range; empty unless the codec learns ranges."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Values of each vector."""
        ends = (*[(self.start, self.stop)] * 4, self.seconds, self.blocks)
        return tuple(stop - start for start, stop in ends)

    @property
    def size(self) -> int:
        """Bytes."""
        return 4 * sum(self.counts)


def plan_pieces(fragments: Sequence[Runs], ranges: bool) -> tuple[Piece, ...]:
    """Cut each fragment of a state into equal pieces; ``ranges``: as modulo codecs learn."""
    total = sum(numel for runs in fragments for numel, _ in runs)
    usual = -(-total // PIECES // BLOCK) * BLOCK
    step = min(MOST_VALUES, max(LEAST_VALUES, usual))
    pieces: list[Piece] = []
    for fragment, runs in enumerate(fragments):
        numel = sum(count for count, _ in runs)
        for start in range(0, numel, step):
            stop = min(numel, start + step)
            seconds = (_seconds_before(runs, start), _seconds_before(runs, stop))
            blocks = (start // BLOCK, -(-stop // BLOCK)) if ranges else (0, 0)
            pieces.append(Piece(len(pieces), fragment, start, stop, seconds, blocks))
    return tuple(pieces)


def _seconds_before(runs: Runs, stop: int) -> int:
    """How many of a fragment's first ``stop`` values have a second moment."""
    count = start = 0
    for numel, second in runs:
        count += max(0, min(stop - start, numel)) if second else 0
        start += numel
    return count


MOST_MOMENTS = 1 << 24
"""AdamW counts in float32."""
_LARGEST_NUMBER = 1 << 53
_DIGEST = 32
_OTHER_BYTES = 1024


@dataclass(frozen=True)
class StateForm:
    """The form of every snapshot of a run."""

    run_id: str
    """SHA-256, hexadecimal, like that of the plan."""
    plan: str
    steps: int
    """Swarm steps of the whole run."""
    fragments: tuple[Runs, ...]
    ranges: bool
    pieces: tuple[Piece, ...]

    @classmethod
    def of(
        cls, run_id: str, plan: str, steps: int, fragments: Sequence[Runs], ranges: bool
    ) -> Self:
        """The form of a run's state."""
        kept = tuple(tuple((numel, second) for numel, second in runs) for runs in fragments)
        return cls(run_id, plan, steps, kept, ranges, plan_pieces(kept, ranges))

    @property
    def size(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.size for piece in self.pieces)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The start of each piece in a file with all pieces in order."""
        return tuple(accumulate((piece.size for piece in self.pieces[:-1]), initial=0))

    @property
    def largest_manifest(self) -> int:
        """Largest size of a manifest in bytes."""
        return _OTHER_BYTES + 40 * len(self.pieces) + 64 * len(self.fragments)


def fits(one: pb.Manifest, base: pb.Manifest, fragment: int, sync: SyncSettings) -> bool:
    """Whether a fragment's pieces of one snapshot may stand beside those of another, ``base``."""
    near = abs(one.swarm_step - base.swarm_step) <= tolerated_lag(sync)
    is_alike = one.slow_digests[fragment] == base.slow_digests[fragment]
    return near and (sync.consensus > 0 or is_alike)


def tolerated_lag(sync: SyncSettings) -> int:
    """Swarm steps between two states that merges can heal."""
    return 2 * sync.interval if sync.consensus > 0 else sync.interval // sync.fragments


def same_version(one: pb.Manifest, other: pb.Manifest) -> bool:
    """Whether two snapshots have the same swarm step and slow weights."""
    return (one.swarm_step, one.slow_digests) == (other.swarm_step, other.slow_digests)


def write_manifest(manifest: pb.Manifest) -> bytes:
    """The one encoding of a manifest."""
    return manifest.SerializeToString(deterministic=True)


def read_manifest(data: bytes, form: StateForm) -> pb.Manifest:
    """Read an untrusted manifest. Raises `ProtocolViolation` if it is not of this run."""
    if len(data) > form.largest_manifest:
        raise ProtocolViolation(
            f"a manifest of {len(data)} bytes: at most {form.largest_manifest} are needed"
        )
    try:
        manifest = pb.Manifest.FromString(data)
    except DecodeError:
        raise ProtocolViolation("bytes that are no manifest") from None
    manifest.DiscardUnknownFields()  # or every copy could have a name of its own
    step, count = manifest.swarm_step, len(form.fragments)
    lengths = len(manifest.versions), len(manifest.slow_digests), len(manifest.digests)
    every = (*manifest.slow_digests, *manifest.digests)
    faults = (
        (
            (manifest.run_id.hex(), manifest.plan.hex()) != (form.run_id, form.plan),
            "a manifest of another run or plan",
        ),
        (step > form.steps, f"a snapshot of swarm step {step} in a run of {form.steps}"),
        (
            manifest.moments >= MOST_MOMENTS
            or any(v >= _LARGEST_NUMBER for v in manifest.versions),
            "a manifest with numbers that no training reaches",
        ),
        (
            lengths != (count, count, len(form.pieces)),
            "a manifest of other fragments or pieces than the plan's",
        ),
        (any(len(digest) != _DIGEST for digest in every), "a manifest with digests that are none"),
    )
    for applies, fault in faults:
        if applies:
            raise ProtocolViolation(fault)
    return manifest


class Values(NamedTuple):
    """The vectors of one piece, in its order."""

    theta: "Vector"
    phi: "Vector"
    delta: "Vector"
    first: "Vector"
    second: "Vector"
    ranges: "Vector"

    def to_bytes(self) -> bytes:
        """Encode a piece."""
        import numpy as np

        return np.concatenate(self).astype("<f4", copy=False).tobytes()


def read_piece(piece: Piece, data: bytes | bytearray | memoryview) -> Values:
    """Views of the vectors of an untrusted piece. Raises `ProtocolViolation`."""
    if len(data) != piece.size:
        raise ProtocolViolation(
            f"piece {piece.index} has {len(data)} bytes instead of {piece.size}"
        )
    import numpy as np

    flat: Vector = np.frombuffer(data, dtype="<f4")
    values = Values(*np.split(flat, list(accumulate(piece.counts[:-1]))))
    # The extremes suffice, and need no mask in memory: NaN spreads to both.
    if not (np.isfinite(flat.min()) and np.isfinite(flat.max())):
        raise ProtocolViolation(f"piece {piece.index} holds NaN or infinity")
    if values.second.size and values.second.min() < 0:
        raise ProtocolViolation(f"piece {piece.index} holds impossible moments")
    return values


def apart(one: Values, other: Values) -> float:
    """The distance of two peers' weights of one piece: 0 if equal, about 1.4 if unrelated."""
    import numpy as np

    mine, theirs = (
        np.concatenate([values.theta, values.phi]).astype(np.float64) for values in (one, other)
    )
    largest = max(float(np.linalg.norm(mine)), float(np.linalg.norm(theirs)))
    return float(np.linalg.norm(mine - theirs)) / largest if largest else 0.0
