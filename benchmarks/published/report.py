"""What was measured, as tables of docs/papers.md and docs/methods.md."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from published import ours, relations, timeline
from published.figures import GBITS, HOURS, IDEAL_HOURS, RATIO_OF_DATA, SHAPES, STEPS, TARGETS
from published.goodput import BARRIER, BETWEEN, WHERE, WINDOW
from published.goodput import barrier as barrier_of
from published.recipe_names import BESIDE
from published.tables import MISSING, table

Results = Mapping[str, Any]
PERCENT = [f"{target:.0%}".replace("%", " %") for target in TARGETS]
OUR_METHODS = ("streaming-diloco-paper", "streaming-diloco", "lowcomm")


def utilization(results: Results) -> str:
    """Gbit/s for each target: the paper's, and the model's where that is another point."""
    rows = []
    for shape, name, mine, theirs in timeline.cells():
        told = [
            f"{their:g}" if not timeline.points_apart(one, their) else f"{their:g} ({one:.3g})"
            for one, their in zip(mine, theirs, strict=True)
        ]
        rows.append([shape.name, name, *told])
    return table(["model", "method", *PERCENT], rows)


def our_utilization(results: Results) -> str:
    """The same for what this project sends."""
    rows = []
    for shape in SHAPES:
        for method in OUR_METHODS:
            sync = ours.settings(method, shape.layers)
            rows.append(
                [
                    shape.name,
                    f"`{method}`",
                    f"{ours.bits(sync):.2f}",
                    *(f"{one:.3g}" for one in ours.needed(shape, sync)),
                    f"{ours.interval(shape, sync, GBITS):,} ({sync.interval})",
                ]
            )
    return table(["model", "method", "bits", *PERCENT, "interval at 1 Gbit/s (as written)"], rows)


def hours(results: Results) -> str:
    """Of a run of 1B parameters."""
    rows = [
        ["no communication", *_beside(timeline.ideal_hours(), IDEAL_HOURS)],
        *([name, *_beside(timeline.hours(name), HOURS[name])] for name in HOURS),
    ]
    return table(["", *STEPS], rows)


def _beside(mine: tuple[float, ...], theirs: tuple[float, ...]) -> list[str]:
    return [
        f"{one:.{2 if one < 10 else 0}f} ({other:g})"
        for one, other in zip(mine, theirs, strict=True)
    ]


def data(results: Results) -> str:
    """Bytes of data-parallel training by those of a method."""
    paper = ours.settings("streaming-diloco-paper", 24)
    rows = [
        ["the paper, 4 bits, every 100 steps", f"{RATIO_OF_DATA:.0f}"],
        [
            f"`streaming-diloco-paper`, {ours.bits(paper):.3g} bits",
            f"{ours.ratio_of_data(paper):.0f}",
        ],
    ]
    return table(["", "bytes of data-parallel training in bf16 / of the method"], rows)


def tree(results: Results) -> str:
    """A tree all-reduce beside a pair."""
    found = results.get("latency", {}).get("tree")
    if not found:
        return table(["sigma"], [[MISSING]])
    sigmas = sorted({key.split("/")[0] for key in found}, key=float)
    peers = sorted({int(key.split("/")[1]) for key in found})
    rows = []
    for sigma in sigmas:
        cells = [found[f"{sigma}/{count}"] for count in peers]
        rows.append([f"{sigma}, one hop", *(f"{one:.1f} ({paper:g})" for one, _, paper in cells)])
        rows.append([f"{sigma}, two hops", *(f"{two:.1f}" for _, two, _ in cells)])
    return table(["sigma", *(f"{count} peers" for count in peers)], rows)


def barrier(results: Results) -> str:
    """A barrier of all beside pairs."""
    found = results.get("latency", {}).get("barrier")
    if not found:
        return table(["peers"], [[MISSING]])
    rows = [["all / pairs", *(f"{one:.3f} ({paper:g})" for one, paper in found.values())]]
    return table(["", *(f"{count} peers" for count in found)], rows)


def waiting(results: Results) -> str:
    """With the production engine."""
    found = results.get("waiting")
    if not found:
        return table(["peers"], [[MISSING]])
    rows = [
        [peers, _percent(one["waited"]), _percent(one["alone"])] for peers, one in found.items()
    ]
    return table(["peers", "time that peers wait", "rounds without a partner"], rows)


def goodput(results: Results) -> str:
    """Of members that fail."""
    head = [
        "one member fails every",
        "barrier every step",
        "barrier every 30 steps",
        "groups",
        "pairs",
        "steps taken",
    ]
    rows = []
    for name in (*BETWEEN, WHERE):
        one = results.get("goodput", {}).get(name)
        if one is None:
            rows.append([name, MISSING, "", "", "", ""])
            continue
        told = f"{one['minutes']:.0f} min, {name}" if name == WHERE else name
        shares = (
            one["every step"],
            one["every window"],
            one["groups"]["merged"],
            one["pairs"]["merged"],
            one["groups"]["steps"],
        )
        rows.append([told, *map(_percent, shares)])
    return table(head, rows)


def others(results: Results) -> str:
    """Other systems as recipes, beside what is shipped."""
    found, rows = results.get("recipes", {}), []
    for name, beside in BESIDE.items():
        one = found.get(name)
        if one is None:
            rows.append([name, MISSING, "", "", "", ""])
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
    return table(["", "loss", "", "spread", "MB a peer", ""], rows)


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
    "losses": relations.losses,
    "peaks": relations.peaks,
    "other-systems": others,
}
"""By name, those of docs/papers.md and docs/methods.md."""


def checks(results: Results) -> Iterator[tuple[str, bool]]:
    """What is claimed of the figures, and whether it holds."""
    apart = timeline.distances()
    yield "utilization: 75 cells of 75 within one point of the grid", max(apart) <= 1
    yield "utilization: at least 60 cells exact", apart.count(0) >= 60
    for name, theirs in (("ideal", IDEAL_HOURS), *HOURS.items()):
        mine = timeline.ideal_hours() if name == "ideal" else timeline.hours(name)
        near = all(abs(one / other - 1) <= 0.04 for one, other in zip(mine, theirs, strict=True))
        yield f"hours, {name}: within 4 %", near
    paper = ours.settings("streaming-diloco-paper", 24)
    yield "ratio of data: 388 to 1", round(ours.ratio_of_data(paper)) == 388
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
        round(barrier_of(WINDOW, BARRIER, float("inf")), 3) == 0.945,
    )
    fell = results.get("goodput", {}).get(WHERE)
    if fell:
        kept = min(fell[one]["steps"] for one in ("groups", "pairs"))
        claim = "goodput: where data-parallel keeps 27 %, our members take over half of all steps"
        yield claim, kept > 0.5
