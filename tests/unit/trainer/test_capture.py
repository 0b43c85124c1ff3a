"""What must hold for a fragment between its capture and its merge: what is refused teaches
nothing."""

from collections.abc import Sequence
from itertools import count

import pytest
import torch

from lowcomm_node.trainer.capture import GroupCapture, PairCapture, Scratch
from lowcomm_node.trainer.judging import (
    PLAUSIBLE,
    Bound,
    Directions,
    Judge,
    Repeats,
    UsualNorm,
)
from lowcomm_protocol.codecs import coder, shard_coder
from lowcomm_protocol.codecs.shards import shard_bounds
from lowcomm_protocol.errors import ImplausibleError, Offence

NUMEL = 1024
MEMBERS = ("a", "b", "c")


def captured(me: str, vector: torch.Tensor, usual: UsualNorm, repeats: Repeats) -> dict:
    phi = torch.zeros(NUMEL)
    judge = Judge(
        theta=vector, phi=phi, pull=0.0, gain=1.0, bound=Bound(float(vector.norm()), usual.value),
        usual=usual, directions=Directions(), repeats=repeats,
    )  # fmt: skip
    return {
        "me": me, "scratch": Scratch(NUMEL, 8), "judge": judge,
        "sent": vector.clone(), "realign": False, "steps": 1, "tokens": 1,
    }  # fmt: skip


def group(
    me: str, vector: torch.Tensor, usual: UsualNorm, members: Sequence[str] = MEMBERS
) -> GroupCapture:
    return GroupCapture(
        **captured(me, vector, usual, Repeats(shard(members, me))),
        coder=shard_coder("fp32", NUMEL),
        averaging="clip",
        members=members,
    )


def shard(members: Sequence[str], me: str) -> int:
    """How many values a member owns."""
    start, stop = shard_bounds(NUMEL, len(members))[list(members).index(me)]
    return stop - start


def share(sender: GroupCapture, owner: str) -> memoryview:
    """What a member sends to an owner."""
    out = memoryview(bytearray(8 * NUMEL))
    sizes = sender.encode(out)
    place = list(sender.members).index(owner)
    return out[sum(sizes[:place]) : sum(sizes[: place + 1])]


def pair(
    me: str, vector: torch.Tensor, usual: UsualNorm, repeats: Repeats | None = None
) -> PairCapture:
    known = Repeats(NUMEL) if repeats is None else repeats
    return PairCapture(**captured(me, vector, usual, known), coder=coder("fp32", NUMEL))


def mean_of(owner: str, scale: float) -> memoryview:
    """What an owner sends as the mean of its shard, where only it has contributed."""
    one, out = (
        group(owner, scale * torch.ones(NUMEL), UsualNorm()),
        memoryview(bytearray(8 * NUMEL)),
    )
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
    mine.judge.learn()
    mine.commit()
    assert usual.learned == pytest.approx(float(torch.ones(NUMEL).norm()), rel=0.01)


def test_what_was_applied_is_not_applied_again_and_what_was_not_is():
    repeats, ones = Repeats(NUMEL), torch.ones(NUMEL)

    steps = count(1)

    def bring(vector: torch.Tensor, apply: bool = True) -> None:
        out = memoryview(bytearray(8 * NUMEL))
        (size,) = pair("b", vector, UsualNorm()).encode(out)
        mine = pair("a", ones + 0.01 * next(steps), UsualNorm(), repeats)
        mine.receive("b", out[:size])
        mine.pool({"a": 1, "b": 1})
        mine.judge.learn() if apply else mine.coder.forget()

    bring(ones, apply=False)
    bring(ones)
    with pytest.raises(ImplausibleError, match="sent its previous update again"):
        bring(ones)
    with pytest.raises(ImplausibleError):
        bring(ones)
    bring(1.01 * ones)
    bring(ones)


# What enters a mean


@pytest.mark.parametrize("members", [("a", "b"), MEMBERS, tuple("abcdefgh")])
@pytest.mark.parametrize("factor", [100.0, -30.0, -1e4])
def test_in_a_group_of_any_size_what_is_far_too_large_enters_no_mean(
    members: tuple[str, ...], factor: float
):
    vector = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    mine, theirs = (
        group("a", vector, UsualNorm(), members),
        group("b", factor * vector, UsualNorm(), members),
    )
    with pytest.raises(ImplausibleError, match="update too large") as refused:
        mine.receive("b", share(theirs, "a"))
    assert refused.value.deed is Offence.HEAVY


def test_in_a_realignment_it_is_the_way_from_our_slow_weights_that_must_be_plausible():
    phi = 100 * torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    step = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))

    def realigning(me: str, theta: torch.Tensor) -> GroupCapture:
        one = group(me, theta, UsualNorm(), ("a", "b"))
        one.judge.phi, one.judge.pull, one.judge.theta = phi, 1.0, phi + step
        one.realign, one.judge.bound = True, Bound(float(step.norm()), 0.0)
        return one

    realigning("a", phi + step).receive("b", share(realigning("b", phi + 2 * step), "a"))
    for lie in (-phi, 2 * phi, torch.zeros(NUMEL), phi - 10 * step):
        with pytest.raises(ImplausibleError):
            realigning("a", phi + step).receive("b", share(realigning("b", lie), "a"))


def test_a_group_knows_again_what_a_member_has_brought():
    ones = torch.ones(NUMEL)
    first, again = group("a", ones, UsualNorm()), group("a", 1.1 * ones, UsualNorm())
    again.judge.repeats = first.judge.repeats
    stale = group("b", ones, UsualNorm())
    first.receive("b", share(stale, "a"))
    first.reduce({"a": 1, "b": 1}, memoryview(bytearray(8 * NUMEL)))
    first.pool(["a"])
    first.judge.learn()
    first.commit()
    with pytest.raises(ImplausibleError, match="sent its previous update again"):
        again.receive("b", share(stale, "a"))


# What is somewhat too large where others can outvote it


def anchored_at(mine: GroupCapture, anchor: torch.Tensor) -> None:
    """Have our slow weights be part of our contribution."""
    mine.judge.phi, mine.judge.pull = anchor, 1.0
    mine.judge.theta, mine.sent = mine.theta + anchor, mine.sent + anchor


def too_large(
    factor: float = 6.0, anchor: torch.Tensor | None = None
) -> tuple[GroupCapture, torch.Tensor]:
    """Our capture after a member brought what is too large but not far too large; and what it
    brought to our shard."""
    vector = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    at = torch.zeros(NUMEL) if anchor is None else anchor
    mine, theirs = group("b", vector, UsualNorm()), group("c", factor * vector, UsualNorm())
    anchored_at(mine, at)
    theirs.sent = factor * vector + at
    mine.receive("c", share(theirs, "b"))
    start, stop = mine.bounds[1]
    return mine, (factor * vector)[start:stop]


@pytest.mark.parametrize("anchored", [False, True])
def test_in_a_group_it_enters_with_the_largest_norm_that_is_plausible_and_its_direction(
    anchored: bool,
):
    anchor = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)) if anchored else None
    mine, brought = too_large(anchor=anchor)
    start, stop = mine.bounds[1]
    seen = mine.received["c"] - mine.judge.pull * mine.judge.phi[start:stop]
    share_of_values = (stop - start) / NUMEL
    ours = max(mine.judge.own_norm(start, stop), share_of_values**0.5 * mine.judge.own_norm())
    assert float(seen.norm()) == pytest.approx(PLAUSIBLE * ours, rel=1e-4) and float(
        seen.norm()
    ) < float(brought.norm())
    assert float(torch.cosine_similarity(seen, brought, dim=0)) == pytest.approx(1.0, abs=1e-4)


def test_a_mean_of_a_shard_is_weighted_by_tokens_and_stands_on_the_anchor():
    vector, anchor = (
        torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)),
        torch.full((NUMEL,), 5.0),
    )
    mine, theirs = group("b", vector, UsualNorm()), group("c", 2.0 * vector, UsualNorm())
    anchored_at(mine, anchor)
    theirs.sent = 2.0 * vector + anchor
    mine.receive("c", share(theirs, "b"))
    out = memoryview(bytearray(8 * NUMEL))
    mine.encode(out)
    size = mine.reduce({"b": 1, "c": 2}, out)
    start, stop = mine.bounds[1]
    assert torch.allclose(mine.mean[start:stop], 5 / 3 * vector[start:stop] + 5.0, atol=1e-5)
    assert torch.equal(mine.mean[:start], torch.zeros(start)), "nothing of other shards"
    other = group("a", vector, UsualNorm())
    anchored_at(other, anchor)
    other.receive_mean("b", out[:size])
    assert torch.equal(other.mean[start:stop], mine.mean[start:stop]), (
        "all others have the same, to the bit"
    )
    assert 0.0 < mine.worst_block < 1.0


@pytest.mark.parametrize("others", [True, False])
def test_of_a_pair_the_direction_counts_only_of_a_lone_partner(others: bool):
    ours = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    mine = pair("a", ours, UsualNorm())
    if others:
        mine.judge.usual.saw("third", 1.0)
    out = memoryview(bytearray(8 * NUMEL))
    lie = out[: sum(pair("b", -ours, UsualNorm()).encode(out))]
    if others:
        assert mine.receive("b", lie) == b""
        assert mine.judge.norms["b"] == pytest.approx(float(ours.norm()))
    else:
        with pytest.raises(ImplausibleError, match="points the opposite way"):
            mine.receive("b", lie)
        assert mine.judge.norms == {}
