"""What must hold for `eval`: lm-eval, installed as the extra has it, gives the figures that follow
from the model's own logits."""

import json
import random
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from helpers.processes import environment
from lowcomm_node.export import ExportChoices, Weights
from lowcomm_node.export.write import export_checkpoint
from lowcomm_node.models.base import Model, build_model
from lowcomm_node.models.inference import generate
from lowcomm_node.storage.checkpoint import CheckpointStore
from lowcomm_protocol.spec.models import TransformerSettings

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
DOCUMENTS, CHOICES = 40, 3
TASK: dict[str, Any] = {
    "task": "tea",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
WRITTEN = TASK | {
    "task": "written",
    "output_type": "generate_until",
    "doc_to_target": "{{target}}",
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    "generation_kwargs": {"max_gen_toks": 3, "until": ["\n"], "do_sample": False},
}
del WRITTEN["doc_to_choice"]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment on top of this one, with the extra: two minutes, and 210 MB."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [own] = folder.glob("lib/python*/site-packages")
    below = [one for one in sys.path if "site-packages" in one or ROOT in Path(one).parents]
    (own / "below.pth").write_text("\n".join(below))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra, lock = project["optional-dependencies"]["eval"], str(ROOT / "requirements.lock")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    subprocess.run([*pip, "--quiet", "--constraint", lock, *extra], check=True, timeout=900)
    return folder / "bin" / "python"


def log_likelihood(model: Model, text: str, rest: str) -> float:
    """How likely ``rest`` is after ``text``, on bytes."""
    tokens = torch.tensor([list((text + rest).encode())])
    with torch.no_grad():
        read = torch.log_softmax(model(tokens)[0, len(text) - 1 : -1].double(), dim=-1)
    return float(read.gather(1, tokens[0, len(text) :, None]).sum())


def test_scores_follow_from_the_logits_of_the_exported_model(python: Path, tmp_path: Path) -> None:
    settings = TransformerSettings.model_validate({"layers": 2, "width": 32, "heads": 2})
    model = build_model(settings, seed=7).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3)
    weights = {name: one.detach() for name, one in model.named_parameters()}
    meta = {"model": settings.model_dump(), "tokenizer": {"file": "bytes", "sha256": ""}}
    CheckpointStore(tmp_path / "run" / "checkpoints").save(1, {"weights": weights}, meta, 1.7e9)
    export_checkpoint(tmp_path / "run", tmp_path / "out", ExportChoices(weights=Weights.FAST))

    chance = random.Random(3)
    documents: list[dict[str, Any]] = []
    for number in range(DOCUMENTS):
        question = "".join(chance.choices("abcdef ", k=12)) + "?"
        choices = ["".join(chance.choices("abcdef", k=4)) for _ in range(CHOICES)]
        written = bytes(generate(model, question.encode(), 3, 0.0))
        is_whole = number % 4 and not set(written) & {0, *b" \t\n\v\f\r"}  # which end or are cut
        documents.append({
            "question": question,
            "choices": choices,
            "answer": chance.randrange(CHOICES),
            "target": written.decode(errors="replace") if is_whole else "else",
        })  # fmt: skip
    lines = (json.dumps(one) for one in documents)
    (tmp_path / "tea.jsonl").write_text("\n".join(lines))
    (tmp_path / "tasks").mkdir()
    data = {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "tea.jsonl")}}}
    for task in (TASK, WRITTEN):
        (tmp_path / "tasks" / f"{task['task']}.yaml").write_text(yaml.safe_dump(task | data))

    def evaluate(task: str, *more: str) -> subprocess.CompletedProcess[str]:
        command = [str(python), "-m", "lowcomm_node", "eval", str(tmp_path / "out")]
        options = "--tasks", task, "--include", str(tmp_path / "tasks"), *more
        away = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
        return subprocess.run(
            [*command, *options],
            env=environment() | away, capture_output=True, text=True, timeout=600,
        )  # fmt: skip

    right = []
    for one in documents:
        likely = [log_likelihood(model, one["question"], f" {word}") for word in one["choices"]]
        right.append(likely.index(max(likely)) == one["answer"])
    accuracy = sum(right) / DOCUMENTS
    assert 0 < accuracy < 1
    done = evaluate("tea,written", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    error = (accuracy * (1 - accuracy) / (DOCUMENTS - 1)) ** 0.5
    expected = {"task": "tea", "metric": "acc", "value": accuracy, "stderr": pytest.approx(error)}
    exact = sum(one["target"] != "else" for one in documents) / DOCUMENTS
    assert 0.5 < exact < 0.8
    wrote = {"task": "written", "metric": "exact_match", "value": exact}
    printed = json.loads(done.stdout)
    assert printed == [expected, wrote | {"stderr": printed[1]["stderr"]}]

    few = sum(right[:10]) / 10
    head, row = evaluate("tea", "--limit", "10").stdout.splitlines()
    assert head.split() == ["task", "metric", "value", "stderr"] and len(head) <= 80
    assert row.split()[:3] == ["tea", "acc", f"{few:.4f}"] and len(row) <= 80

    unknown = evaluate("coffee")
    assert (unknown.returncode, len(unknown.stderr.splitlines())) == (78, 1)
    assert "knows no task 'coffee'" in unknown.stderr and "--include" in unknown.stderr
