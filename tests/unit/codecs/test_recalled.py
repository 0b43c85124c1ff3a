"""What must hold where our values are computed again and not held: the same bytes, the same values
at both ends, and the same lessons as from a whole vector."""

from importlib import import_module

import numpy as np
import pytest
import torch

from lowcomm_protocol.codecs import CODECS, Coder, coder
from lowcomm_protocol.codecs.pieces import Source
from lowcomm_protocol.errors import CodecError
from lowcomm_protocol.exchange.outer import Pair, pooled_of
from lowcomm_protocol.spec.names import BLOCK

NAMES = [name for name in CODECS if coder(name, BLOCK).recalls]
SIZES = [0, 1, BLOCK, 3 * BLOCK - 7, 9 * BLOCK + 100]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch):
    """So that a vector has several of them."""
    for name in ("coder", "modulo"):
        monkeypatch.setattr(import_module(f"lowcomm_protocol.codecs.{name}"), "PIECE", 2 * BLOCK)


class End:
    """One peer, whose coder holds its vector, or computes it again."""

    def __init__(self, name: str, numel: int, recalls: bool) -> None:
        self.coder: Coder = coder(name, numel)
        self.recalls, self.numel = recalls, numel
        self.theirs = np.zeros(numel, np.float32)

    def send(self, vector: np.ndarray) -> bytes:
        self.vector, self.wanted = vector.copy(), vector.copy()
        out = memoryview(bytearray(self.coder.max_size))
        if not self.recalls:
            return bytes(out[: self.coder.encode(self.vector, out)])
        return bytes(out[: self.coder.encode_from(Source(self.wanted), out)])

    def take(self, data: bytes) -> bytes:
        return self.coder.decode(memoryview(data), self.theirs)

    def resend(self, blocks: bytes) -> bytes:
        out = memoryview(bytearray(self.coder.max_size))
        vector = None if self.recalls else self.vector
        return bytes(out[: self.coder.resend(blocks, vector, out)])

    def sent(self) -> np.ndarray:
        """What the other end has of us."""
        if not self.recalls:
            return self.vector
        found = self.wanted.copy()
        for start in range(0, self.numel, BLOCK):
            self.coder.recall(start, found[start : start + BLOCK])
        return found

    def end(self) -> None:
        if self.recalls:
            pair = Pair(
                source=Source(self.wanted),
                recalling=self.coder.recalling(),
                theirs=torch.from_numpy(self.theirs),
                shares=(0.5, 0.5),
            )
            for start in range(0, self.numel, 2 * BLOCK):
                here = slice(start, start + 2 * BLOCK)
                pooled_of(None, pair, start, torch.empty(self.theirs[here].size))
        self.coder.settle()
        self.coder.commit()


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_computed_again_codes_decodes_and_teaches_as_what_is_held(name: str, numel: int):
    random = np.random.default_rng(numel)
    base, resent = 0.05 * random.standard_normal(numel), 0
    ends = [End(name, numel, recalls) for recalls in (False, True)]
    other = End(name, numel, False)
    for number in range(7):
        jump = np.where(np.arange(numel) // BLOCK % 4 == 1, 30.0 if number == 5 else 1.0, 1.0)
        ours, theirs = (
            (base + 1e-3 * jump * random.standard_normal(numel)).astype(np.float32)
            for _ in range(2)
        )
        if number == 6:
            theirs[: numel // 2] += np.float32(40.0)  # far beyond what more digits could hold
        coded = [one.send(ours) for one in ends]
        assert coded[0] == coded[1]
        answer, asked = other.send(theirs), other.take(coded[0])
        for one in ends:
            if again := one.take(answer):
                one.coder.patch(memoryview(other.resend(again)), one.theirs)
        if asked:
            once, twice = (one.resend(asked) for one in ends)
            assert once == twice
            other.coder.patch(memoryview(once), other.theirs)
            resent += 1
        assert ends[0].theirs.tobytes() == ends[1].theirs.tobytes()
        for one in ends:
            assert one.sent().tobytes() == other.theirs.tobytes()
        for one in (*ends, other):
            one.end()
        states = [one.coder.state() for one in ends]
        assert all(np.array_equal(states[0][key], states[1][key]) for key in states[0])
    assert resent or not name.startswith("mod") or numel < 3 * BLOCK - 7


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("mod")])
def test_what_settles_without_a_lesson_looks_at_the_values_once_more(name: str):
    ends = [End(name, 5 * BLOCK, True) for _ in range(2)]
    vector = np.linspace(-1, 1, 5 * BLOCK, dtype=np.float32)
    for one in ends:
        one.send(vector)
        one.theirs = vector + np.float32(1e-3)
        one.take(End(name, 5 * BLOCK, False).send(one.theirs))
    ends[0].end()
    ends[1].coder.settle()
    ends[1].coder.commit()
    assert np.array_equal(*(one.coder.state()["range"] for one in ends))
    with pytest.raises(CodecError, match="encode first"):
        ends[1].take(b"")


def test_a_coder_that_owes_does_not_recall_nor_one_that_loses():
    assert NAMES == ["fp32", "mod3", "mod4", "mod6", "mod8"]
    assert not coder("mod3", BLOCK, feedback=True).recalls
