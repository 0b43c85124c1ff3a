"""A state under download from several donors: which pieces are here, who gave them, and which fit.

incoming/
  state        all pieces in their order; holes where one is missing
  journal      one line a piece: its digest and who gave it
  manifest     of the snapshot that all others must fit: the base

Verified pieces stay good, whatever happens to donors or to us: after a crash each piece in the
journal is hashed again, and the others are fetched.

Numbers that a donor has invented look like honest numbers, but differ from everybody else's. So a
few pieces, drawn at random, are fetched from a second donor, too. If the two have nothing in
common, a third donor decides which of them is left out; without a third, it is the donor that is
not the base.
"""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random
from time import monotonic
from typing import TYPE_CHECKING, Any

from lowcomm_node.errors import CheckpointError
from lowcomm_node.fetch.engine import Download, PieceRequest, Source
from lowcomm_node.storage.files import disk_full_error, require_space
from lowcomm_protocol.errors import ProtocolViolation
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import PeerInfo
from lowcomm_protocol.spec.sections import SyncSettings
from lowcomm_protocol.state import Manifest, Piece, StateForm, Version, name_of, read_manifest

if TYPE_CHECKING:
    from lowcomm_protocol.state import Values

AUDITS = 2
"""Pieces fetched from each donor although another one has given them already."""
AUDITED_SHARE = 1 / 32
"""Largest share of the state that is audited; always at least one piece."""
MAX_OFFERS = 1024
"""Snapshots that donors may offer for one state."""
FAR_APART = 0.75
"""Weights of honest peers at one version are a few hundredths apart; unrelated ones, 1.4."""
VERSION_PATIENCE = 5.0
"""Seconds to wait for a donor of our version, before we switch to the version of other donors and
fetch again what does not fit."""
Plausible = Callable[[PeerInfo, int], Awaitable[bool]]
"""Whether a donor's snapshot may be of this swarm step."""


async def _anything(donor: PeerInfo, swarm_step: int) -> bool:
    return True


@dataclass(eq=False, kw_only=True)
class StateOffer(Source):
    """One snapshot of one donor."""

    number: int
    version: Version
    manifest: Manifest | None = None
    """None: of an earlier start."""
    audits: int = 0
    is_auditing: bool = False
    """A piece that we have already is under way from it."""
    is_out: bool = False
    """It is not believed any more."""


class StateDownload(Download):
    """Call ``load`` first and ``close`` last."""

    name = "state"

    def __init__(
        self,
        folder: Path,
        form: StateForm,
        sync: SyncSettings,
        random: Random,
        plausible: Plausible = _anything,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__()
        self.folder = folder
        self.form = form
        self.total = form.size
        self.base: Manifest | None = None
        self.missing = dict.fromkeys(range(len(form.pieces)))
        self._sync = sync
        self._random = random
        self._plausible = plausible
        self._warn = warn
        self._offsets = form.offsets
        self._offers: list[StateOffer] = []
        self._held: dict[int, StateOffer] = {}
        self._disputes: list[tuple[StateOffer, StateOffer]] = []
        self._agreements: Counter[StateOffer] = Counter()
        self._audited_bytes = 0
        self._stuck_since: float | None = None
        self._state = self._journal = -1

    # on disk

    def load(self) -> None:
        """Open the folder, and continue an earlier download. Raises DiskFull."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._state = os.open(self.folder / "state", os.O_RDWR | os.O_CREAT, 0o600)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self._journal = os.open(self.folder / "journal", flags, 0o600)
        for piece, offer, digest in self._remembered():
            if sha256(self._stored(piece)).hexdigest() == digest and self.fits(offer, piece.index):
                self._hold(piece.index, offer)
        require_space(self.folder, self.form.size - self.size)

    def _remembered(self) -> list[tuple[Piece, StateOffer, str]]:
        """The pieces in the journal. It is emptied if it, or the base's manifest, is of another
        state."""
        form = self.form
        fixed = (form.run_id, form.plan, form.fragments, form.ranges)
        digest = sha256(repr(fixed).encode()).hexdigest()
        data = (self.folder / "journal").read_bytes()
        data = data[: data.rfind(b"\n") + 1]  # a crash may have cut the last line
        pieces: dict[int, tuple[Piece, StateOffer, str]] = {}
        try:
            head, *entries = map(json.loads, data.splitlines())
            if head["form"] != digest:
                raise ValueError("it is of another state")
            for entry in entries:
                if "piece" in entry:
                    piece, offer = form.pieces[entry["piece"]], self._offers[entry["source"]]
                    pieces[piece.index] = piece, offer, entry["sha256"]
                elif "out" in entry:
                    self._offers[entry["out"]].is_out = True
                else:
                    slow = tuple(map(bytes.fromhex, entry["slow"]))
                    self._add(entry["peer"], Version(entry["swarm_step"], slow))
            self.base = read_manifest((self.folder / "manifest").read_bytes(), form)
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            ProtocolViolation,
        ):
            self._offers.clear()
            pieces.clear()
            os.truncate(self._journal, 0)
            self._note({"form": digest})
        else:
            os.truncate(self._journal, len(data))
        return [one for one in pieces.values() if not one[1].is_out]

    def _note(self, entry: dict[str, Any]) -> None:
        os.write(self._journal, json.dumps(entry, separators=(",", ":")).encode() + b"\n")

    def _stored(self, piece: Piece) -> bytes:
        return os.pread(self._state, piece.size, self._offsets[piece.index])

    def forget(self) -> None:
        """Drop all pieces: they are useless."""
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
        return sorted({offer.peer for offer in self._held.values()})

    def is_complete(self) -> bool:
        """Whether all pieces are here, and all audits are done."""
        if self.base is None or len(self._held) < len(self.form.pieces):
            return False
        return not any(offer.is_auditing or self._audit_of(offer) for offer in self._giving())

    def conclude(self) -> bool:
        """Whether the state is complete when the disputes are decided that no third donor
        decided."""

        def weight(offer: StateOffer) -> tuple[int, bool, bool]:
            is_base = offer.version == self._base_version()
            return self._standing(offer), offer.is_open, is_base

        self._look_after_version()
        if not self.is_complete():
            return False
        for pair in self._disputes:
            if not any(offer.is_out for offer in pair):
                self.leave_out(min(pair, key=weight))
        return self.is_complete()

    # donors

    @property
    def enter(self) -> pb.Enter:
        """Ask for the snapshot that the pieces here are of, if it still exists."""
        name = name_of(self.base.to_bytes(self.form)) if self.base is not None else b""
        return pb.Enter(state=name)

    def listing_bytes(self, opened: pb.Opened) -> int:
        if self.base is not None and opened.name == self.enter.state:
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
        if name_of(listing) != opened.name:
            raise ProtocolViolation("a manifest that does not match its digest")
        manifest = read_manifest(listing, self.form)
        if not await self._plausible(peer, manifest.swarm_step):
            raise ProtocolViolation(
                f"a snapshot of swarm step {manifest.swarm_step}, which nobody else is near"
            )
        return self.offer(peer.peer_id, manifest)

    def offer(self, peer: str, manifest: Manifest) -> StateOffer:
        """A donor serves this snapshot now. Raises CheckpointError if there were too many."""
        same = (one for one in self._offers if one.peer == peer and one.version == manifest.version)
        if (offer := next(same, None)) is None:
            if len(self._offers) >= MAX_OFFERS:
                raise CheckpointError(f"more than {MAX_OFFERS} snapshots were offered")
            offer = self._add(peer, manifest.version)
            slow = [digest.hex() for digest in manifest.slow_digests]
            self._note({"peer": peer, "swarm_step": manifest.swarm_step, "slow": slow})
        offer.manifest, offer.is_open = manifest, True
        if self.base is None:
            self._rebase(manifest)
        return offer

    def strike(self, peer: str) -> None:
        """Let a donor that has violated the protocol lose its disputes; its verified pieces
        stay."""
        super().strike(peer)
        self._settle()

    def leave_out(self, offer: StateOffer) -> None:
        """Stop believing a donor. What it gave is fetched from others."""
        if offer.is_out:
            return
        offer.is_out = True
        self._note({"out": offer.number})
        self._drop(lambda index: self._held[index] is offer)
        if offer.version == self._base_version():
            self.base = None
            if giving := self._giving():
                self._rebase(giving[0].manifest)

    def _look_after_version(self) -> None:
        """Continue with an available version where pieces are missing that no serving donor can
        give, being of other versions. What does not fit it is fetched again."""
        giving = self._giving()
        is_stuck = (
            giving
            and self.missing
            and not any(self.fits(offer, index) for offer in giving for index in self.missing)
        )
        if not is_stuck:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = monotonic()
        elif monotonic() - self._stuck_since > VERSION_PATIENCE:
            self._rebase(max(giving, key=lambda one: one.version.swarm_step).manifest)
            self._stuck_since = None

    # pieces

    def give_back(self, source: Source, wanted: PieceRequest) -> None:
        assert isinstance(source, StateOffer)
        source.is_auditing = source.is_auditing and not wanted.is_audit
        super().give_back(source, wanted)

    def size_of(self, source: Source, index: int) -> int:
        return self.form.pieces[index].size

    def fits(self, source: Source, index: int) -> bool:
        assert isinstance(source, StateOffer)
        base = self._base_version()
        if base is None or source.is_out:
            return False
        return source.version.fits(base, self.form.pieces[index].fragment, self._sync)

    def take(self, source: Source) -> PieceRequest | None:
        assert isinstance(source, StateOffer)
        piece = self._audit_of(source)
        if piece is None:
            return super().take(source)
        source.audits, source.is_auditing = source.audits + 1, True
        self._audited_bytes += piece.size
        return PieceRequest(piece.index, piece.size, is_audit=True)

    async def put(self, source: Source, wanted: PieceRequest, data: bytearray) -> None:
        assert isinstance(source, StateOffer)
        assert source.manifest is not None, "it gives nothing now"
        piece, digest = self.form.pieces[wanted.index], source.manifest.digests[wanted.index]
        values = await asyncio.to_thread(_verify, piece, data, digest)
        if wanted.is_audit:
            await self._compare(source, piece, values)
        elif not self.fits(source, piece.index):  # things may have changed while it came
            self.give_back(source, wanted)
        elif piece.index not in self._held:  # else another donor was faster
            # Not on a thread: after a cancellation it would go on, beside the next writer of this
            # piece.
            with disk_full_error(self.folder):
                os.pwrite(self._state, data, self._offsets[piece.index])
            self._note({"piece": piece.index, "source": source.number, "sha256": digest.hex()})
            self._hold(piece.index, source)

    # comparing

    async def _compare(self, offer: StateOffer, piece: Piece, values: "Values") -> None:
        """See whether a piece has something in common with that of another donor."""
        from lowcomm_protocol.state import apart, read_piece

        other = self._held.get(piece.index)
        stored = await asyncio.to_thread(self._stored, piece)
        far = await asyncio.to_thread(lambda: apart(values, read_piece(piece, stored)))
        offer.is_auditing = False
        if other is None or self._held.get(piece.index) is not other:
            return
        if far <= FAR_APART:
            self._agreements.update((offer, other))
        else:
            self._disputes.append((other, offer))
            self._warn(
                f"state of {offer.peer[-6:]} has nothing in common with that of another peer: one "
                "of them is left out"
            )
        self._settle()

    def _audit_of(self, offer: StateOffer) -> Piece | None:
        """A piece given by another donor, to be fetched from this one, too."""
        largest = max(piece.size for piece in self.form.pieces)
        most = max(largest, AUDITED_SHARE * self.form.size)
        if offer.is_out or offer.audits >= AUDITS or self._audited_bytes + largest > most:
            return None
        disputed = {one for pair in self._disputes for one in pair}
        others = {index: one for index, one in self._held.items() if one.peer != offer.peer}
        indexes = [index for index, one in others.items() if one in disputed] or list(others)
        fitting = [self.form.pieces[index] for index in indexes if self.fits(offer, index)]
        return self._random.choice(fitting) if fitting else None

    def _settle(self) -> None:
        for one, other in self._disputes:
            better = self._standing(one) - self._standing(other)
            if better and not (one.is_out or other.is_out):
                self.leave_out(other if better > 0 else one)

    def _standing(self, offer: StateOffer) -> int:
        """Agreements with other donors, less disputes."""
        others = {one for pair in self._disputes if offer in pair for one in pair}
        disputes = sum(one is not offer and not one.is_out for one in others)
        return self._agreements[offer] - disputes - (offer.peer in self.struck)

    # small things

    def _add(self, peer: str, version: Version) -> StateOffer:
        self._offers.append(
            StateOffer(peer=peer, is_open=False, number=len(self._offers), version=version)
        )
        return self._offers[-1]

    def _giving(self) -> list[StateOffer]:
        return [one for one in self._offers if one.is_open and not one.is_out]

    def _base_version(self) -> Version | None:
        return self.base.version if self.base is not None else None

    def _hold(self, index: int, offer: StateOffer) -> None:
        self._held[index] = offer
        self._came(index)

    def _drop(self, unwanted: Callable[[int], bool]) -> None:
        for index in [index for index in self._held if unwanted(index)]:
            del self._held[index]
            self.missing[index] = None

    def _rebase(self, manifest: Manifest | None) -> None:
        assert manifest is not None, "only offers of this start are open"
        temporary = self.folder / ".manifest"
        temporary.write_bytes(manifest.to_bytes(self.form))
        temporary.replace(self.folder / "manifest")
        self.base = manifest
        self._drop(lambda index: not self.fits(self._held[index], index))


def _verify(piece: Piece, data: bytearray, digest: bytes) -> "Values":
    from lowcomm_protocol.state import read_piece  # NumPy: most daemons never need it

    if sha256(data).digest() != digest:
        raise CheckpointError(f"piece {piece.index} does not match its digest")
    return read_piece(piece, data)
