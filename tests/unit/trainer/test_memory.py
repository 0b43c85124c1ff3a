"""What must hold for the memory of a run: it is reckoned before anything is allocated, by what
takes it, and kept to."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.families import Alive, kept_bytes, tiny
from lowcomm_node.errors import ConfigError
from lowcomm_node.models.adapters import footprint_of, shell
from lowcomm_node.models.base import Model, build_model, family_of
from lowcomm_node.system.machine import (
    GIB,
)
from lowcomm_node.trainer import memory as limits
from lowcomm_node.trainer.memory import (
    BETWEEN,
    FLOAT,
    StepChoices,
    check_memory,
    count_parameters,
    estimate_memory,
)
from lowcomm_node.trainer.micro_batch import Cut
from lowcomm_node.trainer.optimizer import BatchedMuon, InnerOptimizer
from lowcomm_protocol.spec.architectures import ARCHITECTURES
from lowcomm_protocol.spec.models import TransformerSettings
from lowcomm_protocol.spec.run import RunSpec

CPU = torch.device("cpu")
MODELS = [
    {},
    {"tied": True},
    {"layers": 2, "width": 128, "heads": 8, "feed_forward": 96, "context": 16, "vocab": 500},
    {"heads": 8, "kv_heads": 2, "head_width": 12},
    {"kv_heads": 2, "qk_norm": False, "qkv_bias": True},
]  # fmt: skip


def spec_of(model: dict[str, Any] | None = None, method: str = "lowcomm", **train: Any) -> RunSpec:
    return RunSpec.model_validate(
        {"run": {"name": "a"}, "model": model or {}, "train": train, "sync": {"method": method}}
    )


def part(spec: RunSpec, name: str) -> float:
    """Values of float32 that one part takes, without gaps."""
    return (
        next(
            amount
            for part, amount in estimate_memory(spec, False).host.items()
            if part.startswith(name)
        )
        / BETWEEN
        / FLOAT
    )


@pytest.mark.parametrize("model", MODELS)
def test_parameters_and_moments_are_those_of_the_real_model(model):
    settings = TransformerSettings.model_validate(model)
    real = build_model(settings, 0)
    assert count_parameters(settings) == sum(one.numel() for one in real.parameters())
    for optimizer in ("adamw", "muon"):
        spec = spec_of(model, optimizer=optimizer, batch=1)
        inner = InnerOptimizer(real, spec.train, CPU)
        tokens = torch.zeros(1, settings.context, dtype=torch.long)
        real.loss(tokens, tokens).backward()
        inner.step(1e-3, 0)
        moments = sum(value.numel() for value in inner.moments().values() if value.ndim)
        scratch = part(spec, "optimizer") - moments
        assert scratch == pytest.approx(0, abs=1) if optimizer == "adamw" else scratch > 0
        assert optimizer == "adamw" or any(isinstance(one, BatchedMuon) for one in inner._parts)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("batch", "separator"), [(1, None), (8, None), (8, 0)])
def test_what_a_step_keeps_for_its_backward_pass_is_counted_to_a_hundredth(model, batch, separator):
    settings = TransformerSettings.model_validate(model)
    real = build_model(settings, 0)
    real.separator = separator
    kept = kept_bytes(real, torch.zeros(batch, settings.context, dtype=torch.long))
    spec = spec_of(model, document_mask=separator is not None)
    found = limits._with_masks(family_of(settings).footprint(settings), spec, False)
    reckoned = FLOAT * batch * settings.context * (found.kept + found.vocab)
    assert kept == pytest.approx(reckoned, rel=0.01)
    parameters = sum(one.numel() for one in real.parameters())
    assert settings.parameters == found.parameters == parameters


FILE = {"name": "a.safetensors", "size": 1, "sha256": "0" * 64, "pieces": "0" * 64}
ADAPTED = [
    {"width": 256, "heads": 4, "feed_forward": 704, "context": 64, "vocab": 512},
    {"layers": 3, "width": 512, "heads": 8, "kv_heads": 2, "feed_forward": 1536, "context": 32},
    {"layers": 8, "heads": 8, "kv_heads": 4, "head_width": 32, "feed_forward": 256, "context": 128},
]


def adapted_spec(model: Any, optimizer: str = "adamw", **adapter: Any) -> RunSpec:
    content = {"run": {"name": "a"}, "model": model, "adapter": {"rank": 16, **adapter}}
    content |= {"train": {"optimizer": optimizer, "batch": 4}, "start": {"files": [FILE]}}
    return RunSpec.model_validate(content | {"sync": {"method": "local"}})


def filled(spec: RunSpec) -> Model:
    """An adapted model with the memory of one of files, and zeros for what they hold."""
    assert spec.adapter is not None
    model = shell(spec.model, spec.adapter)
    family_of(spec.model).allocate(model, CPU)
    for name, one in [*model.named_buffers(), *model.named_parameters()]:
        if "lora_A" in name or "embed" in name:
            torch.nn.init.normal_(one)
        elif not name.endswith("rope") and "inv_freq" not in name:
            torch.nn.init.zeros_(one)
    return model


@pytest.mark.parametrize("base", ["bf16", "int8", "nf4"])
@pytest.mark.parametrize("model", ADAPTED)
@pytest.mark.parametrize(("optimizer", "form"), [("adamw", "fp32"), ("muon", "int8")])
def test_an_adapters_estimate_is_within_15_percent_of_the_tensors_of_its_steps(
    model, base, optimizer, form, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "EVALUATION_TOKENS", 1)
    spec = adapted_spec(model, optimizer, base=base)
    real = filled(spec)
    own = [*real.parameters(), *real.buffers()]
    inner = InnerOptimizer(real, spec.train, CPU, form)
    tokens = torch.zeros(spec.train.batch, spec.model.context, dtype=torch.long)
    with Alive(real) as alive:
        for step in range(2):
            real.loss(tokens, tokens).backward()
            inner.step(1e-3, step)
    taken = alive.most + sum(one.untyped_storage().nbytes() for one in own)
    parts = estimate_memory(spec, False, cut=Cut(spec.train.batch), form=form).host
    training = ("frozen weights", "weights and gradients", "optimizer", "activations")
    estimate = sum(size for name, size in parts.items() if name.startswith(training)) / BETWEEN
    assert estimate == pytest.approx(taken, rel=0.15)


@pytest.mark.parametrize("also", [(), ("norms",), ("embeddings", "norms")])
@pytest.mark.parametrize("type_", ["llama", "qwen3", "olmo2", "gpt2"])
def test_what_an_adapted_model_of_transformers_keeps_is_within_15_percent(type_, also):
    sizes = ARCHITECTURES[type_]
    config = {sizes.width: 256, sizes.layers: 3, sizes.heads: 4, sizes.inner: 704}
    model = tiny(type_, **config).model_dump() | {"context": 64, "vocab": 512}
    spec = adapted_spec(model, train_also=also)
    found, tokens = footprint_of(spec), torch.zeros(2, 64, dtype=torch.long)
    kept = kept_bytes(filled(spec), tokens)
    assert FLOAT * tokens.numel() * (found.kept + found.vocab) == pytest.approx(kept, rel=0.15)


def test_a_long_context_in_large_batches_is_refused_with_what_takes_how_much(
    monkeypatch: pytest.MonkeyPatch,
):
    hungry = spec_of({"context": 1_048_576, "layers": 16}, batch=256)
    with pytest.raises(
        ConfigError, match=r"needs about \d+\.\d GiB of memory, 4\.0 GiB are allowed here"
    ) as caught:
        check_memory(hungry, CPU, 4.0)
    told = str(caught.value)
    assert "(GiB: activations and logits (1 x context 1048576 at once) " in told
    assert "raise --max-memory" in told and "smaller model or context" in told
    monkeypatch.setattr(limits, "memory_of_machine", lambda: (8 * GIB, 7 * GIB))
    with pytest.raises(ConfigError, match=r"7\.3 GiB are allowed here"):
        check_memory(hungry, CPU, None)
    check_memory(spec_of(), CPU, 1.0)


def test_a_gpu_takes_the_training_and_the_host_the_rest(monkeypatch: pytest.MonkeyPatch):
    cuda = torch.device("cuda:0")
    spec = spec_of({"context": 2048, "width": 1024, "heads": 16, "feed_forward": 2816}, batch=32)
    found = estimate_memory(spec, gpu=True)
    assert not set(found.host) & set(found.device) - {"programs"}
    assert found.device_bytes > found.host_bytes / 2
    card = SimpleNamespace(free=GIB, is_integrated=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (card.free, 80 * GIB))
    with pytest.raises(
        ConfigError, match=r"GiB of memory of the GPU, 1\.0 GiB are allowed here .*raise --max-vram"
    ):
        check_memory(spec, cuda, 64.0)
    card.free = 79 * GIB
    check_memory(spec, cuda, 64.0)
    with pytest.raises(ConfigError, match=r"0\.9 GiB are allowed here .*: choose --moments int8, "):
        check_memory(spec, cuda, 64.0, max_vram=0.9)
    needed = estimate_memory(spec, True, cut=Cut(1, True), form="int8").device_bytes
    choices, allowed = StepChoices(moments="int8"), needed / GIB + 0.001
    assert check_memory(spec, cuda, 64.0, allowed, choices=choices)[1] == Cut(1, True)
    with pytest.raises(ConfigError, match="--moments int8"):
        check_memory(spec, cuda, 64.0, allowed)
    host = estimate_memory(spec, True, cut=Cut(1, True)).host_bytes
    both, card.is_integrated = (needed + host) / GIB + 0.001, 1
    check_memory(spec, cuda, both, choices=choices)
    with pytest.raises(ConfigError, match=r"GiB of memory, .*raise --max-memory"):
        check_memory(spec, cuda, both - 0.1, choices=choices)
