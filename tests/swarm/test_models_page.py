"""What docs/models.md tells works as it stands there: from a folder of open weights to a running
swarm, and to what ollama opens. Every command of the page's beginning is run, with a tiny model."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from helpers.following import ROOT, Reader, lines
from helpers.processes import Swarm, until_exchanged
from lowcomm_node.data.tokenizer import BytesTokenizer
from lowcomm_node.export.huggingface import tokenizer_json
from lowcomm_node.models.base import build_model
from lowcomm_node.models.transformer import FAMILY
from lowcomm_node.storage.state_file import write_state
from lowcomm_protocol.spec.models import TransformerSettings

SETTINGS = TransformerSettings(
    layers=2, width=32, heads=4, kv_heads=2, feed_forward=48, context=64, qk_norm=False, tied=True
)
pytestmark = [
    pytest.mark.soak,  # test_guides.py goes from weights to ollama in CI
    pytest.mark.swarm,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("unhurried"),
]


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


class WeightsReader(Reader):
    """Has a small model in the place of what a hub and ollama would bring."""

    def _follow(self, line: str) -> None:
        match shlex.split(line, comments=True):
            case ["pip", "install", what]:
                check_extras(what)
            case ["hf", "download", _, "--local-dir", folder]:
                open_weights(self.swarm.folder / folder)
            case ["ollama", "create", _, "-f", file]:
                check_modelfile(self.swarm.folder / file)
            case ["ollama", "run", *_]:
                pass
            case _:
                super()._follow(line)


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
    reader = WeightsReader(swarm)
    for line in lines("models.md", "## From open weights to ollama"):
        joins_second = " join " in line and bool(reader.nodes)
        reader.follow("b" if joins_second else "a", [line])
        if joins_second:
            until_exchanged(reader.nodes.values(), 1)
    exports = [told for told in reader.told.values() if told.startswith("exported")]
    assert len(exports) == 2
    for told in exports:
        assert "the mean of the slow weights of this node and 1 of its peers" in told, told
    folder = swarm.folder / "tea"
    names = {file.name for file in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert not list(swarm.folder.glob("a/runs/*/gathered")), "nothing is left of the peers' states"
