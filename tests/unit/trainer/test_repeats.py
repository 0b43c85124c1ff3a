"""What must hold for contributions that come again: they are known whatever the codec, and no
honest one is taken for one."""

import numpy as np
import pytest
import torch

from lowcomm_node.trainer.judging import CONTRIBUTIONS, FEWEST, Repeats
from lowcomm_protocol.codecs import BLOCK, Coder, coder

NUMEL = 12 * BLOCK + 7
CODECS = ["fp32", "bf16", "mod8", "mod4", "mod3"]
APART, MOVES = 2e-3, 1e-3
"""How far peers are apart, and how far training takes each value from one exchange to the next."""


def vector(seed: int, spread: float, numel: int = NUMEL) -> np.ndarray:
    return (spread * np.random.default_rng(seed).standard_normal(numel)).astype(np.float32)


class Pair:
    """Two peers of whom one looks whether the other brings the same again."""

    def __init__(self, name: str, numel: int = NUMEL) -> None:
        self.here, self.there = coder(name, numel), coder(name, numel)
        self.repeats, self.numel = Repeats(numel), numel

    def meet(self, ours: np.ndarray, theirs: np.ndarray) -> bool:
        """Exchange; whether theirs was there before. It is applied in any case."""
        ours, theirs, held = ours.copy(), theirs.copy(), np.zeros(self.numel, np.float32)
        self._coded(self.here, ours)
        again = self.here.decode(self._coded(self.there, theirs), held)
        if again:
            buffer = memoryview(bytearray(self.there.max_size))
            self.here.patch(buffer[: self.there.resend(again, theirs, buffer)], held)
        self.there.decode(self._coded(self.here, ours.copy()), np.zeros(self.numel, np.float32))
        steps = torch.from_numpy(self.here.lattice_steps)
        brought = self.repeats.sample(torch.from_numpy(held), steps, torch.from_numpy(ours))
        known = self.repeats.repeats("b", brought)
        self.repeats.applied("b", brought)
        self.here.commit()
        self.there.commit()
        return known

    @staticmethod
    def _coded(one: Coder, values: np.ndarray) -> memoryview:
        buffer = memoryview(bytearray(one.max_size))
        return buffer[: one.encode(values, buffer)]


@pytest.mark.parametrize("name", CODECS)
def test_the_same_is_known_again_while_we_move(name: str):
    pair, base = Pair(name), vector(0, 0.05)
    stale = base + vector(1, APART)
    known = [pair.meet(base + vector(10 + number, MOVES), stale) for number in range(8)]
    # A lattice begins with bf16, and blocks that wrap come as bf16: then too few are coded alike,
    # and it is not judged.
    assert not known[0] and sum(known) >= (7 if name in ("fp32", "bf16") else 4), known


@pytest.mark.parametrize("part", [1.0, 0.1, 0.02])
@pytest.mark.parametrize("name", CODECS)
def test_who_moves_a_little_is_never_taken_for_one_that_does_not(name: str, part: float):
    pair, base = Pair(name), vector(0, 0.05)
    theirs = base + vector(1, APART)
    for number in range(20):
        theirs = theirs + part * vector(100 + number, MOVES)
        assert not pair.meet(base + vector(10 + number, MOVES), theirs), f"exchange {number}"


@pytest.mark.parametrize("name", CODECS)
def test_what_did_not_move_here_either_is_held_against_nobody(name: str):
    pair, ours, theirs = Pair(name), vector(0, 0.05), vector(0, 0.05) + vector(1, APART)
    assert [pair.meet(ours, theirs) for _ in range(6)] == [False] * 6


def test_blocks_that_were_coded_differently_are_not_compared():
    repeats, ones = Repeats(NUMEL), torch.ones(NUMEL)
    lattice, exact = torch.full((13,), 0.5), torch.zeros(13)
    mostly = torch.cat([lattice[:-FEWEST], exact[-FEWEST:]])
    repeats.applied("b", repeats.sample(ones, exact, -ones))

    def known(values: torch.Tensor, steps: torch.Tensor) -> bool:
        return repeats.repeats("b", repeats.sample(values, steps, ones))

    assert known(ones, exact)
    assert not known(ones, lattice)
    assert known(ones, mostly)
    elsewhere = torch.where(torch.arange(NUMEL) < BLOCK, 2.0, 1.0)
    assert known(elsewhere, mostly), "the first block was coded in another way"
    assert not known(elsewhere, exact)
    assert not known(ones, torch.cat([lattice[: 1 - FEWEST], exact[1 - FEWEST :]]))


def test_peers_are_told_apart_and_few_are_remembered():
    repeats, exact = Repeats(BLOCK), torch.zeros(1)
    applied, brought = (
        repeats.sample(torch.ones(BLOCK), exact, ours)
        for ours in (torch.zeros(BLOCK), torch.ones(BLOCK))
    )
    for number in range(CONTRIBUTIONS + 1):
        assert not repeats.repeats(f"peer-{number}", brought)
        repeats.applied(f"peer-{number}", applied)
    assert not repeats.repeats("peer-0", brought), "forgotten"
    assert all(repeats.repeats(f"peer-{number}", brought) for number in range(1, CONTRIBUTIONS + 1))
