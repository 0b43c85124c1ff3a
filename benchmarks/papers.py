"""What the papers of Streaming DiLoCo and NoLoCo print, and what comes of it here.

    python benchmarks/papers.py                    all that takes seconds
    python benchmarks/papers.py --part latency     one part
    python benchmarks/papers.py --report           print what was measured so far, and check it
    python benchmarks/papers.py --write            write the tables of docs/papers.md

``timeline``  compute utilization, hours and data, from a model of layers and a line (always anew)
``latency``   a tree all-reduce beside a pair, a barrier of all beside pairs

Results are kept in benchmarks/results/papers.json. Exits 1 if a claim does not hold.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kit
from published import latency, report, tables

RESULTS = kit.RESULTS / "papers.json"
PAGES = (kit.ROOT / "docs" / "papers.md",)

QUICK: dict[str, Callable[[], Any]] = {
    "latency": latency.measure,
}
"""Parts that take seconds and are measured as a whole."""


def parts() -> list[str]:
    """What can be measured."""
    return ["timeline", *QUICK]


def main() -> int:
    """Measure, print, check."""
    parser = kit.parser(__doc__)
    parser.add_argument("--part", choices=parts(), action="append")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    results = kit.read(arguments.out)
    if not arguments.report and not arguments.write:
        measure(arguments, results)
    made = {name: make(results) for name, make in report.TABLES.items()}
    if arguments.write:
        for page in PAGES:
            tables.write(page, made)
        return 0
    print(kit.machine())
    for name, text in made.items():
        print(f"\n{name}\n\n{text}", end="")
    print()
    failed = 0
    for claim, holds in report.checks(results):
        failed += not holds
        print(f"{'holds' if holds else 'FAILS'}  {claim}")
    return 1 if failed else 0


def measure(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """What was asked for; each part is saved when it is done."""
    for name, run in QUICK.items():
        if name in (arguments.part or QUICK):
            results[name] = run()
            kit.write(arguments.out, results)


if __name__ == "__main__":
    sys.exit(main())
