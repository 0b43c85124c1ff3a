"""What docs/models.md tells works as it stands there: from a folder of open weights to a running
swarm, and to what ollama opens. Every command of the page's beginning is run, with a tiny model."""

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from helpers.processes import Node, Swarm, command, environment, until_exchanged
from lowcomm_node.data.tokenizer import BytesTokenizer
from lowcomm_node.export.huggingface import tokenizer_json
from lowcomm_node.models.base import build_model
from lowcomm_node.models.transformer import FAMILY
from lowcomm_node.storage.state_file import write_state
from lowcomm_protocol.spec.models import TransformerSettings

ROOT = Path(__file__).parents[2]
SETTINGS = TransformerSettings(
    layers=2, width=32, heads=4, kv_heads=2, feed_forward=48, context=64, qk_norm=False, tied=True
)
pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("unhurried"),
]


def commands() -> list[list[str]]:
    """Those of the first section, in their order."""
    page = (ROOT / "docs" / "models.md").read_text()
    section = page.partition("## From open weights to ollama")[2].partition("\n## ")[0]
    blocks = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]


def open_weights(folder: Path) -> None:
    """What `hf download` would bring: a small Llama on bytes."""
    folder.mkdir()
    form = FAMILY.huggingface(SETTINGS)
    assert form is not None
    model = build_model(SETTINGS, 1)
    tensors = {form.names[name]: one.detach() for name, one in model.named_parameters()}
    write_state(folder / "model.safetensors", tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(form.config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(BytesTokenizer())))


class Reader:
    """Somebody who follows the page, in one folder and with one home."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.nodes: list[Node] = []
        self.told: list[str] = []

    def follow(self, words: list[str]) -> None:
        """Do what one line says."""
        words = [self.swarm.address if word == "ADDR" else word for word in words]
        match words:
            case ["pip", "install", what]:
                check_extras(what)
            case ["hf", "download", _, "--local-dir", folder]:
                open_weights(self.swarm.folder / folder)
            case ["lowcomm-bootstrap", "serve"]:
                self.swarm.bootstrap()
            case ["lowcomm-node", "join", "--peers", _, *more]:
                self.join(more)
            case ["lowcomm-node", *arguments]:
                self.told.append(self.run(arguments))
            case ["ollama", "create", _, "-f", file]:
                check_modelfile(self.swarm.folder / file)
            case ["ollama", "run", *_]:
                pass
            case _:
                raise AssertionError(f"docs/models.md says {words}, which nobody has tried")

    def join(self, more: list[str]) -> None:
        """Start a node, the first one in the home of the other commands."""
        if more:
            more = [str(self.swarm.folder / word) if word[0] != "-" else word for word in more]
        self.nodes.append(self.swarm.node("ab"[len(self.nodes)], *more))
        if len(self.nodes) == 2:
            until_exchanged(self.nodes, 1)

    def run(self, arguments: list[str]) -> str:
        """One command to its end; what it printed."""
        done = subprocess.run(
            command("lowcomm_node", *arguments),
            cwd=self.swarm.folder,
            env=environment() | {"LOWCOMM_HOME": str(self.swarm.folder / "a")},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stderr}{done.stdout}"
        return done.stdout


def check_extras(what: str) -> None:
    """These extras are there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.fullmatch(r"lowcomm-node\[(.*)\]", what)
    assert named and set(named[1].split(",")) <= set(project["optional-dependencies"])


def check_modelfile(file: Path) -> None:
    """It names a file that llama.cpp would open."""
    named = re.search(r"^FROM (\S+)$", file.read_text(), re.MULTILINE)
    assert named and (file.parent / named[1]).read_bytes()[:4] == b"GGUF"


def test_the_page_leads_from_open_weights_to_ollama(swarm: Swarm) -> None:
    reader = Reader(swarm)
    for words in commands():
        reader.follow(words)
    exports = [told for told in reader.told if told.startswith("exported")]
    assert len(exports) == 2
    for told in exports:
        assert "the mean of the slow weights of this node and 1 of its peers" in told, told
    folder = swarm.folder / "tea"
    names = {file.name for file in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert not list(swarm.folder.glob("a/runs/*/gathered")), "nothing is left of the peers' states"
