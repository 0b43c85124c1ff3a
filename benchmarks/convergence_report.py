"""What the runs of convergence.py say: tables, shares of all-reduce's gain, plots, and whether each claim holds."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, Protocol

SINGLE, ALLREDUCE = "single", "allreduce"
Results = dict[str, Any]


class Row(Protocol):
    """A method with its settings."""

    name: str
    method: str


class Job(Protocol):
    """A run that was measured; see convergence.py."""

    part: str
    row: Row
    optimizer: str
    peers: int
    steps: int
    seed: int
    scene: str
    key: str


# Tables


def tables(jobs: Sequence[Job], results: Results) -> str:
    """Markdown: a table for each part, optimizer, number of peers and length; figures are means over the seeds."""
    groups: dict[tuple[str, str, int, int], dict[tuple[str, str], list[dict[str, Any]]]] = {}
    for job in jobs:
        group = groups.setdefault((job.part, job.optimizer, job.peers, job.steps), {})
        group.setdefault((job.scene, job.row.name), []).append(results[job.key])
    return "\n\n".join(table(title, rows) for title, rows in groups.items())


def table(title: tuple[str, str, int, int], rows: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    """One table."""
    part, optimizer, peers, steps = title
    lines = [
        f"**{part}, {optimizer}, {peers} peers, {steps} steps**",
        "",
        "| method | loss of replicas: mean (min to max) | averaged weights | spread | worst block | MB sent | all-reduce's bytes |",
        "|---|---|---|---|---|---|---|",
    ]
    full = [one["bytes_sent"] for (_, name), results in rows.items() if name == ALLREDUCE for one in results]
    for (scene, name), results in rows.items():
        losses = [loss for one in results for loss in one["losses"]]
        sent = mean(one["bytes_sent"] for one in results)
        ratio = f"1/{mean(full) / sent:.1f}" if full and sent else ""
        cells = [
            name if scene == "calm" else f"{name}, {scene}",
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
    """How much of all-reduce's gain over a single replica each row of ``wire`` leaves, and for how many of its bytes."""
    lines: list[str] = []
    for optimizer, peers in sorted({(job.optimizer, job.peers) for job in jobs if job.part == "wire"}):
        rows = by_name(jobs, results, optimizer, peers)
        for name in rows:
            if name not in (SINGLE, ALLREDUCE):
                gains, bytes_ = gained(rows, name), mean(sent(rows, name))
                told = " / ".join(f"{100 * gain:.0f}" for gain in gains)
                lines.append(
                    f"- {optimizer}, {peers} peers, {name}: {100 * mean(gains):.1f} % ({told}) of all-reduce's gain"
                    f" for 1/{1 / bytes_:.0f} of its bytes"
                )
    return "\n".join(lines)


# Claims


class Case(NamedTuple):
    """One run beside the others of its part, optimizer, number of peers, length and seed."""

    job: Job
    result: Any
    beside: dict[tuple[str, str], Any]
    """Results by scene and name."""

    def against(self, name: str, scene: str = "calm") -> float:
        """Loss above that of another row."""
        return self.result["loss"] - self.beside[scene, name]["loss"]

    @property
    def bytes_share(self) -> float:
        """Bytes as a share of all-reduce's."""
        return self.result["bytes_sent"] / self.beside["calm", ALLREDUCE]["bytes_sent"]


Claim = tuple[str, float, float]
"""What is claimed, its value, and the most that it may be."""


def claim(jobs: Sequence[Job], results: Results) -> int:
    """Print each claim with its worst case over all that was measured; 1 if one does not hold."""
    worst: dict[str, tuple[float, float]] = {}
    for what, value, most in _claims(jobs, results):
        if what not in worst or value > worst[what][0]:
            worst[what] = (value, most)
    print()
    for what, (value, most) in worst.items():
        print(f"{'holds' if value <= most else 'FAILS'}  {what}, at most {most:.4g}: {value:.4g}")
    return int(any(value > most for value, most in worst.values()))


def _claims(jobs: Sequence[Job], results: Results) -> Iterator[Claim]:
    runs: dict[tuple[Any, ...], dict[tuple[str, str], Any]] = {}
    for job in jobs:
        run = (job.part, job.optimizer, job.peers, job.steps, job.seed)
        runs.setdefault(run, {})[job.scene, job.row.name] = results[job.key]
    about = {"methods": _of_methods, "attacks": _of_scenes, "churn": _of_scenes}
    for job in jobs:
        if job.part in about:
            beside = runs[job.part, job.optimizer, job.peers, job.steps, job.seed]
            yield from about[job.part](Case(job, results[job.key], beside))
    yield from _of_e3m0(jobs, results)
    yield from _of_wire(jobs, results)


def _of_methods(case: Case) -> Iterator[Claim]:
    name, steps, result = case.job.row.name, case.job.steps, case.result
    if case.job.row.method == "local":
        return
    if name.endswith("every 100"):
        yield f"{name}: share of all-reduce's bytes", case.bytes_share, 1 / 500
        return
    gain = 0.03 if steps == 400 else 0.07
    yield f"{steps} steps, {name} above single: nats", case.against(SINGLE), -gain
    yield f"{steps} steps, {name} above local: nats", case.against("local"), -gain
    yield "averaged weights above replicas: nats", result["average_loss"] - result["loss"], 0.02
    yield "weight spread", result["spread"], 6e-3
    if name == "lowcomm mod4":
        yield f"{name} above fp32: nats", case.against("lowcomm fp32"), 0.02
        yield f"{name}: share of all-reduce's bytes", case.bytes_share, 1 / 100
    if name == "streaming-diloco e3m0":
        yield f"{name}: share of all-reduce's bytes", case.bytes_share, 1 / 150


def _of_scenes(case: Case) -> Iterator[Claim]:
    calm, bound = ("three honest", 1.03) if case.job.part == "attacks" else ("undisturbed", 1.02)
    if case.job.scene == calm:
        return
    name, without = case.job.row.name, case.beside[calm, case.job.row.name]
    yield f"{case.job.part}, {name}: loss against {calm}", case.result["loss"] / without["loss"], bound
    if case.job.part == "attacks":
        yield f"{case.job.part}, {name}: weight spread", case.result["spread"], 6e-3


def _of_e3m0(jobs: Sequence[Job], results: Results) -> Iterator[Claim]:
    """Single seeds differ by more than what e3m0 costs, so their mean counts."""
    losses: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for job in jobs:
        if job.part == "methods":
            rows = losses.setdefault((job.optimizer, job.peers, job.steps), {})
            rows.setdefault(job.row.name, []).append(results[job.key]["loss"])
    for rows in losses.values():
        cost = mean(rows["streaming-diloco e3m0"]) - mean(rows["streaming-diloco fp32"])
        yield "streaming-diloco e3m0 above fp32, mean of seeds: nats", cost, 0.01


def _of_wire(jobs: Sequence[Job], results: Results) -> Iterator[Claim]:
    for optimizer, peers in sorted({(job.optimizer, job.peers) for job in jobs if job.part == "wire"}):
        if optimizer != "muon":
            continue
        rows = by_name(jobs, results, optimizer, peers)
        adamw = by_name(jobs, results, "adamw", peers)
        for name, least in (("streaming-diloco, 1/50", 0.75), ("lowcomm, 1/50", 0.65)):
            what = f"{peers} peers, {name}"
            yield f"{what}: share of all-reduce's bytes", max(sent(rows, name)), 1 / 50
            yield f"{what}: part of all-reduce's gain that is missing", 1 - mean(gained(rows, name)), 1 - least
            if ALLREDUCE in adamw:
                above = mean(one["loss"] for one in rows[name]) - mean(one["loss"] for one in adamw[ALLREDUCE])
                yield f"{what}, Muon, above all-reduce with AdamW: nats", above, 0.0


def by_name(jobs: Sequence[Job], results: Results, optimizer: str, peers: int) -> dict[str, list[Any]]:
    """Results of ``wire`` by row, in the order of seeds."""
    rows: dict[str, list[Any]] = {}
    for job in sorted(jobs, key=lambda job: job.seed):
        if (job.part, job.optimizer, job.peers) == ("wire", optimizer, peers):
            rows.setdefault(job.row.name, []).append(results[job.key])
    return rows


def gained(rows: dict[str, list[Any]], name: str) -> list[float]:
    """How much of all-reduce's gain over a single replica a row leaves, seed by seed."""
    return [
        (alone["loss"] - one["loss"]) / (alone["loss"] - full["loss"])
        for alone, full, one in zip(rows[SINGLE], rows[ALLREDUCE], rows[name], strict=True)
    ]


def sent(rows: dict[str, list[Any]], name: str) -> list[float]:
    """Bytes of a row as a share of all-reduce's, seed by seed."""
    return [one["bytes_sent"] / full["bytes_sent"] for one, full in zip(rows[name], rows[ALLREDUCE], strict=True)]


# Plots


def plot(jobs: Sequence[Job], results: Results, folder: Path) -> None:
    """Loss against tokens, and against bytes, of the first seed of the longest runs of ``methods``."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    calm = [job for job in jobs if job.part == "methods"]
    if not calm:
        return
    peers, steps = min(job.peers for job in calm), max(job.steps for job in calm)
    optimizers = sorted({job.optimizer for job in calm})
    for what, title, file in (
        ("tokens", "tokens a replica", "loss-tokens"),
        ("bytes_sent", "bytes sent by a replica", "loss-bytes"),
    ):
        figure, axes = pyplot.subplots(
            1, len(optimizers), figsize=(6 * len(optimizers), 4.5), squeeze=False, sharey=True
        )
        for axis, optimizer in zip(axes[0], optimizers, strict=True):
            axis.set_prop_cycle(color=pyplot.get_cmap("tab20").colors)
            for job in calm:
                if (job.optimizer, job.peers, job.steps, job.seed) != (optimizer, peers, steps, 0):
                    continue
                points = [point for point in results[job.key]["curve"] if point[what]]
                if points:
                    axis.plot(
                        [point[what] for point in points], [point["loss"] for point in points], label=job.row.name
                    )
            axis.set(
                title=f"{optimizer}, {peers} peers, {steps} steps", xlabel=title, ylabel="held-out loss, nats a byte"
            )
            axis.set_xscale("log" if what == "bytes_sent" else "linear")
        axes[0][-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        figure.tight_layout()
        figure.savefig(folder / f"{file}.png", dpi=110)
        pyplot.close(figure)
