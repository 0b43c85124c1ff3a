"""What the benchmarks share: arguments, the machine in words, results in files, and nodes that are
always ended.

A script is a claim: it imports this first, which also makes tests/helpers and the laboratory of
tests/net known."""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
"""In the repository: whoever has a doubt deletes a result and runs again."""
OUT = Path("out")
"""Results that nobody commits."""
sys.path[:0] = [str(ROOT / "tests" / "net"), str(ROOT / "tests")]


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that shows the docstring of its script as it was written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def machine() -> str:
    """What it runs on."""
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def loaded_machine() -> str:
    """What it runs on, and how busy that is."""
    return f"{machine()}, load {os.getloadavg()[0]:.1f}"


def read(path: Path) -> dict[str, Any]:
    """What was measured so far."""
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path, content: Any, indent: int | None = 1) -> None:
    """Write results, as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".writing")
    temporary.write_text(json.dumps(content, indent=indent) + "\n")
    temporary.replace(path)


def cpu_of(pid: int) -> float:
    """Seconds of CPU of a process and those that it has started."""
    root = psutil.Process(pid)
    times = [one.cpu_times() for one in (root, *root.children(recursive=True))]
    return sum(one.user + one.system for one in times)


@contextmanager
def two_nodes(
    name: str,
    interval: int | None,
    *options: str,
    method: str = "noloco",
    model: Any = None,
    optimizer: str | None = None,
    cores: int = 1,
) -> Iterator[list[Any]]:
    """Two nodes (``helpers.processes.Node``) of a run that does not end, and a bootstrap server.

    ``interval`` and ``optimizer``: None for those of the method's preset; ``model``: None for the
    demo's; ``cores``: that each trainer computes on."""
    # Not above: most benchmarks start no nodes, and importing these takes a second.
    from helpers.processes import Node, Swarm
    from lowcomm_node.swarm.run_template import write_template

    class AsUsers(Node):
        pace = ("--nice", "5")  # or whatever else this machine does would decide
        threads = str(cores)

    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder))
        try:
            run = Path(folder) / "run.toml"
            more = {"model": model.model_dump()} if model else {}
            written = write_template(
                name, method, 10_000_000, 0, 2, interval=interval, optimizer=optimizer, more=more
            )
            run.write_text(written)
            swarm.bootstrap("--run", str(run))
            nodes = [AsUsers(Path(folder) / str(k), swarm.address, *options) for k in (1, 2)]
            swarm.processes += nodes
            yield nodes
        finally:
            swarm.close()
