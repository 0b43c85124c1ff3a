"""A whole exchange between two nodes, from capture to merge, beside gloo and hivemind.

    python benchmarks/exchange.py [--size 64] [--only lowcomm noloco ...] [--runs 5] [--alone]

Two daemons, each with a trainer process that takes no step meanwhile, exchange one fragment of
--size MiB in fp32 over gRPC and TLS on loopback. In turn with them gloo all-reduces and hivemind's
averager averages a vector of that size; hivemind counts from the moment at which both have found
their group. Seconds last until both ends have merged, processor time is that of all processes,
and *MB more* is the peak of memory that no file backs, above what both held before their first
exchange. Medians; writes benchmarks/results/exchange.json."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import monotonic, sleep, time
from typing import Any

import kit
import numpy as np
from ends import Answer, EndProcess, Role, cpu_seconds, family

from helpers.memory_dht import MemoryNetwork
from helpers.tunnelling import end as local_end
from lowcomm_node.node.messages import InnerStepTaken, Train, TrainerSettings
from lowcomm_node.node.process import Trainer
from lowcomm_node.storage.files import load_or_create_identity
from lowcomm_node.sync.exchanger import Exchanger
from lowcomm_protocol.exchange.budget import Deadlines
from lowcomm_protocol.peers.records import MAX_LIFE, write_record
from lowcomm_protocol.peers.roster import Roster
from lowcomm_protocol.spec.run import RunSpec

MIB = 2**20
FLOAT, INTERVAL, LAYERS, VOCABULARY, DEADLINE = 4, 4, 4, 256, 120.0
WARM = 2
"""Exchanges before the measured ones: a modulo codec sends the first one in bf16."""
REST, LOOK = 0.2, 0.01
"""Seconds until an exchange has given its memory back; seconds between two looks at memory."""


def spec_of(method: str, size: int) -> RunSpec:
    """A run of a model whose single fragment takes about ``size`` bytes in fp32."""

    def values(width: int) -> int:
        return 2 * VOCABULARY * width + LAYERS * 13 * width**2

    width = min(range(8, 8192, 8), key=lambda width: abs(FLOAT * values(width) - size))
    shape = {"layers": LAYERS, "width": width, "heads": 1, "feed_forward": 3 * width, "context": 16}
    return RunSpec.model_validate(
        {
            "run": {"name": "exchange", "steps": 1_000_000},
            "model": shape,
            "data": {"source": "local"},
            "train": {"batch": 2, "optimizer": "adamw", "evaluate_every": 1_000_000},
            "sync": {"method": method, "fragments": 1, "interval": INTERVAL},
        }
    )


@asynccontextmanager
async def node(
    folder: Path, name: str, method: str, size: int
) -> AsyncIterator[tuple[Any, Answer]]:
    """A node without a DHT, whose trainer steps when it is asked to."""
    spec = spec_of(method, size)
    identity = load_or_create_identity(folder / f"{name}.key")
    peer_id, ended = identity.peer_id, asyncio.Queue[Any]()
    # Text that can be learned: groups apply nothing whose progress points apart.
    text = folder / f"{name}.txt"
    text.write_bytes(np.resize(np.arange(97, 123, dtype=np.uint8), 2**18).tobytes())
    end, roster = local_end(identity, MemoryNetwork(time)), Roster(peer_id, spec.run_id)
    trainer = Trainer(niceness=0)  # neither gloo nor hivemind steps back
    exchanger = Exchanger(
        peer_id=peer_id,
        spec=spec,
        roster=roster,
        channels=end.channels,
        deadlines=Deadlines(),
        tell=ended.put_nowait,
    )
    end.swapping = exchanger.serve
    await end.start()
    settings = TrainerSettings(
        spec=spec.canonical().decode(),
        peer_id=peer_id,
        checkpoints=str(folder / name),
        slow=str(folder / f"{name}-slow"),
        data_cache=str(folder / f"{name}-cache"),
        data=str(text),
        device="cpu",
        threads=1,
        checkpoint_every=1_000_000,
    )
    ready = await trainer.start(settings)
    exchanger.take_over(ready, trainer)
    last: list[InnerStepTaken] = []

    async def stepped() -> None:
        async with asyncio.timeout(DEADLINE):
            news = await trainer.news.get()
        if isinstance(news, InnerStepTaken):
            last[:] = [news]

    def step() -> None:
        exchanger.on_step(last[0].swarm_step, last[0].steps, last[0].tokens, last[0].seconds)

    def record() -> bytes:
        info = end.info(run_id=spec.run_id, addresses=(f"127.0.0.1:{end.port}",))
        return write_record(replace(info, expires=info.issued + MAX_LIFE), identity)

    async def answer(request: Any) -> Any:
        match request:
            case bytes():
                info = roster.hear(request, time())
                if info is not None:
                    roster.heard(info.peer_id, time())
            case "train":
                await trainer.ask(Train(on=True))
                for _ in range(INTERVAL):
                    await stepped()
                await trainer.ask(Train(on=False))
                while not trainer.news.empty():
                    await stepped()
                exchanger.exchanging = False  # or both would begin, and their calls cross
                step()
                exchanger.exchanging = True
                return record()
            case "begin":
                began = monotonic()
                step()
                return began
            case _:
                async with asyncio.timeout(DEADLINE):
                    entry = await ended.get()
                if entry.outcome != "applied":
                    raise RuntimeError(f"the exchange was not applied: {entry.reason}")
                return {"ended": monotonic(), "bytes": entry.bytes_sent}
        return None

    try:
        yield None, answer
    finally:
        await trainer.stop()
        await end.close()


@asynccontextmanager
async def gloo(folder: Path, rank: int, size: int) -> AsyncIterator[tuple[Any, Answer]]:
    """All-reduce of torch.distributed on one vector in fp32."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    vector, place = torch.ones(size // FLOAT), f"file://{folder}/gloo"

    async def answer(request: Any) -> float:
        if request == "meet":
            if not dist.is_initialized():
                await asyncio.to_thread(dist.init_process_group, "gloo", place, None, 2, rank)
            return 0.0
        began = monotonic()
        await asyncio.to_thread(lambda: dist.all_reduce(vector))
        return monotonic() - began

    yield None, answer
    dist.destroy_process_group()


@asynccontextmanager
async def hivemind(size: int, peers: list[str]) -> AsyncIterator[tuple[list[str], Answer]]:
    """hivemind's averager in full precision."""
    import torch
    from hivemind import DHT
    from hivemind.averaging import DecentralizedAverager
    from hivemind.averaging.control import AveragingStage

    torch.set_num_threads(1)
    dht = DHT(initial_peers=peers, start=True)
    averager = DecentralizedAverager(
        [torch.ones(size // FLOAT)],
        dht,
        start=True,
        prefix="exchange",
        target_group_size=2,
        min_matchmaking_time=1.0,
        daemon=True,
    )
    steps: list[Any] = []

    async def answer(request: Any) -> float:
        if request == "meet":
            steps.append(averager.step(wait=False, require_trigger=True, timeout=DEADLINE))
            async with asyncio.timeout(DEADLINE):
                while steps[-1].stage is not AveragingStage.AWAITING_TRIGGER:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            return 0.0
        began = monotonic()
        steps[-1].allow_allreduce()
        await asyncio.to_thread(steps.pop().result, DEADLINE)
        return monotonic() - began

    yield [str(address) for address in dht.get_visible_maddrs()], answer
    averager.shutdown()
    dht.shutdown()


def exchange(ends: list[EndProcess]) -> dict[str, Any]:
    """One exchange of two nodes."""
    first, second = ends
    for one, other in ((first, second), (second, first)):
        other.ask(one.ask("train"))

    def work() -> dict[str, Any]:
        began = first.ask("begin")
        both = ask_both(ends, "end")
        return {"seconds": max(one["ended"] for one in both) - began, "bytes": both[0]["bytes"]}

    return measured(ends, work)


def collective(ends: list[EndProcess]) -> dict[str, Any]:
    """One averaging of gloo or hivemind; the search for the group is not measured."""
    ask_both(ends, "meet")
    return measured(ends, lambda: {"seconds": max(ask_both(ends, "average"))})


def ask_both(ends: list[EndProcess], request: Any) -> list[Any]:
    """Have two ends do the same at once."""
    for end in ends:
        end.send(request)
    return [end.answer() for end in ends]


def measured(ends: list[EndProcess], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``work`` of two ends returns, with its processor time and the peak of memory."""
    cpu, peaks, over = cpu_seconds(ends), [private(ends)], Event()

    def look() -> None:
        while not over.wait(LOOK):
            peaks.append(private(ends))

    thread = Thread(target=look)
    thread.start()
    try:
        row = work()
        sleep(REST)
    finally:
        over.set()
        thread.join()
    return row | {"cpu": cpu_seconds(ends) - cpu, "held": peaks[0], "memory": max(peaks)}


def private(ends: list[EndProcess]) -> int:
    """Bytes of memory without pages of files; what a daemon shares with its trainer counts once."""
    roots, total = [end.process.pid for end in ends], 0
    for process in family(ends):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        total += int(fields["RssAnon"].split()[0])
        total += int(fields["RssShmem"].split()[0]) if process.pid in roots else 0
    return 1024 * total


class Pair:
    """Two processes that exchange with each other, and the measured runs."""

    def __init__(
        self, ends: list[EndProcess], work: Callable[[list[EndProcess]], dict[str, Any]]
    ) -> None:
        self.ends, self._work = ends, work
        self.runs: list[dict[str, Any]] = []
        warm = [work(ends) for _ in range(WARM)]
        self._held = warm[0]["held"]

    def run(self) -> None:
        """Measure once."""
        run = self._work(self.ends)
        run["memory"] -= self._held
        self.runs.append(run)

    def row(self) -> dict[str, Any]:
        """Medians, and the runs."""
        row = {name: median(run[name] for run in self.runs) for name in self.runs[0]}
        return row | {"runs": self.runs}


def main() -> None:
    """Measure, print, write."""
    parser = kit.parser(__doc__)
    parser.add_argument("--size", type=float, default=64, help="MiB of the fragment in fp32")
    parser.add_argument("--only", nargs="*", default=("lowcomm", "noloco"), help="methods")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help="without gloo and hivemind")
    parser.add_argument("--out", type=Path, default=kit.RESULTS / "exchange.json")
    arguments = parser.parse_args()
    size, machine = int(arguments.size * MIB), kit.loaded_machine()
    rows: dict[str, Any] = {}
    with kit.scratch() as folder, ExitStack() as stack:

        def start(stack: ExitStack, role: Role, *settings: Any) -> EndProcess:
            end = EndProcess(role, *settings)
            stack.callback(end.close)
            return end

        beside = {}
        if not arguments.alone:
            reducing = [start(stack, gloo, folder, rank, size) for rank in range(2)]
            averaging = [start(stack, hivemind, size, [])]
            averaging.append(start(stack, hivemind, size, averaging[0].introduction))
            beside = {"gloo": Pair(reducing, collective), "hivemind": Pair(averaging, collective)}
        for method in arguments.only:
            with ExitStack() as ours:
                names = (f"{method}-first", f"{method}-second")
                ends = [start(ours, node, folder, name, method, size) for name in names]
                nodes = Pair(ends, exchange)
                for _ in range(arguments.runs):
                    for pair in (nodes, *beside.values()):
                        pair.run()
                rows[method] = nodes.row()
        rows |= {name: pair.row() for name, pair in beside.items()}
    print(f"{machine}; fragment of {arguments.size:g} MiB, {arguments.runs} runs")
    print(f"{'':17} {'s':>6} {'CPU s':>6} {'MB more':>8} {'MB sent':>8}")
    for name, row in rows.items():
        figures = f"{row['seconds']:6.3f} {row['cpu']:6.2f} {row['memory'] / 1e6:8.0f}"
        print(f"{name:17} {figures} {row.get('bytes', 0) / 1e6:8.2f}")
    known, name = kit.read(arguments.out), f"{arguments.size:g} MiB"
    rows = known.get(name, {}).get("rows", {}) | rows
    kit.write(arguments.out, known | {name: {"machine": machine, "bytes": size, "rows": rows}})


if __name__ == "__main__":
    main()
