"""The manifest of a snapshot: its run, step, and the digest of each piece. Its SHA-256 names the
snapshot.

Pieces of several snapshots make one state if these are of one version: their swarm steps are close
enough for merges to heal the difference, and, if slow weights are equal in the whole swarm, they
are equal here too, fragment by fragment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Self

from google.protobuf.message import DecodeError

from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.spec.settings import SyncSettings
from lowcomm_protocol.state.pieces import Piece, Runs, plan_pieces

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
        told = tuple(tuple((numel, second) for numel, second in runs) for runs in fragments)
        return cls(run_id, plan, steps, told, ranges, plan_pieces(told, ranges))

    @property
    def size(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.size for piece in self.pieces)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The start of each piece in a file with all pieces in order."""
        starts: list[int] = []
        at = 0
        for piece in self.pieces:
            starts.append(at)
            at += piece.size
        return tuple(starts)

    @property
    def largest_manifest(self) -> int:
        """Largest size of a manifest in bytes."""
        return _OTHER_BYTES + 40 * len(self.pieces) + 64 * len(self.fragments)


@dataclass(frozen=True)
class Version:
    """Decides whether pieces fit together."""

    swarm_step: int
    slow_digests: tuple[bytes, ...]

    def fits(self, base: "Version", fragment: int, sync: SyncSettings) -> bool:
        """Whether a fragment's pieces of this version may stand beside those of ``base``."""
        near = abs(self.swarm_step - base.swarm_step) <= tolerated_lag(sync)
        return near and (
            sync.consensus > 0 or self.slow_digests[fragment] == base.slow_digests[fragment]
        )


def tolerated_lag(sync: SyncSettings) -> int:
    """Swarm steps between two states that merges can heal."""
    return 2 * sync.interval if sync.consensus > 0 else sync.interval // sync.fragments


@dataclass(frozen=True)
class Manifest:
    """One state at one moment."""

    swarm_step: int
    moments: int
    """Steps in the inner optimizer's moments; 0: there are none yet."""
    versions: tuple[int, ...]
    slow_digests: tuple[bytes, ...]
    digests: tuple[bytes, ...]

    @property
    def version(self) -> Version:
        """Decides whether its pieces fit others."""
        return Version(self.swarm_step, self.slow_digests)

    def to_bytes(self, form: StateForm) -> bytes:
        """Encode the manifest."""
        return pb.Manifest(
            run_id=bytes.fromhex(form.run_id),
            plan=bytes.fromhex(form.plan),
            swarm_step=self.swarm_step,
            moments=self.moments,
            versions=self.versions,
            slow_digests=self.slow_digests,
            digests=self.digests,
        ).SerializeToString(deterministic=True)


def name_of(manifest: bytes) -> bytes:
    """The name of a snapshot."""
    return sha256(manifest).digest()


def read_manifest(data: bytes, form: StateForm) -> Manifest:
    """Read an untrusted manifest.

    Raises `ProtocolViolation` if it is not one of this run.
    """
    if len(data) > form.largest_manifest:
        raise ProtocolViolation(
            f"a manifest of {len(data)} bytes: at most {form.largest_manifest} are needed"
        )
    try:
        told = pb.Manifest.FromString(data)
    except DecodeError:
        raise ProtocolViolation("bytes that are no manifest") from None
    if told.run_id.hex() != form.run_id or told.plan.hex() != form.plan:
        raise ProtocolViolation("a manifest of another run or plan")
    if told.swarm_step > form.steps:
        raise ProtocolViolation(
            f"a snapshot of swarm step {told.swarm_step} in a run of {form.steps}"
        )
    if told.moments >= MOST_MOMENTS or any(version >= _LARGEST_NUMBER for version in told.versions):
        raise ProtocolViolation("a manifest with numbers that no training reaches")
    count = len(form.fragments)
    if (len(told.versions), len(told.slow_digests), len(told.digests)) != (
        count,
        count,
        len(form.pieces),
    ):
        raise ProtocolViolation("a manifest of other fragments or pieces than the plan's")
    if any(len(digest) != _DIGEST for digest in (*told.slow_digests, *told.digests)):
        raise ProtocolViolation("a manifest with digests that are none")
    return Manifest(
        swarm_step=told.swarm_step,
        moments=told.moments,
        versions=tuple(told.versions),
        slow_digests=tuple(told.slow_digests),
        digests=tuple(told.digests),
    )
