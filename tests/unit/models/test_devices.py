"""What must hold for devices: a name that is not here is refused with those that are, and what a
device can't do is found out by trying, with the processor and ``meta`` as devices."""

from inspect import unwrap
from typing import Any

import pytest
import torch

from lowcomm_node.errors import ConfigError
from lowcomm_node.models import devices
from lowcomm_node.models.base import computing
from lowcomm_node.models.devices import choose_device

CPU, META = torch.device("cpu"), torch.device("meta")
TRIALS = devices.computes_bf16, devices.steps_fused, devices.copies_beside, devices.compiles


def see(monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> None:
    """Have torch see accelerators."""
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind)
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize(("kind", "count"), [("cuda", 2), ("xpu", 2), ("mps", 1)])
def test_auto_takes_the_accelerator_whatever_its_kind(
    kind: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, kind, count)
    assert choose_device("auto") == choose_device(kind) == torch.device(kind, 0)
    assert choose_device("cpu") == CPU
    if count > 1:
        assert choose_device(f"{kind}:1") == torch.device(kind, 1)
    with pytest.raises(ConfigError, match=f"--device {kind}:{count}: .* sees {kind}:0 .*and cpu"):
        choose_device(f"{kind}:{count}")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="no device is missing")
@pytest.mark.parametrize("name", ["cuda", "cuda:1", "xpu", "mps"])
def test_a_device_that_is_not_here_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--device {name}: torch .* sees cpu here: .*auto"):
        choose_device(name)


def test_the_processor_can_all_but_copy_beside_and_compile() -> None:
    assert [trial(CPU) for trial in TRIALS] == [True, True, False, False]


@pytest.mark.parametrize("name", ["meta", "mps", "xpu", "hpu"])
def test_a_device_that_refuses_what_is_tried_can_nothing(name: str) -> None:
    device = torch.device(name)
    assert not any(trial(device) for trial in TRIALS)
    if name != "meta":
        assert not computing(device)._enabled


def test_a_kernel_that_ignores_what_forbids_a_step_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = devices.adamw

    def heedless(*arguments: Any, found_inf: Any = None, **options: Any) -> None:
        honest(*arguments, **options)

    monkeypatch.setattr(devices, "adamw", heedless)
    assert not unwrap(devices.steps_fused)(CPU)


def test_products_that_are_wrong_or_in_fp32_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = unwrap(devices.computes_bf16)
    honest = torch.eye
    monkeypatch.setattr(torch, "eye", lambda size: 1.01 * honest(size))
    assert not tried(CPU)
    monkeypatch.undo()
    assert tried(CPU)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "autocast", lambda *_: torch.no_grad())
        assert not tried(CPU)


def test_memory_is_asked_of_what_a_device_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Metal:
        @staticmethod
        def recommended_max_memory() -> int:
            return 12

    class Silent:
        @staticmethod
        def mem_get_info(device: torch.device) -> tuple[int, int]:
            raise RuntimeError("The device doesn't support querying the available free memory.")

        @staticmethod
        def get_device_properties(device: torch.device) -> Any:
            return type("Properties", (), {"total_memory": 16})

    for module, device, expected in (
        (Metal, "mps:0", ((12, 12), True)),
        (Silent, "xpu:0", ((16, 16), False)),
    ):
        monkeypatch.setattr(devices, "module_of", lambda _, module=module: module)
        one = torch.device(device)
        assert (devices.memory_on(one), devices.shares_memory(one)) == expected
