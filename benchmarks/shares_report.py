"""What the runs of shares.py say: a table for each share of all-reduce's bytes, made from the runs
that were measured, be it all of them or not."""

from collections.abc import Iterator, Sequence
from itertools import product
from statistics import mean
from typing import Any, NamedTuple

from shares_jobs import (
    ALLREDUCE,
    ALONE,
    BYTES_SHARES,
    CHOOSE,
    CONFIRM,
    PEERS,
    SINGLE,
    STEPS,
    Job,
)

Results = dict[str, Any]
"""What came of each run, by the key of its job."""
HEADING = (
    "| method | peers | % of the gain, seeds 0 to 2 | seeds 3 to 5 | averaged | spread | "
    "of all-reduce's bytes | with control |"
)


class Measured(NamedTuple):
    """A run beside its baselines."""

    job: Job
    result: Any
    single: float
    """Loss of one replica alone."""
    allreduce: Any

    def share(self, loss: str = "loss") -> float:
        """How much of all-reduce's gain over one replica alone is kept."""
        return (self.single - self.result[loss]) / (self.single - self.allreduce["loss"])

    @property
    def sent(self) -> float:
        """Bytes of contents as a share of all-reduce's."""
        return self.result["bytes_sent"] / self.allreduce["bytes_sent"]

    @property
    def sent_in_all(self) -> float | None:
        """The same with control; None where that was not counted."""
        control = self.result.get("control_sent")
        every = self.allreduce["bytes_sent"]
        return None if control is None else (self.result["bytes_sent"] + control) / every


class Baselines:
    """One replica alone, and all-reduce with the rate that ended lowest on seed 0."""

    def __init__(self, jobs: Sequence[Job], results: Results) -> None:
        self._there = {
            (job.row.name, job.peers, job.seed, job.steps): results[job.key]
            for job in jobs
            if not job.row.bytes_share and job.key in results
        }
        self._rates = sorted({name for name, *_ in self._there if name.startswith(ALLREDUCE)})

    def allreduce(self, peers: int, seed: int, steps: int) -> Any:
        """Of so many peers; None if it was not measured."""
        tried = [rate for rate in self._rates if (rate, peers, 0, steps) in self._there]
        if not tried:
            return None
        best = min(tried, key=lambda rate: self._there[rate, peers, 0, steps]["loss"])
        return self._there.get((best, peers, seed, steps))

    def beside(self, job: Job, result: Any) -> Measured | None:
        """A run beside its baselines; None if one of them was not measured."""
        full = self.allreduce(job.peers, job.seed, job.steps)
        alone = self._there.get((SINGLE, ALONE, job.seed, job.steps))
        return Measured(job, result, alone["loss"], full) if full and alone else None

    def table(self) -> str:
        """Losses of the baselines."""
        lines = ["| baseline | peers | steps | loss by seed |", "|---|---|---|---|"]
        every = {(steps, name, peers) for name, peers, _, steps in self._there}
        for steps, name, peers in sorted(every):
            losses = {
                seed: one["loss"]
                for (other, count, seed, length), one in sorted(self._there.items())
                if (length, other, count) == (steps, name, peers)
            }
            told = ", ".join(f"{seed}: {loss:.4f}" for seed, loss in losses.items())
            lines.append(f"| {name} | {1 if name == SINGLE else peers} | {steps:,} | {told} |")
        return "\n".join(lines)


def tables(jobs: Sequence[Job], results: Results) -> str:
    """Markdown: the baselines, and a table for each share of all-reduce's bytes."""
    baselines = Baselines(jobs, results)
    parts = [baselines.table()]
    for bytes_share, steps in product(BYTES_SHARES, sorted({job.steps for job in jobs})):
        of_share = [job for job in jobs if (job.row.bytes_share, job.steps) == (bytes_share, steps)]
        if lines := list(_rows(of_share, results, baselines)):
            length = "" if steps == STEPS else f", {steps:,} steps"
            heading = f"**About 1/{bytes_share} of all-reduce's bytes{length}**"
            parts.append("\n".join([heading, "", HEADING, "|---" * 8 + "|", *lines]))
    return "\n\n".join(parts)


def _rows(jobs: Sequence[Job], results: Results, baselines: Baselines) -> Iterator[str]:
    rows = dict.fromkeys(job.row.name for job in jobs)
    for peers in PEERS:
        for name in rows:
            there = [
                beside
                for job in jobs
                if (job.row.name, job.peers) == (name, peers) and job.key in results
                if (beside := baselines.beside(job, results[job.key])) is not None
            ]
            if there:
                yield _row(name, peers, there)


def _row(name: str, peers: int, there: Sequence[Measured]) -> str:
    every = [one.sent_in_all for one in there]
    counted = [one for one in every if one is not None]
    cells = [
        name,
        str(peers),
        _told([one.share() for one in there if one.job.seed in CHOOSE]),
        _told([one.share() for one in there if one.job.seed in CONFIRM]),
        f"{100 * mean(one.share('average_loss') for one in there):.1f}",
        f"{mean(one.result['spread'] for one in there):.1e}",
        f"1/{1 / mean(one.sent for one in there):.0f}",
        f"1/{1 / mean(counted):.0f}" if counted else "",
    ]
    return f"| {' | '.join(cells)} |"


def _told(shares: Sequence[float]) -> str:
    """The mean of some seeds, and each of them."""
    if not shares:
        return ""
    each = " / ".join(f"{100 * share:.0f}" for share in shares)
    return f"{100 * mean(shares):.1f} ({each})"
