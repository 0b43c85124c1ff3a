"""What must hold where peers share out a text without a coordinator: the honest read each piece
once, and one liar takes no more than its share."""

from collections.abc import Sequence

import numpy as np
import pytest

from helpers.packed_runs import RUN, spec_of
from lowcomm_protocol import reading
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import sign
from lowcomm_protocol.reading import (
    MAX_STATEMENT_BYTES,
    PieceClaim,
    SharedReading,
    TextPiece,
    read_claims,
    read_statement,
    supported_step,
    write_claims,
    write_statement,
)

PIECES = 64
ADA, BOB, EVE = (Identity(bytes([number]) * 32) for number in (1, 2, 3))


def stated(who: Identity, pieces: Sequence[int], epoch: int = 0, issued: int = 1) -> bytes:
    """A signed statement of these pieces."""
    read = np.zeros(PIECES, np.bool_)
    read[list(pieces)] = True
    return write_statement(who, RUN, (0, epoch), read, issued)


def knowing(clock: int, *met: Identity) -> SharedReading:
    """What Ada knows at a swarm step, where she has met these."""
    shared = SharedReading(spec_of(), RUN, ADA.peer_id)
    shared.follow(clock, {who.peer_id: () for who in met})
    return shared


def believed(shared: SharedReading, epoch: int = 0) -> int:
    """How many pieces count as read."""
    return int(shared.pieces_read((0, epoch)).sum())


def all_of(shared: SharedReading) -> list[TextPiece]:
    """The pieces of the first epoch that are chosen one after the other."""
    chosen: list[TextPiece] = []
    while (piece := shared.choose(0, chosen)) is not None and piece.epoch == 0:
        chosen.append(piece)
    return chosen


def test_claims_and_statements_are_read_as_they_were_written():
    claims = (
        PieceClaim(TextPiece(7, 70_000, 1 << 20), True),
        PieceClaim(TextPiece(0, 0, 3), False),
    )
    assert read_claims(write_claims(claims)) == claims
    assert len(write_claims(claims * 20)) == 16 * 7, "the first claims count"
    found = read_statement(stated(BOB, [0, 9, 63], epoch=5, issued=77))
    assert (found.peer_id, found.part, found.epoch, found.issued_ms) == (BOB.peer_id, 0, 5, 77)
    assert found.bits(PIECES) == 1 << 63 | 1 << 54 | 1
    assert found.bits(12) == 1 << 11 | 1 << 2, "pieces that do not exist are left out"


def test_a_statement_of_a_million_pieces_fits():
    read = np.random.default_rng(0).random(1 << 20) < 0.5
    data = write_statement(BOB, RUN, (0, 0), read, 1)
    said = read_statement(data).bits(1 << 20)
    assert len(data) <= MAX_STATEMENT_BYTES and said.bit_count() > 90_000
    assert not said & ~int.from_bytes(np.packbits(read).tobytes()), "nothing that was not read"


@pytest.mark.parametrize(
    "fields",
    [
        {"pieces": b""},
        {"pieces": b"no deflate"},
        {"pieces": reading.zlib.compress(bytes((1 << 17) + 1))},
        {"pieces": reading.zlib.compress(b"\x80") + b"more"},
        {"part": 8},
        {"epoch": 1 << 24},
        {"run_id": b"short"},
    ],
    ids=repr,
)
def test_a_statement_out_of_bounds_is_refused(fields: dict[str, object]):
    whole = {"run_id": bytes(32), "peer_id": BOB.peer_id, "pieces": reading.zlib.compress(b"\x80")}
    read_statement(sign(BOB, "pieces read", pb.PiecesRead(**whole)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(LowcommError):
        read_statement(sign(BOB, "pieces read", pb.PiecesRead(**whole | fields)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(LowcommError):  # signed by another
        read_statement(sign(EVE, "pieces read", pb.PiecesRead(**whole)))  # pyright: ignore[reportArgumentType]


def test_a_peer_alone_reads_each_piece_once_and_then_the_next_epoch():
    shared = knowing(0)
    for epoch in range(3):
        pieces: list[int] = []
        for _ in range(PIECES):
            piece = shared.choose(0)
            assert piece is not None and piece.epoch == epoch
            shared.read(piece)
            pieces.append(piece.piece)
        assert sorted(pieces) == list(range(PIECES))
    assert len(shared._own) <= 2, "what does not matter any more is forgotten"


def test_every_window_of_a_block_is_dealt_to_one_of_its_pieces():
    text = spec_of().data.parts[0]  # 64 pieces of 8192 tokens, the last with 3192
    for size, context in ((1, 4096), (5, 1000), (64, 8192)):
        deal = reading.Deal(text, context, size)
        blocks = [deal.block(piece) for piece in range(0, PIECES, size)]
        assert [piece for block in blocks for piece in block] == list(range(PIECES))
        for block in blocks:
            counts = [deal.count(piece) for piece in block]
            assert sum(counts) == deal.windows(block[0]) and max(counts) - min(counts) <= 1
        tokens = [min(len(block) * 8192, text.tokens - block.start * 8192) for block in blocks]
        assert [deal.windows(block[-1]) for block in blocks] == [n // context for n in tokens]
    assert reading.Deal(text, 4096, 1).count(63) == 0, "tokens that fill no window are not read"


def test_a_peer_reads_what_a_block_deals_before_it_goes_to_the_next_one():
    shared = SharedReading(spec_of(shuffle_pieces=8), RUN, ADA.peer_id)
    order = [piece.piece // 8 for piece in all_of(shared)]
    assert [order[at : at + 8] for at in range(0, 64, 8)] == [[block] * 8 for block in order[::8]]
    assert sorted(order[::8]) == list(range(8)) != order[::8]
    shared.follow(0, {BOB.peer_id: [PieceClaim(TextPiece(0, 0, 9), True)]})
    assert shared.readers(0, [15]) == {BOB.peer_id} and not shared.readers(0, [7, 16])


def test_two_peers_choose_in_different_orders_and_leave_what_the_other_claims():
    one, other = (SharedReading(spec_of(), RUN, who.peer_id) for who in (ADA, BOB))
    assert [p.piece for p in all_of(one)[:8]] != [p.piece for p in all_of(other)[:8]]
    claimed = all_of(other)[:16]
    one = SharedReading(spec_of(), RUN, ADA.peer_id)
    one.follow(0, {BOB.peer_id: [PieceClaim(piece, False) for piece in claimed]})
    assert set(all_of(one)).isdisjoint(claimed)
    one.follow(0, {})
    assert set(all_of(one)) == {*all_of(other), *claimed}, "a peer that goes gives pieces back"


def test_of_two_claims_one_gives_way_unless_it_is_kept_and_no_liar_stops_anybody():
    piece = TextPiece(0, 0, 5)
    both = {who.peer_id: SharedReading(spec_of(), RUN, who.peer_id) for who in (ADA, BOB)}
    for me, shared in both.items():
        shared.follow(0, {peer: [PieceClaim(piece, False)] for peer in both if peer != me})
    assert sum(shared.gives_way(piece) for shared in both.values()) == 1
    shared = knowing(0)
    shared.follow(0, {EVE.peer_id: [PieceClaim(TextPiece(0, 0, n), True) for n in range(16)]})
    most = reading.MOST_WAYS
    assert [shared.gives_way(TextPiece(0, 0, n)) for n in range(most + 2)] == [True] * most + [
        False
    ] * 2
    shared.read(TextPiece(0, 0, 3))
    assert shared.gives_way(TextPiece(0, 0, 4)), "it counts again after a piece that was read"


def test_a_liar_takes_at_most_what_one_peer_can_have_read():
    shared = knowing(20, EVE)  # in 20 steps a peer reads 10 pieces, and some since
    shared.hear(read_statement(stated(EVE, range(PIECES))))
    assert believed(shared) == (20 + 8) / 2 + 1
    shared.follow(40, {})
    assert believed(shared) == (40 + 8) / 2 + 1, "it is believed more as time goes by"


def test_many_names_of_one_liar_count_no_more_than_those_that_we_have_met():
    shared = knowing(1000, BOB)
    shared.hear(read_statement(stated(BOB, range(8))))
    shared.read(TextPiece(0, 0, 8))
    for number in range(50):
        who = Identity(bytes([100 + number]) * 32)
        shared.hear(read_statement(stated(who, [number + 10])))
    assert believed(shared) == 18, "nine that are known, nine of strangers"
    newcomer = knowing(1000)
    newcomer.hear(read_statement(stated(EVE, range(PIECES))))
    assert believed(newcomer) == 0, "who has met nobody believes nobody"


def test_in_an_epoch_that_we_did_not_see_begin_nobody_alone_is_believed():
    shared = knowing(10_000, BOB, EVE)
    shared.hear(read_statement(stated(BOB, range(5), epoch=3)))
    shared.hear(read_statement(stated(EVE, range(PIECES), epoch=3)))
    assert believed(shared, 3) == 5 + 8 / 2 + 1


def test_an_epoch_that_began_before_our_eyes_bounds_what_is_read_in_it():
    shared = knowing(10_000, EVE)
    for number in range(PIECES):
        shared.read(TextPiece(0, 0, number))
    piece = shared.choose(0)
    assert piece is not None and piece.epoch == 1
    shared.hear(read_statement(stated(EVE, range(PIECES), epoch=1)))
    assert believed(shared, 1) == 8 / 2 + 1
    shared.follow(10_010, {})
    assert believed(shared, 1) == (10 + 8) / 2 + 1


def test_a_newcomer_begins_where_most_others_read_and_a_reader_follows_no_single_peer():
    def at(epoch: int) -> list[PieceClaim]:
        return [PieceClaim(TextPiece(0, epoch, 0), True)]

    shared = knowing(0)
    shared.follow(0, {"a": at(5), "b": at(5), "c": at(1 << 23)})
    assert shared.epochs == [5]
    shared.read(TextPiece(0, 5, 1))
    shared.follow(0, {"c": at(9)})
    assert shared.epochs == [5]
    shared.follow(0, {"b": at(6), "c": at(9)})
    assert shared.epochs == [6]


def test_a_piece_that_a_lost_peer_gives_back_is_read_though_the_next_epoch_has_begun():
    shared = knowing(0)
    for number in range(1, PIECES):
        shared.read(TextPiece(0, 0, number))
    shared.follow(0, {BOB.peer_id: [PieceClaim(TextPiece(0, 0, 0), True)]})
    piece = shared.choose(0)
    assert piece is not None and piece.epoch == 1
    shared.follow(0, {})
    assert shared.choose(0) == TextPiece(0, 0, 0)


def test_choosing_among_a_thousand_peers_ranks_the_pieces_once(monkeypatch: pytest.MonkeyPatch):
    ranked: list[int] = []
    honest = reading.rank

    def counted(seed: int, place: reading.Place, peer: str, pieces: reading.Ranks) -> reading.Ranks:
        ranked.append(len(pieces))
        return honest(seed, place, peer, pieces)

    monkeypatch.setattr(reading, "rank", counted)
    shared = SharedReading(spec_of(119_000), RUN, ADA.peer_id)
    claims = {
        f"peer{peer}": [PieceClaim(TextPiece(0, 0, 16 * peer + n), True) for n in range(16)]
        for peer in range(1000)
    }
    shared.follow(0, claims)
    piece = shared.choose(0)
    assert piece is not None and piece.piece >= 16_000
    assert len(ranked) == 2 and ranked[0] == 119_000 - 16_000, "no pass for each peer"


def test_a_statement_of_before_replaces_none_of_later_and_removed_peers_count_no_more():
    shared = knowing(1000, BOB)
    shared.hear(read_statement(stated(BOB, range(9), issued=2)))
    shared.hear(read_statement(stated(BOB, range(2), issued=1)))
    assert believed(shared) == 9 and set(shared.statements((0, 0))) == {BOB.peer_id}
    shared.forget(BOB.peer_id)
    assert believed(shared) == 0


def test_no_peer_alone_pushes_the_clock():
    assert supported_step(5, []) == supported_step(5, [10**9]) == 5
    assert supported_step(5, [9, 10**9]) == 9 and supported_step(50, [9, 10]) == 50
