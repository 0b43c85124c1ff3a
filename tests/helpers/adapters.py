"""Weights for adapters to be of: a file of random values, as a run pins it."""

from pathlib import Path
from typing import Any

import tomlkit
import torch
from safetensors.torch import save_file

from lowcomm_node.fetch.files import pin
from lowcomm_node.models.base import build_model, family_of
from lowcomm_protocol.spec.sections import ModelSettings


def write_base(folder: Path, settings: ModelSettings) -> Path:
    """A file with a model of random weights, rounded to bf16."""
    model, form = build_model(settings, 7), family_of(settings).huggingface(settings)
    assert form is not None
    tensors: dict[str, torch.Tensor] = {}
    for number, (name, one) in enumerate(model.named_parameters()):
        noise = torch.randn(one.shape, generator=torch.Generator().manual_seed(number))
        tensors[form.names[name]] = (one.detach() + 0.1 * noise).bfloat16().float().contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder / "model.safetensors"


def sections(base: Path, **adapter: Any) -> str:
    """Sections ``[start]`` and ``[adapter]`` of a run file."""
    start = {"files": [pin(base).model_dump()]}
    return tomlkit.dumps({"start": start, "adapter": {"rank": 4, "alpha": 8.0} | adapter})
