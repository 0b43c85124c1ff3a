"""What the papers of Streaming DiLoCo and NoLoCo print, and what comes of it here.

    python benchmarks/papers.py                    all but learning: four minutes
    python benchmarks/papers.py --part latency     one part
    python benchmarks/papers.py --report           print what was measured so far, and check it
    python benchmarks/papers.py --write            write the tables into docs/

``timeline``  compute utilization, hours and data, from a model of layers and a line (always anew)
``latency``   a tree all-reduce beside a pair, a barrier of all beside pairs
``waiting``   the same with the production engine: how long peers wait, how often they are alone
``goodput``   members that fail at random, with the production engine and with barriers (3 minutes)
``learning``  losses of small models, in simulation: an hour and a half of a core, only when it is
              named, and goes on where it was
``recipes``   other systems on the simulator (docs/methods.md), half an hour, likewise

Results are kept in benchmarks/results/papers.json. Exits 1 if a claim does not hold.
"""

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import kit
from published import goodput, latency, report, tables, waiting
from published.learning_jobs import jobs

RESULTS = kit.RESULTS / "papers.json"
PAGES = (kit.ROOT / "docs" / "papers.md", kit.ROOT / "docs" / "methods.md")

QUICK: dict[str, Callable[[], Any]] = {
    "latency": latency.measure,
    "waiting": waiting.measure,
}
"""Parts that take seconds to minutes and are measured as a whole."""


def parts() -> list[str]:
    """What can be measured."""
    return ["timeline", *QUICK, "goodput", "learning", "recipes"]


def main() -> int:
    """Measure, print, check."""
    parser = kit.parser(__doc__)
    parser.add_argument("--part", choices=parts(), action="append")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--only", default="", help="regular expression: only runs of learning whose key matches"
    )
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
            found = run()
            results.update(kit.read(arguments.out) | {name: found})
            kit.write(arguments.out, results, indent=None)
    if "goodput" in (arguments.part or ("goodput",)):
        fail(arguments, results)
    if "learning" in (arguments.part or ()):
        learn(arguments, results)
    if "recipes" in (arguments.part or ()):
        cook(arguments, results)


def fail(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """The scenes of goodput that are missing; each is saved when it is done."""
    for scene in goodput.SCENES:
        if scene not in results.get("goodput", {}):
            found = goodput.measure(scene)
            results.update(kit.read(arguments.out))
            results.setdefault("goodput", {})[scene] = found
            kit.write(arguments.out, results, indent=None)


def learn(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """The runs that are missing, those first that decide most; each is saved when it is done."""
    from published.learning import measure as run

    missing = [job for job in jobs() if job.key not in results.get("learning", {})]
    missing = [job for job in missing if re.search(arguments.only, job.key)]
    for done, job in enumerate(missing, start=1):
        found = run(job, kit.OUT)
        # What another part has measured meanwhile stays.
        results.update(kit.read(arguments.out))
        results.setdefault("learning", {})[job.key] = found
        kit.write(arguments.out, results, indent=None)
        print(
            f"{done}/{len(missing)} {job.key} {found['average']:.4f}", file=sys.stderr, flush=True
        )


def cook(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """The recipes that are missing; each is saved when it is done."""
    from published import recipes

    for name in recipes.RECIPES:
        if name in results.get("recipes", {}) or not re.search(arguments.only, name):
            continue
        found = asdict(recipes.measure(name, kit.OUT))
        results.update(kit.read(arguments.out))
        results.setdefault("recipes", {})[name] = found
        kit.write(arguments.out, results, indent=None)
        print(f"{name}: {found['loss']:.4f}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
