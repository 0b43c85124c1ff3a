"""What must hold for a fragment between its capture and its merge: what is refused teaches nothing."""

import pytest
import torch

from lowcomm_node.trainer.capture import GroupCapture, PairCapture
from lowcomm_protocol.codecs import coder, shard_coder
from lowcomm_protocol.errors import ImplausibleError
from lowcomm_protocol.repeats import Repeats
from lowcomm_protocol.robust import PLAUSIBLE, UsualNorm

NUMEL = 1024
MEMBERS = ("a", "b", "c")


def captured(me: str, vector: torch.Tensor, usual: UsualNorm) -> dict:
    own = float(vector.norm())
    return {
        "me": me, "theta": vector, "progress": vector, "anchor": None, "sent": vector.clone(), "realign": False,
        "own": own, "most": PLAUSIBLE * max(own, usual.value), "usual": usual, "steps": 1, "tokens": 1,
    }  # fmt: skip


def group(me: str, vector: torch.Tensor, usual: UsualNorm) -> GroupCapture:
    return GroupCapture(**captured(me, vector, usual), coder=shard_coder("fp32", NUMEL), kind="clip", members=MEMBERS)


def pair(me: str, vector: torch.Tensor, usual: UsualNorm, repeats: Repeats | None = None) -> PairCapture:
    known = Repeats(NUMEL) if repeats is None else repeats
    return PairCapture(**captured(me, vector, usual), coder=coder("fp32", NUMEL), repeats=known)


def mean_of(owner: str, scale: float) -> memoryview:
    """What an owner sends as the mean of its shard, where only it has contributed."""
    one, out = group(owner, scale * torch.ones(NUMEL), UsualNorm()), memoryview(bytearray(8 * NUMEL))
    one.encode(out)
    return out[: one.reduce({owner: 1}, out)]


@pytest.mark.parametrize("scale", [10.0, 1e30])
def test_a_mean_that_is_refused_does_not_move_what_is_usual(scale: float):
    usual = UsualNorm()
    mine = group("a", torch.ones(NUMEL), usual)
    mine.encode(memoryview(bytearray(8 * NUMEL)))
    mine.reduce({"a": 1}, memoryview(bytearray(8 * NUMEL)))
    mine.receive_mean("c", mean_of("c", 1.0))
    with pytest.raises(ImplausibleError):
        mine.receive_mean("b", mean_of("b", scale))
    mine.pool(["a", "c"])
    mine.commit()
    assert usual.learned == pytest.approx(float(torch.ones(NUMEL).norm()), rel=0.01)


def test_a_mean_that_is_not_applied_teaches_nothing():
    usual = UsualNorm()
    mine = group("a", torch.ones(NUMEL), usual)
    mine.encode(memoryview(bytearray(8 * NUMEL)))
    mine.reduce({"a": 1}, memoryview(bytearray(8 * NUMEL)))
    for owner in ("b", "c"):
        mine.receive_mean(owner, mean_of(owner, 2.0))
    mine.pool(["a"])
    mine.commit()
    assert usual.learned == 0.0


def test_a_contribution_of_a_pair_that_is_refused_does_not_move_what_is_usual():
    usual, out = UsualNorm(1.0), memoryview(bytearray(8 * NUMEL))
    theirs, mine = pair("b", 100 * torch.ones(NUMEL), UsualNorm()), pair("a", torch.ones(NUMEL), usual)
    with pytest.raises(ImplausibleError):
        mine.receive("b", out[: theirs.encode(out)])
    mine.pool({"a": 1})
    mine.commit()
    assert usual.learned == 1.0


def test_what_was_applied_is_not_applied_again_and_what_was_not_is():
    repeats, ones = Repeats(NUMEL), torch.ones(NUMEL)

    def bring(vector: torch.Tensor, apply: bool = True) -> None:
        out = memoryview(bytearray(8 * NUMEL))
        size = pair("b", vector, UsualNorm()).encode(out)
        mine = pair("a", ones, UsualNorm(), repeats)
        mine.receive("b", out[:size])
        mine.pool({"a": 1, "b": 1})
        mine.commit() if apply else mine.forget()

    bring(ones, apply=False)
    bring(ones)
    with pytest.raises(ImplausibleError, match="what it has brought before"):
        bring(ones)
    with pytest.raises(ImplausibleError):
        bring(ones)
    bring(1.01 * ones)
    bring(ones)
