"""What must hold for the outer step: the papers' rules from one vector a peer, to the bit where
that is promised."""

import hashlib
import itertools
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lowcomm_protocol.codecs import codec
from lowcomm_protocol.errors import PlanError, SpecError
from lowcomm_protocol.exchange.outer import (
    are_finite,
    contribution,
    mean_contribution,
    merge,
    outer_step,
    square_and_cosine_apart,
    square_apart,
    token_weights,
    worst_block_spread,
)
from lowcomm_protocol.spec.outer import (
    OuterSettings,
    consensus_radius,
    validate_outer,
)

NESTEROV = OuterSettings("nesterov", 0.7, 0.9, 0.0, "mix", 0.5)
NOLOCO = OuterSettings("noloco", 0.7, 0.5, 0.7, "shift", 0.0)
REMEMBERING = replace(NOLOCO, outer_lr=1.0, consensus=1.0, memory=0.9)
NUMEL = 1003  # not a multiple of a vector register


def group_of(
    size: int, seed: int = 0, spread: float = 1.0
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Slow weights (``spread`` apart) and zero momenta of a group."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(NUMEL, generator=generator)
    phis = [start + spread * torch.randn(NUMEL, generator=generator) for _ in range(size)]
    return phis, [torch.zeros(NUMEL) for _ in range(size)]


def progress_of(size: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return [0.1 * torch.randn(NUMEL, generator=generator) for _ in range(size)]


def meet(settings, phis, deltas, thetas, weights=None, code=lambda sent: sent) -> None:
    """One exchange of a whole group, each member on its own."""
    sent = [code(contribution(settings, p, t)) for p, t in zip(phis, thetas, strict=True)]
    for phi, delta, theta, own in zip(phis, deltas, thetas, sent, strict=True):
        outer_step(settings, phi, delta, mean_contribution(sent, weights), theta - phi, own)


def literal(settings, phis, deltas, progress, weights):
    """The rules as the papers write them, two vectors a peer, in float64, with weighted means."""
    pooled = sum(w * d for w, d in zip(weights, progress, strict=True))
    centre = sum(w * phi for w, phi in zip(weights, phis, strict=True))
    pulls = [settings.consensus * (phi - centre) for phi in phis]
    for i, pull in enumerate(pulls):
        if settings.kind == "noloco":
            step = settings.momentum * deltas[i] + settings.outer_lr * pooled - pull
            deltas[i] = settings.memory * deltas[i] + (1.0 - settings.memory) * step
            phis[i] = phis[i] + step
        else:
            gradient = -(pooled - pull)
            deltas[i] = settings.momentum * deltas[i] + gradient
            phis[i] = phis[i] - settings.outer_lr * (gradient + settings.momentum * deltas[i])


def exact_nesterov(settings, phi, delta, pooled) -> tuple[np.ndarray, np.ndarray]:
    """The step in float32 with every operation rounded: numpy's own, which fuses nothing."""
    rate, momentum = np.float32(settings.outer_lr), np.float32(settings.momentum)
    gradient = -pooled
    delta = momentum * delta + gradient
    return phi - rate * (gradient + momentum * delta), delta


@pytest.mark.parametrize("lr, momentum", [(0.7, 0.9), (0.4, 0.9), (1.0, 0.5), (0.7, 0.0)])
def test_nesterov_rounds_every_operation_and_is_torchs_sgd_but_for_what_that_fuses(lr, momentum):
    settings = replace(NESTEROV, outer_lr=lr, momentum=momentum)
    phis, deltas = group_of(3, spread=0.0)
    exact_phi, exact_delta = phis[0].numpy().copy(), deltas[0].numpy().copy()
    parameter = torch.nn.Parameter(phis[0].clone())
    sgd = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=momentum > 0)
    for step in range(50):
        thetas = [phi + one for phi, one in zip(phis, progress_of(3, step), strict=True)]
        pooled = mean_contribution([theta - phi for theta, phi in zip(thetas, phis, strict=True)])
        parameter.grad = -pooled
        sgd.step()
        exact_phi, exact_delta = exact_nesterov(settings, exact_phi, exact_delta, pooled.numpy())
        meet(settings, phis, deltas, thetas)
        for phi, delta in zip(phis, deltas, strict=True):
            assert (phi.numpy() == exact_phi).all() and (delta.numpy() == exact_delta).all()
    # A fused operation differs by half a unit in the last place, of values up to 4 here, twice in
    # each of 50 steps.
    assert (phis[0] - parameter.detach()).abs().max() <= 50 * 2 * 2.0**-22


def exact_remembering(settings, phi, delta, pooled) -> tuple[np.ndarray, np.ndarray]:
    """The step in float32 with every operation rounded: numpy's own, which fuses nothing."""
    momentum, memory = np.float32(settings.momentum), np.float32(settings.memory)
    step = momentum * delta + pooled
    return phi + step, memory * delta + np.float32(1.0 - settings.memory) * step


@pytest.mark.parametrize("momentum, memory", [(0.5, 0.9), (0.37, 0.61), (0.0, 0.5)])
def test_a_rule_that_remembers_rounds_every_operation(momentum, memory):
    settings = replace(REMEMBERING, momentum=momentum, memory=memory)
    (phi,), (delta,) = group_of(1)
    exact_phi, exact_delta = phi.numpy().copy(), delta.numpy().copy()
    for step in range(30):
        progress, mean = progress_of(2, step)
        sent = phi + progress
        mean = mean + phi
        pooled = progress.numpy() - (sent.numpy() - mean.numpy())
        exact_phi, exact_delta = exact_remembering(settings, exact_phi, exact_delta, pooled)
        outer_step(settings, phi, delta, mean, progress, sent)
        assert (phi.numpy() == exact_phi).all() and (delta.numpy() == exact_delta).all()


def many_steps() -> tuple[str, str, bool]:
    """What torch may use of this processor, the digest of 30 outer steps, and whether torch's own
    come to the same bits."""
    settings = OuterSettings("nesterov", 0.4, 0.9, 0.0, "mix", 0.5)
    draw = np.random.default_rng(1)  # torch draws other bits with AVX2

    def vector() -> torch.Tensor:
        return torch.from_numpy(draw.standard_normal(4099, dtype=np.float32))

    phi, delta = vector(), torch.zeros(4099)
    parameter = torch.nn.Parameter(phi.clone())
    sgd = torch.optim.SGD([parameter], lr=0.4, momentum=0.9, nesterov=True)
    for _ in range(30):
        mean = mean_contribution([vector(), vector(), vector()], token_weights([300, 512, 700]))
        parameter.grad = -mean
        sgd.step()
        outer_step(settings, phi, delta, mean)
    digest = hashlib.sha256(phi.numpy().tobytes() + delta.numpy().tobytes()).hexdigest()
    return torch.backends.cpu.get_cpu_capability(), digest, torch.equal(phi, parameter.detach())


@pytest.mark.slow
def test_the_outer_step_gives_the_same_bits_with_and_without_fused_operations():
    script = "import test_outer; print(*test_outer.many_steps())"
    environment = os.environ | {
        "ATEN_CPU_CAPABILITY": "default",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    ran = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    used, digest, as_torch = ran.stdout.split()
    assert used == "DEFAULT"
    assert as_torch == "True", "where torch fuses nothing it computes the same to the bit"
    assert digest == many_steps()[1], f"with {many_steps()[0]} as well"


@pytest.mark.parametrize(
    "settings", [NESTEROV, replace(REMEMBERING, consensus=0.0)], ids=["nesterov", "remembering"]
)
def test_a_momentum_that_is_no_longer_fed_ends_at_zero_and_never_becomes_subnormal(settings):
    phi, delta = torch.ones(3), torch.tensor([1e-30, -1e-30, 1e-30])
    for _ in range(50):
        outer_step(settings, phi, delta, torch.tensor([0.0, 0.0, 1e-42]))
        assert all(one == 0.0 or abs(one) >= 2.0**-100 for one in delta.tolist())
    assert delta.tolist() == [0.0, 0.0, 0.0] and phi.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        NOLOCO,
        replace(NOLOCO, consensus=0.0),
        replace(NESTEROV, consensus=0.8, momentum=0.5),
        NESTEROV,
        REMEMBERING,
        replace(REMEMBERING, consensus=0.0),
    ],
    ids=[
        "noloco",
        "noloco without consensus",
        "nesterov with consensus",
        "nesterov",
        "remembering",
        "remembering without consensus",
    ],
)
def test_one_vector_gives_what_the_papers_compute_from_two(settings, size, weighted):
    phis, deltas = group_of(size)
    exact_phis, exact_deltas = [phi.double() for phi in phis], [delta.double() for delta in deltas]
    weights = (
        [(i + 1) / (size * (size + 1) / 2) for i in range(size)] if weighted else [1 / size] * size
    )
    for step in range(5):
        thetas = [phi + one for phi, one in zip(phis, progress_of(size, step), strict=True)]
        progress = [(theta - phi).double() for theta, phi in zip(thetas, phis, strict=True)]
        literal(settings, exact_phis, exact_deltas, progress, weights)
        meet(settings, phis, deltas, thetas, weights if weighted else None)
        for got, expected in zip(phis + deltas, exact_phis + exact_deltas, strict=True):
            assert (got - expected).abs().max() <= 1e-6 * exact_phis[0].abs().max()


@pytest.mark.parametrize("name", ["e3m0", "int8"])
@pytest.mark.parametrize(
    "settings",
    [NESTEROV, replace(NOLOCO, consensus=0.0), replace(REMEMBERING, consensus=0.0)],
    ids=["nesterov", "noloco", "remembering"],
)
def test_members_stay_equal_to_the_bit_under_a_lossy_codec(name, settings):
    def code(sent: torch.Tensor) -> torch.Tensor:
        data, restored = bytearray(codec(name).coded_size(NUMEL)), torch.empty(NUMEL)
        codec(name).encode(sent.numpy(), memoryview(data))
        codec(name).decode(bytes(data), restored.numpy())
        return restored

    phis, deltas = group_of(3, spread=0.0)
    for step in range(10):
        thetas = [phi + one for phi, one in zip(phis, progress_of(3, step), strict=True)]
        meet(settings, phis, deltas, thetas, code=code)
        assert torch.equal(phis[0], phis[1])
        assert torch.equal(phis[0], phis[2])
        assert torch.equal(deltas[0], deltas[2])


@pytest.mark.parametrize(
    "weights", [[1.0], [1.0, -1.0], [0.0, 0.0], [1.0, math.nan], [1.0, math.inf], [1e308, 1e308]]
)
def test_weights_that_are_not_valid_are_refused(weights):
    with pytest.raises(SpecError, match="weights"):
        mean_contribution([torch.ones(2), torch.ones(2)], weights)


@pytest.mark.parametrize(
    "wrong", [torch.ones(1), torch.ones(3, 1), torch.ones(3).double()], ids=["1", "2-D", "f64"]
)
def test_vectors_that_torch_would_broadcast_or_promote_are_refused(wrong):
    right = torch.ones(3)
    calls = [
        lambda: contribution(NOLOCO, right, wrong),
        lambda: contribution(NOLOCO, right, right, wrong),
        lambda: mean_contribution([right, wrong]),
        lambda: mean_contribution([]),
        lambda: merge(NOLOCO, right, wrong, right),
        lambda: merge(NOLOCO, right, right, wrong),
        *[
            lambda at=at: outer_step(
                NOLOCO, right, *[wrong if k == at else right.clone() for k in range(4)]
            )
            for at in range(4)
        ],
    ]
    for call in calls:
        with pytest.raises(PlanError):
            call()
    assert right.tolist() == [1, 1, 1]


def test_shift_gives_phi_to_the_bit_where_nothing_moved_and_keeps_the_steps_elsewhere():
    generator = torch.Generator().manual_seed(0)
    captured, phi = (
        torch.randn(NUMEL, generator=generator),
        torch.randn(NUMEL, generator=generator) * 1e-3,
    )
    assert not torch.equal(captured + (phi - captured), phi)  # rounding would show
    theta = captured.clone()
    theta[::2] += 0.5
    merge(NOLOCO, theta, phi, captured)
    assert torch.equal(theta[1::2], phi[1::2])
    assert torch.allclose(theta[::2], phi[::2] + 0.5, atol=1e-6)


@pytest.mark.parametrize("kind", ["noloco", "nesterov"])
@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("memory", [0.0, 0.9])
def test_the_radius_is_that_of_the_matrix_of_moments(kind, momentum, memory):
    for consensus, group in itertools.product((0.0, 1e-6, 0.1, 1.0, 3.0, 30.0), (2, 3, 8)):
        settings = OuterSettings(kind, 0.7, momentum, consensus, "mix", 0.5, memory)
        p, q, r, s = settings.rule.dynamics(settings)
        # Of 64 peers each meets `group`: x is phi, or nothing, in the mean of the second moments.
        k = (1 - 1 / group) * 64 / 63
        alone, met = (np.array([[1 + q * met, p], [s * met, r]]) for met in (0, 1))
        moments = (1 - k) * np.kron(alone, alone) + k * np.kron(met, met)
        radius = np.abs(np.linalg.eigvals(moments)).max()
        assert consensus_radius(settings, group, 64) == pytest.approx(radius, rel=1e-6)


@pytest.mark.parametrize("kind", ["noloco", "nesterov"])
@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("lr", [0.1, 0.7, 1.0])
def test_a_consensus_that_is_stable_in_pairs_is_stable_in_every_larger_group(kind, momentum, lr):
    for consensus in np.geomspace(0.01, 30, 40):
        settings = OuterSettings(kind, lr, momentum, float(consensus), "mix", 0.5)
        if consensus_radius(settings, 2) < 1:
            assert all(consensus_radius(settings, size) < 1 for size in (3, 4, 8, 64, 10_000))


def test_diverging_settings_are_refused_with_the_largest_stable_consensus():
    with pytest.raises(
        SpecError, match=r"consensus = 0.7 and momentum = 0.9 diverges in groups of 2.*below 0.38,"
    ):
        validate_outer(replace(NOLOCO, momentum=0.9), 2)
    with pytest.raises(SpecError, match=r"below 1.21,"):
        validate_outer(replace(NESTEROV, consensus=1.25), 2)
    validate_outer(replace(NESTEROV, consensus=1.2), 2)


@pytest.mark.parametrize(
    "tokens, weights",
    [
        ([512, 512], [512, 512]),
        ([256, 512], [256, 512]),
        ([0, 0], [1, 1]),
        ([10**15, 512], [1024, 512]),
        ([0, 10**15], [1, 2]),
        ([100, 400, 400, 10**15], [100, 400, 400, 800]),
        ([10**15, 10**15, 400], [10**15, 10**15, 400]),
    ],
)
def test_nobody_weighs_more_by_claiming_more_than_twice_what_is_usual(tokens, weights):
    assert token_weights(tokens) == weights


@pytest.mark.parametrize(
    "settings", [NOLOCO, replace(NESTEROV, consensus=1.0)], ids=["noloco", "nesterov"]
)
def test_in_groups_who_starts_equal_ends_equal_to_the_bit_with_a_consensus_term_too(settings):
    generator = torch.Generator().manual_seed(0)
    phi = torch.randn(1000, generator=generator)
    thetas = [phi + 0.1 * torch.randn(1000, generator=generator) for _ in range(3)]
    mean = mean_contribution([contribution(settings, phi, theta) for theta in thetas])
    group, pairs = [], []
    for theta in thetas:
        for ends, own in ((group, ()), (pairs, (theta - phi, contribution(settings, phi, theta)))):
            new, delta = phi.clone(), torch.zeros(1000)
            outer_step(settings, new, delta, mean, *own)
            ends.append(new)
    assert all(torch.equal(one, group[0]) for one in group)
    assert all(torch.allclose(one, group[0], atol=1e-6) for one in pairs), (
        "the same rule up to rounding"
    )


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 65_536, 200_001])
def test_the_spread_is_the_variance_across_vectors_whatever_their_number_and_length(
    count: int, numel: int
):
    vectors = [
        torch.randn(numel, generator=torch.Generator().manual_seed(seed)) for seed in range(count)
    ]
    variance = torch.stack(vectors).var(0, correction=0)
    blocks = torch.nn.functional.pad(variance, (0, -numel % 256)).view(-1, 256)
    assert worst_block_spread(vectors) == pytest.approx(
        float(blocks.mean(1).max().sqrt()), rel=1e-6
    )


# Norms and directions of progress


@pytest.mark.parametrize("numel", [1, 255, 256, 257, 100_001])
@pytest.mark.parametrize("pull", [0.0, 0.3, 1.0])
def test_norm_and_cosine_are_those_of_the_differences(numel: int, pull: float):
    source = torch.Generator().manual_seed(numel)
    theta, phi, sent = (torch.randn(numel, generator=source) for _ in range(3))
    ours, theirs = (theta - phi).double(), (sent - pull * phi).double()
    assert square_apart(sent, phi, pull) == pytest.approx(float(theirs @ theirs), rel=1e-5)
    expected = float(ours @ theirs / (ours.norm() * theirs.norm()))
    own = square_apart(theta, phi, 1.0)
    square, cosine = square_and_cosine_apart(sent, theta, phi, pull, own)
    assert square == square_apart(sent, phi, pull)
    assert cosine == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("place", [0, 255, 256, 999])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_found_wherever_it_is(place: int, value: float):
    vector = torch.full((1000,), -3.4e38)
    fine = vector.clone()
    assert are_finite(vector, fine)
    vector[place] = value
    assert not are_finite(vector, fine)
    assert not are_finite(fine, vector)


@pytest.mark.parametrize("settings", [NOLOCO, replace(NESTEROV, merge="mix", mix=0.25)])
@pytest.mark.parametrize("last", [0.0, math.inf])
def test_a_merge_tells_whether_its_outcome_is_finite_and_keeps_what_the_weights_were(
    settings: OuterSettings, last: float
):
    source = torch.Generator().manual_seed(0)
    theta, phi, captured = (torch.randn(1000, generator=source) for _ in range(3))
    captured[::7], phi[-1] = theta[::7], last
    before = theta.clone()
    assert merge(settings, theta, phi, captured) == (last == 0.0)
    assert torch.equal(captured, before)
