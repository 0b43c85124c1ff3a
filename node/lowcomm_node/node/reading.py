"""Pieces of packed text that this node reads, from the choice to the trainer.

choose ──► claim, in our record ──► have its block fetched ──► hand it to the trainer ──► stated
                                          │
                                          └── nobody gives it for ten minutes: skipped

``SharedReading`` has the rules. Of a part the trainer has at least two pieces, more where a batch
takes several. The next ones are claimed early, so that others know it before they are handed over.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice, takewhile
from math import ceil
from time import monotonic, time
from typing import Any

from lowcomm_node.catalogue import Waiting
from lowcomm_node.dht.keys import MAX_LIFE, read_key
from lowcomm_node.errors import TrainerError
from lowcomm_node.fetch.packs import PackStore
from lowcomm_node.fetch.text import RunText
from lowcomm_node.node.messages import AddText, PieceRead, ReadAgain, Ready, TextAwaited
from lowcomm_node.node.report import NodeState
from lowcomm_node.status.events import PieceSkipped
from lowcomm_node.storage.files import read_small, write_atomic
from lowcomm_node.swarm.membership import Membership
from lowcomm_node.system.tasks import Tasks, endure, repeat
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.reading import (
    PieceClaim,
    Place,
    SharedReading,
    deals_of,
    read_claims,
    read_statement,
    supported_step,
    write_claims,
    write_statement,
)
from lowcomm_protocol.spec.run import SignedRun
from lowcomm_protocol.spec.sections import TextPiece

UNGIVEN, LONGEST = 600.0, 3600.0
"""Seconds after which a block is skipped that nobody gives, or that still is not here."""
RETRY = 10.0
"""Seconds after which a piece is tried again that our own disk has no room for."""
PATIENCE = 15.0
"""Seconds that training waits before it reads again what is here."""
ENOUGH = 0.25
"""Pieces that are enough for that while more come, beside those of a block."""
MOST_AGAIN = 4096
"""Pieces that are read again."""
EARLY = 6
"""Pieces that are claimed early, of all parts, where they are of one block."""
SETTLE = 2.0
"""Looks at the DHT after which others should know of a claim, where there is time."""
LOOKS, LONGEST_LOOK, PEERS_A_SECOND = 2.0, 120.0, 8
"""Between two looks at statements: that many looks for records, the longest pause in seconds, and
how many peers make it a second longer."""
MOST_RESTORED = 8
"""Statements of peers that have gone which we store again in one look."""
MAX_KEPT_BYTES = 16 * 1024**2
"""Of statements in the home."""


@dataclass(eq=False)
class _Held:
    """A piece that we claim."""

    piece: TextPiece
    block: range
    """The pieces that must be here, so that it can be read."""
    is_resumed: bool = False
    """Whether the trainer's queue had it when it started."""
    is_here: bool = False
    """Whether its block is."""
    is_kept: bool = False
    """Whether the trainer has it."""
    claimed: float = field(default_factory=monotonic)
    given: float = field(default_factory=monotonic)
    """When it was last on its way."""
    why: str = ""
    """What it waits for."""
    fetching: asyncio.Task[None] | None = None


class TextReader:
    """Chooses pieces, has them fetched, and hands them to the trainer of one run."""

    def __init__(self, state: NodeState, run: SignedRun, identity: Identity, text: RunText) -> None:
        self._state = state
        self._run = run
        self._identity = identity
        self._text = text
        self._board = state.board
        self._shared = SharedReading(run.spec, run.run_id, identity.peer_id)
        self._deals = deals_of(run.spec)
        self._held: dict[TextPiece, _Held] = {}
        self._ended: dict[TextPiece, float | None] = {}
        """Pieces that we have read, until others know of it, and when that was stated."""
        self._skipped: set[TextPiece] = set()
        self._issued_ms: dict[Place, int] = {}
        self._changed_places: set[Place] = set()
        """Where we have read since our last statement."""
        self._changed = asyncio.Event()
        self._built = asyncio.Event()  # set once there is a trainer, and the stores are open
        self._is_known = self._has_begun = False
        self._waits_since: float | None = None
        """Since when training has waited for text."""
        self._again = set[int]()
        """Parts that are read again, since their next pieces do not come."""
        self._published: bytes | None = None
        self._publish_due = 0.0
        self._tasks = Tasks()
        self._file = state.settings.paths.read(run.fingerprint)
        self._kept = b""

    # what others ask

    def claims(self) -> bytes:
        """Field ``reading`` of our record."""
        if self._board.phase in ("finished", "left", "paused"):
            return b""  # others may read it
        ours = sorted(self._held.values(), key=lambda held: not held.is_kept)
        ended = [PieceClaim(piece, True) for piece in reversed(self._ended)]
        return write_claims([*(PieceClaim(held.piece, held.is_kept) for held in ours), *ended])

    def describe(self, part: int) -> Mapping[str, Any]:
        """Fields of `TextStatus` on the reading of a part."""
        epoch = self._shared.epochs[part]
        own = self._shared.own((part, epoch))
        return {
            "epoch": epoch,
            "pieces_read": int(self._shared.pieces_read((part, epoch)).sum()),
            "own_pieces": 0 if own is None else int(own.sum()),
            "waiting": self._why(part) if self._waits_since is not None else "",
        }

    def hear(self, event: PieceRead | TextAwaited) -> None:
        """Take in news of the trainer."""
        if isinstance(event, TextAwaited):
            self._waits_since = monotonic() if event.waits else None
        else:
            piece = TextPiece(event.part, event.epoch, event.piece)
            self._held.pop(piece, None)
            self._ended[piece] = None
            self._shared.read(piece)
            self._changed_places.add((piece.part, piece.epoch))
        self._changed.set()

    def take_over(self, ready: Ready) -> None:
        """Go on with the queue of a trainer that has started, or has taken over a state."""
        before, self._waits_since = self._held, None
        for held in before.values():
            held.is_kept = held.is_resumed = False
        self._held = {}
        for piece in ready.text:
            block = self._deals[piece.part].block(piece.piece)
            self._held[piece] = before.pop(piece, None) or _Held(piece, block)
            self._held[piece].is_resumed = True
        self._held |= before
        self._again.clear()
        for held in self._held.values():
            self._begin(held)
        self._built.set()
        self._changed.set()

    # work

    async def run(self, membership: Membership) -> None:
        """Read until cancelled."""
        warn = self._board.warning("defect")
        await self._built.wait()
        for part, store in enumerate(self._text.stores):
            store.assigned = partial(self._assigned, part)
            store.readers = partial(self._shared.readers, part)
        await asyncio.to_thread(self._load)
        poll, record_life = self._state.settings.poll, self._state.settings.record_life
        reading = partial(repeat, partial(self._read, membership), lambda: 0.0)
        stating = partial(
            repeat,
            partial(self._state_and_look, membership),
            lambda: (
                min(LONGEST_LOOK, record_life, LOOKS * poll)
                + min(LONGEST_LOOK, membership.count() / PEERS_A_SECOND)
            ),
        )
        try:
            await asyncio.gather(
                endure("no text is read", reading, warn),
                endure("nobody learns what is read here", stating, warn),
            )
        finally:
            await self._tasks.cancel()

    async def _read(self, membership: Membership) -> None:
        """Do what is due now, and wait for news."""
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._changed.wait()
        self._changed.clear()
        if not self._is_known:
            return
        self._follow(membership)
        shares = [part.share for part in self._state.spec_now(self._run).data.parts]
        if self._state.supervisor.runs and self._board.phase != "finished":
            for part, share in enumerate(shares):
                if share:
                    self._fill(part, share / sum(shares))
                    await self._read_again(part)
                else:  # an amendment may end a part
                    for held in self._of(part):
                        self._let_go(held)
            self._skip_missing()
            await self._hand_over(membership, shares)
        self._show()
        claims, now = self.claims(), monotonic()
        if claims != self._published and now >= self._publish_due:
            self._published, self._publish_due = claims, now + self._state.settings.poll
            await membership.publish(renews=True)

    def _queued(self, part: int, share: float) -> int:
        """Pieces of a part that the trainer has."""
        windows = self._run.spec.train.batch * share / max(1, self._deals[part].count(0))
        return max(2, 1 + ceil(2 * windows))

    def _follow(self, membership: Membership) -> None:
        alive = membership.roster.alive(time())
        step = supported_step(self._board.position()[0], (info.swarm_step for info in alive))
        self._shared.follow(step, {info.peer_id: read_claims(info.reading) for info in alive})

    def _of(self, part: int) -> list[_Held]:
        return [held for held in self._held.values() if held.piece.part == part]

    def _assigned(self, part: int) -> set[int]:
        return {piece for held in self._of(part) for piece in held.block}

    def _fill(self, part: int, share: float) -> None:
        """Claim pieces of a part, and have their blocks fetched."""
        early = min(EARLY // len(self._deals), self._deals[part].size)
        while len(self._of(part)) < max(early, self._queued(part, share) + 1):
            piece = self._shared.choose(part, [*self._held, *self._ended, *self._skipped])
            if piece is None:
                return
            self._held[piece] = _Held(piece, self._deals[part].block(piece.piece))
            self._begin(self._held[piece])

    async def _read_again(self, part: int) -> None:
        """Let training go on with text that is here, while the next comes slowly, or not at all."""
        long_ago = monotonic() - PATIENCE
        lacking = [held for held in self._of(part) if not held.is_here]
        waits = self._waits_since is not None and self._waits_since < long_ago
        if part in self._again or not (waits and lacking):
            return
        store = self._text.stores[part]
        training = range(store.part.training_pieces)
        here = tuple(islice((piece for piece in training if store.file.has(piece)), MOST_AGAIN))
        is_missing = any(held.given < long_ago for held in lacking)
        if here and (is_missing or len(here) >= ENOUGH * len(lacking[0].block)):
            self._again.add(part)
            again = "training goes on with text that is here, and reads it again"
            self._board.warn("text-missing", f"{self._why(part)}; {again}")
            with suppress(TrainerError):  # the next trainer waits again
                await self._state.supervisor.trainer.ask(ReadAgain(part=part, pieces=here))

    def _begin(self, held: _Held) -> None:
        if not held.is_here and held.fetching is None:
            held.fetching = self._tasks.start(self._have(held))

    def _let_go(self, held: _Held) -> None:
        """Claim a piece no longer."""
        del self._held[held.piece]
        if held.fetching is not None:
            held.fetching.cancel()

    async def _have(self, held: _Held) -> None:
        """Have a block here, however long it takes."""
        store = self._text.stores[held.piece.part]

        def show(text: str) -> None:
            held.why = text

        while not held.is_here:
            try:
                await store.have(held.block, show)
                held.is_here = True
                self._changed.set()
            except LowcommError as error:
                held.why = str(error)
                await asyncio.sleep(RETRY)

    async def _hand_over(self, membership: Membership, shares: list[float]) -> None:
        pieces: list[_Held] = []
        for part, share in enumerate(shares):
            pieces += self._due(part, share / sum(shares), membership)
        if not pieces:
            return
        self._has_begun = True
        if self._again:
            self._again -= {held.piece.part for held in pieces}
            if not self._again:
                self._board.withdraw("text-missing")
        for held in pieces:
            held.is_kept = True
        with suppress(TrainerError):  # the next trainer says what it has
            added = AddText(pieces=tuple(held.piece for held in pieces))
            await self._state.supervisor.trainer.ask(added)

    def _due(self, part: int, share: float, membership: Membership) -> list[_Held]:
        """Pieces of a part that the trainer gets now: first those of its queue, in their order."""
        ours = self._of(part)
        due: list[_Held] = []
        for held in [held for held in ours if held.is_resumed and not held.is_kept]:
            if not held.is_here:
                return due
            due.append(held)
        kept = sum(held.is_kept for held in ours) + len(due)
        settle = SETTLE * self._state.settings.poll if membership.count() else 0.0
        for held in ours:
            # Others may take what they do not know of yet; training must not wait for that.
            is_needed = self._has_begun and kept < 2
            is_settled = is_needed or monotonic() >= held.claimed + settle
            if kept >= self._queued(part, share):
                break
            if held.is_here and is_settled and not (held.is_kept or held.is_resumed):
                if self._shared.gives_way(held.piece):
                    self._let_go(held)
                    self._changed.set()
                else:
                    due.append(held)
                    kept += 1
        return due

    # text that does not come

    def _skip_missing(self) -> None:
        now = monotonic()
        for held in [held for held in self._held.values() if not held.is_here]:
            store = self._text.stores[held.piece.part]
            lacking = [piece for piece in held.block if not store.file.has(piece)]
            if not lacking or any(store.is_coming(piece) for piece in lacking):
                held.given = now
            is_last = len(held.block) == store.part.training_pieces  # there is nothing else to read
            is_late = now > min(held.given + UNGIVEN, held.claimed + LONGEST)
            if held.piece in self._held and is_late and not is_last:
                self._skip(store, held, lacking)

    def _skip(self, store: PackStore, held: _Held, lacking: list[int]) -> None:
        """Read in this epoch nothing of a block."""
        part, epoch = held.piece.part, held.piece.epoch
        kept = {one for one in self._skipped if one.part != part or one.epoch == epoch}
        self._skipped = kept | {TextPiece(part, epoch, piece) for piece in held.block}
        for piece in self._skipped & self._held.keys():
            self._let_go(self._held[piece])
        name, piece = store.part.name, lacking[0] if lacking else held.piece.piece
        self._board.tell(PieceSkipped(text=name, epoch=epoch, piece=piece))
        self._board.withdraw("piece-skipped")
        others = sum(skipped.part == part for skipped in self._skipped) - 1
        block = f", with {others} that are shuffled with it," if others else ""
        why = held.why or "nobody gives it"
        self._board.warn(
            "piece-skipped",
            f"piece {piece} of {name}{block} did not come for ten minutes and is skipped: {why}",
        )

    def _why(self, part: int) -> str:
        """What a part waits for."""
        reasons = (held.why for held in self._of(part) if held.why and not held.is_here)
        return next(reasons, f"the next piece of {self._text.stores[part].part.name}")

    def _show(self) -> None:
        waiting = self._board.waiting
        if self._waits_since is None or self._board.phase != "training":
            if waiting is not None and waiting.code == "text" and self._board.phase == "training":
                self._board.show(None)
            return
        parts = range(len(self._text.stores))
        lacking = next(
            (part for part in parts if any(not held.is_here for held in self._of(part))), 0
        )
        self._board.show(Waiting("text", f"training waits for text: {self._why(lacking)}"))

    # statements

    async def _state_and_look(self, membership: Membership) -> None:
        """Publish what we have read, and learn what others have."""
        barred = membership.roster.admission.barred
        for peer in self._shared.peers():
            if barred(peer, time()):
                self._shared.forget(peer)
        places, kept = self._shared.places(), list[bytes]()
        for place in places:
            kept += await self._exchange_statements(place, membership)
        self._is_known = True
        settled = monotonic() - 2 * LOOKS * self._state.settings.poll
        for piece, stated in list(self._ended.items()):
            if (stated is not None and stated < settled) or (
                (piece.part, piece.epoch) not in places
            ):
                del self._ended[piece]
        self._changed.set()
        await asyncio.to_thread(self._keep, kept)

    async def _exchange_statements(self, place: Place, membership: Membership) -> list[bytes]:
        """Statements on one epoch that we keep in the home."""
        key, me = read_key(self._run.run_id, *place), self._identity.peer_id
        discovery = membership.discovery
        found = await discovery.lookup(key)
        for peer, data in found.items():
            barred = membership.roster.admission.barred(peer, time())
            with suppress(LowcommError):
                if peer != me and not barred:
                    self._shared.hear(read_statement(data))
        kept = self._shared.statements(place)
        alive = {info.peer_id for info in membership.roster.alive(time())}
        gone = [peer for peer in kept if peer not in found and peer not in alive]
        for peer in gone[:MOST_RESTORED]:
            await discovery.publish(key, peer, kept[peer], MAX_LIFE)
        own = self._shared.own(place)
        if own is None:
            return list(kept.values())
        stating = [piece for piece in self._ended if (piece.part, piece.epoch) == place]
        now_ms = round(time() * 1000)
        issued_ms = max(now_ms, self._issued_ms.get(place, 0) + 1)
        statement = write_statement(self._identity, self._run.run_id, place, own, issued_ms)
        if place in self._changed_places or me not in found:
            self._issued_ms[place] = issued_ms
            self._changed_places.discard(place)
            await discovery.publish(key, me, statement, MAX_LIFE)
        for piece in stating:
            if self._ended.get(piece, 0.0) is None:
                self._ended[piece] = monotonic()
        return [statement, *kept.values()]

    def _load(self) -> None:
        """Read the statements in the home."""
        data = read_small(self._file, MAX_KEPT_BYTES)
        while len(data) > 4:
            end = 4 + int.from_bytes(data[:4])
            with suppress(LowcommError):
                statement = read_statement(data[4:end])
                place = statement.part, statement.epoch
                if statement.peer_id == self._identity.peer_id:
                    self._issued_ms[place] = statement.issued_ms
                    self._shared.resume(place)
                self._shared.hear(statement, is_met=True)
            data = data[end:]

    def _keep(self, statements: list[bytes]) -> None:
        lengths = accumulate(4 + len(statement) for statement in statements)
        fitting = takewhile(
            lambda pair: pair[1] <= MAX_KEPT_BYTES, zip(statements, lengths, strict=True)
        )
        data = b"".join(len(statement).to_bytes(4) + statement for statement, _ in fitting)
        if data and data != self._kept:
            write_atomic(self._file, data, 0o600)
            self._kept = data
