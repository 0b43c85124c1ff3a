"""Devices that torch computes on: which are here, and what each can do.

Nothing follows from the name of a device, which says little: ROCm's torch calls its cards ``cuda``.
A few values are tried once a process, and where they come out wrong, the caller does without.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from lowcomm_node.errors import ConfigError
from lowcomm_node.system.machine import can_compile

module_of: Callable[[torch.device], Any] = torch.get_device_module
"""What torch offers for one kind of device alone, such as ``torch.cuda``."""


def devices_here() -> list[str]:
    """Names of all devices that torch sees, those of an accelerator first."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if kind else 0
    return [*(f"{kind.type}:{number}" for number in range(count) if kind), "cpu"]


def devices_of(names: str) -> list[str]:
    """The devices that an owner names: one, ``all`` of an accelerator, or several by number or
    name, with commas between them."""
    here = devices_here()
    if names == "all":
        return here[:-1] or here
    kind = here[0].partition(":")[0]
    return [f"{kind}:{name}" if name.isdigit() else name for name in names.split(",")]


def choose_device(name: str) -> torch.device:
    """``auto`` takes an accelerator where there is one; ``cuda`` is the first of that kind.

    Raises ConfigError for a device that is not there.
    """
    here = devices_here()
    # torch limits the memory of a device only where its number is given.
    wanted = here[0] if name == "auto" else name if name == "cpu" or ":" in name else f"{name}:0"
    if wanted not in here:
        raise ConfigError(
            f"--device {name}: torch {torch.__version__} sees {' and '.join(here)} here: choose "
            "one of them or auto, or install the build of torch for that device."
        )
    return torch.device(wanted)


def memory_on(device: torch.device) -> tuple[int, int]:
    """Free bytes of a device's memory, and all; the same where the driver knows no others."""
    module = module_of(device)
    with suppress(AttributeError, RuntimeError):  # MPS has none, nor has every driver of Intel
        return module.mem_get_info(device)
    if hasattr(module, "recommended_max_memory"):
        return (module.recommended_max_memory(),) * 2
    return (module.get_device_properties(device).total_memory,) * 2


def shares_memory(device: torch.device) -> bool:
    """Whether an accelerator takes the machine's memory instead of its own."""
    properties = getattr(module_of(device), "get_device_properties", None)  # MPS has none
    return properties is None or bool(getattr(properties(device), "is_integrated", False))


def card_of(device: torch.device) -> str:
    """UUID of a card of NVIDIA, as its driver writes it; empty for another device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return ""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", "")
    return f"GPU-{uuid}" if uuid else ""


# what a device can do


def _tried(trial: Callable[[torch.device], bool]) -> Callable[[torch.device], bool]:
    """A function that makes a trial once for each device; False where torch refuses it."""

    @cache
    @wraps(trial)
    def works(device: torch.device) -> bool:
        try:
            return trial(device)
        except Exception:  # of torch, a driver or a compiler: each has its own
            return False

    return works


@_tried
def computes_bf16(device: torch.device) -> bool:
    """Whether autocast multiplies matrices in bf16."""
    matrix = torch.arange(64.0, device=device).view(8, 8)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        product = matrix @ torch.eye(8).to(device)
    return product.dtype == torch.bfloat16 and torch.equal(product.float(), matrix)


@_tried
@torch.no_grad()
def steps_fused(device: torch.device) -> bool:
    """Whether the fused kernel of AdamW moves weights, unless a value of the device forbids it."""
    slope = torch.linspace(2, -3, 64)
    before = [torch.linspace(-1, 1, 64), slope, slope / 9, slope**2, torch.ones(())]

    def step(device: torch.device, **options: Any) -> list[Tensor]:
        after = [one.to(device, copy=True) for one in before]
        some, slopes, first, second, count = ([one] for one in after)
        settings = {"beta1": 0.9, "beta2": 0.95, "lr": 0.1, "weight_decay": 0.1, "eps": 1e-8}
        options = {**settings, **options, "amsgrad": False, "maximize": False}
        adamw(some, slopes, first, second, [], count, **options)
        return [one.cpu() for one in after]

    bad = torch.ones((), device=device)
    held, moved = (step(device, fused=True, found_inf=value) for value in (bad, 0 * bad))
    expected = step(torch.device("cpu"), fused=False)
    near = (torch.allclose(*both, 1e-4, 1e-6) for both in zip(moved, expected, strict=True))
    return all(near) and all(map(torch.equal, held, before))


@_tried
def copies_beside(device: torch.device) -> bool:
    """Whether copies of pinned memory run on a stream of their own, until an event."""
    if device.type == "cpu":
        return False
    module = module_of(device)
    sent, received = (torch.zeros(4096, pin_memory=True) for _ in range(2))
    sent += torch.arange(4096)
    with module.stream(module.Stream(device)):
        there = sent.to(device, non_blocking=True)
        received.copy_(there, non_blocking=True)
        arrived = module.current_stream(device).record_event()
    module.current_stream(device).wait_event(arrived)
    there.record_stream(module.current_stream(device))
    arrived.synchronize()
    return torch.equal(sent, received)


@_tried
def compiles(device: torch.device) -> bool:
    """Whether torch builds kernels for an accelerator; a processor waits long and gains little."""
    if device.type == "cpu" or not can_compile():
        return False
    values = torch.linspace(-1, 1, 1000, device=device)
    compiled = torch.compile(lambda some: some.exp() * some)
    return torch.allclose(compiled(values), values.exp() * values, rtol=1e-4)


def main() -> None:
    """Print as JSON what was tried on the device that ``auto`` takes, and what works."""
    device = choose_device("auto")
    found: dict[str, Any] = {"kind": "rocm" if torch.version.hip else device.type, "name": "CPU"}
    if device.type != "cpu":
        name_of = getattr(module_of(device), "get_device_name", str)
        found["name"] = name_of(device)
        found["free"], found["total"] = memory_on(device)
        several = map(torch.device, devices_of("all"))
        found["all"] = {str(one): [name_of(one), memory_on(one)[0]] for one in several}
        trials = computes_bf16, steps_fused, copies_beside, compiles
        found["tried"] = {trial.__name__: trial(device) for trial in trials}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
