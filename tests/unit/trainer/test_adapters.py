"""What must hold for an adapter of every type of model: it trains, exchanges and goes on to the bit
after a kill, peft computes the same with it, and nothing else than it moves."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.adapters import sections, write_base
from helpers.driven_trainer import Driven, begin, driven, finish, image
from helpers.families import section, tiny
from lowcomm_node.errors import ConfigError
from lowcomm_node.export import ExportChoices, Format, Weights
from lowcomm_node.export.write import export_checkpoint
from lowcomm_node.models.adapters import adapted, merged, shell, unadapted
from lowcomm_node.models.base import family_of, trained
from lowcomm_node.models.frozen import BLOCK, FORMS, FrozenLinear
from lowcomm_node.node.messages import InnerStepTaken, OuterStepApplied, RequestFailed, Save
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.spec.architectures import ARCHITECTURES
from lowcomm_protocol.spec.models import TransformerSettings, TransformersSettings
from lowcomm_protocol.spec.run import sign_run
from lowcomm_protocol.spec.sections import AdapterSettings, ModelSettings

OURS = TransformerSettings(
    layers=2, width=32, heads=4, kv_heads=2, feed_forward=48, context=16, qk_norm=False
)
SETTINGS = {"transformer": OURS, **{type_: tiny(type_) for type_ in ARCHITECTURES}}
TRAIN = """
[train]
batch = 2
learning_rate = 0.02
warmup = 3
optimizer = "{optimizer}"
[sync]
interval = 8
min_steps = 1
overlap = 0
fragments = 2
"""
TOKENS = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
ADAPTER = AdapterSettings(rank=4)
pytestmark = pytest.mark.slow


def trainers(
    folder: Path, settings: ModelSettings, *peers: str, optimizer: str = "adamw", **adapter: Any
) -> Any:
    base = folder / "start" / "model.safetensors"
    if not base.exists():
        write_base(base.parent, settings)
    model = section(settings) if isinstance(settings, TransformersSettings) else _own(settings)
    more = TRAIN.format(optimizer=optimizer).replace("[train]\nbatch = 2\n", "", 1)
    more += sections(base, **adapter)
    return driven(folder, *peers, more=more, model=model, start=(str(base),))


def _own(settings: ModelSettings) -> str:
    return "\n".join(
        f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
        for name, value in settings.model_dump(exclude_defaults=True).items()
    )


@pytest.mark.parametrize("type_", SETTINGS)
def test_it_trains_exchanges_resumes_to_the_bit_and_is_exported(tmp_path: Path, type_: str) -> None:
    settings = SETTINGS[type_]
    with trainers(tmp_path, settings, "a", "b") as (one, other):
        assert all(name.endswith(".lora_B") for name in one.replica.weights)
        frozen = _frozen(one)
        begun = one.replica.model(TOKENS).detach()
        for here in (one, other):
            here.steps(5)
        mine = one.replica.fast(0).clone()
        begin(one, other)
        for here, number in zip((one, other), finish(one, other), strict=True):
            assert isinstance(here.answer(number), OuterStepApplied)
        assert not torch.equal(mine, one.replica.fast(0)), "the exchange moves weights"
        with unadapted(one.replica.model), torch.no_grad():
            assert torch.equal(one.replica.model(TOKENS), begun)
        one.ask(Save())
        one.steps(2)
        with trainers(tmp_path, settings, "a") as (again,):
            assert again.built.resumed == 5
            again.steps(2)
            assert image(again) == image(one)
        after = _frozen(one)
        assert all(torch.equal(after[name], tensor) for name, tensor in frozen.items())
        losses = [event.loss for event in one.events(InnerStepTaken)]
        assert losses[-1] < losses[0]
        check_exports(one, tmp_path)


def _frozen(one: Driven) -> dict[str, torch.Tensor]:
    model, weights = one.replica.model, one.replica.weights
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    return {name: tensor.clone() for name, tensor in tensors.items() if name not in weights}


@torch.no_grad()
def check_exports(one: Driven, folder: Path) -> None:
    """peft computes with the adapter what transformers computes with the merged model, and what the
    replica does."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = folder / "run"
    run.mkdir()
    for name, target in (("checkpoints", one.peer), ("start", "start")):
        (run / name).symlink_to(folder / target)
    (run / "run.json").write_bytes(sign_run(one.replica.spec, Identity(bytes(32))).to_bytes())
    one.ask(Save())
    for format_, out in ((Format.HF, "whole"), (Format.ADAPTER, "adapter")):
        export_checkpoint(run, folder / out, ExportChoices(format_, weights=Weights.FAST))
    assert "PeftModel.from_pretrained" in (folder / "adapter" / "README.md").read_text()
    for out in ("whole", "adapter"):
        assert (
            "| open weights, by an adapter of rank 4 on bf16 |"
            in (folder / out / "README.md").read_text()
        )
    opened: Any = AutoModelForCausalLM.from_pretrained(
        folder / "whole", output_loading_info=True, attn_implementation="sdpa"
    )
    whole, told = opened
    assert not told["missing_keys"] and not told["unexpected_keys"]
    logits = one.replica.model(TOKENS)
    torch.testing.assert_close(whole(TOKENS).logits, logits, atol=1e-4, rtol=1e-5)
    base = AutoModelForCausalLM.from_config(whole.config, attn_implementation="sdpa")
    weights = adapted(one.replica.spec.model, ADAPTER, 0, [folder / "start" / "model.safetensors"])
    form = family_of(one.replica.spec.model).huggingface(one.replica.spec.model)
    assert form is not None
    names = {name: theirs.replace("embed_out", "lm_head") for name, theirs in form.names.items()}
    base.load_state_dict({names[name]: value for name, value in merged(weights).items()}, False)
    base.tie_weights()
    theirs = PeftModel.from_pretrained(base, folder / "adapter").eval()
    torch.testing.assert_close(theirs(TOKENS).logits, logits, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("base", FORMS)
def test_a_step_keeps_matrices_packed_and_its_gradient_is_that_of_what_they_hold(
    tmp_path: Path, base: str
) -> None:
    more: Any = {"base": base, "train_also": ("embeddings", "norms")}
    adapter = AdapterSettings(rank=4, **more)
    model = adapted(OURS, adapter, 0, [write_base(tmp_path, OURS)])
    linear = [module for module in model.modules() if isinstance(module, FrozenLinear)]
    values = sum(one.outputs * one.inputs for one in linear)
    packed = sum(one.codes.nbytes + one.scales.nbytes for one in linear)
    assert packed * 8 == FORMS[base].bits * values
    with torch.no_grad():
        for name, one in trained(model).items():
            if name.endswith("lora_B"):
                one.normal_(std=0.05)
    model.loss(TOKENS, TOKENS).backward()
    # The same function in plain torch, where matrices are what is packed.
    plain = {name: one.clone().requires_grad_() for name, one in merged(model).items()}
    other = family_of(OURS).blank(OURS)
    loss = torch.func.functional_call(other, plain, (TOKENS,))
    torch.nn.functional.cross_entropy(loss.flatten(0, 1), TOKENS.flatten()).backward()
    for name, one in trained(model).items():
        whole = plain.get(name)
        if whole is None:
            module = model.get_submodule(name.removesuffix(".lora_B"))
            matrix = plain[name.replace(".lora_B", ".weight")].grad
            assert isinstance(module, FrozenLinear) and module.lora_A is not None
            assert matrix is not None
            wanted = module.scaling * matrix @ module.lora_A.mT
        else:
            wanted = whole.grad
        torch.testing.assert_close(one.grad, wanted, atol=1e-5, rtol=1e-3)


def test_what_is_packed_is_near(tmp_path: Path) -> None:
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    errors = {}
    for name, form in FORMS.items():
        back = form.unpack(*form.pack(values)).view(64, 128).float()
        errors[name] = float((back - values).norm() / values.norm())
        largest = [one.abs().view(-1, BLOCK).amax(1) for one in (back, values)]
        torch.testing.assert_close(*largest, rtol=4e-3 if name == "bf16" else 1e-6, atol=0)
        zeros = form.unpack(*form.pack(torch.zeros(3, 5))).flatten()[:15]
        assert torch.equal(zeros.float(), torch.zeros(15))
    assert errors["bf16"] < 0.002 < errors["int8"] < 0.01 < errors["nf4"] < 0.1


def test_the_mean_of_adapters_is_the_mean_of_what_they_add(tmp_path: Path) -> None:
    file = write_base(tmp_path, OURS)
    models = [adapted(OURS, ADAPTER, 3, [file]) for _ in range(3)]
    start = merged(models[0])
    with torch.no_grad():
        for number, model in enumerate(models):
            for one in trained(model).values():
                one.normal_(std=0.1, generator=torch.Generator().manual_seed(number))
        added = [merged(model) for model in models]
        for name, one in trained(models[0]).items():
            one.copy_(torch.stack([other.get_parameter(name) for other in models]).mean(0))
    for name, whole in merged(models[0]).items():
        mean = sum(one[name] - start[name] for one in added) / 3
        torch.testing.assert_close(whole - start[name], mean, atol=2e-6, rtol=1e-5)


def test_a_target_that_does_not_exist_is_refused_by_name_before_anything_is_allocated(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"'q_prj', .* all-linear, down_proj, .* q_proj"):
        shell(OURS, AdapterSettings(rank=4, targets=("q_prj",)))
    refused = pytest.raises(AssertionError, match="'q_prj'")
    with refused as failure, trainers(tmp_path, OURS, "a", targets=["q_prj"]):
        pass
    assert RequestFailed.__name__ in str(failure.value)


def test_named_targets_alone_are_adapted() -> None:
    model = shell(OURS, AdapterSettings(rank=4, targets=("q_proj", "v_proj")))
    assert sorted({name.split(".", 2)[2] for name in trained(model)}) == [
        "attention.query.lora_B",
        "attention.value.lora_B",
    ]


def test_without_its_base_an_adapter_does_not_begin(tmp_path: Path) -> None:
    with trainers(tmp_path, OURS, "a") as (one,):
        one.ask(Save())
    (tmp_path / "start" / "model.safetensors").rename(tmp_path / "kept")
    other = write_base(tmp_path / "other", OURS.model_copy(update={"feed_forward": 40}))
    other.rename(tmp_path / "start" / "model.safetensors")
    refused = pytest.raises(AssertionError, match=r"mlp\.\w+\.weight is \[.*\] in the weights")
    with refused, trainers(tmp_path, OURS, "a"):
        pass


def test_dropout_draws_the_same_after_a_kill(tmp_path: Path) -> None:
    with trainers(tmp_path, OURS, "a", dropout=0.3) as (one,):
        one.steps(3)
        one.ask(Save())
        one.steps(2)
        with trainers(tmp_path, OURS, "a", dropout=0.3) as (again,):
            torch.manual_seed(5)
            with torch.no_grad():
                assert torch.equal(*(again.replica.model(TOKENS) for _ in range(2)))
            again.steps(2)
            assert image(again) == image(one)
