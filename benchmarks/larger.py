"""Do the presets that are shipped hold on a larger model and another text? In simulation, with the
protocol's own objects, on held-out text.

    python benchmarks/larger.py                  all runs, half an hour of a core a seed; resumes
    python benchmarks/larger.py --only /0        those whose key matches a regular expression
    python benchmarks/larger.py --report         what has been measured so far

A model of two million parameters, in words of a byte-pair encoding of 1,024, on the C++ headers
that come with torch: presets were chosen with a ninth of the parameters, on bytes of Python. Four
peers, Muon, 300 steps. As in shares.py a method keeps so much of what all-reduce gains over one
replica alone. All use the learning rates that the presets have, and all-reduce the momentum that
was best for it there. Writes benchmarks/results/larger.json."""

import json
import os
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import kit

OUT = kit.RESULTS / "larger.json"
FOLDER = kit.OUT / "larger"
PEERS, STEPS, WORDS, SEEDS = 4, 300, 1024, range(3)
TEXT_BYTES = 12_000_000
MODEL = {"layers": 6, "width": 160, "heads": 5, "feed_forward": 432, "context": 64}
ALLREDUCE = "all-reduce"
STEADY = {"muon_momentum": 0.8}
METHODS: dict[str, dict[str, Any]] = {
    "local": STEADY,
    ALLREDUCE: STEADY | {"learning_rate": 0.02},
    "lowcomm": {},
    "streaming-diloco": {},
    "streaming-diloco of 0.1": {},
}
"""Settings of training beside the preset of that name."""
NO_PRESETS: dict[str, dict[str, Any]] = {
    ALLREDUCE: {"method": "local"},
    "streaming-diloco of 0.1": {
        "method": "streaming-diloco",
        "outer": "nesterov",
        "memory": 0.0,
        "merge": "mix",
        "mix": 0.25,
    },
}
"""Settings of exchanges of the other rows."""


class Job(NamedTuple):
    """One run to measure."""

    method: str
    seed: int

    @property
    def key(self) -> str:
        """Its name in the results."""
        return f"{self.method}/{self.seed}"


def prepare() -> None:
    """Write text and tokenizer, once; processes may do so at the same time."""
    import torch
    from tokenizers import ByteLevelBPETokenizer

    text, words = FOLDER / "text.jsonl", FOLDER / "tokenizer.json"
    if words.exists():
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    left, lines = TEXT_BYTES, list[str]()
    for path in sorted((Path(torch.__file__).parent / "include").rglob("*.h")):
        content = path.read_text(errors="ignore")
        if (left := left - len(content)) < 0:
            break
        lines.append(json.dumps({"text": content}))
    mine = FOLDER / f"writing-{os.getpid()}"
    mine.write_text("\n".join(lines) + "\n")
    mine.replace(text)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator((json.loads(line)["text"] for line in lines), vocab_size=WORDS)
    tokenizer.save(str(mine))
    mine.replace(words)


def measure(job: Job) -> dict[str, Any]:
    """Run one job in this process; what came of it."""
    from baselines import measured

    from lowcomm_node.data import open_data

    content = {
        "run": {"name": "larger", "seed": job.seed, "steps": STEPS},
        "model": MODEL | {"vocab": WORDS},
        "train": {"optimizer": "muon", "batch": 4} | METHODS[job.method],
        "data": {"source": "local", "tokenizer": "local"},
        "sync": NO_PRESETS.get(job.method, {"method": job.method}),
    }
    prepare()
    data = open_data(str(FOLDER / "text.jsonl"), str(FOLDER / "tokenizer.json"), FOLDER)
    return measured(content, PEERS, "allreduce" if job.method == ALLREDUCE else "swarm", data)


def report(results: dict[str, Any]) -> str:
    """A table in Markdown of the seeds whose baselines are there."""
    rows: list[list[str]] = []
    for method in METHODS:
        kept, spreads, sent = list[float](), list[float](), list[float]()
        for seed in SEEDS:
            keys = Job(method, seed).key, f"local/{seed}", f"{ALLREDUCE}/{seed}"
            if all(key in results for key in keys):
                one, alone, best = (results[key] for key in keys)
                kept.append(100 * (alone["loss"] - one["loss"]) / (alone["loss"] - best["loss"]))
                spreads.append(one["spread"])
                sent.append(one["bytes_sent"] / best["bytes_sent"])
        if kept and method not in ("local", ALLREDUCE):
            by_seed = " / ".join(f"{one:.0f}" for one in kept)
            share = f"{mean(kept):.1f} ({by_seed})"
            rows.append([method, share, f"{mean(spreads):.1e}", f"1/{1 / mean(sent):.0f}"])
    return kit.table(("method", "% of all-reduce's gain", "spread", "of its bytes"), rows)


def main() -> None:
    """Measure what is missing and print the table."""
    _, out = kit.measure_all(__doc__, measure, list(map(Job._make, product(METHODS, SEEDS))), OUT)
    print(f"{kit.machine()}; means over the seeds.\n\n{report(kit.read(out))}")


if __name__ == "__main__":
    main()
