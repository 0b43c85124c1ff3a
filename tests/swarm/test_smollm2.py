"""Open weights of 135M parameters, from a folder through a swarm to a folder again."""

import json
from pathlib import Path

import pytest
import tomlkit
import torch

from helpers import smollm2
from helpers.open_weights import SENTENCES, write_text
from helpers.processes import Node, Swarm, run
from lowcomm_node.models.base import family_of
from lowcomm_node.models.configs import read_config
from lowcomm_node.models.inference import load_checkpoint
from lowcomm_node.models.open_weights import files_of, load_weights

pytestmark = [pytest.mark.swarm, pytest.mark.soak, pytest.mark.timeout(3600)]
TEXT = "The capital of France is Paris. In 1789 the people of that city"
STEPS = 20
PATIENCE = 1500.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2.write_folder(tmp_path_factory.mktemp("smollm2") / "SmolLM2-135M")


def test_it_is_read_as_transformers_reads_it(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokens = torch.tensor([tokenizer.encode(TEXT)])
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    settings = read_config(json.loads((folder / "config.json").read_text()), "config.json").settings
    ours = family_of(settings).blank(settings).eval()
    load_weights(ours, files_of(folder))
    with torch.no_grad():
        logits, wanted = ours(tokens), theirs(tokens).logits
    apart = float((logits - wanted).abs().max())
    print(f"logits of {tokens.shape[1]} tokens differ by {apart:.1e} at most")
    assert apart < 1e-4
    loss = torch.nn.functional.cross_entropy(wanted[0, :-1], tokens[0, 1:])
    assert loss < 4.0, "it knows the language, so tensors and tokens are in their places"


def test_a_swarm_trains_it_and_a_node_without_a_file_joins(swarm: Swarm, folder: Path) -> None:
    text = write_text(swarm.folder / "tea.txt")
    swarm.bootstrap()
    file = swarm.folder / "run.toml"
    done = run("lowcomm_node", "init", "--from", str(folder), str(file), timeout=300)
    assert done.returncode == 0, done.stderr
    spec = tomlkit.parse(file.read_text())
    spec["run"].update({"steps": 100_000, "work": 0, "start_peers": 2})
    spec["data"]["source"] = "local"
    spec["sync"].update({"interval": 8, "fragments": 8, "min_steps": 2})  # less memory
    spec["model"]["context"] = 32
    spec["train"].update({"batch": 1, "evaluate_every": 10, "warmup": 5, "schedule": "constant"})
    file.write_text(tomlkit.dumps(spec))
    done = run(
        "lowcomm_node", "create", str(file), "--peers", swarm.address,
        "--home", str(swarm.folder / "ada"), "--tokenizer", str(folder / "tokenizer.json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    options = (
        "--data",
        str(text),
        "--exchange-deadline",
        "120",
        "--keep",
        "1",
        "--max-memory",
        "12",
    )
    ada = swarm.node("ada", *options, "--weights", str(folder))
    bob = swarm.node("bob", *options, "--weights", str(folder))
    for node in (ada, bob):
        node.until(
            lambda s: (s["trainer"]["steps"] or 0) >= STEPS and s["exchanges"]["completed"] >= 4,
            f"{STEPS} steps and some exchanges",
            PATIENCE,
        )
    eve = swarm.node("eve", *options)
    eve.until_completed(1, PATIENCE)
    for name in ("tokenizer.json", "model.safetensors"):
        [copy] = eve.home.glob(f"runs/*/**/{name}")
        assert copy.read_bytes() == (folder / name).read_bytes(), name

    for node in (ada, bob):
        status = node.until(lambda s: s["trainer"]["val_loss_last"] is not None, "an evaluation")
        told = status["trainer"]
        print(f"loss {told['val_loss_first']:.3f}, then {told['val_loss_last']:.3f}")
        assert told["val_loss_last"] < 0.9 * told["val_loss_first"]
    for node in (ada, bob, eve):
        assert node.end(timeout=300) == 0
    spread = spread_of([ada, bob])
    print(f"spread of the weights {spread:.1e}")
    assert spread < 6e-3

    out = swarm.folder / "out"
    done = run(
        "lowcomm_node", "checkpoint", "export", str(out), "--home", str(ada.home), timeout=600
    )
    assert done.returncode == 0, done.stderr
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(out).eval()
    tokens = AutoTokenizer.from_pretrained(out)(SENTENCES[0], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = float(model(tokens, labels=tokens).loss)
    print(f"loss of a sentence after it: {loss:.3f}")
    assert loss < 3.0


def spread_of(nodes: list[Node]) -> float:
    """Root mean square, over all parameters, of the deviation between nodes."""
    weights = []
    for node in nodes:
        [checkpoints] = node.home.glob("runs/*/checkpoints")
        weights.append(load_checkpoint(checkpoints).tensors["weights"])
    squares, count = 0.0, 0
    for name in weights[0]:
        both = torch.stack([one[name] for one in weights])
        squares += float(both.var(dim=0, correction=0).sum())
        count += both[0].numel()
    return (squares / count) ** 0.5
