"""What the papers of Streaming DiLoCo and NoLoCo print, and what comes of it here.

    python benchmarks/papers.py                    all but learning: four minutes
    python benchmarks/papers.py --part latency     one part
    python benchmarks/papers.py --report           print what was measured so far, and check it
    python benchmarks/papers.py --write            write the tables into docs/

``timeline``  compute utilization, hours and data, from a model of layers and a line (every time)
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import kit
from published import engine, latency, recipes, relations, timeline
from published.learning import measure as learn_one

RESULTS = kit.RESULTS / "papers.json"
PAGES = (kit.ROOT / "docs" / "measurements.md", kit.ROOT / "docs" / "methods.md")
BLOCK = re.compile(r"(<!-- measured: (?P<name>[a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
"""A table of a page, between its marks."""
PARTS = ("timeline", "latency", "waiting", "goodput", "learning", "recipes")
Results = Mapping[str, Any]
PERCENT = [f"{target:.0%}".replace("%", " %") for target in timeline.TARGETS]
OUR_METHODS = ("streaming-diloco-paper", "streaming-diloco", "lowcomm")


def utilization(results: Results) -> str:
    """Gbit/s for each target: the paper's, and the model's where that is another point."""
    rows = []
    for shape, name, mine, theirs in timeline.cells():
        cells = [
            f"{their:g}" if not timeline.points_apart(one, their) else f"{their:g} ({one:.3g})"
            for one, their in zip(mine, theirs, strict=True)
        ]
        rows.append([shape.name, name, *cells])
    return kit.table(["model", "method", *PERCENT], rows)


def our_utilization(results: Results) -> str:
    """The same for what this project sends."""
    rows = []
    for shape in timeline.SHAPES:
        for method in OUR_METHODS:
            sync = timeline.our_settings(method, shape.layers)
            rows.append(
                [
                    shape.name,
                    f"`{method}`",
                    f"{timeline.bits(sync):.2f}",
                    *(f"{one:.3g}" for one in timeline.our_needed(shape, sync)),
                    f"{timeline.our_interval(shape, sync, timeline.GBITS):,} ({sync.interval})",
                ]
            )
    return kit.table(
        ["model", "method", "bits", *PERCENT, "interval at 1 Gbit/s (as written)"], rows
    )


def hours(results: Results) -> str:
    """Of a run of 1B parameters."""
    rows = [
        ["no communication", *_beside(timeline.ideal_hours(), timeline.IDEAL_HOURS)],
        *([name, *_beside(timeline.hours(name), timeline.HOURS[name])] for name in timeline.HOURS),
    ]
    return kit.table(["", *timeline.STEPS], rows)


def _beside(mine: tuple[float, ...], theirs: tuple[float, ...]) -> list[str]:
    return [
        f"{one:.{2 if one < 10 else 0}f} ({other:g})"
        for one, other in zip(mine, theirs, strict=True)
    ]


def data(results: Results) -> str:
    """Bytes of data-parallel training by those of a method."""
    paper = timeline.our_settings("streaming-diloco-paper", 24)
    rows = [
        ["the paper, 4 bits, every 100 steps", f"{timeline.RATIO_OF_DATA:.0f}"],
        [
            f"`streaming-diloco-paper`, {timeline.bits(paper):.3g} bits",
            f"{timeline.ratio_of_data(paper):.0f}",
        ],
    ]
    return kit.table(["", "bytes of data-parallel training in bf16 / of the method"], rows)


def tree(results: Results) -> str:
    """A tree all-reduce beside a pair."""
    found = results.get("latency", {}).get("tree", {})
    sigmas = sorted({key.split("/")[0] for key in found}, key=float)
    peers = sorted({int(key.split("/")[1]) for key in found})
    rows = []
    for sigma in sigmas:
        cells = [found[f"{sigma}/{count}"] for count in peers]
        rows.append([f"{sigma}, one hop", *(f"{one:.1f} ({paper:g})" for one, _, paper in cells)])
        rows.append([f"{sigma}, two hops", *(f"{two:.1f}" for _, two, _ in cells)])
    return kit.table(["sigma", *(f"{count} peers" for count in peers)], rows)


def barrier(results: Results) -> str:
    """A barrier of all beside pairs."""
    found = results.get("latency", {}).get("barrier", {})
    rows = [["all / pairs", *(f"{one:.3f} ({paper:g})" for one, paper in found.values())]]
    return kit.table(["", *(f"{count} peers" for count in found)], rows)


def waiting(results: Results) -> str:
    """With the production engine."""
    rows = [
        [peers, _percent(one["waited"]), _percent(one["alone"])]
        for peers, one in results.get("waiting", {}).items()
    ]
    return kit.table(["peers", "time that peers wait", "rounds without a partner"], rows)


def goodput(results: Results) -> str:
    """Of members that fail."""
    barriers = "barrier every step", "barrier every 30 steps"
    head = ["one member fails every", *barriers, "groups", "pairs", "steps taken"]
    rows = []
    for name in (*engine.BETWEEN, engine.WHERE):
        one = results.get("goodput", {}).get(name)
        if one is None:
            rows.append([name, relations.MISSING, "", "", "", ""])
            continue
        told = f"{one['minutes']:.0f} min, {name}" if name == engine.WHERE else name
        shares = (
            one["every step"],
            one["every window"],
            one["groups"]["merged"],
            one["pairs"]["merged"],
            one["groups"]["steps"],
        )
        rows.append([told, *map(_percent, shares)])
    return kit.table(head, rows)


def others(results: Results) -> str:
    """Other systems as recipes, beside what is shipped."""
    found, rows = results.get("recipes", {}), []
    for name, beside in recipes.BESIDE.items():
        one = found.get(name)
        if one is None:
            rows.append([name, relations.MISSING, "", "", "", ""])
            continue
        than = found.get(beside)
        apart = f"{100 * (one['loss'] / than['loss'] - 1):+.2f} %" if than else ""
        notes = "; ".join(f"{note} {figure:.3g}" for note, figure in one["notes"].items())
        rows.append(
            [
                name,
                f"{one['loss']:.4f}",
                f"{apart} beside {beside}" if apart else "",
                f"{one['spread']:.1e}" if one["spread"] else "",
                f"{one['megabytes']:.2f}",
                notes,
            ]
        )
    return kit.table(["", "loss", "", "spread", "MB a peer", ""], rows)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


TABLES: dict[str, Callable[[Results], str]] = {
    "utilization": utilization,
    "our-utilization": our_utilization,
    "hours": hours,
    "data": data,
    "tree": tree,
    "barrier": barrier,
    "waiting": waiting,
    "goodput": goodput,
    "relations": relations.relations,
    "other-systems": others,
}
"""By name, those of docs/measurements.md and docs/methods.md."""


def checks(results: Results) -> Iterator[tuple[str, bool]]:
    """What is claimed of the figures, and whether it holds."""
    apart = timeline.distances()
    yield "utilization: 75 cells of 75 within one point of the grid", max(apart) <= 1
    yield "utilization: at least 60 cells exact", apart.count(0) >= 60
    for name, theirs in (("ideal", timeline.IDEAL_HOURS), *timeline.HOURS.items()):
        mine = timeline.ideal_hours() if name == "ideal" else timeline.hours(name)
        near = all(abs(one / other - 1) <= 0.04 for one, other in zip(mine, theirs, strict=True))
        yield f"hours, {name}: within 4 %", near
    paper = timeline.our_settings("streaming-diloco-paper", 24)
    yield "ratio of data: 388 to 1", round(timeline.ratio_of_data(paper)) == 388
    latency = results.get("latency")
    if latency:
        near = all(
            abs(two / (int(key.split("/")[1]).bit_length() - 1) - 1) <= 0.1
            for key, (_, two, _) in latency["tree"].items()
            if key.startswith("0.1/")
        )
        yield "tree: two hops within 10 % of log2 N at sigma 0.1", near
        yield (
            "barrier: 1.20 +- 0.02 at 1024 peers",
            abs(latency["barrier"]["1024"][0] - 1.2) <= 0.02,
        )
    if "waiting" in results:
        waited = max(one["waited"] for one in results["waiting"].values())
        yield "engine: nobody waits for anybody", waited == 0
    yield (
        "goodput: Covenant's 94.5 % without failures",
        round(engine.barrier(engine.WINDOW, engine.BARRIER, float("inf")), 3) == 0.945,
    )
    fell = results.get("goodput", {}).get(engine.WHERE)
    if fell:
        kept = min(fell[one]["steps"] for one in ("groups", "pairs"))
        claim = "goodput: where data-parallel keeps 27 %, our members take over half of all steps"
        yield claim, kept > 0.5


def filled(text: str, made: Mapping[str, str]) -> str:
    """A page with these tables in place of those that it has."""
    return BLOCK.sub(lambda found: f"{found[1]}{made[found['name']]}\n{found[3]}", text)


def main() -> int:
    """Measure, print, check."""
    parser = kit.parser(__doc__)
    parser.add_argument("--part", choices=PARTS, action="append")
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
    made = {name: make(results) for name, make in TABLES.items()}
    if arguments.write:
        for page in PAGES:
            page.write_text(filled(page.read_text(), made))
        return 0
    print(kit.machine())
    for name, text in made.items():
        print(f"\n{name}\n\n{text}")
    print()
    claims = list(checks(results))
    for claim, holds in claims:
        print(f"{'holds' if holds else 'FAILS'}  {claim}")
    return int(not all(holds for _, holds in claims))


def measure(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """What was asked for; each part, or run of a part, is saved when it is done."""
    chosen = arguments.part or ("latency", "waiting", "goodput")

    def keep(part: str, name: str, found: Any) -> None:
        # What another process has measured meanwhile stays.
        results.update(kit.read(arguments.out))
        results.setdefault(part, {})[name] = found
        kit.write(arguments.out, results, indent=None)

    def missing(part: str, names: Iterable[str]) -> list[str]:
        there = results.get(part, {})
        return [one for one in names if one not in there and re.search(arguments.only, one)]

    for part, run in (("latency", latency.measure), ("waiting", engine.waiting)):
        if part in chosen:
            for name, found in run().items():
                keep(part, name, found)
    if "goodput" in chosen:
        for scene in missing("goodput", engine.SCENES):
            keep("goodput", scene, engine.goodput(scene))
    if "learning" in chosen:
        jobs = {job.key: job for job in relations.jobs()}
        for key in missing("learning", jobs):
            keep("learning", key, found := learn_one(jobs[key], kit.OUT))
            print(f"{key} {found['average']:.4f}", file=sys.stderr, flush=True)
    if "recipes" in chosen:
        for name in missing("recipes", recipes.RECIPES):
            keep("recipes", name, found := asdict(recipes.measure(name, kit.OUT)))
            print(f"{name}: {found['loss']:.4f}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
