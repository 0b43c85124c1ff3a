"""What must hold for an exported file: llama.cpp reads the same tokens, and continues them with the
same 32 tokens as our own model does.

It needs Node 20, and 85 MB of npm packages, which package-lock.json pins: `npm install` puts them
here the first time, and runs no script of theirs. So it is not for CI.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit
import torch

from lowcomm_node.export import Dtype, ExportChoices, Format, Weights
from lowcomm_node.export.write import export_checkpoint
from lowcomm_node.models.base import Model, build_model, tensor_specs
from lowcomm_node.models.inference import generate
from lowcomm_node.storage.checkpoint import CheckpointStore
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.plan import plan_fragments
from lowcomm_protocol.spec.models import TransformerSettings
from lowcomm_protocol.spec.run import parse_toml, sign_run

TEXT = "def f(x): é €"
COUNT = 32
FORMS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3 tied": {"tied": True},
    "qwen2": {"kv_heads": 1, "qk_norm": False, "qkv_bias": True, "rope_base": 1e6},
    "llama": {"qk_norm": False, "kv_heads": 2},
    "llama3": {
        "qk_norm": False,
        "kv_heads": 2,
        "rope_scaling": "llama3",
        "rope_original": 16,
        "rope_base": 500_000.0,
        "tied": True,
    },
}
Continue = Callable[[Path, int, str], dict[str, Any]]
pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


def trained(settings: dict[str, Any]) -> Model:
    """A model that has learned a few sentences: what it writes next is beyond doubt."""
    torch.manual_seed(0)
    model = build_model(TransformerSettings.model_validate(settings), 1)
    text = torch.tensor(list(b"def f(x): \xc3\xa9 \xe2\x82\xac return x + 1; " * 20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        starts = [(7 * step + 11 * row) % 600 for row in range(8)]
        windows = torch.stack([text[start : start + 65] for start in starts])
        loss = model.loss(windows[:, :-1], windows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def saved(folder: Path, model: Model) -> Path:
    """A home's folder of a run with a checkpoint of this model."""
    tables = {"run": {"name": "tea"}, "model": model.settings.model_dump()}
    run = sign_run(parse_toml(tomlkit.dumps(tables)), Identity(bytes(32)))
    sync = run.spec.sync
    plan = plan_fragments(tensor_specs(model), sync.fragments, sync.pattern)
    meta: dict[str, Any] = {
        "model": model.settings.model_dump(),
        "run_id": run.run_id,
        "plan": plan.digest,
        "tokenizer": {"file": "bytes", "sha256": ""},
    }
    weights = {name: one.detach() for name, one in model.named_parameters()}
    CheckpointStore(folder / "checkpoints").save(1, {"weights": weights}, meta, 1.7e9)
    (folder / "run.json").write_bytes(run.to_bytes())
    return folder


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("form", FORMS)
def test_llama_cpp_continues_with_the_same_tokens(
    tmp_path: Path, llama_cpp: Continue, form: str, dtype: Dtype
) -> None:
    model = trained(FORMS[form])
    run = saved(tmp_path / "run", model)
    export_checkpoint(run, tmp_path / "out", ExportChoices(Format.GGUF, dtype, Weights.FAST))
    (file,) = (tmp_path / "out").glob("*.gguf")
    told = llama_cpp(file, COUNT, TEXT)
    assert told["read"] == list(TEXT.encode())
    assert told["added"] == list(generate(model, told["read"], COUNT, 0.0))
