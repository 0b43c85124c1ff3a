"""Memory of the daemon over hundreds of exchanges: two real nodes on loopback, a small model, an
exchange every few steps.

    python benchmarks/memory.py [--exchanges 500]

Prints and writes (out/memory.json) the resident and private memory of both daemons, and the open
descriptors, as exchanges go by."""

import sys
import time
from typing import Any

import kit
import psutil

MIB = 2**20
POLL = 0.5
"""Seconds between two looks at a node's count of exchanges, which can't be waited for."""


def main() -> int:
    """Measure; 1 if the private memory of a daemon grew by more than a tenth in the second half."""
    parser = kit.parser(__doc__)
    parser.add_argument("--exchanges", type=int, default=500)
    parser.add_argument("--timeout", type=float, default=1800)
    arguments = parser.parse_args()
    with kit.two_nodes("memory", 4, "--checkpoint-every", "100000") as nodes:
        samples = sample_until(nodes, arguments.exchanges, arguments.timeout)
    kit.write(kit.OUT / "memory.json", {"machine": kit.machine(), "samples": samples})
    print(f"{kit.machine()}\nexchanges  node  resident MiB  private MiB  descriptors")
    for sample in samples:
        for node, figures in enumerate(sample["nodes"], 1):
            print(
                f"{sample['exchanges']:9}  {node:4}  {figures['rss'] / MIB:12.1f}  "
                f"{figures['uss'] / MIB:11.1f}  {figures['descriptors']:11}"
            )
    middle, last = samples[len(samples) // 2]["nodes"], samples[-1]["nodes"]
    growth = max(
        after["uss"] / before["uss"] - 1 for before, after in zip(middle, last, strict=True)
    )
    print(f"growth of private memory in the second half: {growth:+.1%}")
    return int(growth > 0.1)


def sample_until(nodes: list[Any], exchanges: int, timeout: float) -> list[dict[str, Any]]:
    """Sample whenever another tenth of the exchanges is done. Raises TimeoutError."""
    samples: list[dict[str, Any]] = []
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        done = completed(nodes[0])
        if done >= len(samples) * exchanges // 10 and (done or not samples):
            of_nodes = [figures(node.child.pid) for node in nodes]
            samples.append({"exchanges": done, "nodes": of_nodes})
        if done >= exchanges:
            return samples
        time.sleep(POLL)
    raise TimeoutError(f"only {completed(nodes[0])} exchanges within {timeout:.0f} s")


def completed(node: Any) -> int:
    """Exchanges that a node has completed; 0 while it does not answer."""
    status = node.status()
    return int(status["exchanges"]["completed"]) if status else 0


def figures(pid: int) -> dict[str, int]:
    """Memory in bytes (``uss`` is what nobody shares) and open descriptors of one process."""
    process = psutil.Process(pid)
    memory = process.memory_full_info()
    return {"rss": memory.rss, "uss": memory.uss, "descriptors": process.num_fds()}


if __name__ == "__main__":
    sys.exit(main())
