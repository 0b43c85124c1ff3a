"""What must hold for the sessions of tunnels: nothing is lost, however streams break off. No I/O,
and no clock."""

import os
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowcomm_node.net.frames import (
    ANSWER,
    MAX_LENGTH,
    OPENING,
    SESSION,
    Ack,
    Decoder,
    Opening,
    Signal,
    numbered,
    opening,
    read_answer,
    read_opening,
    word,
)
from lowcomm_node.net.session import Session, Sizes, Slabs
from lowcomm_protocol.errors import ProtocolViolation

NAME = bytes(range(SESSION))
SMALL = Sizes(slab=8, window=64, shared=200, spare=16, ack_every=16)

# Words


def feed(session: Session, data: bytes) -> bytes:
    """The bytes for gRPC in what a stream brings."""
    return b"".join(session.feed(session.decode(memoryview(data))))


def encode(part: bytes | Signal | Ack) -> bytes:
    if isinstance(part, Ack):
        return numbered(Signal.ACK, part.number)
    return word(part) if isinstance(part, Signal) else word(len(part)) + part


def test_pieces_and_signals_come_out_as_they_went_in():
    parts = [b"abc", Ack(2**63), Signal.END, Signal.GONE]
    found = list(Decoder().feed(memoryview(b"".join(map(encode, parts)))))
    assert [bytes(part) if isinstance(part, memoryview) else part for part in found] == parts


PARTS = st.lists(
    st.binary(min_size=1, max_size=300)
    | st.sampled_from([Signal.END, Signal.GONE])
    | st.builds(Ack, st.integers(0, 2**64 - 1)),
    max_size=20,
)


@given(PARTS, st.lists(st.integers(1, 50)))
def test_it_does_not_matter_how_the_bytes_are_cut(parts, cuts):
    data = b"".join(map(encode, parts))
    decoder, found, signals = Decoder(), b"", list[tuple[int, Signal | Ack]]()
    while data:
        size = cuts.pop() if cuts else len(data)
        for part in decoder.feed(memoryview(data[:size])):
            if isinstance(part, memoryview):
                found += part
            else:
                signals.append((len(found), part))
        data = data[size:]
    assert found == b"".join(part for part in parts if isinstance(part, bytes))
    expected, place = [], 0
    for part in parts:
        if isinstance(part, bytes):
            place += len(part)
        else:
            expected.append((place, part))
    assert signals == expected


@pytest.mark.parametrize(
    "number",
    [0, MAX_LENGTH + 1, Signal.END - 1, Signal.READY, Signal.NEW, max(Signal) + 1, 2**32 - 1],
)
def test_a_word_that_has_no_place_in_a_tunnel_is_refused(number):
    with pytest.raises(ProtocolViolation):
        list(Decoder().feed(memoryview(word(number))))


def test_first_words_and_answers_are_read_as_they_were_written():
    assert len(opening(NAME, None)) == len(opening(NAME, 5)) == OPENING
    assert read_opening(opening(NAME, None)) == Opening(NAME, None)
    assert read_opening(opening(NAME, 0)) == Opening(NAME, 0)
    assert read_opening(opening(NAME, 2**64 - 1)) == Opening(NAME, 2**64 - 1)
    assert len(numbered(Signal.READY, 7)) == ANSWER
    assert read_answer(numbered(Signal.READY, 7)) == (Signal.READY, 7)


@pytest.mark.parametrize(
    "data", [bytes(OPENING), word(Signal.NEW) + NAME + b"\1" * 8, word(Signal.READY) + bytes(24)]
)
def test_first_words_that_mean_nothing_are_refused(data):
    with pytest.raises(ProtocolViolation):
        read_opening(data)


@pytest.mark.parametrize("data", [bytes(ANSWER), numbered(Signal.ACK, 1), numbered(Signal.NEW, 0)])
def test_answers_that_mean_nothing_are_refused(data):
    with pytest.raises(ProtocolViolation):
        read_answer(data)


# Sessions


@dataclass
class Side:
    """One end: its session, what gRPC has for it, and what gRPC has got of it."""

    slabs: Slabs
    session: Session = field(init=False)
    pending: bytes = b""
    ends: bool = False
    got: bytes = b""

    def __post_init__(self) -> None:
        self.session = Session(self.slabs)

    def take(self) -> None:
        """Move from gRPC into the session what there is room for."""
        while self.pending and (room := self.session.room()) is not None:
            part = self.pending[: len(room)]
            room[: len(part)] = part
            self.session.add(len(part))
            self.pending = self.pending[len(part) :]
        if self.ends and not self.pending and not self.session.ended:
            self.session.end()


class Twins:
    """Two sides, and a stream between them that holds what was sent and has not come."""

    def __init__(self, sizes: Sizes = SMALL) -> None:
        self.sides = Side(Slabs(sizes)), Side(Slabs(sizes))
        self.way = [b"", b""]
        """What is on its way to each side."""
        self.carried = [0, 0]
        """Bytes that have come to each side over the stream of the moment."""

    def send(self, index: int, most: int) -> int:
        """Have a stream take so many bytes from a side, at most; how many it took."""
        side, sent = self.sides[index], 0
        side.take()
        while sent < most and (parts := side.session.outgoing()):
            data = b"".join(parts)[: most - sent]
            side.session.sent(len(data))
            self.way[1 - index] += data
            sent += len(data)
        return sent

    def come(self, index: int, most: int) -> int:
        """Let so many bytes come to a side, at most; how many came."""
        data, self.way[index] = self.way[index][:most], self.way[index][most:]
        self.sides[index].got += feed(self.sides[index].session, data)
        self.carried[index] += len(data)
        return len(data)

    def cut(self) -> None:
        """The stream breaks off, and another takes its place: what was on its way is lost."""
        self.way, self.carried = [b"", b""], [0, 0]
        for side in self.sides:
            side.session.break_off()
        ada, bob = (side.session for side in self.sides)
        asked = read_opening(opening(NAME, ada.received))
        greeting = numbered(Signal.READY, bob.received)
        assert asked.number is not None
        bob.resume(asked.number, greeting)
        taken = b"".join(bob.outgoing())[:ANSWER]
        assert taken == greeting, "the answer comes before everything else"
        bob.sent(ANSWER)
        ada.resume(read_answer(taken)[1])

    def run(self, step: int = 10**9) -> None:
        """Carry until nothing moves any more, in steps of so many bytes."""
        while any([self.send(0, step), self.send(1, step), self.come(0, step), self.come(1, step)]):
            pass

    def check(self, there: bytes, back: bytes) -> None:
        """All has come, and nothing is kept."""
        ada, bob = self.sides
        assert (bob.got, ada.got) == (there, back)
        assert ada.session.done and bob.session.done
        for side in self.sides:
            side.session.close()
            assert side.slabs.used == 0


def talk(there: bytes, back: bytes) -> Twins:
    twins = Twins()
    for side, data in zip(twins.sides, (there, back), strict=True):
        side.pending, side.ends = data, True
    return twins


def test_all_that_both_have_to_say_comes_and_the_ends_are_acknowledged():
    there, back = os.urandom(1000), os.urandom(3)
    twins = talk(there, back)
    twins.run()
    twins.check(there, back)
    assert [side.session.repeated for side in twins.sides] == [0, 0]


THERE, BACK = bytes(range(100)), bytes(range(100, 130))
"""More than a slab, less than a window."""


def whole_way() -> tuple[int, int]:
    """How many bytes a talk without a cut brings to each side."""
    twins = talk(THERE, BACK)
    twins.run(1)
    return twins.carried[0], twins.carried[1]


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("step", [1, 5, 1000])
def test_a_cut_at_any_byte_in_either_direction_loses_nothing(index, step):
    for place in range(whole_way()[index] + 1):
        twins = talk(THERE, BACK)
        while twins.carried[index] < place:
            twins.send(0, step)
            twins.send(1, step)
            twins.come(1 - index, step)
            if not twins.come(index, min(step, place - twins.carried[index])) and not any(
                twins.way
            ):
                break
        twins.cut()
        twins.run(step)
        twins.check(THERE, BACK)


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.integers(0, 1), st.integers(1, 100)),
        st.tuples(st.just("send"), st.integers(0, 1), st.integers(1, 60)),
        st.tuples(st.just("come"), st.integers(0, 1), st.integers(1, 60)),
        st.tuples(st.just("end"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("acknowledge"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("cut"), st.just(0), st.just(0)),
    ),
    max_size=200,
)


@given(MOVES, st.integers(0, 255))
def test_whatever_happens_in_whatever_order_nothing_is_lost_and_no_more_is_held_than_allowed(
    moves, first
):
    twins, said = Twins(), [b"", b""]
    for move, index, size in moves:
        side = twins.sides[index]
        match move:
            case "say" if not side.ends:
                data = bytes((first + len(said[index]) + n) % 256 for n in range(size))
                said[index] += data
                side.pending += data
            case "send":
                twins.send(index, size)
            case "come":
                twins.come(index, size)
            case "end":
                side.ends = True
            case "acknowledge":
                side.session.acknowledge()
            case "cut":
                twins.cut()
        for end in twins.sides:
            assert end.slabs.used <= SMALL.window
        assert said[0].startswith(twins.sides[1].got) and said[1].startswith(twins.sides[0].got)
    for side in twins.sides:
        side.ends = True
    twins.run()
    twins.check(said[0], said[1])


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12), st.integers(1, 64))
def test_a_cut_repeats_no_more_than_a_window(cuts, step):
    there = os.urandom(500)
    twins = talk(there, b"")
    for moves in cuts:
        for _ in range(moves):
            twins.send(0, step)
            twins.come(1, step)
            twins.send(1, step)
            twins.come(0, step)
        before = twins.sides[0].session.repeated
        twins.cut()
        assert twins.sides[0].session.repeated - before <= SMALL.window + 1
    twins.run()
    twins.check(there, b"")


def test_who_gets_no_acknowledgement_takes_no_more_than_a_window():
    twins = talk(bytes(1000), b"")
    assert twins.send(0, 10**6) == SMALL.window + len(word(1)) * SMALL.window // SMALL.slab
    assert len(twins.sides[0].pending) == 1000 - SMALL.window


def test_sessions_share_memory_and_each_can_go_on_all_the_same():
    slabs = Slabs(SMALL)
    crowd = [Side(slabs, pending=bytes(1000)) for _ in range(10)]
    for side in crowd:
        side.take()
    assert slabs.used <= SMALL.shared + len(crowd) * SMALL.least
    last = Twins()
    last.sides = crowd[-1], Side(Slabs(SMALL))
    last.sides[0].ends = last.sides[1].ends = True
    last.run()
    assert last.sides[1].got == bytes(1000)
    for side in crowd:
        side.session.close()
    assert slabs.used == 0


def sent_ten() -> Session:
    """A session that has sent ten bytes, of which four are acknowledged."""
    twins = Twins()
    twins.sides[0].pending = bytes(10)
    twins.send(0, 1000)
    session = twins.sides[0].session
    feed(session, numbered(Signal.ACK, 4))
    return session


@pytest.mark.parametrize("number", [3, 11, 2**64 - 1])
def test_a_number_that_can_not_be_is_refused(number):
    with pytest.raises(ProtocolViolation):
        feed(sent_ten(), numbered(Signal.ACK, number))
    session = sent_ten()
    session.break_off()
    with pytest.raises(ProtocolViolation):
        session.resume(number)


@pytest.mark.parametrize("number", [5, 10])
def test_nobody_acknowledges_on_a_stream_what_was_not_sent_on_it(number):
    """Or memory would be given back that is still to be sent, and then others' bytes would go
    out."""
    session = sent_ten()
    session.break_off()
    session.resume(4)
    with pytest.raises(ProtocolViolation, match=f"acknowledged {number} where 4 to 4 are due"):
        feed(session, numbered(Signal.ACK, number))
    assert b"".join(session.outgoing()) == word(4) + bytes(4)


@pytest.mark.parametrize("number", [4, 7, 10])
def test_numbers_that_can_be_are_taken(number):
    session = sent_ten()
    session.break_off()
    session.resume(number)
    assert len(b"".join(session.outgoing())) == (
        10 - number and 4 + min(8 - number % 8, 10 - number)
    )


@pytest.mark.parametrize("more", [word(1) + b"x", word(Signal.END)])
def test_nothing_may_come_after_the_end(more):
    session = Session(Slabs(SMALL))
    with pytest.raises(ProtocolViolation, match="after its end"):
        feed(session, word(Signal.END) + more)


def test_a_session_that_is_given_up_says_so_only_where_it_is_understood():
    session = sent_ten()
    assert session.farewell() == word(Signal.GONE)
    twins = talk(bytes(10), b"")
    twins.send(0, 6)
    assert twins.sides[0].session.farewell() == b"", (
        "in the middle of a piece it would be taken for bytes"
    )
    other = Session(Slabs(SMALL))
    feed(other, word(Signal.GONE))
    assert other.is_gone
