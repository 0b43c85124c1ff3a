"""A worker of `slow_lines.py` that is no node: the same model, text and steps, brought together by
somebody else's means.

    ddp        gradients are averaged after every step, in fp32, by gloo's all-reduce: what
               DistributedDataParallel does
    hivemind   hivemind's Optimizer with local updates and delayed averaging: all average parameters
               beside training, in float16, as often as the line carries that

Started in a namespace, with what it must know as JSON in its only argument. It prints a line of
JSON for each thing to tell: ``ready``, and then ``steps`` and ``loss``.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
from torch import Tensor, nn

from lowcomm_node.data import open_data
from lowcomm_node.models.evaluation import Evaluation, evaluate
from lowcomm_node.simulation import Replica
from lowcomm_node.trainer.optimizer import learning_rate
from lowcomm_protocol.spec.run import parse_toml

WINDOWS = 64
"""Of held-out text, for each look; as in `tests/helpers/pacing.py`."""

Step = Callable[[Tensor], None]
"""What follows the gradients of a step, given its loss."""


def main() -> None:
    """Train until somebody ends it."""
    told = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    spec = parse_toml(told["spec"], "slow lines")
    text = open_data("builtin:python", "bytes", Path(told["folder"]))
    replica = Replica(spec, f"peer{told['rank']}", text, torch.device("cpu"))
    after = {"ddp": ddp, "hivemind": hivemind}[told["role"]](replica, told)
    look(replica)
    say(ready=True)
    looked = began = monotonic()
    while True:
        tokens, targets = replica.stream.next_batch()
        loss = replica.loss(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(replica.model.parameters(), spec.train.clip)
        sleep(max(0.0, began + told["step"] - monotonic()))
        after(loss)
        replica.steps += 1
        replica.clock.tick()
        say(steps=replica.steps)
        began = monotonic()  # a look takes no time from the next step
        if began - looked > told["look"]:
            looked = began
            look(replica)


def ddp(replica: Replica, told: dict[str, Any]) -> Step:
    """Average gradients, then step."""
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = told["device"]
    place = f"tcp://{told['first']}:{told['port']}"
    dist.init_process_group("gloo", place, None, told["nodes"], told["rank"])

    def step(loss: Tensor) -> None:
        gradients = [one.grad for one in replica.model.parameters() if one.grad is not None]
        flat = torch.cat([one.view(-1) for one in gradients])
        dist.all_reduce(flat)
        flat /= told["nodes"]
        parts = flat.split([one.numel() for one in gradients])
        for one, part in zip(gradients, parts, strict=True):
            one.copy_(part.view_as(one))
        spec = replica.spec
        replica.optimizer.step(replica.clock.step, spec.run.steps, spec.train)

    return step


def hivemind(replica: Replica, told: dict[str, Any]) -> Step:
    """Step alone; parameters are averaged beside that."""
    from hivemind import DHT, Optimizer
    from hivemind.compression import Float16Compression

    address = Path(told["folder"]) / "first"
    peers = []
    if told["rank"]:
        while not address.exists():  # the first one writes it
            sleep(0.2)
        peers = json.loads(address.read_text())
    dht = DHT(
        initial_peers=peers,
        host_maddrs=[f"/ip4/{told['address']}/tcp/{told['port']}"],
        start=True,
    )
    if not told["rank"]:
        written = address.with_suffix(".writing")
        written.write_text(json.dumps([str(one) for one in dht.get_visible_maddrs()]))
        written.replace(address)
    train = replica.spec.train
    optimizer = Optimizer(
        dht=dht,
        run_id="slow",
        batch_size_per_step=train.batch,
        target_batch_size=train.batch * told["nodes"] * told["epoch"],
        optimizer=torch.optim.AdamW(
            replica.model.parameters(),
            lr=train.learning_rate,
            betas=(train.beta1, train.beta2),
            weight_decay=train.weight_decay,
        ),
        use_local_updates=True,
        delay_state_averaging=True,
        matchmaking_time=5.0,
        averaging_timeout=300.0,
        state_averaging_compression=Float16Compression(),
        verbose=True,
    )

    def step(loss: Tensor) -> None:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(train, replica.clock.step, replica.spec.run.steps)
        optimizer.step()
        replica.model.zero_grad(set_to_none=True)
        say(epoch=optimizer.local_epoch)

    return step


def look(replica: Replica) -> None:
    """Tell the loss on held-out text."""
    context = replica.spec.model.context
    like = Evaluation(0.0, WINDOWS, WINDOWS * context)
    found = evaluate(replica.model, replica.dataset, context, like=like)
    say(loss=found.loss)


def say(**told: Any) -> None:
    """Print a line of JSON."""
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
