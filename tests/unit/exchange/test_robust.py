"""What must hold for means among liars."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowcomm_protocol.deeds import Deed
from lowcomm_protocol.errors import ImplausibleError, SpecError
from lowcomm_protocol.exchange import robust
from lowcomm_protocol.exchange.outer import mean_contribution
from lowcomm_protocol.exchange.robust import (
    ALONE,
    CLIP,
    ENOUGH,
    GROWTH,
    LONGER,
    MEANS,
    PLAUSIBLE,
    RECENT,
    REMEMBERED,
    Bound,
    Directions,
    UsualNorm,
    believed_steps,
    growth,
    plausible_norm,
    robust_mean,
)
from lowcomm_protocol.peers import trust

ROBUST = ("clip", "median", "trimmed")


def honest(count: int, seed: int = 0, numel: int = 2000, noise: float = 1.0) -> list[torch.Tensor]:
    """Progress of peers on one model: a common direction, and noise of each."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(numel, generator=generator)
    return [common + noise * torch.randn(numel, generator=generator) for _ in range(count)]


LIES = {
    "huge": lambda one: 100 * one,
    "flipped": lambda one: -one,
    "flipped and huge": lambda one: -10 * one,
    "zero": lambda one: 0 * one,
}


@pytest.mark.parametrize("kind", ROBUST)
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("count", [4, 5, 8])
def test_one_liar_moves_the_mean_little(kind, lie, count):
    peers = honest(count)
    wanted = mean_contribution(peers[1:])
    got = robust_mean(kind, [LIES[lie](peers[0]), *peers[1:]], [1.0] * count)
    assert float((got - wanted).norm() / wanted.norm()) < 0.55
    assert float(torch.cosine_similarity(got, wanted, dim=0)) > 0.85


@pytest.mark.parametrize("lie", ["flipped", "flipped and huge"])
@pytest.mark.parametrize("count", [3, 4, 8])
@pytest.mark.parametrize("noise", [1.0, 3.0, 5.0])
def test_who_points_against_all_others_is_left_out_however_noisy_they_are(lie, count, noise):
    for seed in range(5):
        peers = honest(count, seed, 20_000, noise)
        got = robust_mean("clip", [LIES[lie](peers[0]), *peers[1:]], [1.0] * count)
        assert torch.equal(got, mean_contribution(peers[1:], [1.0] * (count - 1)))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_of_three_a_flipped_one_is_left_out_though_it_cancels_the_second_for_the_third(place):
    """Its noise is the least: what it flips is nearer to each of the others than they are to each
    other."""
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        common = torch.randn(20_000, generator=generator)
        noise = [0.1 if index == place else 0.3 for index in range(3)]
        peers = [common + one * torch.randn(20_000, generator=generator) for one in noise]
        rows = [-one if index == place else one for index, one in enumerate(peers)]
        kept = [one for index, one in enumerate(rows) if index != place]
        assert torch.equal(robust_mean("clip", rows, [1.0] * 3), mean_contribution(kept, [1.0] * 2))


@pytest.mark.parametrize("numel", [1, 4, 64, 20_000])
def test_honest_peers_without_anything_in_common_are_hardly_ever_left_out(numel):
    generator, left_out = torch.Generator().manual_seed(0), 0
    for _ in range(100):
        peers = [torch.randn(numel, generator=generator) for _ in range(4)]
        most = CLIP * sorted(float(one.norm()) for one in peers)[1]
        clipped = [one * min(1.0, most / float(one.norm())) for one in peers]
        left_out += not torch.allclose(
            robust_mean("clip", peers, [1.0] * 4), mean_contribution(clipped), atol=1e-6
        )
    assert left_out < 25


@pytest.mark.parametrize("lie", ["huge", "flipped and huge"])
def test_a_plain_mean_is_at_the_mercy_of_one_liar(lie):
    peers = honest(4)
    got = robust_mean("mean", [LIES[lie](peers[0]), *peers[1:]], [1.0] * 4)
    assert float((got - mean_contribution(peers[1:])).norm()) > float(got.norm()) * 0.7


@pytest.mark.parametrize("kind", ["mean", "clip"])
def test_among_honest_peers_it_is_the_weighted_mean(kind):
    peers, weights = honest(4), [1.0, 2.0, 1.0, 0.5]
    assert torch.equal(robust_mean(kind, peers, weights), mean_contribution(peers, weights))


@pytest.mark.parametrize(("kind", "expected"), [("median", [2.0, 5.0]), ("trimmed", [2.0, 5.0])])
def test_of_three_the_middle_one_counts(kind, expected):
    rows = [torch.tensor(row) for row in ([1.0, 5.0], [2.0, 900.0], [30.0, -7.0])]
    assert robust_mean(kind, rows, [1.0] * 3).tolist() == expected


def test_of_five_trimmed_takes_three_and_median_one():
    rows = [torch.tensor([value]) for value in (1.0, 2.0, 3.0, 7.0, 100.0)]
    assert robust_mean("trimmed", rows, [1.0] * 5).tolist() == [4.0]
    assert robust_mean("median", rows, [1.0] * 5).tolist() == [3.0]


def test_clipping_brings_a_norm_down_to_what_the_middle_of_the_group_has():
    rows = [torch.tensor([value]) for value in (1.0, 1.0, 1.0, 50.0)]
    assert robust_mean("clip", rows, [1.0] * 4).tolist() == [pytest.approx((3 + CLIP) / 4)]


@pytest.mark.parametrize("kind", MEANS)
def test_in_a_group_of_two_there_is_no_majority(kind):
    rows = [torch.tensor([1.0]), torch.tensor([5.0])]
    assert robust_mean(kind, rows, [1.0, 3.0]).tolist() == [4.0]


@given(st.sampled_from(MEANS), st.integers(2, 8), st.integers(0, 50))
def test_the_same_contributions_give_the_same_bits(kind, count, seed):
    peers = honest(count, seed, 50)
    copies = [one.clone() for one in peers]
    assert torch.equal(
        robust_mean(kind, peers, [1.0] * count), robust_mean(kind, copies, [1.0] * count)
    )
    assert all(torch.equal(one, copy) for one, copy in zip(peers, copies, strict=True)), (
        "nothing is changed"
    )


def test_directions_without_a_majority_are_all_kept():
    rows = [torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.0]), torch.tensor([0.0, 0.0])]
    assert robust_mean("clip", rows, [1.0] * 3).isfinite().all()


def test_an_unknown_kind_is_refused():
    with pytest.raises(SpecError, match="mean = 'best'"):
        robust_mean("best", [torch.ones(1)] * 3, [1.0] * 3)  # type: ignore[arg-type]


def test_what_is_plausible_follows_our_own_norm_and_what_has_been_usual():
    assert plausible_norm(1.0, 0.0) == PLAUSIBLE
    assert plausible_norm(1.0, 2.0) == 2 * PLAUSIBLE


def test_what_is_usual_is_the_lower_median_of_what_each_peer_brought_last():
    usual = UsualNorm()
    assert usual.value == 0.0
    usual.saw("liar", 100.0)
    assert usual.value == 0.0, "one alone could be the liar"
    usual.saw("honest", 1.0)
    assert usual.value == 1.0
    for _ in range(9):
        usual.saw("liar", 1000.0)
        usual.saw("liar", math.nan)
        usual.saw("liar", math.inf)
    assert usual.value == 1.0, "the same peer counts once, however often it tries"
    usual.saw("far", 5.0)
    assert usual.value == 5.0, "two of three are far away: so we are"


def test_what_was_usual_before_a_restart_counts_until_others_have_come():
    usual = UsualNorm(2.0)
    assert usual.value == 2.0
    usual.saw("one", 7.0)
    usual.saw("two", 9.0)
    assert usual.value == 7.0


def test_a_partner_that_always_brings_as_much_as_it_may_does_not_raise_what_it_may_for_ever():
    usual, bounds = UsualNorm(), []
    for _ in range(200):
        bounds.append(plausible_norm(1.0, usual.value))
        usual.saw("liar", bounds[-1])
        usual.applied(bounds[-1], own=1.0)
    assert max(bounds) <= PLAUSIBLE * ALONE and usual.learned == 1.0
    assert bounds[-1] == bounds[100], "it has levelled off"


def test_what_was_applied_of_late_is_usual_where_half_of_it_agrees():
    usual = UsualNorm()
    usual.applied(5.0, own=5.0)
    assert usual.value == 5.0, "the first one"
    for _ in range(RECENT):
        usual.applied(2.0, own=5.0)
    assert usual.value == 2.0
    for _ in range(RECENT):
        usual.applied(5.0, own=3.0)
    assert usual.value == 3.0


def test_a_liar_that_comes_while_our_progress_is_large_has_no_larger_bound_from_then_on():
    usual = UsualNorm()
    assert plausible_norm(34.0, usual.value) > 81.0, (
        "five steps after the start of a run nobody can tell"
    )
    usual.saw("liar", 81.0)
    usual.applied(81.0, own=34.0)
    usual.saw("honest", 3.0)
    usual.applied(3.0, own=4.0)
    usual.saw("liar", 75.0)
    assert plausible_norm(4.0, usual.value) < 30.0


def test_two_peers_that_drifted_apart_come_together_and_one_that_lies_stays_bounded():
    usual = UsualNorm(1.0)
    usual.saw("partner", 3.5)
    assert usual.value == 3.5
    for _ in range(9):
        usual.saw("partner", 100.0)
    assert usual.value == ALONE


def test_only_so_many_peers_are_remembered():
    usual = UsualNorm()
    usual.saw("old", 1e9)
    for number in range(REMEMBERED):
        usual.saw("again" if number % 2 else f"peer{number}", 1.0)
    assert usual.value == 1.0
    for number in range(10 * REMEMBERED):
        usual.saw(f"new{number}", 3.0)
    assert usual.value == 3.0
    assert len(usual._last) == REMEMBERED


def test_who_claims_to_have_trained_for_longer_may_bring_more_up_to_a_bound():
    assert believed_steps(20, 0, 20, False) == 20
    assert believed_steps(20, -15, 20, False) == 20, "who has trained less makes us no smaller"
    assert believed_steps(20, 10, 20, False) == 30
    assert believed_steps(20, 10**9, 20, False) == 20 * LONGER
    assert believed_steps(60, 10**9, 20, False) == 60 * LONGER
    assert believed_steps(20, 10**9, 20, False, most=200) == 200, "as far as any honest peer can be"
    assert believed_steps(2, 0, 20, False) == 20, (
        "who has just synced expects a whole interval of others"
    )
    assert believed_steps(2, 0, 20, True) == 2, "but not in the first interval"


def test_progress_grows_with_the_learning_rates_of_its_steps():
    assert growth(20.0, 20.0) == growth(20.0, 5.0) == growth(1.0, 0.0) == 1.0
    assert growth(20.0, 30.0) == pytest.approx(1.5**GROWTH)
    warming_up = [sum(range(1, steps + 1)) for steps in (3, 20)]
    assert growth(*warming_up) > 2 * growth(3, 20), (
        "the norm of 20 steps of warm-up where ours has 3"
    )


def test_a_part_may_have_its_share_of_our_norm_or_as_much_as_ours_has_there():
    whole = Bound(own=4.0, usual=2.0, growth=2.0, claimed=3.0)
    assert whole.part(0.0, 0.25) == Bound(2.0, 1.0, 2.0, 3.0)
    assert whole.part(3.9, 0.25).own == 3.9
    assert whole.most == PLAUSIBLE * 8.0 and whole.explained == PLAUSIBLE * 12.0


@given(st.floats(0, 1e30), st.floats(0, 1e30), st.floats(1, 100), st.floats(1, 100))
def test_whatever_is_known_no_norm_that_is_none_is_plausible(own, usual, grows, claims):
    for norm in (math.nan, math.inf):
        with pytest.raises(ImplausibleError) as refused:
            Bound(own, usual, grows, claims).check(norm, "brings progress")
        assert refused.value.deed is Deed.HEAVY


@pytest.mark.parametrize(
    ("norm", "deed", "apart_deed"),
    [
        (6.0, "", ""),
        (6.1, None, None),
        (12.0, None, None),
        (12.1, Deed.STUMBLE, Deed.STUMBLE),
        (36.0, Deed.STUMBLE, Deed.STUMBLE),
        (36.1, Deed.HEAVY, Deed.STUMBLE),
        (math.inf, Deed.HEAVY, Deed.HEAVY),
        (math.nan, Deed.HEAVY, Deed.HEAVY),
    ],
)
def test_what_a_norm_beyond_the_bound_costs(
    norm: float, deed: Deed | str | None, apart_deed: Deed | str | None
):
    for apart, costs in ((False, deed), (True, apart_deed)):
        bound = Bound(own=1.0, usual=0.0, growth=2.0, claimed=4.0, far=3.0, apart=apart)
        try:
            bound.check(norm, "brings progress")
        except ImplausibleError as error:
            assert error.deed == costs and "where 6 is plausible" in str(error)
        else:
            assert costs == ""


def test_what_is_usual_explains_as_much_as_our_own_progress():
    bound = Bound(own=1.0, usual=5.0, growth=2.0, claimed=1.0)
    assert (bound.grown, bound.most, bound.explained) == (2.0, 5 * PLAUSIBLE, 5 * PLAUSIBLE)
    assert Bound(own=3.0, usual=0.0, growth=2.0, claimed=1.0).explained == 6 * PLAUSIBLE, (
        "claims make it no smaller"
    )


def turned(cosine: float) -> torch.Tensor:
    """What has this cosine with OURS."""
    return torch.tensor([cosine, (1.0 - cosine * cosine) ** 0.5]) * 7.0


OURS = torch.tensor([3.0, 0.0])


def refused_at(directions: Directions, peer: str, cosine: float, tries: int = 30) -> int | None:
    """At which contribution with this cosine a peer is refused, if at all."""
    for number in range(1, tries + 1):
        try:
            directions.check(peer, OURS, turned(cosine))
        except ImplausibleError as error:
            assert error.deed is None, "it is held against nobody"
            return number
    return None


@pytest.mark.parametrize(
    ("cosine", "at"),
    [
        (1.0, None),
        (0.0, None),
        (-0.05, None),
        (-0.07, ENOUGH),
        (-0.24, ENOUGH),
        (-0.26, 1),
        (-1.0, 1),
    ],
)
def test_who_points_against_us_is_refused_at_once_and_who_does_so_a_little_once_it_is_clear(
    cosine: float, at: int | None
):
    assert refused_at(Directions(), "b", cosine) == at


def test_only_the_last_contributions_tell_where_a_peer_points_and_each_peer_for_itself():
    directions = Directions()
    for _ in range(10 * RECENT):
        directions.check("b", OURS, turned(0.02))
    assert refused_at(directions, "b", -0.2) == 6, "the sixth of the last 16"
    assert refused_at(directions, "c", -0.2) == ENOUGH
    directions.check("d", OURS, turned(-0.2))
    for number in range(REMEMBERED - 1):
        directions.check(f"other{number}", OURS, turned(0.5))
    assert refused_at(directions, "d", -0.2) == ENOUGH - 1, "it is still remembered"
    for number in range(REMEMBERED):
        directions.check(f"other{number}", OURS, turned(0.5))
    assert refused_at(directions, "d", -0.2) == ENOUGH


@pytest.mark.parametrize(
    "theirs", [torch.zeros(2), torch.full((2,), -1e30), torch.full((2,), math.inf)]
)
def test_what_has_no_direction_points_nowhere(theirs: torch.Tensor):
    directions = Directions()
    for _ in range(2 * ENOUGH):
        directions.check("b", OURS, theirs)


def test_a_partner_is_lone_until_another_peer_has_brought_anything():
    usual = UsualNorm()
    assert usual.is_lone("b")
    usual.saw("b", 1.0)
    assert usual.is_lone("b") and not usual.is_lone("c")
    usual.saw("c", math.nan)
    assert usual.is_lone("b"), "a norm that is none is nothing"
    usual.saw("c", 1.0)
    assert not usual.is_lone("b")


def test_clipping_weighs_and_scales_only_what_is_longer():
    rows = [torch.tensor(row) for row in ([3.0, 4.0], [6.0, 8.0], [30.0, 40.0])]
    most = CLIP * 10.0
    wanted = (1.0 * rows[0] + 2.0 * rows[1] + 1.0 * rows[2] * (most / 50.0)) / 4.0
    assert torch.allclose(robust_mean("clip", rows, [1.0, 2.0, 1.0]), wanted)


def test_the_middle_of_an_even_number_is_the_mean_of_two_and_trimming_takes_one_from_each_end():
    rows = [torch.tensor([value]) for value in (1.0, 3.0, 4.0, 100.0)]
    assert robust_mean("median", rows, [1.0] * 4).tolist() == [3.5]
    assert robust_mean("trimmed", rows, [1.0] * 4).tolist() == [3.5]
    six = [torch.tensor([value]) for value in (-9.0, 1.0, 2.0, 6.0, 7.0, 100.0)]
    assert robust_mean("median", six, [1.0] * 6).tolist() == [4.0]
    assert robust_mean("trimmed", six, [1.0] * 6).tolist() == [4.0]


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ((robust.CLIP,), "norms above {:g} times the group's lower median"),
        (
            (PLAUSIBLE, PLAUSIBLE),
            "refused above {:g} times our own norm, or {:g} times what is usual",
        ),
        ((GROWTH,), "to the power {:g}, which holds in warm-up"),
        ((robust.FAR,), "a stumble (see *Score*) up to {:g} times that; a heavy deed beyond"),
        (
            (robust.FAR_APART,),
            "whose slow weights part while a peer stands still, it is {:g} times",
        ),
        (
            (robust.OPPOSED, robust.CONTRARY, RECENT),
            "below {:g}, or below {:g} on average over the last {:g}",
        ),
        ((trust.BOUND,), "Below {:g} a peer is neither called nor accepted"),
        ((trust.LIGHT,), "before an exchange is applied takes {:g}"),
        ((trust.MEMORY,), "half of them in {:g} intervals"),
    ],
)
def test_the_figures_of_the_documents_are_those_of_the_code(figures: tuple[float, ...], words: str):
    assert LONGER == 2 and trust.FORGIVEN == 8 and trust.GOOD == 0.25, (
        "twice; eight in a row; a quarter"
    )
    text = " ".join((Path(__file__).parents[3] / "docs" / "methods.md").read_text().split())
    assert words.format(*figures) in text
