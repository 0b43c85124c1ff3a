"""A state under download from several donors: which pieces are here, who gave them, and which fit.

incoming/
  state        all pieces in their order; holes where one is missing
  manifest     of the snapshot that all others must fit: the base
  PEER.STEP    manifest of each donor that is believed

Verified pieces stay good, whatever happens to donors or to us: after a crash each piece is hashed
again. Those that one of the manifests lists are kept, and the others are fetched.

Numbers that a donor has invented look like honest numbers, but differ from everybody else's. So a
few pieces, drawn at random, are fetched from a second donor, too. If the two have nothing in
common, a third donor decides which of them is left out; without a third, it is the donor that is
not the base.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random
from time import monotonic
from typing import TYPE_CHECKING

from lowcomm_node.errors import CheckpointError
from lowcomm_node.fetch.engine import Download, Source
from lowcomm_node.storage.files import disk_full_error, require_space, write_atomic
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import PeerInfo
from lowcomm_protocol.spec.sections import SyncSettings
from lowcomm_protocol.state import (
    Piece,
    StateForm,
    fits,
    read_manifest,
    same_version,
    write_manifest,
)

if TYPE_CHECKING:
    from lowcomm_protocol.state import Values

AUDITS = 2  # pieces fetched from each donor although another one has given them already
AUDITED_SHARE = 1 / 32  # largest share of the state that is audited; always at least one piece
MAX_OFFERS = 1024  # snapshots that donors may offer for one state
FAR_APART = 0.75  # honest peers at one version are a few hundredths apart; unrelated weights, 1.4
VERSION_PATIENCE = 5.0  # seconds to wait for a donor of our version, before we take another
Plausible = Callable[[PeerInfo, int], Awaitable[bool]]
"""Whether a donor's snapshot may be of this swarm step."""


@dataclass(eq=False, kw_only=True)
class StateOffer(Source):
    """One snapshot of one donor."""

    manifest: pb.Manifest
    path: Path
    """Copy of the manifest."""
    audits: int = 0
    auditing: int | None = None
    """Piece that we have already, under way from it."""
    agreements: int = 0
    """Comparisons with other donors that went well."""
    is_out: bool = False
    """It is not believed any more."""


class StateDownload(Download[StateOffer]):
    """Call ``load`` first and ``close`` last."""

    def __init__(
        self,
        folder: Path,
        form: StateForm,
        sync: SyncSettings,
        random: Random,
        plausible: Plausible | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__("state", pb.Enter(state=b""), form.size)
        self.folder = folder
        self.form = form
        self.base: pb.Manifest | None = None
        self.missing.update(dict.fromkeys(range(len(form.pieces)), 0))
        self._sync = sync
        self._random = random
        self._plausible = plausible
        self._warn = warn
        self._offsets = form.offsets
        self._offers: list[StateOffer] = []
        self._held: dict[int, StateOffer] = {}
        self._disputes: list[tuple[StateOffer, StateOffer]] = []
        self._audited_bytes = 0
        self._stuck_since: float | None = None
        self._state = -1

    # On disk

    def load(self) -> None:
        """Open the folder, and continue an earlier download. Raises DiskFull."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._state = os.open(self.folder / "state", os.O_RDWR | os.O_CREAT, 0o600)
        self._set_base(self._read(self.folder / "manifest"), is_new=False)
        for path in sorted(self.folder.glob("*.*[0-9]")):
            if (manifest := self._read(path)) is None or self.base is None:
                path.unlink()
            else:
                offer = StateOffer(peer=path.stem, is_open=False, manifest=manifest, path=path)
                self._offers.append(offer)
        if self._offers:
            for index, piece in enumerate(self.form.pieces):
                stored = os.pread(self._state, piece.size, self._offsets[index])
                digest = sha256(stored).digest()
                for offer in self._offers:
                    if offer.manifest.digests[index] == digest and self.fits(offer, index):
                        self._hold(index, offer)
                        break
        if not self._held:
            self._set_base(None)
        require_space(self.folder, self.total - self.size)

    def _read(self, path: Path) -> pb.Manifest | None:
        """A manifest, unless it is of another state."""
        with suppress(OSError, ProtocolViolation):
            return read_manifest(path.read_bytes(), self.form)
        return None

    def close(self) -> None:
        """Leave the folder as it is."""
        if self._state >= 0:
            os.close(self._state)
        self._state = -1

    # How far it is

    @property
    def peers(self) -> list[str]:
        """Donors of the pieces that are here."""
        return sorted({offer.peer for offer in self._held.values()})

    def is_complete(self) -> bool:
        """Whether all pieces are here, and all audits are done."""
        if self.base is None or len(self._held) < len(self.form.pieces):
            return False
        return not any(
            offer.auditing is not None or self._audit_of(offer) is not None
            for offer in self._giving()
        )

    def conclude(self) -> bool:
        """Whether the state is complete once the remaining disputes are decided."""
        self._settle()
        self._look_after_version()
        if self.is_complete():
            self._settle(is_last=True)
        return self.is_complete()

    # Donors and versions

    def listing_bytes(self, opened: pb.Opened, enter: pb.Enter) -> int:
        if self.base is not None and opened.name == enter.state:
            return 0
        if not 0 < opened.size <= self.form.largest_manifest:
            raise ProtocolViolation(
                f"a manifest of {opened.size} bytes: at most {self.form.largest_manifest} are "
                "needed"
            )
        return opened.size

    async def open(self, peer: PeerInfo, opened: pb.Opened, listing: bytes) -> StateOffer:
        if not listing:
            assert self.base is not None
            return self.offer(peer.peer_id, self.base)
        if sha256(listing).digest() != opened.name:
            raise ProtocolViolation("a manifest that does not match its digest")
        manifest = read_manifest(listing, self.form)
        if self._plausible and not await self._plausible(peer, manifest.swarm_step):
            raise ProtocolViolation(
                f"a snapshot of swarm step {manifest.swarm_step}, which nobody else is near"
            )
        return self.offer(peer.peer_id, manifest)

    def offer(self, peer: str, manifest: pb.Manifest) -> StateOffer:
        """A donor serves this snapshot now. Raises CheckpointError if there were too many."""
        same = (
            one for one in self._offers if one.peer == peer and same_version(one.manifest, manifest)
        )
        if (offer := next(same, None)) is None:
            if len(self._offers) >= MAX_OFFERS:
                raise CheckpointError(f"more than {MAX_OFFERS} snapshots were offered")
            path = self.folder / f"{peer}.{manifest.swarm_step}"
            offer = StateOffer(peer=peer, manifest=manifest, path=path)
            self._offers.append(offer)
        offer.manifest, offer.is_open = manifest, True
        if not offer.is_out:
            write_atomic(offer.path, write_manifest(manifest))
        if self.base is None:
            self._set_base(manifest)
        return offer

    def _giving(self) -> list[StateOffer]:
        return [one for one in self._offers if one.is_open and not one.is_out]

    def _set_base(self, manifest: pb.Manifest | None, is_new: bool = True) -> None:
        """Have all pieces fit this manifest from now on; None: until a donor offers the next."""
        self.base, self.enter = manifest, pb.Enter(state=b"")
        if manifest is not None:
            self.enter = pb.Enter(state=sha256(write_manifest(manifest)).digest())
            if is_new:
                write_atomic(self.folder / "manifest", write_manifest(manifest))
                self._drop(lambda index: not self.fits(self._held[index], index))

    def _look_after_version(self) -> None:
        """Switch to the version of serving donors where none of them can give what is missing."""
        giving = self._giving()
        if not (giving and self.missing) or any(
            self.fits(offer, index) for offer in giving for index in self.missing
        ):
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = monotonic()
        elif monotonic() - self._stuck_since > VERSION_PATIENCE:
            self._set_base(max(giving, key=lambda one: one.manifest.swarm_step).manifest)
            self._stuck_since = None

    def _is_of_base(self, offer: StateOffer) -> bool:
        return self.base is not None and same_version(offer.manifest, self.base)

    # Pieces

    def size_of(self, source: StateOffer, index: int) -> int:
        return self.form.pieces[index].size

    def fits(self, source: StateOffer, index: int) -> bool:
        if self.base is None or source.is_out:
            return False
        return fits(source.manifest, self.base, self.form.pieces[index].fragment, self._sync)

    def take(self, source: StateOffer) -> int | None:
        if source.auditing is not None or (index := self._audit_of(source)) is None:
            return super().take(source)
        source.audits, source.auditing = source.audits + 1, index
        self._audited_bytes += self.form.pieces[index].size
        return index

    def give_back(self, source: StateOffer, index: int) -> None:
        if source.auditing == index:
            source.auditing = None
        super().give_back(source, index)

    async def put(self, source: StateOffer, index: int, data: bytearray) -> None:
        digest = source.manifest.digests[index]
        values = await asyncio.to_thread(_verify, self.form.pieces[index], data, digest)
        if source.auditing == index:
            await self._compare(source, index, values)
        elif not self.fits(source, index):  # things may have changed while it came
            self.give_back(source, index)
        elif index not in self._held:  # else another donor was faster
            # Not on a thread: after a cancellation it would go on, beside the next writer of this
            # piece.
            with disk_full_error(self.folder):
                os.pwrite(self._state, data, self._offsets[index])
            self._hold(index, source)

    def _hold(self, index: int, offer: StateOffer) -> None:
        self._held[index] = offer
        self._came(index, self.form.pieces[index].size)

    def _drop(self, is_unwanted: Callable[[int], bool]) -> None:
        for index in [index for index in self._held if is_unwanted(index)]:
            del self._held[index]
            self.size -= self.form.pieces[index].size
            self.missing[index] = 0

    # Whom to believe

    def leave_out(self, offer: StateOffer) -> None:
        """Stop believing a donor, and fetch its pieces from others."""
        offer.is_out = True
        offer.path.unlink(missing_ok=True)
        self._drop(lambda index: self._held[index] is offer)
        if self._is_of_base(offer):
            giving = self._giving()
            self._set_base(giving[0].manifest if giving else None)

    async def _compare(self, offer: StateOffer, index: int, values: "Values") -> None:
        """See whether a piece has something in common with that of another donor."""
        from lowcomm_protocol.state import apart, read_piece

        other, piece = self._held.get(index), self.form.pieces[index]
        stored = await asyncio.to_thread(os.pread, self._state, piece.size, self._offsets[index])
        distance = await asyncio.to_thread(lambda: apart(values, read_piece(piece, stored)))
        offer.auditing = None
        if other is None or self._held.get(index) is not other:
            return
        if distance <= FAR_APART:
            offer.agreements += 1
            other.agreements += 1
        else:
            self._disputes.append((other, offer))
            self._warn(
                f"state of {offer.peer[-6:]} has nothing in common with that of another peer: one "
                "of them is left out"
            )
        self._settle()

    def _audit_of(self, offer: StateOffer) -> int | None:
        """A piece given by another donor, to be fetched from this one, too."""
        largest = max(piece.size for piece in self.form.pieces)
        most = max(largest, AUDITED_SHARE * self.total)
        if offer.is_out or offer.audits >= AUDITS or self._audited_bytes + largest > most:
            return None
        disputed = {one for pair in self._disputes for one in pair}
        others = {index: one for index, one in self._held.items() if one.peer != offer.peer}
        indexes = [index for index, one in others.items() if one in disputed] or list(others)
        fitting = [index for index in indexes if self.fits(offer, index)]
        return self._random.choice(fitting) if fitting else None

    def _settle(self, is_last: bool = False) -> None:
        """Leave out the worse donor of each dispute; ``is_last``: one of two equals, too."""

        def weight(offer: StateOffer) -> tuple[int, bool, bool]:
            return self._standing(offer), offer.is_open, self._is_of_base(offer)

        for pair in self._disputes:
            worse, better = sorted(pair, key=weight)
            is_decided = is_last or self._standing(worse) < self._standing(better)
            if is_decided and not (worse.is_out or better.is_out):
                self.leave_out(worse)

    def _standing(self, offer: StateOffer) -> int:
        """Agreements with other donors, less disputes."""
        others = {one for pair in self._disputes if offer in pair for one in pair}
        disputes = sum(one is not offer and not one.is_out for one in others)
        return offer.agreements - disputes - (offer.peer in self.struck)


def _verify(piece: Piece, data: bytearray, digest: bytes) -> "Values":
    from lowcomm_protocol.state import read_piece  # NumPy: most daemons never need it

    if sha256(data).digest() != digest:
        raise CheckpointError(f"piece {piece.index} does not match its digest")
    return read_piece(piece, data)
