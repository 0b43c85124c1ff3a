"""The ends of an exchange that is measured: nodes, and the processes of what stands beside them.

A node here is all that an exchange meets: the exchanger and its machine, gRPC over TLS, and a
trainer in a process of its own. It has no DHT: it is told the one peer that there is. Its trainer
takes a few steps before each exchange and none meanwhile."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic, time
from typing import Any

import numpy as np
from ends import RUN, End, record_of, say, set_up

DEADLINE = 120.0
FLOAT = 4
CONTEXT, BATCH, LAYERS, HEADS, VOCABULARY = 16, 2, 4, 4, 256
INTERVAL = 4
"""Steps between two exchanges."""
SLACK = 0.02
"""Seconds between two looks at hivemind's averager, which can't be waited for."""
Do = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Carries out one request of whoever measures; what it answers."""


def run_of(method: str, size: int) -> Any:
    """A run of a model whose one fragment takes about ``size`` bytes in fp32."""
    from lowcomm_protocol.spec.run import parse_toml

    width = min(range(8, 8192, 8), key=lambda width: abs(FLOAT * values_of(width) - size))
    text = f"""
[run]
name = "exchange"
steps = 1000000
[model]
layers = {LAYERS}
width = {width}
heads = {HEADS if width % (2 * HEADS) == 0 else 1}
feed_forward = {3 * width}
context = {CONTEXT}
[data]
source = "local"
[train]
batch = {BATCH}
optimizer = "adamw"
evaluate_every = 1000000
[sync]
method = "{method}"
fragments = 1
interval = {INTERVAL}
"""
    return parse_toml(text)


def values_of(width: int) -> int:
    """About as many as the model of this width has."""
    return 2 * VOCABULARY * width + LAYERS * (4 + 9) * width**2


class Node(End):
    """A node whose trainer steps, and that exchanges, when it is asked to."""

    def __init__(self, name: str, folder: Path, spec: Any, trainer: Any) -> None:
        super().__init__(name, folder, ())
        from lowcomm_protocol.peers.roster import Roster

        self.spec = spec
        self.trainer = trainer
        self.folder = folder
        self.peer_id = self.identity.peer_id
        self.roster = Roster(self.peer_id, RUN)
        self.ended: asyncio.Queue[Any] = asyncio.Queue()

    async def open(self) -> dict[str, Any]:
        """Listen, and build the trainer; what the other end must know."""
        from lowcomm_node.node.messages import TrainerSettings
        from lowcomm_node.sync.exchanger import Exchanger
        from lowcomm_protocol.exchange.budget import Deadlines

        await self.start()
        self.exchanger = Exchanger(
            peer_id=self.peer_id,
            spec=self.spec,
            roster=self.roster,
            channels=self.channels,
            deadlines=Deadlines(),
            tell=self.ended.put_nowait,
        )
        text = self.folder / "text.txt"
        # What can be learned: of two whose progress points apart, groups apply neither.
        text.write_bytes(np.resize(np.arange(97, 123, dtype=np.uint8), 2**18).tobytes())
        settings = TrainerSettings(
            spec=self.spec.canonical().decode(),
            peer_id=self.peer_id,
            checkpoints=str(self.folder / self.peer_id),
            slow=str(self.folder / f"slow-{self.peer_id}"),
            data_cache=str(self.folder / f"cache-{self.peer_id}"),
            data=str(text),
            device="cpu",
            threads=1,
            checkpoint_every=1_000_000,
        )
        ready = await self.trainer.start(settings)
        self.exchanger.take_over(ready, self.trainer)
        return {"values": ready.numels[0]} | self.introduction()

    def introduction(self) -> dict[str, Any]:
        """What the other end must know for the next minutes."""
        from lowcomm_protocol.peers.records import MAX_LIFE, write_record

        told = {"peer": self.peer_id, "certificate": self.certificate.public_key.hex()}
        info = record_of(told, [f"127.0.0.1:{self.port}"], [])
        info = replace(info, expires=info.issued + MAX_LIFE)
        return {"peer": self.peer_id, "record": write_record(info, self.identity).hex()}

    async def swap(self, peer: str, stream: Any) -> None:
        """See End."""
        await self.exchanger.serve(peer, stream)

    async def do(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request."""
        if "record" in request:
            self.roster.hear(bytes.fromhex(request["record"]), time())
            self.roster.liveness.heard(request["peer"], time())
            return {}
        if "train" in request:
            return await self.train()
        if "go" in request:
            began = monotonic()
            self.step(self.last)
            return {"began": began}
        entry = await asyncio.wait_for(self.ended.get(), DEADLINE)
        ended = monotonic()
        await asyncio.gather(*self.exchanger._closing)
        return {
            "ended": ended,
            "outcome": entry.outcome.value,
            "reason": entry.reason,
            "bytes": entry.bytes_sent,
            "stages": dict(getattr(entry, "stages", {})),
        }

    async def train(self) -> dict[str, Any]:
        """Take the steps to the next exchange, which does not begin yet; what the other end must
        know."""
        while not self.trainer.news.empty():
            self.trainer.news.get_nowait()
        from lowcomm_node.node.messages import Train

        await self.trainer.ask(Train(on=True))
        for _ in range(INTERVAL):
            await asyncio.wait_for(self.stepped(), DEADLINE)
        await self.trainer.ask(Train(on=False))
        while not self.trainer.news.empty():
            await self.stepped()
        self.exchanger.exchanging = False  # or both would begin, and their calls cross
        self.step(self.last)
        self.exchanger.exchanging = True
        return self.introduction()

    async def stepped(self) -> None:
        """Take in the next news of the trainer."""
        from lowcomm_node.node.messages import Stepped

        news = await self.trainer.news.get()
        if isinstance(news, Stepped):
            self.last = news

    def step(self, told: Any) -> None:
        """Tell the exchanger of a step."""
        self.exchanger.on_step(told.swarm_step, told.steps, told.tokens, told.seconds)

    async def close(self) -> None:
        """End everything."""
        await self.trainer.stop()
        await super().close()


@asynccontextmanager
async def node(told: dict[str, Any]) -> AsyncIterator[Do]:
    """A node of ours."""
    set_up()
    from lowcomm_node.node.process import Trainer

    folder = Path(told["folder"])
    trainer = Trainer(niceness=0)  # what it is compared with does not step back either
    one = Node(told["name"], folder, run_of(told["method"], told["size"]), trainer)
    try:
        say(await one.open())
        yield one.do
    finally:
        await one.close()


@asynccontextmanager
async def gloo(told: dict[str, Any]) -> AsyncIterator[Do]:
    """All-reduce of torch.distributed, on one vector of fp32."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    place = f"file://{told['folder']}/gloo"
    say({})  # the other one is started meanwhile, and both wait for each other

    def reduce() -> None:
        dist.all_reduce(vector)

    await asyncio.to_thread(dist.init_process_group, "gloo", place, None, 2, told["rank"])
    vector = torch.ones(told["size"] // FLOAT)

    async def do(request: dict[str, Any]) -> dict[str, Any]:
        began = monotonic()
        await asyncio.to_thread(reduce)
        return {"began": began, "ended": monotonic()}

    yield do
    dist.destroy_process_group()


@asynccontextmanager
async def hivemind(told: dict[str, Any]) -> AsyncIterator[Do]:
    """hivemind's averager in full precision; from the moment at which both have found the group."""
    import torch
    from hivemind import DHT
    from hivemind.averaging import DecentralizedAverager
    from hivemind.averaging.control import AveragingStage

    torch.set_num_threads(1)
    dht = DHT(initial_peers=told.get("peers", []), start=True)
    averager = DecentralizedAverager(
        [torch.ones(told["size"] // FLOAT)],
        dht,
        start=True,
        prefix="exchange",
        target_group_size=2,
        min_matchmaking_time=1.0,
        daemon=True,
    )
    say({"peers": [str(address) for address in dht.get_visible_maddrs()]})
    steps: list[Any] = []

    async def do(request: dict[str, Any]) -> dict[str, Any]:
        if "meet" in request:
            steps.append(averager.step(wait=False, require_trigger=True, timeout=DEADLINE))
            return {}
        if "met" in request:
            async with asyncio.timeout(DEADLINE):
                while steps[-1].stage is not AveragingStage.AWAITING_TRIGGER:  # noqa: ASYNC110
                    await asyncio.sleep(SLACK)
            return {}
        began = monotonic()
        steps[-1].allow_allreduce()
        await asyncio.to_thread(steps.pop().result, DEADLINE)
        return {"began": began, "ended": monotonic()}

    yield do
    averager.shutdown()
    dht.shutdown()


ROLES = {"node": node, "gloo": gloo, "hivemind": hivemind}


async def play(role: str, told: dict[str, Any]) -> None:
    """Be one end: do what is asked, line by line."""
    async with ROLES[role](told) as do:
        while line := await asyncio.to_thread(sys.stdin.readline):
            say(await do(json.loads(line)))
