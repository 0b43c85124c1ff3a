"""What must hold for a fragment between its capture and its merge: what is refused teaches nothing."""

import pytest
import torch

from lowcomm_node.trainer.capture import GroupCapture, PairCapture
from lowcomm_protocol.codecs import coder, shard_coder
from lowcomm_protocol.errors import ImplausibleError
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
    theirs = PairCapture(**captured("b", 100 * torch.ones(NUMEL), UsualNorm()), coder=coder("fp32", NUMEL))
    mine = PairCapture(**captured("a", torch.ones(NUMEL), usual), coder=coder("fp32", NUMEL))
    with pytest.raises(ImplausibleError):
        mine.receive("b", out[: theirs.encode(out)])
    mine.pool({"a": 1})
    mine.commit()
    assert usual.learned == 1.0
