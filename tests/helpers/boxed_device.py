"""A device in memory, to torch an accelerator like any other: it has no streams, no pinned memory,
no bf16 and no compiler, and its tensors are out of NumPy's reach.

    PYTHONPATH=tests python tests/helpers/boxed_device.py [MISSING ...]

trains a tiny run on it without the operations MISSING, and prints as JSON what came out. In a
process of its own, because torch forgets no device.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as tree
from torch.utils import backend_registration as torch_backends

from helpers import merged_bits
from helpers.driven_trainer import driven
from lowcomm_node.models import devices
from lowcomm_node.node import messages

NAME, TOTAL = "box", 1 << 34
EXCHANGES = ("noloco", "streaming-diloco", "realigned")
RUN = """
evaluate_every = 4
[sync]
method = "lowcomm"
fragments = 2
"""


class Module:
    """What torch offers for this device alone: as little as for MPS."""

    def is_initialized(self) -> bool:
        """See torch.cuda, as for all that follow."""
        return True

    is_available = is_initialized

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def synchronize(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def recommended_max_memory(self) -> int:
        return TOTAL


class Boxed(Tensor):
    """A tensor of the device; its values are those of ``VALUES``, by its storage."""

    __torch_function__ = torch._C._disabled_torch_function_impl


VALUES: dict[int, Tensor] = {}


def box(values: Tensor) -> Tensor:
    """A tensor of the device with these values of host memory."""
    boxed = torch._C._acc.create_empty_tensor(values.shape, values.dtype)
    boxed.__class__ = Boxed
    VALUES[boxed.untyped_storage()._cdata] = values
    return boxed


def unbox(boxed: Tensor) -> Tensor:
    """Its values, which torch may see in another shape."""
    values = VALUES[boxed.untyped_storage()._cdata]
    return values if values.shape == boxed.shape else values.reshape(boxed.shape)


def register(missing: list[str]) -> None:
    """Make it known to torch, without some operations."""
    torch_backends._setup_privateuseone_for_python_backend(NAME, Module())
    any_operation, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    cpu = torch.device("cpu")

    def compute(operation: Any, *arguments: Any, **options: Any) -> Any:
        name = operation.name().removeprefix("aten::")
        if name in missing:
            raise NotImplementedError(f"{name} is not there")
        boxes: dict[int, Tensor] = {}

        def taken_out(one: Any) -> Any:
            if isinstance(one, Tensor) and one.device.type == NAME:
                values = unbox(one)
                # torch takes each tensor here for contiguous, and these read memory as it lies.
                values = values.contiguous() if "fused" in name else values
                boxes[id(values)] = one
                return values
            return cpu if isinstance(one, torch.device) and one.type == NAME else one

        inner, kept = tree.tree_map(taken_out, (arguments, options))
        if name == "_copy_from":
            inner[1].copy_(inner[0])
            return arguments[1]
        if name in ("view", "_reshape_alias"):
            found = inner[0].reshape(inner[1])
        elif name == "as_strided":
            values, offset = inner[0].contiguous(), inner[3] if len(inner) > 3 else 0
            found = values.as_strided(inner[1], inner[2], values.storage_offset() + (offset or 0))
        else:
            found = operation(*inner, **kept)
        target = options.get("device")
        if isinstance(target, torch.device) and target.type != NAME:
            return found

        def put_in(one: Any) -> Any:
            if not isinstance(one, Tensor):
                return one
            return boxes[id(one)] if id(one) in boxes else box(one)

        return tree.tree_map(put_in, found)

    any_operation.fallback(compute, "PrivateUse1")
    any_operation.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in ("detach", "alias"):
        aten.impl(name, lambda one: box(unbox(one).detach()), "PrivateUse1")
    KEPT.extend((any_operation, aten))


KEPT: list[torch.library.Library] = []
"""Registrations end with their objects."""


def trained(folder: Path, device: str, **settings: Any) -> dict[str, Any]:
    """What comes out of a few steps, of an evaluation, and of steps after a restart."""
    losses: list[float | None] = []
    for _ in range(2):
        with driven(folder, "a", more=RUN, device=device, **settings) as (one,):
            one.steps(6)
            losses += [step.loss for step in one.events(messages.InnerStepTaken)]
            scores = [event.loss for event in one.events(messages.Evaluated)]
            one.ask(messages.Save())
            built = one.built
    return {
        "device": built.device,
        "resumed": built.resumed,
        "losses": losses,
        "scores": scores,
    }


def main() -> None:
    """Print what comes out."""
    register(sys.argv[1:])
    torch.set_num_threads(1)
    device = devices.choose_device("auto")
    trials = devices.computes_bf16, devices.steps_fused, devices.copies_beside, devices.compiles
    with TemporaryDirectory() as folder:
        found = trained(Path(folder), "auto")
    found["works"] = [trial.__name__ for trial in trials if trial(device)]
    found["exchanges"] = [merged_bits.digest(name, device) for name in EXCHANGES]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
