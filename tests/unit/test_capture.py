"""What must hold for a fragment between its capture and its merge: what is refused teaches nothing."""

from collections.abc import Sequence
from itertools import count

import pytest
import torch

from lowcomm_node.trainer.capture import GroupCapture, PairCapture
from lowcomm_protocol.codecs import coder, shard_coder
from lowcomm_protocol.codecs.shards import shard_bounds
from lowcomm_protocol.errors import ImplausibleError
from lowcomm_protocol.repeats import Repeats
from lowcomm_protocol.robust import ENOUGH, FAR, PLAUSIBLE, Bound, Directions, UsualNorm
from lowcomm_protocol.trust import Deed

NUMEL = 1024
MEMBERS = ("a", "b", "c")


def captured(me: str, vector: torch.Tensor, usual: UsualNorm) -> dict:
    own = float(vector.norm())
    return {
        "me": me, "theta": vector, "progress": vector, "anchor": None, "sent": vector.clone(), "realign": False,
        "bound": Bound(own, usual.value), "gain": 1.0, "usual": usual, "directions": Directions(), "steps": 1, "tokens": 1,
    }  # fmt: skip


def group(me: str, vector: torch.Tensor, usual: UsualNorm, members: Sequence[str] = MEMBERS) -> GroupCapture:
    return GroupCapture(
        **captured(me, vector, usual),
        coder=shard_coder("fp32", NUMEL),
        repeats=Repeats(shard(members, me)),
        kind="clip",
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

    steps = count(1)

    def bring(vector: torch.Tensor, apply: bool = True) -> None:
        out = memoryview(bytearray(8 * NUMEL))
        size = pair("b", vector, UsualNorm()).encode(out)
        mine = pair("a", ones + 0.01 * next(steps), UsualNorm(), repeats)
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


# What enters a mean


@pytest.mark.parametrize("members", [("a", "b"), MEMBERS, tuple("abcdefgh")])
@pytest.mark.parametrize("factor", [100.0, -30.0, -1e4])
def test_in_a_group_of_any_size_what_is_far_too_large_enters_no_mean(members: tuple[str, ...], factor: float):
    vector = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    mine, theirs = group("a", vector, UsualNorm(), members), group("b", factor * vector, UsualNorm(), members)
    with pytest.raises(ImplausibleError, match="brings progress of norm") as refused:
        mine.receive("b", share(theirs, "a"))
    assert refused.value.deed is Deed.HEAVY


@pytest.mark.parametrize(
    ("factor", "deed"), [(1.05, Deed.STUMBLE), (FAR * 0.95, Deed.STUMBLE), (FAR * 1.05, Deed.HEAVY)]
)
def test_near_the_bound_costs_little_and_far_beyond_it_much(factor: float, deed: Deed):
    ones, out = torch.ones(NUMEL), memoryview(bytearray(8 * NUMEL))
    with pytest.raises(ImplausibleError) as refused:
        pair("a", ones, UsualNorm()).receive("b", out[: pair("b", factor * PLAUSIBLE * ones, UsualNorm()).encode(out)])
    assert refused.value.deed is deed


def test_what_a_long_time_alone_explains_is_refused_and_held_against_nobody():
    ones, out = torch.ones(NUMEL), memoryview(bytearray(8 * NUMEL))
    mine = pair("a", ones, UsualNorm())
    mine.bound = Bound(mine.bound.own, 0.0, growth=2.0, claimed=10.0)
    with pytest.raises(ImplausibleError) as refused:
        mine.receive("b", out[: pair("b", 8.0 * PLAUSIBLE * ones, UsualNorm()).encode(out)])
    assert refused.value.deed is None


def test_in_a_realignment_it_is_the_way_from_our_slow_weights_that_must_be_plausible():
    phi = 100 * torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    step = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))

    def realigning(me: str, theta: torch.Tensor) -> GroupCapture:
        one = group(me, theta, UsualNorm(), ("a", "b"))
        one.anchor, one.progress, one.realign, one.bound = phi, step, True, Bound(float(step.norm()), 0.0)
        return one

    realigning("a", phi + step).receive("b", share(realigning("b", phi + 2 * step), "a"))
    for lie in (-phi, 2 * phi, torch.zeros(NUMEL), phi - 10 * step):
        with pytest.raises(ImplausibleError):
            realigning("a", phi + step).receive("b", share(realigning("b", lie), "a"))


def flipped(members: tuple[str, ...]) -> tuple[GroupCapture, memoryview]:
    """What we hold, and a contribution that points against it."""
    vector = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    return group("a", vector, UsualNorm(), members), share(group("b", -vector, UsualNorm(), members), "a")


def test_of_two_one_that_points_against_us_is_refused():
    mine, lie = flipped(("a", "b"))
    with pytest.raises(ImplausibleError, match="points against ours"):
        mine.receive("b", lie)


@pytest.mark.parametrize("others", [("b",), ("b", "c")])
def test_of_three_one_that_points_against_us_is_left_out_if_the_third_is_late(others: tuple[str, ...]):
    mine, lie = flipped(MEMBERS)
    honest = share(group("c", mine.sent + 0.1, UsualNorm()), "a")
    mine.receive("b", lie)
    mine.receive("c", honest)
    mine.reduce(dict.fromkeys(("a", *others), 1), memoryview(bytearray(8 * NUMEL)))
    assert list(mine.left_out) == (["b"] if others == ("b",) else [])
    start, stop = mine.bounds[0]
    assert float(mine.mean[start:stop] @ mine.progress[start:stop]) > 0


def test_who_points_a_little_against_us_is_refused_if_it_goes_on_and_nobody_is_blamed():
    directions, ours, askew = Directions(), torch.tensor([1.0, 0.0]), torch.tensor([-0.1, 1.0])
    with pytest.raises(ImplausibleError) as once:
        directions.check("opposed", ours, -ours)
    assert once.value.deed is None
    for _ in range(ENOUGH - 1):
        directions.check("contrary", ours, askew)
    with pytest.raises(ImplausibleError, match="of late") as often:
        directions.check("contrary", ours, askew)
    assert often.value.deed is None
    for _ in range(50):
        directions.check("honest", ours, torch.tensor([0.01, 1.0]))
    directions.check("still", ours, torch.zeros(2))


def test_a_group_knows_again_what_a_member_has_brought():
    ones = torch.ones(NUMEL)
    first, again = group("a", ones, UsualNorm()), group("a", 1.1 * ones, UsualNorm())
    again.repeats = first.repeats
    stale = group("b", ones, UsualNorm())
    first.receive("b", share(stale, "a"))
    first.reduce({"a": 1, "b": 1}, memoryview(bytearray(8 * NUMEL)))
    first.pool(["a"])
    first.commit()
    with pytest.raises(ImplausibleError, match="what it has brought before"):
        again.receive("b", share(stale, "a"))


def test_a_shard_in_which_we_move_most_may_move_most_there():
    vector = torch.zeros(NUMEL)
    vector[:100] = 1.0
    group("a", vector, UsualNorm()).receive("b", share(group("b", 1.5 * vector, UsualNorm()), "a"))
