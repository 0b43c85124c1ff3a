"""What a node costs besides training and exchanges, by how many there are.

    python benchmarks/scale.py [--sizes 4 8 16] [--seconds 60]

Swarms of that many real daemons, each with its p2pd, on loopback. Trainers are stand-ins that take
a step each quarter of a second (``tests/helpers/light_process.py``), so that 16 nodes fit on
two cores. The run has no exchanges: how many a node makes does not depend on the others. Once all
see all, it counts for a window, for each node and minute, the middle one: CPU seconds of daemon and
p2pd; bytes of p2pd's TCP connections, which are the DHT; and bytes of the daemon's, which are
messages. Five nodes keep the records of a run and answer for them, so of the DHT the mean is shown,
too. The kernel counts bytes (``ss``), both ways; nodes listen over TCP alone, since it counts none
of QUIC. More nodes must cost each of them no more.

Prints and writes (benchmarks/results/scale.json)."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import fmean, median
from time import monotonic, sleep
from typing import Any

import kit
import psutil

RESULT = kit.RESULTS / "scale.json"
STEP = 0.25
"""Seconds of a step."""
SETTLE, TICK = 20.0, 1.0
START = 300.0
"""Seconds until all see all."""
HEAD = """
nodes   daemon    p2pd          DHT       mean   messages   load
         CPU s   CPU s           kB         kB         kB
"""


def main() -> None:
    """Measure and print."""
    parser = kit.parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--seconds", type=float, default=60.0, help="of the window")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"machine": kit.machine(), "seconds": arguments.seconds, "sizes": {}}
    print(f"{kit.machine()}; of one node, a minute\n{HEAD}", end="", flush=True)
    for size in arguments.sizes:
        row = measure(size, arguments.seconds)
        results["sizes"][str(size)] = row
        print(
            f"{size:5} {row['daemon_cpu_s']:8.2f} {row['p2pd_cpu_s']:7.2f} "
            f"{row['dht_bytes'] / 1e3:12.1f} {row['mean_dht_bytes'] / 1e3:10.1f} "
            f"{row['message_bytes'] / 1e3:10.1f} {row['load']:6.1f}",
            flush=True,
        )
        kit.write(arguments.out, results)


def measure(size: int, seconds: float) -> dict[str, float]:
    """One swarm: what its middle node takes a minute."""
    from helpers.processes import Node, Process, Swarm
    from lowcomm_node.swarm.run_template import write_template

    class Paced(Node):
        """A node whose trainer is a stand-in."""

        pace = ("--nice", "0")
        launch = staticmethod(start_here)

    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder))
        try:
            run = Path(folder) / "run.toml"
            spec = write_template("scale", "local", 10_000_000, 0, size)
            run.write_text(spec)
            Process.launch = staticmethod(start_here)
            swarm.bootstrap("--run", str(run))
            nodes = [Paced(Path(folder) / str(number), swarm.address) for number in range(size)]
            swarm.processes += nodes
            for node in nodes:
                node.until(
                    lambda status: status["phase"] == "training" and status["peers"] == size - 1,
                    f"{size - 1} peers",
                    START,
                )
            sleep(SETTLE)
            return watch(nodes, seconds)
        finally:
            swarm.close()


def start_here(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """In place of ``python -m``: a node or a bootstrap server that speaks TCP."""
    _, _, module, *arguments = command
    return subprocess.Popen([sys.executable, __file__, f"--{module}", *arguments], **options)


def node(arguments: Sequence[str]) -> None:
    """One node, in a process of its own."""
    from helpers.light_trainer import LightTrainer
    from lowcomm_node.cli import main as cli

    speak_tcp()
    for name in ("lowcomm_node.cli.join", "lowcomm_node.node.node"):
        import_module(name).TrainerProcess = lambda _: LightTrainer(f"pace:{STEP}")
    sys.argv = ["lowcomm-node", *arguments]
    cli()


def server(arguments: Sequence[str]) -> None:
    """The bootstrap server, in a process of its own."""
    from lowcomm_bootstrap.cli import main as cli

    speak_tcp()
    sys.argv = ["lowcomm-bootstrap", *arguments]
    cli()


def speak_tcp() -> None:
    """Listen over TCP alone: the kernel counts no bytes of UDP sockets, which QUIC uses."""
    p2pd: Any = import_module("lowcomm_node.net.p2pd")
    both = p2pd.listeners
    p2pd.listeners = lambda *place: tuple(one for one in both(*place) if "/tcp/" in one)


def watch(nodes: Sequence[Any], seconds: float) -> dict[str, float]:
    """Count for a window."""
    families = [family(node.child.pid) for node in nodes]
    before = work(families)
    sockets = Sockets({pid for one in families for pid in one.values()})
    began = monotonic()
    while monotonic() - began < seconds:
        sleep(TICK)
        sockets.look()
    minutes, after = (monotonic() - began) / 60, work(families)

    def middle(amounts: Sequence[float]) -> float:
        return median(amounts) / minutes

    def cpu(name: str) -> float:
        pairs = zip(before, after, strict=True)
        return middle([late[name] - early[name] for early, late in pairs])

    return {
        "daemon_cpu_s": cpu("daemon"),
        "p2pd_cpu_s": cpu("p2pd"),
        "dht_bytes": middle([sockets.bytes[one["p2pd"]] for one in families]),
        "mean_dht_bytes": fmean(sockets.bytes[one["p2pd"]] for one in families) / minutes,
        "message_bytes": middle([sockets.bytes[one["daemon"]] for one in families]),
        "load": psutil.getloadavg()[0],
    }


def family(pid: int) -> dict[str, int]:
    """Process ids of a daemon and its p2pd."""
    children = psutil.Process(pid).children()
    [p2pd] = [child.pid for child in children if child.name() == "p2pd"]
    return {"daemon": pid, "p2pd": p2pd}


def work(families: Sequence[Mapping[str, int]]) -> list[dict[str, float]]:
    """CPU seconds up to now."""
    return [
        {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in one.items()}
        for one in families
    ]


class Sockets:
    """Bytes that the TCP sockets of processes carry from now on, both ways."""

    def __init__(self, pids: set[int]) -> None:
        self.bytes = dict.fromkeys(pids, 0)
        self._seen: dict[tuple[int, str, str], int] = {}
        self.look()
        self.bytes = dict.fromkeys(pids, 0)

    def look(self) -> None:
        """Look again; what a socket carries between the last look and its end is lost."""
        told = subprocess.run(
            ["ss", "-tinpHO"], capture_output=True, text=True, check=True, timeout=30
        ).stdout
        for line in told.splitlines():
            found = re.search(r"pid=(\d+),", line)
            if found is None or int(found[1]) not in self.bytes:
                continue
            pid, (_, _, _, near, far, *_) = int(found[1]), line.split()
            count = sum(map(int, re.findall(r"bytes_(?:acked|received):(\d+)", line)))
            self.bytes[pid] += count - self._seen.get((pid, near, far), 0)
            self._seen[pid, near, far] = count


if __name__ == "__main__":
    {"--lowcomm_node": node, "--lowcomm_bootstrap": server}.get(
        sys.argv[1] if sys.argv[1:] else "", lambda _: main()
    )(sys.argv[2:])
