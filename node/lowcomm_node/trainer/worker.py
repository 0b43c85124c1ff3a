"""The worker of a lender: what a machine of the owner computes for a trainer.

A replica computes gradients of whole windows (``lent.py``), a stage holds blocks of the model
(``stage.py``): the first line of the trainer says which.
"""

import json
import socket
import sys
from contextlib import suppress
from time import monotonic
from typing import Any, NoReturn

import torch
from torch import Tensor

from lowcomm_node.models.adapters import allocated
from lowcomm_node.models.base import Model, computing, family_of, trained
from lowcomm_node.models.devices import choose_device
from lowcomm_node.node.messages import is_foreseen, text_of
from lowcomm_node.system.command import die_with_parent, end
from lowcomm_node.system.units import clean
from lowcomm_node.trainer import memory
from lowcomm_node.trainer.gpu import loss_of, use
from lowcomm_node.trainer.lent import untrained
from lowcomm_node.trainer.micro_batch import Gradient
from lowcomm_node.trainer.stage import hold
from lowcomm_node.trainer.wire import Wire
from lowcomm_protocol.spec.run import RunSpec, parse_canonical


def work(wire: Wire, device: torch.device, max_bytes: int | None) -> None:
    """Compute until the trainer is gone. Raises ConfigError, LinkLost, OSError."""
    order = wire.read()
    if order is None:
        return
    spec = parse_canonical(order["spec"])
    if order.get("stages"):
        hold(wire, order, spec, device, max_bytes)
    else:
        compute(wire, order, spec, device, max_bytes)


def compute(
    wire: Wire, order: dict[str, Any], spec: RunSpec, device: torch.device, max_bytes: int | None
) -> None:
    """Compute gradients until the trainer is gone. Raises ConfigError, LinkLost, OSError."""
    gradient, model = _built(spec, device, max_bytes, wire)
    model.separator = order["separator"]
    weights = list(trained(model).values())
    received = [torch.empty(one.shape) for one in weights]
    wire.send({"here": True})
    while (order := wire.read()) is not None:
        shape = order["windows"]
        batch = [torch.empty(shape, dtype=torch.int32) for _ in range(2)]
        wire.read_exactly([*received, *batch])
        began = monotonic()
        with torch.no_grad():
            for weight, came in zip(weights, received, strict=True):
                weight.copy_(came)
                weight.grad = None
        if model.draws:
            torch.manual_seed(order["seed"])
        tokens, targets = (one.long().to(device) for one in batch)
        loss = float(gradient.of(tokens, targets, max(1, order["learned"])))
        slopes = [torch.zeros_like(one) if one.grad is None else one.grad for one in weights]
        wire.send({"loss": loss, "seconds": monotonic() - began}, slopes)


def _built(
    spec: RunSpec, device: torch.device, max_bytes: int | None, wire: Wire
) -> tuple[Gradient, Model]:
    family_of(spec.model).check(spec.model)
    limit = None if max_bytes is None else max_bytes / memory.GIB
    _, cut = memory.check_memory(spec, device, limit, exchanges=0)
    if spec.adapter is not None:
        model = allocated(spec.model, spec.adapter, device)
    else:
        model = family_of(spec.model).blank(spec.model).to(device)
    with torch.no_grad():
        for one, form in untrained(model):
            came = torch.empty(one.shape, dtype=form)
            wire.read_exactly([came])
            one.copy_(came)
    loss = loss_of(model, compiled=False)

    def loss_here(tokens: Tensor, targets: Tensor) -> Tensor:
        with computing(device):
            return loss(tokens, targets)

    gradient = Gradient(model, loss_here, spec.train.batch)
    gradient.cut = cut
    return gradient, model


def main() -> NoReturn:
    """Entry of a worker, whose arguments are settings of the lender as JSON, and the descriptor of
    a socket to the trainer."""
    die_with_parent()
    own = json.loads(sys.argv[1])
    with socket.socket(fileno=int(sys.argv[2])) as sock:
        wire = Wire(sock)
        try:
            device = choose_device(own.get("device") or "auto")
            use(device)
            work(wire, device, own.get("max_memory_bytes"))
        except Exception as error:
            if not is_foreseen(error):
                raise
            print(clean(text_of(error)), file=sys.stderr)
            with suppress(OSError):
                wire.send({"failed": text_of(error)})
            end(1)
    end(0)


if __name__ == "__main__":
    main()
