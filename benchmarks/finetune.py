"""Fine-tuning by an adapter: three peers against one process with the batches of all three, on
conversations that are made here.

    python benchmarks/finetune.py                a small model, which is trained here first
    python benchmarks/finetune.py --from DIR     open weights with a chat template

Losses are of answers that nobody trained on.
"""

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kit
from baselines import allreduce, single

RESULT = kit.RESULTS / "finetune.json"
PEERS, SEEDS, RANK = 3, (0, 1, 2), 16
SMALL = "small"
STEPS = {SMALL: 200}
OTHERS = 40
"""Steps of larger models."""
SETTINGS = {"context": 48, "batch": 4, "warmup": 5, "evaluate_every": 1000}
WORDS = [
    *("tea", "rain", "fox", "roof", "hill", "lamp", "stone", "river"),
    *("bread", "cloud", "door", "glass", "horse", "moon", "paper", "salt"),
]
ONE, BOTH, WIDER = "one process", "3 peers, A and B trained", "3 peers, twice the rank"
ROWS: dict[str, tuple[dict[str, Any], ...]] = {
    "3 peers": ({}, {}, {}),
    ONE: (),
    BOTH: ({}, {}, {}),
    WIDER: ({}, {}, {}),
    "3 peers and a liar": ({}, {}, {}, {"attack": "flipped-huge"}),
    "3 peers and one with NaN": ({}, {}, {}, {"attack": "nan"}),
    "2 peers and a late one": ({}, {}, {"joins": 0.3}),
    "3 peers, one leaves, one is slow": ({}, {"leaves": 0.5}, {"speed": 0.5}),
}
"""Members by row; times are shares of the run."""
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def conversations(count: int) -> list[dict[str, Any]]:
    """Questions about a rule that no model knows: words come back in reverse, each with its
    length."""
    draw, found = random.Random(1), {}
    while len(found) < count:
        words = tuple(draw.sample(WORDS, draw.randint(2, 4)))
        found[words] = " ".join(f"{word}-{len(word)}" for word in reversed(words)) + " done"
    return [
        {
            "messages": [
                {"role": "user", "content": f"Fold: {' '.join(words)}"},
                {"role": "assistant", "content": answer},
            ]
        }
        for words, answer in found.items()
    ]


def command(*arguments: str) -> None:
    """Run a command of the node."""
    subprocess.run([sys.executable, "-m", "lowcomm_node", *arguments], check=True)


def prepare(weights: Path, folder: Path) -> tuple[Path, Path]:
    """Write run.toml and the pack; their paths."""
    pack, run = folder / "chats.pack", folder / "run.toml"
    if not pack.exists():
        folder.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(one) for one in conversations(2000))
        (folder / "chats.jsonl").write_text("\n".join(lines))
        tokenizer = str(weights / "tokenizer.json")
        home = ("--home", str(folder / "home"))
        command(
            *("data", "pack", str(folder / "chats.jsonl"), str(pack), "--chat"),
            *("--tokenizer", tokenizer, "--piece", "16KiB", *home),
        )
    more = ("--data", str(pack), "--force")
    command("init", str(run), "--from", str(weights), "--adapter", str(RANK), *more)
    return run, pack


def small_base(folder: Path) -> Path:
    """Train a small model on Python's own text, and write it as open weights."""
    from safetensors.torch import save_file

    from helpers.open_weights import LLAMA, write_tokenizer
    from lowcomm_node.data import open_data
    from lowcomm_node.models.base import family_of
    from lowcomm_node.simulation import Replica
    from lowcomm_protocol.spec.run import RunSpec

    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = str(write_tokenizer(folder / "tokenizer.json"))
    model = LLAMA | {"layers": 4, "width": 64, "feed_forward": 176, "context": 48}
    run = {"run": {"name": "base", "steps": 600}, "model": model, "sync": {"method": "local"}}
    spec = RunSpec.model_validate(run | {"train": {"optimizer": "muon"}})
    kept: list[Replica] = []

    class Kept(Replica):
        def __init__(self, *rest: Any) -> None:
            super().__init__(*rest)
            kept.append(self)

    single(spec, open_data("builtin:python", tokenizer, kit.OUT / "data"), kind=Kept)
    form = family_of(spec.model).huggingface(spec.model)
    assert form is not None
    weights = {form.names[name]: one.detach() for name, one in kept[0].model.named_parameters()}
    (folder / "config.json").write_text(json.dumps(form.config))
    settings = {"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@contextmanager
def both_trained(row: str) -> Iterator[None]:
    """A context in which A is trained, too, and both are averaged, which no run does."""
    import torch

    from lowcomm_node.models.frozen import FrozenLinear
    from lowcomm_node.trainer import inner

    build = inner.adapted

    def adapted(*given: Any) -> Any:
        model = build(*given)
        for module in model.modules():
            if isinstance(module, FrozenLinear) and module.lora_A is not None:
                factor = module.lora_A
                del module.lora_A
                module.lora_A = torch.nn.Parameter(factor)
        return model

    if row == BOTH:
        inner.adapted = adapted
    try:
        yield
    finally:
        inner.adapted = build


def measure(weights: Path, run: Path, pack: Path, row: str, seed: int) -> dict[str, Any]:
    """Held-out losses before and after, and the bytes that a peer sent."""
    import tomlkit
    import torch

    from lowcomm_node.data import Dataset, open_tokenizer
    from lowcomm_node.data.packed import PackedHeldOut, PackedStream, PackedTraining, PartFile
    from lowcomm_node.models.evaluation import held_out_loss
    from lowcomm_node.models.open_weights import files_of
    from lowcomm_node.simulation import Member, Replica, simulate
    from lowcomm_node.trainer.memory import count_parameters
    from lowcomm_protocol.reading import deals_of
    from lowcomm_protocol.spec.run import parse_toml
    from lowcomm_protocol.spec.sections import TextPiece

    torch.set_num_threads(1)
    text: Any = tomlkit.parse(run.read_text())
    steps = STEPS.get(weights.name, OTHERS)
    text["run"].update({"seed": seed, "steps": steps})
    if row == WIDER:
        text["adapter"].update({"rank": 2 * RANK, "alpha": 4.0 * RANK})
    for name, value in SETTINGS.items():
        text["model" if name == "context" else "train"][name] = value
    spec, files = parse_toml(tomlkit.dumps(text)), files_of(weights)
    data = spec.data
    tokenizer = open_tokenizer(str(weights / "tokenizer.json"), data.begin_tokens, data.end_token)
    parts = tuple(PartFile(deal, pack, tokenizer.vocab) for deal in deals_of(spec))
    dataset = Dataset("packed", tokenizer, PackedTraining(parts), PackedHeldOut(parts))

    class Adapted(Replica):
        """A replica that reads each third piece of the text."""

        def __init__(self, *rest: Any) -> None:
            super().__init__(*rest, base=files)
            assert isinstance(self.stream, PackedStream)
            first = int(self.peer_id[-1]) % PEERS
            pieces = range(first, data.parts[0].training_pieces, PEERS)
            self.stream.add(TextPiece(0, epoch, piece) for epoch in range(9) for piece in pieces)

    with both_trained(row):
        fresh = Adapted(spec, "peer-0", dataset, torch.device("cpu"))
        before = held_out_loss(fresh.model, dataset, spec.model.context)
        if row == ONE:
            result = allreduce(spec, dataset, PEERS, kind=Adapted)
        else:
            times = ("joins", "leaves")
            members = [
                Member(**{name: at * steps if name in times else at for name, at in one.items()})
                for one in ROWS[row]
            ]
            result = simulate(spec, dataset, members, kind=Adapted)
    return {
        "before": before,
        "loss": result.average_loss,
        "bytes_sent": result.bytes_sent,
        "trained": fresh.plan.numel,
        "parameters": count_parameters(spec.model),
        "steps": steps,
    }


def report(results: dict[str, Any]) -> str:
    """Losses of each row by seed, and what it kept of the fall of one process."""
    lines = []
    for name in dict.fromkeys(key.rpartition(" ")[0] for key in results):
        base, _, row = name.partition(": ")
        found = {seed: results.get(f"{name} {seed}") for seed in SEEDS}
        there = {seed: one for seed, one in found.items() if one}
        together = {seed: results.get(f"{base}: {ONE} {seed}") for seed in there}
        kept = [
            (one["before"] - one["loss"]) / (best["before"] - best["loss"])
            for seed, one in there.items()
            if (best := together[seed])
        ]
        share = f"{statistics.mean(kept):.1%}" if kept else ""
        losses = ", ".join(f"{one['loss']:.4f}" for one in there.values())
        sent = statistics.mean(one["bytes_sent"] for one in there.values())
        lines.append((base, row, losses, share, f"{sent / 1e3:,.0f} kB"))
    return kit.table(("model", "row", "held-out loss", "of its fall", "sent by a peer"), lines)


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--from", dest="weights", type=Path)
    parser.add_argument("--row", action="append", choices=list(ROWS))
    parser.add_argument("--seed", type=int, action="append")
    arguments = parser.parse_args()
    weights = arguments.weights or small_base(kit.OUT / SMALL)
    run, pack = prepare(weights, kit.OUT / f"finetune-{weights.name}")
    for seed in arguments.seed or SEEDS:
        for row in arguments.row or ROWS:
            key = f"{weights.name}: {row} {seed}"
            if key in kit.read(RESULT):
                continue
            found = {"machine": kit.machine()} | measure(weights, run, pack, row, seed)
            kit.write(RESULT, kit.read(RESULT) | {key: found})
            print(key, found, flush=True)
    print(report(kit.read(RESULT)))


if __name__ == "__main__":
    main()
