"""What must hold for means among liars."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowcomm_protocol.exchange.outer import mean_contribution
from lowcomm_protocol.exchange.robust import CLIP, MEANS, robust_mean

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


@pytest.mark.parametrize("kind", ["mean", "clip"])
def test_among_honest_peers_it_is_the_weighted_mean(kind):
    peers, weights = honest(4), [1.0, 2.0, 1.0, 0.5]
    assert torch.equal(robust_mean(kind, peers, weights), mean_contribution(peers, weights))


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
