"""A state under download from several donors: which pieces are here, who gave them, and which fit.

incoming/
  state        all pieces in their order; holes where one is missing
  journal      one line a piece: its digest and who gave it
  manifest     of the snapshot that all others must fit: the base

Verified pieces stay good, whatever happens to donors or to us: after a crash each piece in the
journal is hashed again, and the others are fetched.

One can't tell a donor's invented numbers from honest ones, but they differ from everybody else's.
So a few pieces, drawn at random, are fetched from a second donor, too. If the two have nothing in
common, a third decides who is left out; without a third, the donor that is not the base.
"""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from lowcomm_node.errors import CheckpointError
from lowcomm_node.storage.files import disk_full_error, require_space
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.spec.sections import SyncSettings
from lowcomm_protocol.state import Manifest, Piece, StateForm, Version, read_manifest

if TYPE_CHECKING:
    from lowcomm_protocol.state import Values

AUDITS = 2
"""Pieces fetched from each donor although another one has given them already."""
AUDITED_SHARE = 1 / 32
"""Of the state, at most; but always one piece."""
MAX_SOURCES = 1024
FAR_APART = 0.75
"""Weights of honest peers at one version are a few hundredths apart; unrelated ones, 1.4."""


@dataclass(eq=False)
class Source:
    """One snapshot of one donor."""

    number: int
    peer: str
    version: Version
    manifest: Manifest | None = None
    """While it may give more."""
    audits: int = 0
    struck: bool = False
    """It has violated the protocol."""
    out: bool = False
    """It is not believed any more."""
    taken: dict[int, Piece] = field(default_factory=dict)
    """Pieces under way from it."""
    auditing: bool = False
    """A piece that we have already is under way from it."""


class Download:
    """Used from one event loop. Call ``load`` first and ``close`` last."""

    def __init__(self, folder: Path, form: StateForm, sync: SyncSettings, random: Random) -> None:
        self.folder = folder
        self.form = form
        self.base: Manifest | None = None
        self._sync = sync
        self._random = random
        self._offsets = form.offsets
        self._sources: list[Source] = []
        self._held: dict[int, Source] = {}
        self._missing: dict[int, None] = dict.fromkeys(range(len(form.pieces)))
        self._disputes: list[tuple[Source, Source]] = []
        self._agreements: Counter[Source] = Counter()
        self._audited = 0
        self._state = self._journal = -1

    # on disk

    def load(self) -> None:
        """Open the folder, and take up an earlier download. Raises DiskFull."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._state = os.open(self.folder / "state", os.O_RDWR | os.O_CREAT, 0o600)
        self._journal = os.open(
            self.folder / "journal", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600
        )
        for piece, source, digest in self._remembered():
            data = os.pread(self._state, piece.size, self._offsets[piece.index])
            if sha256(data).hexdigest() == digest and self._fits(source, piece):
                self._hold(piece, source)
        require_space(self.folder, self.form.size - self.size)

    def _remembered(self) -> list[tuple[Piece, Source, str]]:
        """The pieces in the journal. It begins anew if it, or the base's manifest, is of another
        state."""
        data = (self.folder / "journal").read_bytes()
        data = data[: data.rfind(b"\n") + 1]  # a crash may have cut the last line
        found: dict[int, tuple[Piece, Source, str]] = {}
        try:
            for line in data.splitlines()[1:]:
                self._take_in(json.loads(line), found)
            if json.loads(data.splitlines()[0])["form"] != self._form_digest():
                raise ValueError("it is of another state")
            self.base = read_manifest((self.folder / "manifest").read_bytes(), self.form)
        except (
            OSError,
            ValueError,
            KeyError,
            IndexError,
            TypeError,
            AttributeError,
            ProtocolViolation,
        ):
            self._sources.clear()
            found.clear()
            os.truncate(self._journal, 0)
            self._note({"form": self._form_digest()})
        else:
            os.truncate(self._journal, len(data))
        return [one for one in found.values() if not one[1].out]

    def _take_in(self, entry: dict[str, Any], found: dict[int, tuple[Piece, Source, str]]) -> None:
        if "piece" in entry:
            piece, source = self.form.pieces[entry["piece"]], self._sources[entry["source"]]
            found[piece.index] = (piece, source, entry["sha256"])
        elif "out" in entry:
            self._sources[entry["out"]].out = True
        else:
            slow = tuple(map(bytes.fromhex, entry["slow"]))
            self._add(entry["peer"], Version(entry["swarm_step"], slow))

    def _note(self, entry: dict[str, Any]) -> None:
        os.write(self._journal, json.dumps(entry, separators=(",", ":")).encode() + b"\n")

    def _form_digest(self) -> str:
        form = self.form
        return sha256(
            repr((form.run_id, form.plan, form.fragments, form.ranges)).encode()
        ).hexdigest()

    def forget(self) -> None:
        """Begin anew: what is here is useless."""
        self.base = None
        self._drop(lambda _: True)

    def close(self) -> None:
        """Close the files, and leave the folder as it is."""
        for descriptor in (self._state, self._journal):
            if descriptor >= 0:
                os.close(descriptor)
        self._state = self._journal = -1

    # how far it is

    @property
    def size(self) -> int:
        """Bytes of the pieces that are here."""
        return sum(self.form.pieces[index].size for index in self._held)

    @property
    def peers(self) -> list[str]:
        """Their donors."""
        return sorted({source.peer for source in self._held.values()})

    def is_complete(self) -> bool:
        """Whether all pieces are here, and all audits are done."""
        if self.base is None or len(self._held) < len(self.form.pieces):
            return False
        return not any(source.auditing or self._audit_of(source) for source in self._giving())

    def conclude(self) -> bool:
        """Decide the disputes that no third donor decided. Returns whether the state is still
        complete."""

        def weight(source: Source) -> tuple[int, bool, bool]:
            return (
                self._standing(source),
                source.manifest is not None,
                source.version == self._base_version(),
            )

        for one, other in self._disputes:
            if not (one.out or other.out):
                self.leave_out(min(one, other, key=weight))
        return self.is_complete()

    # donors

    def open(self, peer: str, manifest: Manifest) -> Source:
        """A donor serves this snapshot now. Raises CheckpointError if there were too many."""
        source = next(
            (one for one in self._sources if one.peer == peer and one.version == manifest.version),
            None,
        )
        if source is None:
            if len(self._sources) >= MAX_SOURCES:
                raise CheckpointError(f"more than {MAX_SOURCES} snapshots were offered")
            source = self._add(peer, manifest.version)
            slow = [digest.hex() for digest in manifest.slow_digests]
            self._note({"peer": peer, "swarm_step": manifest.swarm_step, "slow": slow})
        source.manifest = manifest
        if self.base is None:
            self._rebase(manifest)
        return source

    def strike(self, peer: str) -> None:
        """A donor has violated the protocol.

        Its verified pieces stay, but it loses its disputes.
        """
        for source in self._sources:
            source.struck = source.struck or source.peer == peer
        self._settle()

    def close_source(self, source: Source) -> None:
        """A donor gives no more for now."""
        source.manifest, source.auditing = None, False
        for piece in list(source.taken.values()):
            self.give_back(source, piece)

    def take(self, source: Source) -> Piece | None:
        """The next piece to ask a donor for."""
        if source.out:
            return None
        for index in self._missing:
            piece = self.form.pieces[index]
            if self._fits(source, piece):
                del self._missing[index]
                source.taken[index] = piece
                return piece
        return None

    def claim(self, source: Source, piece: Piece) -> bool:
        """Ask a donor for the rest of a piece, unless it is not missing any more. Returns whether
        to ask."""
        wanted = piece.index in self._missing and self._fits(source, piece)
        if wanted:
            del self._missing[piece.index]
            source.taken[piece.index] = piece
        return wanted

    def give_back(self, source: Source, piece: Piece) -> None:
        """A piece does not come."""
        if source.taken.pop(piece.index, None) is not None:
            self._missing[piece.index] = None

    async def put(self, source: Source, piece: Piece, data: bytearray) -> None:
        """Keep a piece that matches its digest.

        Raises CheckpointError or ProtocolViolation, DiskFull.
        """
        digest = self._promised(source, piece)
        await asyncio.to_thread(_verify, piece, data, digest)
        if source.out or not self._fits(source, piece):  # things may have changed while it came
            self.give_back(source, piece)
        elif source.taken.pop(piece.index, None) is not None:  # else it was given up meanwhile
            # Not on a thread: after a cancellation it would go on, beside the next writer of this
            # piece.
            with disk_full_error(self.folder):
                os.pwrite(self._state, data, self._offsets[piece.index])
            self._note({"piece": piece.index, "source": source.number, "sha256": digest.hex()})
            self._hold(piece, source)

    def is_stuck(self) -> bool:
        """Whether pieces are missing that no serving donor can give, being of other versions."""
        giving = self._giving()
        wanted = [self.form.pieces[index] for index in self._missing]
        return bool(giving and wanted) and not any(
            self._fits(one, piece) for one in giving for piece in wanted
        )

    def rebase(self) -> None:
        """Continue with an available version. What does not fit it is fetched again."""
        manifests = [one.manifest for one in self._giving() if one.manifest is not None]
        self._rebase(max(manifests, key=lambda one: one.swarm_step))

    def leave_out(self, source: Source) -> None:
        """Stop believing a donor. What it gave is fetched from others."""
        if source.out:
            return
        source.out = True
        self._note({"out": source.number})
        self._drop(lambda index: self._held[index] is source)
        if source.version == self._base_version():
            self.base = None
            others = [one.manifest for one in self._giving() if one.manifest is not None]
            if others:
                self._rebase(others[0])

    # comparing

    def audit(self, source: Source) -> Piece | None:
        """A piece given by another donor, to be fetched from this one, too."""
        piece = self._audit_of(source)
        if piece is not None:
            source.audits, source.auditing = source.audits + 1, True
            self._audited += piece.size
        return piece

    async def compare(self, source: Source, piece: Piece, data: bytearray) -> bool:
        """Whether this donor's piece agrees with the one that is here.

        Raises CheckpointError or ProtocolViolation.
        """
        digest, other = self._promised(source, piece), self._held.get(piece.index)

        def distance() -> float:
            from lowcomm_protocol.state import apart, read_piece

            values = _verify(piece, data, digest)
            return apart(
                values,
                read_piece(piece, os.pread(self._state, piece.size, self._offsets[piece.index])),
            )

        far = await asyncio.to_thread(distance)
        source.auditing = False
        if other is None or self._held.get(piece.index) is not other:
            return True
        if far <= FAR_APART:
            self._agreements.update((source, other))
            alike = True
        else:
            self._disputes.append((other, source))
            alike = False
        self._settle()
        return alike

    def _audit_of(self, source: Source) -> Piece | None:
        largest = max(piece.size for piece in self.form.pieces)
        if (
            source.out
            or source.audits >= AUDITS
            or self._audited + largest > max(largest, AUDITED_SHARE * self.form.size)
        ):
            return None
        disputed = {one for pair in self._disputes for one in pair}
        others = {index: one for index, one in self._held.items() if one.peer != source.peer}
        pieces = [index for index, one in others.items() if one in disputed] or list(others)
        fitting = [
            self.form.pieces[index]
            for index in pieces
            if self._fits(source, self.form.pieces[index])
        ]
        return self._random.choice(fitting) if fitting else None

    def _settle(self) -> None:
        for one, other in self._disputes:
            better = self._standing(one) - self._standing(other)
            if better and not (one.out or other.out):
                self.leave_out(other if better > 0 else one)

    def _standing(self, source: Source) -> int:
        """Agreements with other donors, less disputes."""
        others = {
            one
            for pair in self._disputes
            if source in pair
            for one in pair
            if one is not source and not one.out
        }
        return self._agreements[source] - len(others) - source.struck

    # small things

    def _add(self, peer: str, version: Version) -> Source:
        self._sources.append(Source(len(self._sources), peer, version))
        return self._sources[-1]

    def _giving(self) -> list[Source]:
        return [one for one in self._sources if one.manifest is not None and not one.out]

    def _base_version(self) -> Version | None:
        return self.base.version if self.base is not None else None

    def _fits(self, source: Source, piece: Piece) -> bool:
        base = self._base_version()
        return base is not None and source.version.fits(base, piece.fragment, self._sync)

    def _hold(self, piece: Piece, source: Source) -> None:
        self._held[piece.index] = source
        self._missing.pop(piece.index, None)

    def _drop(self, unwanted: Callable[[int], bool]) -> None:
        for index in [index for index in self._held if unwanted(index)]:
            del self._held[index]
            self._missing[index] = None

    def _rebase(self, manifest: Manifest) -> None:
        temporary = self.folder / ".manifest"
        temporary.write_bytes(manifest.to_bytes(self.form))
        temporary.replace(self.folder / "manifest")
        self.base = manifest
        self._drop(lambda index: not self._fits(self._held[index], self.form.pieces[index]))

    def _promised(self, source: Source, piece: Piece) -> bytes:
        assert source.manifest is not None, "it gives nothing now"
        return source.manifest.digests[piece.index]


def _verify(piece: Piece, data: bytearray, digest: bytes) -> "Values":
    from lowcomm_protocol.state import read_piece  # NumPy: most daemons never need it

    if sha256(data).digest() != digest:
        raise CheckpointError(f"piece {piece.index} does not match its digest")
    return read_piece(piece, data)
