"""What the benchmarks share: arguments, the machine in words, results in files, tables, and
parallel runs.

Each script measures one claim of the documents. It imports this first, which also makes
tests/helpers and the laboratory of tests/net importable."""

import argparse
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
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


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for homes, keys and control sockets, short enough for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="lc-", dir="/tmp") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        yield Path(folder)


@contextmanager
def laboratory() -> Iterator[tuple[Any, Path]]:
    """An emulated network and a folder for homes; exits where this machine can't have one."""
    from laboratory import Lab
    from namespaces import missing

    if reason := missing():
        sys.exit(f"no laboratory on this machine: {reason}")
    with scratch() as folder, Lab() as lab:
        yield lab, folder


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
    description: str | None,
    measure: Callable[[Any], dict[str, Any]],
    jobs: Sequence[Any],
    out: Path,
    indent: int | None = 1,
) -> tuple[list[Any], Path]:
    """Run the jobs that the command line asks for and whose results are missing, in parallel and in
    the order given: all that were asked for, and where the results are.

    Each result is saved at once, by ``job.key``."""
    from lowcomm_node.system.command import die_with_parent

    options = parser(description)
    options.add_argument("--only", default="", help="regular expression: runs whose key matches")
    options.add_argument("--report", action="store_true", help="print what is there; run nothing")
    options.add_argument("--processes", type=int, default=os.cpu_count())
    options.add_argument("--out", type=Path, default=out)
    given = options.parse_args()
    asked, there = [job for job in jobs if re.search(given.only, job.key)], read(given.out)
    missing = [] if given.report else [job for job in asked if job.key not in there]
    with ProcessPoolExecutor(
        given.processes, get_context("spawn"), initializer=die_with_parent
    ) as pool:
        running = {pool.submit(measure, job): job for job in missing}
        for done, future in enumerate(as_completed(running), start=1):
            job, result = running[future], future.result()
            # Read again: another process may have added runs of its own.
            write(given.out, read(given.out) | {job.key: result}, indent)
            counted = f"{done}/{len(missing)}"
            print(f"{counted} {job.key} {result['loss']:.4f}", file=sys.stderr, flush=True)
    return asked, given.out
