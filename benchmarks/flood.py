"""What a flood costs a node: a real swarm of two on loopback, and a hostile client (flooding.py) at
one of them.

    python benchmarks/flood.py [--rounds 3] [--seconds 20] [--calls 10000]

Phases of equal length take turns: calm, with a process that burns as much as the client has of
late, at the same low priority; and flood. So both share the processor with a stranger alike, and
what is left of the difference is what the node spends. Measured are the steps of the flooded node
in each phase, the exchanges of both nodes that were applied meanwhile (with each other: the
client's never are), the private memory of its daemon, trainer and p2pd together, and the
processor's seconds that daemon and p2pd take in a second: on a machine that has nothing to spare,
training loses no more than the difference."""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import kit
import psutil
from flooding import certificate_of

MIB = 2**20
MAX_GROWTH, MAX_SLOWER = 64 * MIB, 0.10
SETTLE = 5.0
"""Seconds between two phases: what a flood has left behind (connections, calls that run out) must
not count as calm."""
POLL = 0.5
"""Seconds between two looks at memory, whose peak nothing tells, or at a node's count of
exchanges."""
NICE = 10
"""Priority of the client, and of what burns in its place."""
HOG = """
import sys, time
share, period = float(sys.argv[1]), 0.02
print("ready", flush=True)
sys.stdin.readline()
while True:
    spent, began = time.process_time(), time.monotonic()
    while time.process_time() - spent < share * period:
        pass
    time.sleep(max(0.0, period - (time.monotonic() - began)))  # idle for the rest of each period
"""


def main() -> int:
    """Measure; 1 if memory grows by more or training is slower than promised, or exchanges do not
    go on."""
    parser = kit.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--calls", type=int, default=10_000, help="in all rounds together")
    parser.add_argument(
        "--connections", type=int, default=1000, help="half-open, of each kind, in each flood"
    )
    parser.add_argument("--out", type=Path, default=kit.RESULTS / "flood.json")
    arguments = parser.parse_args()
    often = ("--checkpoint-every", "100000", "--exchange-deadline", "15")
    with kit.two_nodes("flood", 20, *often) as nodes:
        measured = Flooded(nodes[0]).measure(
            arguments.rounds, arguments.seconds, arguments.calls, arguments.connections
        )
    result = {"machine": kit.loaded_machine(), **measured}
    kit.write(arguments.out, result)
    return tell(result)


def tell(result: dict[str, Any]) -> int:
    """Print what was measured; 1 if it is not what is promised."""
    print(result["machine"])
    growth, slower = result["growth"], result["slower"]
    fewest = min(phase["exchanges"] for phase in result["phases"] if phase["kind"] == "flood")
    print(f"memory at its peak was {growth / MIB:.1f} MiB above that of the first calm")
    print(f"training was {slower:.1%} slower (median of pairs)")
    print(
        f"refused: {result['refusals']}\nhow calls and connections ended: "
        f"{json.dumps(result['ends'])}"
    )
    return int(growth > MAX_GROWTH or slower > MAX_SLOWER or fewest == 0)


class Flooded:
    """The node that is flooded."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.client_share = 1.0
        """Seconds of a processor that the client took in a second."""

    def status(self) -> dict[str, Any]:
        """What it says."""
        return self.node.until(lambda _: True, "an answer")

    def spent(self) -> tuple[float, float]:
        """Seconds of a processor that the daemon, and that p2pd has taken."""
        daemon = psutil.Process(self.node.child.pid)
        (aside,) = [one for one in daemon.children() if "p2pd" in one.name()]
        of_daemon, of_p2pd = (sum(one.cpu_times()[:2]) for one in (daemon, aside))
        return of_daemon, of_p2pd

    def memory(self) -> int:
        """Private bytes of the daemon and all its children."""
        daemon = psutil.Process(self.node.child.pid)
        return sum(one.memory_full_info().uss for one in (daemon, *daemon.children(recursive=True)))

    def measure(self, rounds: int, seconds: float, calls: int, connections: int) -> dict[str, Any]:
        """Calm and flood in turn."""
        self.node.until(lambda status: status["exchanges"]["completed"] >= 3, "three exchanges")
        (self.node.home / "certificate").write_text(certificate_of(self.status()["addresses"][0]))
        # What every node needs once, such as a checkpoint for a joiner or a second channel, is not
        # the flood's. As hard as those that count, so that the first calm is spent beside as much
        # as the others.
        print(
            "phase   steps/s  exchanges  private MiB  CPU s/s: daemon  p2pd  stranger", flush=True
        )
        self._phase("flood", seconds / 2, calls // rounds // 2, connections // 2)
        kinds = ["calm", "flood"] * rounds
        phases = [self._phase(kind, seconds, calls // rounds, connections) for kind in kinds]
        pairs = [
            (phases[i]["steps_per_second"], phases[i + 1]["steps_per_second"])
            for i in range(0, len(phases), 2)
        ]
        ends: dict[str, int] = {}
        for phase in phases:
            for end, count in phase.pop("ends").items():
                ends[end] = ends.get(end, 0) + count
        return {
            "rounds": rounds, "seconds": seconds, "calls": calls, "connections": connections,
            "phases": phases, "ends": ends,
            "growth": max(phase["peak"] for phase in phases if phase["kind"] == "flood")
            - phases[0]["peak"],
            "slower": statistics.median(1 - flooded / calm for calm, flooded in pairs),
            "refusals": self.status()["refusals"],
        }  # fmt: skip

    def _phase(self, kind: str, seconds: float, calls: int, connections: int) -> dict[str, Any]:
        command = (
            [sys.executable, "-c", HOG, str(self.client_share)]
            if kind == "calm"
            else self._client(self.status(), seconds, calls, connections)
        )
        command = ["nice", "-n", str(NICE), *command]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdin is not None and other.stdout is not None
            try:
                assert other.stdout.readline() == b"ready\n", "the client has gone"
                before, spent, began, peak = (
                    self.status(),
                    self.spent(),
                    time.monotonic(),
                    self.memory(),
                )
                burnt = sum(psutil.Process(other.pid).cpu_times()[:2])
                other.stdin.write(b"\n")
                other.stdin.flush()
                while time.monotonic() - began < seconds:
                    time.sleep(min(POLL, seconds / 4))  # between two looks at its memory
                    peak = max(peak, self.memory())
                after, took = self.status(), time.monotonic() - began
                of_daemon, of_p2pd = (
                    (now - then) / took for now, then in zip(self.spent(), spent, strict=True)
                )
                share = (sum(psutil.Process(other.pid).cpu_times()[:2]) - burnt) / took
                self.client_share = share if kind == "flood" else self.client_share
                told = b"" if kind == "calm" else other.stdout.readline()
            finally:
                other.kill()
        time.sleep(SETTLE)  # what a phase left behind must not count in the next one
        phase = {
            "kind": kind, "daemon_cpu": of_daemon, "p2pd_cpu": of_p2pd, "other_cpu": share,
            "steps_per_second": (after["trainer"]["steps"] - before["trainer"]["steps"]) / took,
            "exchanges": after["exchanges"]["completed"] - before["exchanges"]["completed"],
            "memory": self.memory(), "peak": peak,
            "ends": json.loads(told)["ends"] if kind == "flood" else {},
        }  # fmt: skip
        mib, shown = (
            phase["memory"] / MIB,
            f"{kind:6}  {phase['steps_per_second']:7.2f}  {phase['exchanges']:9}",
        )
        print(f"{shown}  {mib:11.1f}  {of_daemon:14.2f} {of_p2pd:5.2f} {share:8.2f}", flush=True)
        return phase

    def _client(
        self, status: dict[str, Any], seconds: float, calls: int, connections: int
    ) -> list[str]:
        (run,) = (self.node.home / "runs").glob("*/run.json")
        dht = next(one.split("/")[4] for one in status["entry_points"] if "/tcp/" in one)
        return [
            sys.executable, str(Path(__file__).with_name("flooding.py")), status["addresses"][0],
            status["peer_id"], str(run), "--seconds", str(seconds), "--calls", str(calls),
            "--connections", str(connections),
            "--parameters", str(status["trainer"]["parameters"]), "--dht-port", dht,
            "--certificate", str(self.node.home / "certificate"),
        ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
