"""Four peers read one epoch by the pure rules, in virtual time: what they know of one another comes
late, and some join, leave or are killed."""

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest

from helpers.packed_runs import RUN, spec_of
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.reading import (
    PieceClaim,
    SharedReading,
    TextPiece,
    deals_of,
    read_statement,
    write_statement,
)

PIECES = 128
SECONDS_A_PIECE, RECORDS_LATE, STATED_EVERY, RECORD_LIFE, SETTLE = 30, 8, 15, 30, 4
SPEC = spec_of(PIECES, interval=8)
STEPS_A_PIECE = 2


@dataclass(eq=False)
class Reader:
    """A peer: it claims three pieces, reads the first, and states what it has read."""

    number: int
    began: int
    pace: float
    kept: list[TextPiece] = field(default_factory=list)
    claimed: dict[TextPiece, int] = field(default_factory=dict)
    ended: dict[TextPiece, int] = field(default_factory=dict)
    done: float = 0.0
    left: int | None = None
    killed: bool = False

    def __post_init__(self) -> None:
        self.identity = Identity(bytes([self.number]) * 32)
        self.shared = SharedReading(SPEC, RUN, self.identity.peer_id)
        self.records: list[tuple[int, list[PieceClaim]]] = []
        """What it has published, and when."""

    def claims(self) -> list[PieceClaim]:
        kept = [PieceClaim(one, True) for one in (*self.kept, *self.ended)]
        return kept + [PieceClaim(one, False) for one in self.claimed]

    def seen(self, now: int) -> list[PieceClaim] | None:
        """Its claims as others see them; None: it is not there any more."""
        if self.left is not None and now >= self.left + (RECORD_LIFE if self.killed else 1):
            return None
        known = [claims for at, claims in self.records if at + RECORDS_LATE <= now]
        return known[-1] if known else []


class Together:
    """All readers, and the statements in the DHT."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0
        self.readers: list[Reader] = []
        self.stored: dict[tuple[int, str], bytes] = {}
        self.read = Counter[TextPiece]()
        """Windows that were read of each piece, by anybody."""

    def join(self) -> Reader:
        pace = self.random.uniform(0.5, 1.5) / SECONDS_A_PIECE
        self.readers.append(Reader(len(self.readers) + 1, self.now, pace))
        return self.readers[-1]

    def leave(self, reader: Reader, killed: bool) -> None:
        reader.left, reader.killed = self.now, killed
        if not killed:
            self._state(reader)

    def run(self) -> None:
        """Until the first epoch has been read for a while."""
        while any(one.shared.epochs[0] == 0 for one in self.there()) or not self.there():
            self.tick()

    def there(self) -> list[Reader]:
        return [one for one in self.readers if one.left is None]

    def tick(self) -> None:
        self.now += 1
        for reader in self.there():
            if (self.now + reader.number) % STATED_EVERY == 0:
                self._state(reader)
            self._follow(reader)
            while len(reader.kept) + len(reader.claimed) < 3:
                mine = [*reader.kept, *reader.claimed, *reader.ended]
                piece = reader.shared.choose(0, mine)
                assert piece is not None
                reader.claimed[piece] = self.now
            for piece, since in list(reader.claimed.items()):
                settled = self.now >= since + SETTLE + RECORDS_LATE and self.now > reader.began + 15
                if settled and len(reader.kept) < 2:
                    del reader.claimed[piece]
                    if not reader.shared.gives_way(piece):
                        reader.kept.append(piece)
            if not reader.records or reader.records[-1][1] != reader.claims():
                reader.records.append((self.now, reader.claims()))
            self._train(reader)

    def _follow(self, reader: Reader) -> None:
        claims = {
            one.identity.peer_id: seen
            for one in self.readers
            if one is not reader and (seen := one.seen(self.now)) is not None
        }
        reader.shared.follow(int(self.now * 1.5 / SECONDS_A_PIECE * STEPS_A_PIECE), claims)

    def _train(self, reader: Reader) -> None:
        reader.done += reader.pace if reader.kept else 0.0
        if reader.done >= 1.0:
            reader.done -= 1.0
            piece = reader.kept.pop(0)
            reader.shared.read(piece)
            reader.ended[piece] = self.now + 3 * STATED_EVERY
            self.read[piece] += 1

    def _state(self, reader: Reader) -> None:
        for place in reader.shared.places():
            for (epoch, peer), data in self.stored.items():
                if epoch == place[1] and peer != reader.identity.peer_id:
                    reader.shared.hear(read_statement(data))
            if (own := reader.shared.own(place)) is not None:
                data = write_statement(reader.identity, RUN, place, own, self.now)
                self.stored[place[1], reader.identity.peer_id] = data
        reader.ended = {piece: at for piece, at in reader.ended.items() if at > self.now}

    def windows(self) -> tuple[int, int, int]:
        """Windows of the epoch: all, those that were read once, and those read more often."""
        (deal,) = deals_of(SPEC)
        size = [deal.count(piece) for piece in range(PIECES)]
        times = [self.read[TextPiece(0, 0, piece)] for piece in range(PIECES)]
        once = sum(windows for windows, count in zip(size, times, strict=True) if count == 1)
        more = sum(windows for windows, count in zip(size, times, strict=True) if count > 1)
        return sum(size), once, more


def finish(together: Together) -> None:
    together.run()
    for _ in range(4 * SECONDS_A_PIECE):  # until those that are under way are read, too
        together.tick()


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 4))]


@pytest.mark.parametrize("seed", SEEDS)
def test_without_churn_four_peers_read_every_window_once(seed: int):
    together = Together(seed)
    for _ in range(4):
        together.join()
    finish(together)
    total, once, more = together.windows()
    assert (once, more) == (total, 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_with_joins_leaves_and_kills_at_least_97_percent_are_read_once(seed: int):
    together = Together(seed)
    for _ in range(4):
        together.join()
    for moment in sorted(together.random.sample(range(60, 900), 8)):
        while together.now < moment:
            together.tick()
        if len(together.there()) > 3:
            gone = together.random.choice(together.there())
            together.leave(gone, killed=together.random.random() < 0.6)
        else:
            together.join()
    finish(together)
    total, once, more = together.windows()
    assert once >= 0.97 * total and more <= 0.03 * total
