"""What the runs of convergence.py say: tables, shares of all-reduce's gain, plots, and whether each
claim holds.

Everything is made from the runs that were measured, be it all of them or not.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from convergence_jobs import ALLREDUCE, SINGLE, Job

Results = dict[str, Any]
"""What came of each run, by the key of its job."""
Rows = dict[str, dict[int, Any]]
"""The same, by label and seed, of runs that can be compared."""
Circumstances = tuple[str, str, int, int]
"""Part, optimizer, number of peers and length."""


def under_the_same(jobs: Sequence[Job]) -> dict[Circumstances, list[Job]]:
    """Jobs that can be compared with each other."""
    groups: dict[Circumstances, list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.part, job.optimizer, job.peers, job.steps), []).append(job)
    return groups


def measured(jobs: Sequence[Job], results: Results) -> Rows:
    """What is there of jobs that can be compared; rows in the order of the jobs, seeds in
    theirs."""
    rows: Rows = {}
    for job in sorted(jobs, key=lambda job: job.seed):
        if job.key in results:
            rows.setdefault(job.label, {})[job.seed] = results[job.key]
    return {job.label: rows[job.label] for job in jobs if job.label in rows}


def together(*rows: dict[int, Any]) -> list[tuple[Any, ...]]:
    """Results of some rows side by side, of the seeds that all of them have."""
    return [
        tuple(row[seed] for row in rows) for seed in rows[0] if all(seed in row for row in rows)
    ]


def seeds_there(label: str, jobs: Sequence[Job], rows: Rows) -> str:
    """How many seeds there are of a row, if not all."""
    there, all_ = len(rows[label]), sum(job.label == label for job in jobs)
    return "" if there == all_ else f" ({there} of {all_} seeds)"


# Tables


def tables(jobs: Sequence[Job], results: Results) -> str:
    """Markdown: a table for each part, optimizer, number of peers and length; figures are means
    over the seeds."""
    groups = under_the_same(jobs).items()
    return "\n\n".join(
        table(title, group, rows) for title, group in groups if (rows := measured(group, results))
    )


def table(title: Circumstances, jobs: Sequence[Job], rows: Rows) -> str:
    """One table."""
    part, optimizer, peers, steps = title
    lines = [
        f"**{part}, {optimizer}, {peers} peers, {steps} steps**",
        "",
        "| method | loss: mean (min to max) | averaged | spread | worst block | MB sent | of "
        "all-reduce |",
        "|---|---|---|---|---|---|---|",
    ]
    full = [one["bytes_sent"] for one in rows.get(ALLREDUCE, {}).values()]
    for label, row in rows.items():
        results = row.values()
        losses = [loss for one in results for loss in one["losses"]]
        sent = mean(one["bytes_sent"] for one in results)
        ratio = f"1/{mean(full) / sent:.1f}" if full and sent else ""
        cells = [
            label + seeds_there(label, jobs, rows),
            f"{mean(one['loss'] for one in results):.3f} ({min(losses):.3f} to {max(losses):.3f})",
            f"{mean(one['average_loss'] for one in results):.3f}",
            f"{mean(one['spread'] for one in results):.1e}",
            f"{max(one['worst_block'] for one in results):.1e}",
            f"{sent / 1e6:.2f}",
            ratio,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shares(jobs: Sequence[Job], results: Results) -> str:
    """How much of all-reduce's gain over a single replica each row of ``wire`` leaves, and for how
    many of its bytes."""
    lines: list[str] = []
    for (part, optimizer, peers, _), group in sorted(under_the_same(jobs).items()):
        rows = measured(group, results) if part == "wire" else {}
        for label in rows:
            gains, bytes_ = gained(rows, label), sent(rows, label)
            if gains and label not in (SINGLE, ALLREDUCE):
                told = " / ".join(f"{100 * gain:.0f}" for gain in gains)
                lines.append(
                    f"- {optimizer}, {peers} peers, {label}{seeds_there(label, group, rows)}: "
                    f"{100 * mean(gains):.1f} % ({told}) of all-reduce's gain for "
                    f"1/{1 / mean(bytes_):.0f} of its bytes"
                )
    return "\n".join(lines)


def gained(rows: Rows, label: str) -> list[float]:
    """How much of all-reduce's gain over a single replica a row leaves, seed by seed."""
    return [
        (alone["loss"] - one["loss"]) / (alone["loss"] - full["loss"])
        for alone, full, one in together(
            rows.get(SINGLE, {}), rows.get(ALLREDUCE, {}), rows.get(label, {})
        )
    ]


def sent(rows: Rows, label: str) -> list[float]:
    """Bytes of a row as a share of all-reduce's, seed by seed."""
    return [
        one["bytes_sent"] / full["bytes_sent"]
        for one, full in together(rows.get(label, {}), rows.get(ALLREDUCE, {}))
    ]


# Claims


class Case(NamedTuple):
    """One run that was measured beside the others like it."""

    job: Job
    rows: Rows

    @property
    def result(self) -> Any:
        """What came of it."""
        return self.rows[self.job.label][self.job.seed]

    def beside(self, label: str) -> Any:
        """What came of another row with the same seed; None if it was not measured."""
        return self.rows.get(label, {}).get(self.job.seed)

    def above(self, label: str) -> float | None:
        """Loss above that of another row."""
        other = self.beside(label)
        return self.result["loss"] - other["loss"] if other else None

    @property
    def bytes_share(self) -> float | None:
        """Bytes as a share of all-reduce's."""
        full = self.beside(ALLREDUCE)
        return self.result["bytes_sent"] / full["bytes_sent"] if full else None


Claim = tuple[str, float | None, float]
"""What is claimed, its value (None: what it is compared with was not measured), and the most that
it may be."""


def claim(jobs: Sequence[Job], results: Results) -> int:
    """Print each claim with its worst case over all that was measured; 1 if one does not hold."""
    worst: dict[str, tuple[float, float]] = {}
    for what, value, most in _claims(jobs, results):
        if value is not None and (what not in worst or value > worst[what][0]):
            worst[what] = (value, most)
    print()
    for what, (value, most) in worst.items():
        print(f"{'holds' if value <= most else 'FAILS'}  {what}, at most {most:.4g}: {value:.4g}")
    return int(any(value > most for value, most in worst.values()))


def _claims(jobs: Sequence[Job], results: Results) -> Iterator[Claim]:
    groups = under_the_same(jobs)
    of_all = {circumstances: measured(group, results) for circumstances, group in groups.items()}
    about = {"methods": _of_methods, "attacks": _of_scenes, "churn": _of_scenes}
    for circumstances, group in groups.items():
        for job in group:
            if job.part in about and job.key in results:
                yield from about[job.part](Case(job, of_all[circumstances]))
    for (part, optimizer, peers, steps), rows in of_all.items():
        if part == "methods":
            yield from _of_e3m0(rows)
        if part == "wire" and optimizer == "muon":
            yield from _of_wire(peers, rows, of_all.get((part, "adamw", peers, steps), {}))


def _of_methods(case: Case) -> Iterator[Claim]:
    name, steps, result = case.job.row.name, case.job.steps, case.result
    if case.job.row.method == "local":
        return
    if name.endswith("every 100"):
        yield f"{name}: share of all-reduce's bytes", case.bytes_share, 1 / 500
        return
    gain = 0.03 if steps == 400 else 0.07
    yield f"{steps} steps, {name} above single: nats", case.above(SINGLE), -gain
    yield f"{steps} steps, {name} above local: nats", case.above("local"), -gain
    yield "averaged weights above replicas: nats", result["average_loss"] - result["loss"], 0.02
    yield f"{name}: weight spread", result["spread"], 6e-3
    if name == "lowcomm mod4":
        yield f"{name} above fp32: nats", case.above("lowcomm fp32"), 0.02
        yield f"{name}: share of all-reduce's bytes", case.bytes_share, 1 / 100
    if name == "streaming-diloco e3m0":
        yield f"{name}: share of all-reduce's bytes", case.bytes_share, 1 / 150


def _of_scenes(case: Case) -> Iterator[Claim]:
    part, name, result = case.job.part, case.job.row.name, case.result
    calm, bound = ("three honest", 1.03) if part == "attacks" else ("undisturbed", 1.02)
    if case.job.scene == calm or name == SINGLE:
        return
    alone = case.beside(SINGLE)
    yield (
        f"{part}, {name}: loss against alone",
        max(result["losses"]) / alone["loss"] if alone else None,
        1.01,
    )
    without = case.beside(f"{name}, {calm}")
    yield (
        f"{part}, {name}: loss against {calm}",
        result["loss"] / without["loss"] if without else None,
        bound,
    )
    if part == "attacks" and case.job.scene.endswith("one late"):
        # A refused member costs its group the shard that it owns, each time: there its members
        # part.
        yield f"{part}, {name}, one late: weight spread", result["spread"], 1e-2
    elif part == "attacks":
        yield f"{part}, {name}: weight spread", result["spread"], 6e-3


def _of_e3m0(rows: Rows) -> Iterator[Claim]:
    """Single seeds differ by more than what e3m0 costs, so their mean counts."""
    both = together(rows.get("streaming-diloco e3m0", {}), rows.get("streaming-diloco fp32", {}))
    cost = _mean(coded["loss"] - full["loss"] for coded, full in both)
    yield "streaming-diloco e3m0 above fp32, mean of seeds: nats", cost, 0.01


def _of_wire(peers: int, muon: Rows, adamw: Rows) -> Iterator[Claim]:
    for name, least in (("streaming-diloco, 1/50", 0.75), ("lowcomm, 1/50", 0.65)):
        what = f"{peers} peers, {name}"
        yield f"{what}: share of all-reduce's bytes", max(sent(muon, name), default=None), 1 / 50
        missing = _mean(1 - gain for gain in gained(muon, name))
        yield f"{what}: part of all-reduce's gain that is missing", missing, 1 - least
        both = together(muon.get(name, {}), adamw.get(ALLREDUCE, {}))
        above = _mean(one["loss"] - full["loss"] for one, full in both)
        yield f"{what}, Muon, above all-reduce with AdamW: nats", above, 0.0


def _mean(values: Iterator[float]) -> float | None:
    there = list(values)
    return mean(there) if there else None


# Plots


def plot(jobs: Sequence[Job], results: Results, folder: Path) -> None:
    """Loss against tokens, and against bytes, of the first seed of the longest runs of
    ``methods``."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    calm = [job for job in jobs if job.part == "methods" and job.key in results]
    if not calm:
        return
    first = min(calm, key=lambda job: (job.peers, -job.steps, job.seed))
    calm = [
        job
        for job in calm
        if (job.peers, job.steps, job.seed) == (first.peers, first.steps, first.seed)
    ]
    optimizers, names = (
        sorted({job.optimizer for job in calm}),
        list(dict.fromkeys(job.row.name for job in calm)),
    )
    colors = dict(zip(names, pyplot.get_cmap("tab20").colors, strict=False))
    for what, title, file in (
        ("tokens", "tokens a replica", "loss-tokens"),
        ("bytes_sent", "bytes sent by a replica", "loss-bytes"),
    ):
        figure, axes = pyplot.subplots(
            1, len(optimizers), figsize=(6 * len(optimizers), 4.5), squeeze=False, sharey=True
        )
        lines: dict[str, Any] = {}
        for axis, optimizer in zip(axes[0], optimizers, strict=True):
            for job in calm:
                points = [
                    (point[what], point["loss"])
                    for point in results[job.key]["curve"]
                    if point[what]
                ]
                if points and job.optimizer == optimizer:
                    name = job.row.name
                    (lines[name],) = axis.plot(
                        *zip(*points, strict=True), label=name, color=colors[name]
                    )
            axis.set(
                title=f"{optimizer}, {first.peers} peers, {first.steps} steps",
                xlabel=title,
                ylabel="held-out loss, nats a byte",
            )
            axis.set_xscale("log" if what == "bytes_sent" else "linear")
        axes[0][-1].legend(
            handles=list(lines.values()), fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0)
        )
        figure.tight_layout()
        figure.savefig(folder / f"{file}.png", dpi=110)
        pyplot.close(figure)
