"""Adapters: low-rank factors beside the frozen weights that a run begins with.

    shell        shapes alone: frozen matrices, factors, and what is trained
    adapted      the same with the weights of files, A from the run's seed, and B = 0

What is trained has ``requires_grad``: B, and the weights of ``train_also``. All else is in the
files and the seed, so no checkpoint and no peer sends it. The names are those of LoRA elsewhere.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from lowcomm_node.errors import ConfigError
from lowcomm_node.models.base import (
    Footprint,
    Model,
    Stage,
    family_of,
    fill_normal,
    staged,
    trained,
)
from lowcomm_node.models.frozen import FORMS, FrozenLinear
from lowcomm_node.models.open_weights import read_weights
from lowcomm_protocol.spec.run import RunSpec
from lowcomm_protocol.spec.sections import ALL_LINEAR, AdapterSettings, ModelSettings, read_model

TURNED = "Conv1D"
"""Class of the library whose matrices lie as ``[inputs, outputs]``."""
CPU = torch.device("cpu")
UNDER_WAY = 2
"""Micro-batches of which a stage keeps states: one computes here while one does elsewhere."""
UNPACKED = {"bf16": 1, "int8": 1.5, "nf4": 1.5}
"""fp32 values for each value of a matrix while it is unpacked, by ``adapter.base``."""


def shell(settings: ModelSettings, adapter: AdapterSettings) -> Model:
    """An adapted model on the meta device. Raises ConfigError for a target that does not exist."""
    family = family_of(settings)
    with torch.device("meta"):
        model = family.blank(settings)
        form = family.huggingface(settings)
        if form is None:
            raise ConfigError(f"model.kind = {settings.kind!r}: transformers has no such model.")
        linear = [
            name.removesuffix(".weight")
            for name, one in model.named_parameters()
            if one.ndim == 2 and name.endswith(".weight") and model.place_of(name).role == "block"
        ]
        target_of = {name: form.names[f"{name}.weight"].split(".")[-2] for name in linear}
        known = sorted(set(target_of.values()))
        for target in adapter.targets:
            if target not in (ALL_LINEAR, *known):
                raise ConfigError(
                    f"adapter.targets names {target!r}, which this model does not have: choose "
                    f"from {ALL_LINEAR}, {', '.join(known)}."
                )
        model.requires_grad_(False)
        for name, target in target_of.items():
            found = model.get_submodule(name)
            frozen = FrozenLinear(found, FORMS[adapter.base], type(found).__name__ == TURNED)
            if not {ALL_LINEAR, target}.isdisjoint(adapter.targets):
                frozen.adapt(adapter.rank, adapter.alpha, adapter.dropout)
            model.set_submodule(name, frozen)
        for name, parameter in model.named_parameters():
            if _trains_whole(model, name, parameter, adapter):
                parameter.requires_grad_(True)
    return model


def _trains_whole(model: Model, name: str, one: nn.Parameter, adapter: AdapterSettings) -> bool:
    role = model.place_of(name).role
    if role in ("embedding", "head"):
        return "embeddings" in adapter.train_also and one.ndim > 1
    is_norm = role == "norm" or "norm" in name or ".ln_" in name
    return is_norm and "norms" in adapter.train_also


def adapted(
    settings: ModelSettings,
    adapter: AdapterSettings,
    seed: int,
    files: Sequence[Path],
    device: torch.device = CPU,
) -> Model:
    """The adapted model of a run, as it begins. Raises ConfigError if files hold another model."""
    model = allocated(settings, adapter, device)
    for name, tensor in read_weights(settings, shapes_of(settings), files):
        take_weight(model, name, tensor)
    draw_factors(model, seed)
    return model


@torch.no_grad()
def take_weight(model: Model, name: str, tensor: Tensor) -> None:
    """Set one weight from a file; those that are frozen are packed."""
    module = model.get_submodule(name.rpartition(".")[0])
    if isinstance(module, FrozenLinear) and name.endswith(".weight"):
        module.take(tensor)
    else:
        model.get_parameter(name).copy_(tensor.to(torch.bfloat16))


def draw_factors(model: Model, seed: int) -> None:
    """Set all factors as they begin."""
    for name, module in model.named_modules():
        if isinstance(module, FrozenLinear) and module.lora_A is not None:
            fill_normal(module.lora_A, module.inputs**-0.5, f"{seed}:{name}.lora_A")
            nn.init.zeros_(module.get_parameter("lora_B"))


def allocated(
    settings: ModelSettings,
    adapter: AdapterSettings,
    device: torch.device,
    stage: Stage | None = None,
) -> Model:
    """An adapted model, or a stage of it, whose weights are still to be set.

    Frozen weights are in bf16 or less, which a processor keeps in fp32 outside of the blocks.
    """
    model = shell(settings, adapter)
    if stage is not None:
        staged(model).keep(stage)
    model.draws = adapter.dropout > 0
    if device.type != "cpu":
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    family_of(settings).allocate(model, device)
    return model


def shapes_of(settings: ModelSettings) -> Mapping[str, Sequence[int]]:
    """Shapes of all weights of the unadapted model."""
    with torch.device("meta"):
        blank = family_of(settings).blank(settings)
    return {name: parameter.shape for name, parameter in blank.named_parameters()}


@contextmanager
def unadapted(model: Model) -> Iterator[None]:
    """A context in which a model computes as it began. Raises ConfigError if it trains weights that
    are no factors."""
    if not all(name.endswith(".lora_B") for name in trained(model)):
        raise ConfigError("This run trains whole weights: only an adapter can be left aside.")
    linear = [module for module in model.modules() if isinstance(module, FrozenLinear)]
    kept = [module.scaling for module in linear]
    try:
        for module in linear:
            module.scaling = 0.0
        yield
    finally:
        for module, scaling in zip(linear, kept, strict=True):
            module.scaling = scaling


def merged(model: Model) -> dict[str, Tensor]:
    """All weights of the unadapted model, with the adapter in them, by our names."""
    tensors = {
        name: one.detach() for name, one in model.named_parameters() if not name.endswith(".lora_B")
    }
    for name, module in model.named_modules():
        if isinstance(module, FrozenLinear):
            tensors[f"{name}.weight"] = module.merged().detach()
    return tensors


def footprint_of(spec: RunSpec, stage: Stage | None = None) -> Footprint:
    """Memory of what a run trains, and of what it keeps frozen beside that; of a stage, with as
    many micro-batches as it has under way. Raises ConfigError."""
    if spec.adapter is None and stage is None:
        return family_of(spec.model).footprint(spec.model)
    adapter = "" if spec.adapter is None else spec.adapter.model_dump_json()
    return _footprint(spec.model.model_dump_json(), adapter, stage)


@lru_cache(maxsize=64)
def _footprint(model_json: str, adapter_json: str, stage: Stage | None) -> Footprint:
    settings = read_model(json.loads(model_json))
    found = family_of(settings).footprint(settings)
    if adapter_json:
        adapter = AdapterSettings.model_validate_json(adapter_json)
        model = shell(settings, adapter)
    else:
        adapter = None
        with torch.device("meta"):
            model = family_of(settings).blank(settings)
    if stage is not None:
        staged(model).keep(stage)
        found = _of_stage(found, stage)
    weights = trained(model)
    blocks = [one for name, one in weights.items() if model.place_of(name).role == "block"]
    matrices = Counter((one.shape[0], one.shape[1]) for one in blocks if one.ndim == 2)
    others = sum(one.numel() for one in weights.values()) - sum(map(prod, matrices.elements()))
    found = replace(found, matrices=matrices, others=others)
    if adapter is None:
        return found
    linear = [module for module in model.modules() if isinstance(module, FrozenLinear)]
    low = [one for one in linear if one.lora_B is not None]
    # A step keeps A x, and where A drops values of x, which those are.
    kept = adapter.rank * len(low) + (adapter.dropout > 0) * sum(one.inputs for one in low)
    kept -= found.kept_for_matrices
    kept -= 0 if "norms" in adapter.train_also else found.kept_for_norms
    largest = max((one.outputs * one.inputs for one in linear), default=0)
    return replace(
        found,
        kept=found.kept + kept,
        in_block=found.in_block + kept // max(1, found.blocks),
        passing=found.passing - found.passing_for_matrices,
        looking=found.passing if found.looking is None else found.looking,
        packed_bytes=sum(one.nbytes for module in linear for one in module.buffers()),
        frozen=sum(one.numel() for one in model.parameters() if not one.requires_grad),
        unpacked=int(UNPACKED[adapter.base] * largest),
    )


def _of_stage(whole: Footprint, stage: Stage) -> Footprint:
    """What a step keeps in a stage: states of each micro-batch that is under way."""
    blocks = stage.stop - stage.start
    beyond = whole.kept - whole.blocks * whole.in_block if stage.outside else 0
    # What comes and goes: states, and their gradient.
    moving = 4 * whole.between
    share = UNDER_WAY * blocks / whole.blocks
    return replace(
        whole,
        kept=UNDER_WAY * (blocks * whole.in_block + moving) + beyond,
        kept_for_matrices=int(share * whole.kept_for_matrices),
        kept_for_norms=int(share * whole.kept_for_norms),
        vocab=whole.vocab if stage.outside else 0,
        blocks=blocks,
        in_block=UNDER_WAY * whole.in_block,
        between=UNDER_WAY * whole.between,
    )
