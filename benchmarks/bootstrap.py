"""What a bootstrap server takes with 10 to 200 clients on loopback, beside an idle one; and what
they do when it is killed.

    python benchmarks/bootstrap.py [--sizes 10 50 100 200] [--seconds 20] [--looks 2] [--beats 5]

Clients are real peers of the DHT (tests/helpers/clients.py), many in one Python process: each has a
p2pd of its own, publishes its record and knocks at the server. A node does so every 10 s, and looks
up the peers of its run every 2 s. Two cores do not do that for 200 clients: here all together look
``--looks`` times a second, and publish and knock ``--beats`` times at most, so each of 50 every 10
s, each of 200 every 40. For every number of clients, of three windows of ``--seconds`` the median:

    far     the run's records lie with other peers: the usual case in a large swarm
    near    the server is one of the five peers that keep them: each look of each client reads
            all of them from it
    burst   eight clients ask the server alone for all records of the run, as fast as it answers
    viewers   the swarm's page is asked ``--viewers`` times a second beside that (`viewers.py`)

CPU is that of the server's two processes, in percent of one core. Memory is what they do not share
with others (USS). Traffic is all that went to and from its port, both ways, with headers; it is
counted by iptables in a network namespace of the benchmark's own, so only where this runs as root.
Then the server is killed and started again.

200 clients take 20 GB, and more processors than two. Results go into
benchmarks/results/bootstrap.json, beside those of other sizes that are there.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from statistics import median, quantiles
from time import monotonic, sleep
from typing import Any

import kit
import psutil
from ends import end_all

from helpers.processes import Process, environment, free_port
from helpers.waiting import until
from lowcomm_node.dht.guard import place_of
from lowcomm_node.dht.keys import peers_key
from lowcomm_node.net.hivemind_parts import DHTID
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.spec.run import SignedRun, parse_toml, sign_run

OUT = kit.RESULTS / "bootstrap.json"
WINDOWS = 3
CROWD = 25
"""Clients in one process, at most."""
ASKING = 8
BEAT = 10.0
"""Seconds between two signs of life of a node, and two knocks."""
START = 600.0
"""Seconds for the clients of a size to start, and to see each other."""
SETTLE = 60.0
"""Seconds for all clients to see all, before a window begins."""
CANDIDATES = 500
COUNTED = "COUNTED_BOOTSTRAP"
"""Set where traffic is counted."""


def main() -> None:
    """Measure, print, and write down."""
    parser = kit.parser(__doc__)
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[10, 50, 100, 200],
        help="numbers of clients, growing",
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of one window")
    parser.add_argument("--looks", type=float, default=2.0, help="of all clients a second")
    parser.add_argument("--beats", type=float, default=5.0, help="of all clients a second, at most")
    parser.add_argument("--viewers", type=float, default=500.0, help="requests a second")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that all are ended
    if (
        COUNTED not in os.environ
        and os.geteuid() == 0
        and all(map(which, ("unshare", "ip", "iptables")))
    ):
        inside = ["sh", "-c", 'ip link set lo up && exec "$0" "$@"', sys.executable, *sys.argv]
        os.execvpe("unshare", ["unshare", "--net", "--", *inside], os.environ | {COUNTED: "1"})
    with tempfile.TemporaryDirectory(
        prefix="lc-", dir="/tmp"
    ) as folder:  # a short name, as sockets need
        os.environ["XDG_RUNTIME_DIR"] = folder
        rates = Rates(arguments.seconds, arguments.looks, arguments.beats, arguments.viewers)
        bench = Bench(Path(folder), rates)
        try:
            results = bench.run(sorted(arguments.sizes))
        finally:
            bench.close()
    kit.write(OUT, results)


@dataclass(frozen=True)
class Rates:
    """Seconds of a window, and how often what is done in it."""

    seconds: float
    looks: float
    beats: float
    viewers: float


class Bench:
    """A server, and clients in processes of their own; ``close`` ends them all."""

    def __init__(self, folder: Path, rates: Rates) -> None:
        self._folder, self._rates = folder, rates
        self._port = free_port()
        if COUNTED in os.environ:
            for protocol in ("tcp", "udp"):
                for end in ("--dport", "--sport"):
                    subprocess.run(
                        ["iptables", "-A", "INPUT", "-p", protocol, end, str(self._port)],
                        check=True,
                    )
        self._crowds: list[Remote] = []
        home = folder / "server"
        listed = subprocess.run(
            [sys.executable, "-m", "lowcomm_bootstrap", "id", "--home", str(home)],
            capture_output=True, text=True, check=True, env=environment(),
        )  # fmt: skip
        self._peer_id = listed.stdout.strip()
        self._far, self._near = runs_around(self._peer_id)
        for run in (self._far, self._near):
            (folder / f"{run.spec.run.name}.json").write_bytes(run.to_bytes())
        self._server, _ = self._serve()

    def run(self, sizes: Sequence[int]) -> dict[str, Any]:
        """All measurements."""
        known = kit.read(OUT).get("sizes", {})
        results: dict[str, Any] = {
            "machine": kit.machine(),
            "seconds": self._rates.seconds,
            "idle": self._windows(sleep),
            "sizes": known,
        }
        print(HEAD, flush=True)
        print(row("idle", results["idle"]), flush=True)
        for size in sizes:
            self._grow(size)
            of_size = known[str(size)] = dict[str, Any]()
            for name, run in (("far", self._far), ("near", self._near)):
                self._move(run, size)
                of_size[name] = self._lived(size)
                print(row(f"{size}, {name}", of_size[name]), flush=True)
            of_size["burst"] = self._windows(self._ask)
            print(row(f"{size}, burst", of_size["burst"]), flush=True)
            of_size["viewers"] = self._windows(self._view)
            print(row(f"{size}, viewers", of_size["viewers"]), flush=True)
            kit.write(OUT, results)
        results["killed"] = self._kill(sizes[-1])
        print(results["killed"], flush=True)
        return results

    def close(self) -> None:
        """End everything."""
        for crowd in self._crowds:
            crowd.end()
        self._server.end()

    def _serve(self) -> tuple[Process, float]:
        """A server that is ready, and the seconds that it took."""
        home, began = self._folder / "server", monotonic()
        told = (home / "log").read_text().count('"ready"') if (home / "log").exists() else 0
        runs = [
            word
            for run in (self._far, self._near)
            for word in ("--run", str(self._folder / f"{run.spec.run.name}.json"))
        ]
        server = Process(
            home, "lowcomm_bootstrap", "serve", "--json", "--host", "127.0.0.1", "--port",
            str(self._port), "--web", "0",
            "--home", str(home), *runs,
        )  # fmt: skip
        until(lambda: server.events("ready")[told:], START, "the server is ready")
        return server, monotonic() - began

    def _grow(self, size: int) -> None:
        missing = size - sum(crowd.count for crowd in self._crowds)
        beat = str(self._beat(size))
        self._all("beat", beat)
        address = f"/ip4/127.0.0.1/tcp/{self._port}/p2p/{self._peer_id}"
        while missing > 0:
            count = min(missing, CROWD)
            folder = self._folder / f"crowd-{len(self._crowds)}"
            self._crowds.append(
                Remote(folder, count, self._far.run_id, size / self._rates.looks, beat, address)
            )
            self._crowds[-1].wait_ready()  # one after the other: they share the cores
            missing -= count

    def _beat(self, size: int) -> float:
        """Seconds between two signs of life of a client, and two knocks."""
        return max(BEAT, size / self._rates.beats)

    def _move(self, run: SignedRun, size: int) -> None:
        self._all("move", run.run_id, str(size / self._rates.looks))
        with suppress(
            AssertionError
        ):  # on a busy machine some are always late; what they see is in the results
            until(lambda: self._fewest() >= size, SETTLE, f"all {size} see all")
        self._all("told")  # what was measured until now does not count

    def _lived(self, size: int) -> dict[str, Any]:
        def live(seconds: float) -> dict[str, Any]:
            sleep(seconds)
            told = self._all("told")
            looks = [took for one in told for took in one["looks"]]
            return {
                **spread(looks, seconds),
                "fewest_seen": min(one["fewest"] for one in told),
                "answered": sum(one["doors"].get(self._peer_id, 0) for one in told),
            }

        return {"clients": size, "beat": self._beat(size), **self._windows(live)}

    def _ask(self, seconds: float) -> dict[str, Any]:
        """A window of the burst."""
        told = self._crowds[0].ask("ask", self._peer_id, str(ASKING), str(seconds))
        return spread(told["took"], seconds)

    def _view(self, seconds: float) -> dict[str, Any]:
        """A window with viewers."""
        port = self._server.events("ready")[-1]["web"]
        script = Path(__file__).with_name("viewers.py")
        done = subprocess.run(
            [sys.executable, str(script), str(port), str(self._rates.viewers), str(seconds)],
            capture_output=True, text=True, check=True, env=environment(),
        )  # fmt: skip
        told: dict[str, Any] = json.loads(done.stdout)
        shares = {f"answers_{status}": count for status, count in told["statuses"].items()}
        return {**spread(told["took"], seconds), **shares}

    def _windows(self, live: Callable[[float], dict[str, Any] | None]) -> dict[str, Any]:
        """The median of each figure over WINDOWS windows."""
        windows = []
        for _ in range(WINDOWS):
            before, began = Usage.of(self._server), monotonic()
            told = live(self._rates.seconds) or {}
            after, seconds = Usage.of(self._server), monotonic() - began
            windows.append({**after.since(before, seconds), **told, "load": os.getloadavg()[0]})
        return {
            name: round(median(window.get(name, 0) for window in windows), 4) for name in windows[0]
        }

    def _kill(self, size: int) -> dict[str, Any]:
        """Kill -9, and a start with nothing but its home."""
        before = self._server.events("ready")[-1]["addresses"]
        self._server.end(signal.SIGKILL)
        lost = monotonic()
        until(lambda: self._answered() == 0, START, "all clients see that the server is gone")
        noticed = monotonic() - lost
        self._server, started = self._serve()
        ready = monotonic()
        until(lambda: self._answered() == size, START, "all clients are back")
        back = monotonic() - ready
        counted = until(
            lambda: [e for e in self._server.events("run.peers") if e["peers"] == size],
            START,
            "counted",
        )
        kept = subprocess.run(
            [sys.executable, "-m", "lowcomm_bootstrap", "runs", "--json", "--home",
                str(self._server.home)],
            capture_output=True, text=True, check=True, env=environment(),
        )  # fmt: skip
        return {
            "clients": size,
            "seconds_until_all_noticed": round(noticed, 1),
            "seconds_of_the_start": round(started, 1),
            "seconds_until_all_were_back": round(back, 1),
            "same_addresses": self._server.events("ready")[-1]["addresses"] == before,
            "runs": len(kept.stdout.splitlines()),
            "peers_counted": counted[-1]["peers"],
            "load": os.getloadavg()[0],
        }

    def _fewest(self) -> int:
        return min(told["fewest"] for told in self._all("told"))

    def _answered(self) -> int:
        return sum(told["doors"].get(self._peer_id, 0) for told in self._all("told"))

    def _all(self, *words: str) -> list[dict[str, Any]]:
        for crowd in self._crowds:
            crowd.send(*words)
        return [crowd.answer() for crowd in self._crowds]


class Remote:
    """A process of clients."""

    def __init__(
        self, folder: Path, count: int, run_id: str, poll: float, beat: str, address: str
    ) -> None:
        self.count = count
        folder.mkdir()
        script = kit.ROOT / "tests" / "helpers" / "clients.py"
        self._errors = (folder / "errors").open("wb")
        self._child = subprocess.Popen(
            [sys.executable, str(script), str(folder), str(count), run_id, str(poll), beat,
                address],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment(),
            text=True,
        )  # fmt: skip

    def wait_ready(self) -> None:
        """Until all of them have entered."""
        self.answer()

    def ask(self, *words: str) -> dict[str, Any]:
        """A command, and its answer."""
        self.send(*words)
        return self.answer()

    def send(self, *words: str) -> None:
        """A command."""
        assert self._child.stdin is not None
        self._child.stdin.write(" ".join(words) + "\n")
        self._child.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The answer to the command that was sent first."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        assert line, (
            f"clients ended: see {self._errors.name}: "
            f"{Path(str(self._errors.name)).read_text()[-2000:]}"
        )
        return json.loads(line)

    def end(self) -> None:
        """End it and its clients."""
        end_all([self._child])
        self._errors.close()


@dataclass(frozen=True)
class Usage:
    """What the server and its p2pd have taken until now."""

    cpu: tuple[float, float]
    """Seconds, of the server and of p2pd."""
    memory: tuple[int, int]
    files: int
    carried: float
    """Bytes, both ways; NaN where nobody counts."""

    @classmethod
    def of(cls, server: Process) -> "Usage":
        """As it is now."""
        own = psutil.Process(server.child.pid)
        (p2pd,) = (child for child in own.children() if child.name() == "p2pd")
        both = (own, p2pd)
        return cls(
            cpu=tuple(sum(one.cpu_times()[:2]) for one in both),  # pyright: ignore[reportArgumentType]
            memory=tuple(one.memory_full_info().uss for one in both),  # pyright: ignore[reportArgumentType]
            files=sum(one.num_fds() for one in both),
            carried=carried(),
        )

    def since(self, before: "Usage", seconds: float) -> dict[str, float]:
        """Rates, and what there is now."""
        return {
            "cpu_python": 100 * (self.cpu[0] - before.cpu[0]) / seconds,
            "cpu_p2pd": 100 * (self.cpu[1] - before.cpu[1]) / seconds,
            "memory_python": self.memory[0],
            "memory_p2pd": self.memory[1],
            "descriptors": self.files,
            "traffic": (self.carried - before.carried) / seconds,
        }


def carried() -> float:
    """Bytes to and from the server's port."""
    if COUNTED not in os.environ:
        return math.nan
    lines = subprocess.run(
        ["iptables", "-nvxL", "INPUT"], capture_output=True, text=True, check=True
    ).stdout
    return float(sum(int(line.split()[1]) for line in lines.splitlines()[2:]))


def spread(took: list[float], seconds: float) -> dict[str, float]:
    """How many a second, and how long they took."""
    if len(took) < 2:
        return {"lookups": len(took) / seconds, "ms_median": 0.0, "ms_95": 0.0}
    return {
        "lookups": len(took) / seconds,
        "ms_median": 1000 * median(took),
        "ms_95": 1000 * quantiles(took, n=20)[-1],
    }


def runs_around(peer_id: str) -> tuple[SignedRun, SignedRun]:
    """A run whose records lie far from this peer, and one whose records it is the first to keep."""
    creator, place = Identity(b"c" * 32), place_of(peer_id)

    def distance(run: SignedRun) -> int:
        return int(place.xor_distance(DHTID.generate(source=peers_key(run.run_id))))

    runs = [
        sign_run(parse_toml(f'[run]\nname = "run-{number}"\n'), creator)
        for number in range(CANDIDATES)
    ]
    return max(runs, key=distance), min(runs, key=distance)


HEAD = (
    "| clients | CPU %, of it p2pd | memory MB, of it p2pd | descriptors | traffic KB/s | "
    "lookups/s | ms, median and 95 % | load |\n|---|---|---|---|---|---|---|---|"
)


def row(name: str, of: dict[str, Any]) -> str:
    """A line of the table."""
    cpu, memory = of["cpu_python"] + of["cpu_p2pd"], (of["memory_python"] + of["memory_p2pd"]) / 1e6
    looks = (
        f"{of['lookups']:.1f} | {of['ms_median']:.0f} / {of['ms_95']:.0f}"
        if "lookups" in of
        else "- | -"
    )
    return (
        f"| {name} | {cpu:.1f}, {of['cpu_p2pd']:.1f} | {memory:.0f}, {of['memory_p2pd'] / 1e6:.0f} "
        f"| {of['descriptors']:.0f} | {of['traffic'] / 1e3:.1f} | {looks} | {of['load']:.0f} |"
    )


if __name__ == "__main__":
    main()
