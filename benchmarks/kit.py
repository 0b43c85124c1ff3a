"""What the benchmarks share: arguments, the machine in words, results in files, tables, and
parallel runs.

Each script measures one claim of the documents. It imports this first, which also makes
tests/helpers and the laboratory of tests/net importable."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
"""Committed. To measure a result again, delete it and run its script."""
OUT = Path("out")
"""Results that are not committed."""
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


def measure_missing(
    arguments: argparse.ArgumentParser, jobs: Mapping[str, Callable[[], dict[str, Any]]], out: Path
) -> None:
    """Run the jobs whose results are missing, or those of ``--only``, one after the other."""
    arguments.add_argument("--only", nargs="*", default=list(jobs), choices=list(jobs))
    for key in arguments.parse_args().only:
        if key not in read(out):
            row = {"machine": loaded_machine()} | jobs[key]()
            write(out, read(out) | {key: row})
            print(key, row, flush=True)


def cpu_of(pid: int) -> float:
    """Seconds of CPU of a process and those that it has started."""
    root = psutil.Process(pid)
    times = [one.cpu_times() for one in (root, *root.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Markdown, without a line break at the end."""
    lines = [f"| {' | '.join(map(str, line))} |" for line in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def measure_all(
    measure: Callable[[Any], dict[str, Any]],
    jobs: Sequence[Any],
    out: Path,
    processes: int,
    indent: int | None = 1,
) -> None:
    """Run jobs in parallel, in the order given; each result is saved at once, by ``job.key``."""
    from lowcomm_node.system.command import die_with_parent

    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=die_with_parent) as pool:
        running = {pool.submit(measure, job): job for job in jobs}
        for done, future in enumerate(as_completed(running), start=1):
            job, result = running[future], future.result()
            # Read again: another process may have added runs of its own.
            write(out, read(out) | {job.key: result}, indent)
            print(f"{done}/{len(jobs)} {job.key} {result['loss']:.4f}", file=sys.stderr, flush=True)


def simulated(result: Any) -> dict[str, Any]:
    """What a simulation came to, as a result that is kept."""
    return asdict(result) | {"loss": result.loss}
