"""Memory of the daemon over hundreds of exchanges: two real nodes on loopback, a small model, an exchange every few steps.

    python benchmarks/memory.py [--exchanges 500]

Prints and writes (out/memory.json) the resident and private memory of both daemons, and the open descriptors, as exchanges go by.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from lowcomm_node.control.client import ControlClient
from lowcomm_node.errors import NodeError
from lowcomm_node.swarm.run_template import write_template

MIB = 2**20
START_DEADLINE = 90.0
POLL = 0.5
"""Seconds between two looks at a log, or at a node's count of exchanges: neither can be waited for."""


def main() -> int:
    """Measure; 1 if the private memory of a daemon grew by more than a tenth in the second half."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exchanges", type=int, default=500)
    parser.add_argument("--timeout", type=float, default=1800)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples = measure(Path(folder), arguments.exchanges, arguments.timeout)
    out = Path("out") / "memory.json"
    out.parent.mkdir(exist_ok=True)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    out.write_text(json.dumps({"machine": machine, "samples": samples}, indent=1))
    print(f"{machine}\nexchanges  node  resident MiB  private MiB  descriptors")
    for sample in samples:
        for node, figures in enumerate(sample["nodes"], 1):
            print(
                f"{sample['exchanges']:9}  {node:4}  {figures['rss'] / MIB:12.1f}  {figures['uss'] / MIB:11.1f}  "
                f"{figures['descriptors']:11}"
            )
    middle, last = samples[len(samples) // 2]["nodes"], samples[-1]["nodes"]
    growth = max(after["uss"] / before["uss"] - 1 for before, after in zip(middle, last, strict=True))
    print(f"growth of private memory in the second half: {growth:+.1%}")
    return int(growth > 0.1)


def measure(folder: Path, exchanges: int, timeout: float) -> list[dict[str, Any]]:
    """About ten samples on the way to so many exchanges."""
    spec = folder / "run.toml"
    spec.write_text(write_template("memory", "noloco", 10_000_000, 0, 2, interval=4))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    children: list[subprocess.Popen[bytes]] = []

    def start(module: str, home: Path, *arguments: str) -> subprocess.Popen[bytes]:
        home.mkdir()
        with (home / "log").open("wb") as log:
            command = [sys.executable, "-m", module, *arguments, "--home", str(home)]
            child = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        children.append(child)
        return child

    try:
        start(
            "lowcomm_bootstrap",
            folder / "b",
            "serve",
            "--json",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--run",
            str(spec),
        )
        address = first_address(folder / "b" / "log")
        homes = [folder / "1", folder / "2"]
        for home in homes:
            start(
                "lowcomm_node",
                home,
                "join",
                "--json",
                "--peers",
                address,
                "--threads",
                "1",
                "--checkpoint-every",
                "100000",
            )
        return sample_until(homes, children[1:], exchanges, timeout)
    finally:
        for child in children:
            child.send_signal(signal.SIGTERM)
        for child in children:
            child.wait(60)


def first_address(log: Path) -> str:
    """The address in the bootstrap server's ready line."""
    deadline = time.monotonic() + START_DEADLINE
    while time.monotonic() < deadline:
        for line in log.read_text().splitlines() if log.exists() else []:
            if line.startswith("{") and '"ready"' in line:
                return str(json.loads(line)["addresses"][0])
        time.sleep(POLL)
    raise TimeoutError(f"the bootstrap server was not ready within {START_DEADLINE:.0f} s: {log.read_text()}")


def sample_until(
    homes: list[Path], daemons: list[subprocess.Popen[bytes]], exchanges: int, timeout: float
) -> list[dict[str, Any]]:
    """Sample whenever another tenth of the exchanges is done. Raises TimeoutError."""
    samples: list[dict[str, Any]] = []
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        done = completed(homes[0])
        if done >= len(samples) * exchanges // 10 and (done or not samples):
            samples.append({"exchanges": done, "nodes": [figures(daemon.pid) for daemon in daemons]})
        if done >= exchanges:
            return samples
        time.sleep(POLL)
    raise TimeoutError(f"only {completed(homes[0])} exchanges within {timeout:.0f} s")


def completed(home: Path) -> int:
    """Exchanges that a node has completed; 0 while it does not answer."""
    try:
        with ControlClient(home) as client:
            return int(client.status()["exchanges"]["completed"])
    except NodeError:
        return 0


def figures(pid: int) -> dict[str, int]:
    """Memory in bytes (``uss`` is what nobody shares) and open descriptors of one process."""
    process = psutil.Process(pid)
    memory = process.memory_full_info()
    return {"rss": memory.rss, "uss": memory.uss, "descriptors": process.num_fds()}


if __name__ == "__main__":
    sys.exit(main())
