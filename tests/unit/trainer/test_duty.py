"""What must hold for a trainer that rests as its owner wants: computing takes the share of the time
that was asked for, rest is counted, and the bits stay."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.cards import FakeCard, FakeLibrary
from helpers.driven_trainer import driven
from lowcomm_node.errors import ConfigError
from lowcomm_node.node.messages import Cooling, InnerStepTaken, Stop, Train, TrainingDevice
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.trainer.rest import LOOK_SECONDS, MOST_CREDIT, CardLimits, Duty


class Time:
    """A clock that passes only where somebody computes or sleeps; sleep takes ``late`` more."""

    def __init__(self, share: float, late: float = 0.0) -> None:
        self.now, self.computed, self.kept, self.late = 100.0, 0.0, 0.0, late
        self.rests: list[float] = []
        self.duty = Duty(waited=lambda: self.kept, clock=lambda: self.now, sleep=self.sleep)
        self.duty.share = share

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.computed += seconds

    def sleep(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.now += seconds + self.late


@pytest.mark.parametrize("share", [0.1, 0.6, 0.99])
@pytest.mark.parametrize("late", [0.0, 0.003])
def test_computing_takes_its_share_of_the_time_whatever_its_parts_take(share: float, late: float):
    time = Time(share, late)
    for step in range(200):
        time.duty.begin()
        for part in range(1 + step % 8):
            time.compute([0.0001, 0.02, 1.5][(step + part) % 3])
            time.duty.rest()
    passed = time.now - 100.0
    assert time.computed / passed == pytest.approx(share, rel=1e-3)
    assert time.duty.rested == pytest.approx(passed - time.computed)


def test_neither_waits_nor_rests_that_took_hours_change_later_rests():
    time = Time(0.5, late=7200.0)
    for _ in range(3):
        time.now += 1000.0  # waiting for text
        time.duty.begin()
        time.compute(2.0)
        time.now += 100.0  # for which other programs have the processor
        time.kept += 100.0
        time.duty.rest()
        time.late = 0.0
    assert time.rests == [2.0, 2.0 - MOST_CREDIT, 2.0]


def test_a_node_rests_between_micro_batches_and_learns_the_same(tmp_path: Path):
    time = Time(0.5)
    with driven(tmp_path, "a", micro_batch=1) as (plain,):
        plain.steps(3)
    with driven(tmp_path, "a", micro_batch=1, duty="50%") as (one,):
        assert (plain.built.duty, one.built.duty) == (1.0, 0.5)
        honest, duty = one.replica.loss, one.replica.duty
        duty.clock, duty.sleep, duty.waited = lambda: time.now, time.sleep, lambda: 0.0

        def loss(tokens: Tensor, targets: Tensor) -> Tensor:
            time.compute(1.0)
            return honest(tokens, targets)

        one.replica.loss = loss
        one.steps(3)
        assert time.rests == [1.0] * 6, "two micro-batches a step"
        assert one.events(InnerStepTaken)[-1].waited["duty"] == 6.0
    for name, weight in one.replica.weights.items():
        assert torch.equal(weight, plain.replica.weights[name])


# The card


def limits(*uuids: str, **settings: Any) -> CardLimits:
    devices = [
        TrainingDevice(name=f"cuda:{place}", pid=1, gpu=uuid)
        for place, uuid in enumerate(uuids or ("GPU-1",))
    ]
    return CardLimits(NodeSettings.model_validate({"home": "/", **settings}), devices)


def test_a_card_that_was_hot_cools_and_is_asked_once_a_second(monkeypatch: pytest.MonkeyPatch):
    library, ours, now = FakeLibrary(monkeypatch), limits(max_gpu_temp=80), 0.0
    for degrees, hot in ((79, False), (80, True), (76, True), (75, False), (79, False), (90, True)):
        library.degrees = degrees
        assert ours.is_hot(now := now + LOOK_SECONDS) == hot
        library.degrees = 40 if hot else 99
        assert ours.is_hot(now + LOOK_SECONDS / 2) == hot, "too early to look again"
    assert ours.why_hot == "the GPU has 90 °C: rests until it has cooled to 75 °C"


def test_one_of_several_cards_that_is_hot_holds_all_until_all_are_cool(
    monkeypatch: pytest.MonkeyPatch,
):
    library, now = FakeLibrary(monkeypatch), 0.0
    library.cards.append(other := FakeCard("GPU-2"))
    ours = limits("GPU-1", "GPU-2", max_gpu_temp=80)
    for first, second, hot in ((79, 79, False), (60, 81, True), (76, 60, True), (75, 75, False)):
        library.degrees, other.degrees = first, second
        assert ours.is_hot(now := now + LOOK_SECONDS) == hot
        if hot:
            assert ours.why_hot.startswith("cuda:1 has 81 °C")


def test_power_of_each_of_several_cards_is_limited_and_given_back(monkeypatch: pytest.MonkeyPatch):
    library = FakeLibrary(monkeypatch)
    library.cards += [FakeCard("GPU-2"), FakeCard("GPU-3")]
    library.cards[2].milliwatts = 200_000
    ours = limits("GPU-1", "GPU-2", "GPU-3", gpu_power=150)
    assert [card.milliwatts for card in library.cards] == [150_000] * 3
    ours.free()
    assert [card.milliwatts for card in library.cards] == [250_000, 250_000, 200_000]
    library.is_root = False
    ours = limits("GPU-1", "GPU-2", "GPU-3", gpu_power=150)
    assert ours.share == 0.6, "the one that is furthest above it"
    assert "-i GPU-1,GPU-2,GPU-3 -pl 150" in ours.unlimited
    with pytest.raises(ConfigError, match="is another device"):
        limits("GPU-1", "", gpu_power=150)


def test_a_card_whose_power_is_limited_gets_it_back_where_another_refuses(
    monkeypatch: pytest.MonkeyPatch,
):
    library = FakeLibrary(monkeypatch)
    library.cards.append(other := FakeCard("GPU-2"))
    library.calls["nvmlDeviceGetPowerManagementLimitConstraints"] = lambda card: (
        [200_000 if card is other else 100_000, 300_000]
    )
    with pytest.raises(ConfigError, match="takes 200 to 300 W"):
        limits("GPU-1", "GPU-2", gpu_power=150)
    assert library.milliwatts == 250_000


def test_a_trainer_takes_no_step_while_its_card_is_hot_and_frees_its_power_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    library, taken = FakeLibrary(monkeypatch), list[int]()
    monkeypatch.setattr("lowcomm_node.trainer.rest.LOOK_SECONDS", 0.0)
    with driven(tmp_path, "a") as (one,):
        one.loop.limits = limits(max_gpu_temp=80, gpu_power=150)
        one.ask(Train(on=True))
        for library.degrees in (60, 80, 78, 75):
            if one.loop._can_step():
                one.loop._step()
            one.loop._serve(wait=not one.loop._can_step())
            taken.append(one.replica.steps)
        assert taken == [1, 1, 1, 2]
        hot = "the GPU has 80 °C: rests until it has cooled to 75 °C"
        assert [event.why for event in one.events(Cooling)] == [hot, ""]
        assert one.loop._waits.seconds["heat"] > 0
        assert (library.milliwatts, one.loop.limits.share) == (150_000, 1.0)
        one.ask(Stop())
        one.loop.run()
        assert library.milliwatts == 250_000


def test_power_is_only_lowered_and_without_root_a_node_says_how_and_rests(
    monkeypatch: pytest.MonkeyPatch,
):
    library = FakeLibrary(monkeypatch)
    library.milliwatts, library.is_root = 120_000, False
    limits(gpu_power=150).free()
    assert library.milliwatts == 120_000, "as its owner has set it"
    library.milliwatts = 250_000
    ours = limits(gpu_power=150)
    assert ours.share == 0.6 and ours.unlimited == (
        "--gpu-power 150 needs root (Insufficient Permissions): `sudo nvidia-smi -i GPU-1 -pl 150` "
        "before the start limits it; now steps compute 60% of the time instead"
    )
    with pytest.raises(ConfigError, match=r"--gpu-power 90: Large 9 takes 100 to 300 W: choose"):
        limits(gpu_power=90)
    for setting in ("max_gpu_temp", "gpu_power"):
        with pytest.raises(ConfigError, match="is another device: drop --"):
            limits("", **{setting: 80})
    assert not limits("").is_hot(1e9)
