"""Models as they lie on the Hub, through `init`, two nodes and an export, into llama.cpp: the same
tokens of a text with every added token, and the same greedy text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit
import torch

from helpers.hub_configs import READ
from helpers.hub_tokenizers import ADDED, CHAT, SPECIAL, write_tokenizer
from helpers.open_weights import SENTENCES, write_text
from helpers.processes import Swarm, run

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
STEPS, COUNT = 120, 32
TEXT = "def f(x):\n        return 1\n    " + " text ".join((*ADDED, *SPECIAL)) + " é € 1234 it's"
MODELS: dict[str, str] = {
    "Llama-2-7b-chat": "gpt2",
    "Llama-3.2-1B": "llama3",
    "Mistral-7B-v0.3": "gpt2",
    "Qwen2.5-0.5B-Instruct": "qwen2",
    "Qwen3-0.6B": "qwen2",
    "SmolLM2-135M": "smollm",
}
"""How each cuts text into words: six kinds of ``config.json`` that a GGUF file can hold."""


def write_folder(folder: Path, name: str) -> Path:
    """A folder with random weights, as the Hub has one of this name."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir()
    tokenizer = write_tokenizer(folder / "tokenizer.json", MODELS[name], begins="Llama" in name)
    ends = {"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": 3}
    config = READ[name] | ends | {"vocab_size": tokenizer.get_vocab_size() + 6}
    config |= {"max_position_embeddings": 8192}
    torch.manual_seed(1)
    built = AutoConfig.for_model(**json.loads(json.dumps(config)))
    AutoModelForCausalLM.from_config(built, dtype=torch.float32).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    generation = {**ends, "do_sample": True, "temperature": 0.6, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "chat_template.jinja").write_text(CHAT)
    return folder


def trained(swarm: Swarm, folder: Path, *adapter: str) -> Path:
    """The home of one of two nodes that have trained a run to its end."""
    swarm.bootstrap()
    file, text = swarm.folder / "run.toml", write_text(swarm.folder / "text.txt")
    begins = "--from", str(folder), *adapter
    ran("init", *begins, "--method", "noloco", "--steps", str(STEPS), str(file))
    spec = tomlkit.parse(file.read_text())
    spec["run"].update({"start_peers": 2})
    spec["data"]["source"] = "local"
    spec["model"]["context"] = 32
    spec["train"].update({"batch": 8, "evaluate_every": 1000, "warmup": 5, "learning_rate": 0.01})
    spec["sync"].update({"interval": 20, "min_steps": 5})
    file.write_text(tomlkit.dumps(spec))
    ran(
        "create", str(file), "--peers", swarm.address, "--home", str(swarm.folder / "ada"),
        "--tokenizer", str(folder / "tokenizer.json"),
    )  # fmt: skip
    ada = swarm.node("ada", "--data", str(text), "--weights", str(folder))
    bob = swarm.node("bob", "--data", str(text))
    for node in (ada, bob):
        assert node.child.wait(400) == 0, node.output[-3000:]
    return bob.home


def ran(*arguments: str) -> str:
    done = run("lowcomm_node", *arguments, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.swarm
@pytest.mark.parametrize(
    ("name", "adapter"), [*((name, ()) for name in MODELS), ("SmolLM2-135M", ("--adapter", "16"))]
)
def test_a_model_of_the_hub_comes_out_as_it_went_in(
    name: str,
    adapter: tuple[str, ...],
    swarm: Swarm,
    llama_cpp: Callable[[Path, int, str], dict[str, Any]],
) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    folder = write_folder(swarm.folder / "open", name)
    home, out = trained(swarm, folder, *adapter), swarm.folder / "out"
    ran("checkpoint", "export", str(out), "--weights", "fast", "--home", str(home))
    before, after = (json.loads((one / "config.json").read_text()) for one in (folder, out))
    kept = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
    assert [after[key] for key in kept] == [before[key] for key in kept]
    said, says = (json.loads((one / "generation_config.json").read_text()) for one in (folder, out))
    assert says == said
    opened = AutoTokenizer.from_pretrained(out)
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert opened(TEXT)["input_ids"] == ours.encode(TEXT).ids
    assert opened.chat_template == CHAT

    gguf = swarm.folder / "gguf"
    told = "--format", "gguf", "--weights", "fast"
    ran("checkpoint", "export", str(gguf), *told, "--home", str(home))
    [file] = gguf.glob("*.gguf")
    read = llama_cpp(file, 1, TEXT)
    assert [*read["begin"], *read["read"]] == ours.encode(TEXT).ids
    assert (read["eos"], read["chat"]) == (1, CHAT)
    prompt = SENTENCES[0][:12]
    generate = "generate", prompt, "--tokens", str(COUNT), "--temperature", "0", "--json"
    written = json.loads(ran(*generate, "--home", str(home)))["text"]
    theirs = llama_cpp(file, COUNT, prompt)["text"]
    assert len(theirs) > 20 and theirs == written
