"""A swarm under continuous loss of its peers: a bootstrap server and nodes of which one is killed,
stopped or started every few seconds. At the end the survivors must agree, and be as good as a swarm
that nobody disturbed.

    PYTHONPATH=tests python tests/chaos/soak.py [--minutes 60] [--nodes 8] [--seed 0] [--out
    out/soak.json]

Prints what it does as it does it, then a table and what does not hold; writes JSON.
"""

import argparse
import json
import math
import os
import platform
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import psutil
from invariants import Events, violations

from helpers.processes import Node, Swarm
from helpers.waiting import until
from lowcomm_node.storage.checkpoint import CheckpointStore

INTERVAL = 10
"""Swarm steps between two syncs of a fragment in the run of ``helpers.processes``."""
PAUSE = (5.0, 20.0)
"""Seconds between two disturbances."""
KILLED = 0.6
"""Share of disturbances that are a SIGKILL; a third of the rest are a SIGSTOP for a while, the
others starts."""
STOPPED = (2.0, 20.0)
"""Seconds that a stopped node stands still."""
LOOK = 1.0
"""Seconds between two samples of memory, and between two looks at what is due: it is due by the
clock."""
LATE = 120.0
"""Seconds beyond its time in which kills that are still missing must come."""
SETTLE = 120.0
"""Seconds for the survivors to come together at the end."""
GROWTH = 1.1
"""What memory and descriptors of a process may be, times what they were once it had settled."""
MIB = 2**20


@dataclass
class Peer:
    """A node through all its lives."""

    name: str
    node: Node | None = None
    wakes: float = 0.0
    kills: int = 0
    samples: list[dict[str, int]] = field(default_factory=list)
    """Private memory and descriptors of the daemon over its present life, since its first
    exchange: by then it has loaded what it needs, however busy the machine is."""
    exchanges_before: int = 0
    """Exchanges of its earlier lives."""

    @property
    def has_exchanged(self) -> bool:
        """Whether it has, in its present life."""
        return self.node is not None and _exchanges(self.node) > self.exchanges_before

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.node is not None and self.node.child.poll() is None


def _exchanges(node: Node) -> int:
    """Exchanges that it has told of in all its lives; a kill may have cut a line short."""
    return node.output.count('"event": "exchange.applied"')


@dataclass(frozen=True)
class Survivor:
    """What a node that is alive at the end tells."""

    name: str
    swarm_step: int
    steps: int
    tokens: int
    loss: float
    completed: int


class Soak:
    """The swarm and what happens to it."""

    def __init__(
        self,
        swarm: Swarm,
        nodes: int,
        seed: int,
        evaluate_every: int = 50,
        pause: tuple[float, float] = PAUSE,
    ) -> None:
        self.swarm, self.random, self.pause = swarm, Random(f"soak:{seed}"), pause
        self.peers = [Peer(f"node{number}") for number in range(nodes)]
        self.happened = Counter[str]()
        self.damaged: list[str] = []
        """Checkpoints of killed nodes that could not be used."""
        self.server = swarm.bootstrap("--run", str(swarm.spec(evaluate_every=evaluate_every)))
        self.began = time.monotonic()

    def say(self, text: str) -> None:
        """Print what happens, and when."""
        print(f"{time.monotonic() - self.began:7.1f} s  {text}", flush=True)

    def start(self, peer: Peer) -> None:
        """Start a node, or start it again in its home."""
        peer.node = self.swarm.node(peer.name, "--checkpoint-every", "50", "--join-deadline", "120")
        peer.samples.clear()
        peer.exchanges_before = _exchanges(peer.node)

    def until_training(self) -> None:
        """Wait until all nodes train and have exchanged."""
        for peer in self.peers:
            assert peer.node is not None
            peer.node.until_completed(1, deadline=240)

    def disturb(self, seconds: float, kills: int = 0) -> None:
        """Kill, stop and start for so long, and until so many nodes were killed."""
        end = time.monotonic() + seconds
        server_due = end - seconds / 2
        due = time.monotonic() + self.random.uniform(*self.pause)
        while time.monotonic() < end or self.happened["killed"] < kills:
            assert time.monotonic() < end + LATE, f"not within {LATE:.0f} s more: {kills} kills"
            if time.monotonic() >= server_due:
                server_due = math.inf
                self._kill_server()
            if time.monotonic() >= due:
                self._one_disturbance()
                due = time.monotonic() + self.random.uniform(*self.pause)
            self._wake()
            self._sample()
            time.sleep(LOOK)  # between two looks; the end of the run is its deadline

    def leave_alone(self, steps: int, deadline: float) -> None:
        """Wait until each has done so many steps."""
        end = time.monotonic() + deadline
        while any(status["trainer"]["steps"] < steps for status in self.statuses()):
            assert time.monotonic() < end, f"not within {deadline:.0f} s: {steps} steps of each"
            self._sample()
            time.sleep(LOOK)

    def _one_disturbance(self) -> None:
        running, dead = (
            [p for p in self.peers if p.alive and not p.wakes],
            [p for p in self.peers if not p.alive],
        )
        draw = self.random.random()
        if draw < KILLED and len(running) > 2:
            self._kill(self.random.choice(running))
        elif draw < KILLED + (1 - KILLED) / 3 and len(running) > 2:
            self._stop(self.random.choice(running))
        if len(dead) > len(self.peers) // 3 or (dead and draw >= KILLED):
            peer = self.random.choice(dead)
            self.start(peer)
            self._note("started", peer.name)

    def _note(self, what: str, name: str) -> None:
        self.happened[what] += 1
        self.say(f"{name} {what}")

    def _kill(self, peer: Peer) -> None:
        assert peer.node is not None
        peer.node.child.send_signal(signal.SIGKILL)
        peer.node.child.wait(30)
        peer.kills += 1
        self._note("killed", peer.name)
        self.damaged += damaged_checkpoints(peer.node.home)

    def _stop(self, peer: Peer) -> None:
        assert peer.node is not None
        peer.node.child.send_signal(signal.SIGSTOP)
        peer.wakes = time.monotonic() + self.random.uniform(*STOPPED)
        self._note("stopped", peer.name)

    def _kill_server(self) -> None:
        self.server.child.send_signal(signal.SIGKILL)
        self.server.child.wait(30)
        self.server = self.swarm.bootstrap()
        self._note("killed and started again", "the bootstrap server")

    def _wake(self, all_of_them: bool = False) -> None:
        for peer in self.peers:
            if peer.wakes and (all_of_them or time.monotonic() >= peer.wakes):
                assert peer.node is not None
                peer.node.child.send_signal(signal.SIGCONT)
                peer.wakes = 0.0
                self.say(f"{peer.name} goes on")

    def _sample(self) -> None:
        for peer in self.peers:
            if not peer.alive or peer.wakes or peer.node is None:
                continue
            if not peer.samples and not peer.has_exchanged:
                continue
            try:
                process = psutil.Process(peer.node.child.pid)
                memory = process.memory_full_info()
                peer.samples.append({"private": memory.uss, "descriptors": process.num_fds()})
            except psutil.Error:
                continue

    def settle(self) -> list[Survivor]:
        """Start what is dead, and wait until all are at the same swarm step."""
        self._wake(all_of_them=True)
        for peer in self.peers:
            if not peer.alive:
                self.start(peer)
        self.until_training()
        self.say("all train again")
        self.together()
        return [self._survivor(peer) for peer in self.peers]

    def together(self) -> int:
        """How far apart the nodes are, once that is no more than two intervals. On a busy machine
        a single look may see more, as its answers come at different times."""
        seen: list[int] = []

        def are_together() -> bool:
            seen.append(self.apart())
            return seen[-1] <= 2 * INTERVAL

        until(are_together, SETTLE, "all within two intervals of each other")
        return seen[-1]

    def apart(self) -> int:
        """How many swarm steps are between the first and the last node."""
        steps = [status["trainer"]["swarm_step"] for status in self.statuses()]
        return max(steps) - min(steps)

    def statuses(self) -> list[dict[str, Any]]:
        """The status of each node."""
        return [peer.node.until(bool, "answering") for peer in self.peers if peer.node is not None]

    def _survivor(self, peer: Peer) -> Survivor:
        assert peer.node is not None
        seen = len(peer.node.events("evaluated"))
        until(
            lambda: len(peer.node.events("evaluated")) > seen,
            SETTLE,
            "one more look at held-out text",
        )
        status = peer.node.until(bool, "answering")
        trainer = status["trainer"]
        return Survivor(
            name=peer.name,
            swarm_step=trainer["swarm_step"],
            steps=trainer["steps"],
            tokens=trainer["tokens"],
            loss=trainer["val_loss_last"],
            completed=status["exchanges"]["completed"],
        )

    def told(self) -> dict[str, Events]:
        """What each node has printed in all its lives, by peer id."""
        found: dict[str, Events] = {}
        for peer, status in zip(self.peers, self.statuses(), strict=True):
            assert peer.node is not None
            lines = [
                line
                for line in peer.node.output.splitlines()
                if line.startswith('{"time"') and line.endswith("}")
            ]
            found[status["peer_id"]] = [json.loads(line) for line in lines]
        return found

    def killed(self) -> list[str]:
        """Peer ids, once for each time that one was killed."""
        return [
            s["peer_id"]
            for peer, s in zip(self.peers, self.statuses(), strict=True)
            for _ in range(peer.kills)
        ]

    def grown(self) -> list[str]:
        """Whose memory or descriptors grew once it had settled."""
        found: list[str] = []
        for peer in self.peers:
            if len(peer.samples) < 60:
                continue
            third = len(peer.samples) // 3
            for what in ("private", "descriptors"):
                parts = (peer.samples[third : 2 * third], peer.samples[-third:])
                before, after = (mean(sample[what] for sample in part) for part in parts)
                if after > GROWTH * before + (20 if what == "descriptors" else 8 * MIB):
                    found.append(f"{peer.name}: {what} grew from {before:,.0f} to {after:,.0f}")
        return found


def damaged_checkpoints(home: Path) -> list[str]:
    """What is wrong with the checkpoints of a home; every bit is read."""
    stores = [CheckpointStore(folder, keep=3) for folder in home.glob("runs/*/checkpoints")]
    return [problem for store in stores for step in store.steps() for problem in store.verify(step)]


def undisturbed(folder: Path, nodes: int, steps: int) -> tuple[float, list[str]]:
    """Mean held-out loss of a swarm of as many nodes that nobody disturbs, at so many steps of
    each; what does not hold of it.

    Its nodes live as long as it does, so it is here that memory and descriptors must stay flat for
    the whole time."""
    folder.mkdir()
    swarm = Swarm(folder)
    try:
        run = Soak(swarm, nodes, 0, evaluate_every=max(10, min(100, steps // 10)))
        for peer in run.peers:
            run.start(peer)
        run.until_training()
        run.leave_alone(steps, 4 * 3600)
        losses = [closest_loss(peer.node, steps) for peer in run.peers if peer.node is not None]
        return mean(losses), run.grown()
    finally:
        swarm.close()


def closest_loss(node: Node, steps: int) -> float:
    """What it measured nearest to so many steps of its own."""
    return float(
        min(node.events("evaluated"), key=lambda event: abs(event["steps"] - steps))["loss"]
    )


def soak(
    folder: Path,
    minutes: float,
    nodes: int,
    seed: int,
    kills: int = 0,
    pause: tuple[float, float] = PAUSE,
) -> dict[str, Any]:
    """Disturb a swarm for so long, and until so many nodes were killed, with so many seconds
    between two disturbances; figures, and what does not hold."""
    folder.mkdir(exist_ok=True)
    swarm = Swarm(folder)
    try:
        run = Soak(swarm, nodes, seed, pause=pause)
        for peer in run.peers:
            run.start(peer)
        run.until_training()
        run.say(f"{nodes} nodes train: disturbing them for {minutes:g} minutes")
        run.disturb(60 * minutes, kills)
        survivors = run.settle()
        apart = run.together()
        broken = [*violations(run.told(), run.killed()), *run.grown(), *run.damaged]
        private = [peer.samples[-1]["private"] for peer in run.peers if peer.samples]
    finally:
        swarm.close()
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores,"
        f" Python {platform.python_version()}",
        "minutes": minutes,
        "nodes": nodes,
        "seed": seed,
        "happened": dict(run.happened),
        "survivors": [asdict(survivor) for survivor in survivors],
        "swarm_steps_apart": apart,
        "private_mib": max(private, default=0) / MIB,
        "violations": broken,
    }


def main() -> int:
    """Soak, compare, print; 1 if anything does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/soak.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(
        prefix="lc-", dir="/tmp"
    ) as folder:  # a short name, as sockets need
        os.environ["XDG_RUNTIME_DIR"] = folder
        result = soak(
            Path(folder) / "disturbed", arguments.minutes, arguments.nodes, arguments.seed
        )
        steps = round(mean(survivor["steps"] for survivor in result["survivors"]))
        result["steps_each"] = steps
        result["undisturbed_loss"], grown = undisturbed(
            Path(folder) / "undisturbed", arguments.nodes, steps
        )
        result["violations"] += grown
    result["loss"] = mean(survivor["loss"] for survivor in result["survivors"])
    if result["loss"] > 1.05 * result["undisturbed_loss"]:
        result["violations"].append(
            "the held-out loss is more than 5 % above that of a swarm that nobody disturbed"
        )
    if result["swarm_steps_apart"] > 2 * INTERVAL:
        result["violations"].append("the survivors are more than two intervals apart")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1))
    show(result)
    return int(bool(result["violations"]))


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    print(f"\n{result['machine']}; {result['minutes']:g} minutes, seed {result['seed']}")
    print("; ".join(f"{count} times {what}" for what, count in result["happened"].items()))
    print("node    swarm step   steps  exchanges   loss")
    for one in result["survivors"]:
        print(
            f"{one['name']:<8}{one['swarm_step']:10}{one['steps']:8}{one['completed']:11}{one['loss']:7.3f}"
        )
    ratio = result["loss"] / result["undisturbed_loss"] - 1
    print(f"loss {result['loss']:.3f} after {result['steps_each']} steps each")
    print(f"undisturbed {result['undisturbed_loss']:.3f} ({ratio:+.1%})")
    for one in result["violations"]:
        print(f"does not hold: {one}")


if __name__ == "__main__":
    sys.exit(main())
