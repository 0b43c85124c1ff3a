"""What must hold for exports: other programs compute what our model computes, from the same
text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomlkit
import torch
from torch import Tensor

from helpers.hub_tokenizers import ADDED, CHAT, SPECIAL, write_tokenizer
from lowcomm_node.data import open_tokenizer
from lowcomm_node.data.tokenizer import identify
from lowcomm_node.errors import ConfigError
from lowcomm_node.export import Dtype, ExportChoices, Format, Weights
from lowcomm_node.export.write import export_checkpoint
from lowcomm_node.models.base import Model, build_model, tensor_specs
from lowcomm_node.storage.checkpoint import CheckpointStore
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.plan import plan_fragments
from lowcomm_protocol.spec.models import TransformerSettings
from lowcomm_protocol.spec.run import RunSpec, parse_toml, sign_run

pytestmark = pytest.mark.slow

STEP = 7
CREATOR = Identity(bytes(32))
BYTES = {"file": "bytes", "sha256": ""}


MODELS = {
    "qwen3 tied": {"tied": True},
    "qwen3 grouped": {"heads": 8, "kv_heads": 2, "head_width": 12, "norm_epsilon": 1e-5},
    "qwen2": {"kv_heads": 1, "qk_norm": False, "qkv_bias": True, "rope_base": 1e6},
    "llama3": {
        "qk_norm": False,
        "kv_heads": 2,
        "rope_scaling": "llama3",
        "rope_original": 16,
        "rope_base": 500_000.0,
        "tied": True,
    },
}


def trained(model: dict[str, Any] | None = None, seed: int = 1) -> Model:
    """A model whose every weight differs from where it began, norms too."""
    real = build_model(TransformerSettings.model_validate(model or {}), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in real.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
            else:
                parameter.add_(torch.rand(parameter.shape, generator=generator) * 0.5)
    return real.eval()


def spec_of(model: Model, method: str = "lowcomm") -> RunSpec:
    tables = {
        "run": {"name": "tea", "description": "A run."},
        "model": model.settings.model_dump(),
        "sync": {"method": method},
    }
    return parse_toml(tomlkit.dumps(tables))


def saved(folder: Path, model: Model, method: str = "lowcomm", shift: float = 0.0) -> Path:
    """A home's folder of a run with a checkpoint; slow weights are the fast ones + ``shift``."""
    run = sign_run(spec_of(model, method), CREATOR)
    weights = {name: one.detach() for name, one in model.named_parameters()}
    sync = run.spec.sync
    plan = plan_fragments(tensor_specs(model), sync.fragments, sync.pattern)
    outer = {
        f"phi.{fragment.index}": torch.cat(
            [weights[one.tensor][one.start : one.stop].flatten() for one in fragment.slices]
        )
        + shift
        for fragment in plan.fragments
    }
    meta: dict[str, Any] = {
        "model": model.settings.model_dump(),
        "run_id": run.run_id,
        "plan": plan.digest,
        "swarm_step": STEP,
        "tokens": 1234567,
        "tokenizer": BYTES,
    }
    store = CheckpointStore(folder / "checkpoints")
    store.save(STEP, {"weights": weights, "outer": outer}, meta, 1.7e9)
    (folder / "run.json").write_bytes(run.to_bytes())
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.fixture
def exported(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Model, Path]]:
    """A model, and the folder that transformers opens."""
    model = trained(request.param)
    export_checkpoint(saved(tmp_path / "run", model), tmp_path / "out", ExportChoices())
    yield model, tmp_path / "out"


@pytest.mark.slow
@pytest.mark.parametrize("exported", MODELS.values(), indirect=True, ids=MODELS)
def test_transformers_computes_the_same_logits(exported: tuple[Model, Path]) -> None:
    from transformers import AutoModelForCausalLM

    model, folder = exported
    theirs, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    tokens = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model(tokens)
        assert float(ours.abs().max()) > 0.5, "or anything would be near"
        assert float((theirs(tokens).logits - ours).abs().max()) < 1e-5


def test_slow_weights_are_exported_where_a_run_has_them(tmp_path: Path) -> None:
    model = trained()
    run = saved(tmp_path / "run", model, shift=1.0)
    assert export_checkpoint(run, tmp_path / "slow", ExportChoices()).weights is Weights.SLOW
    fast = ExportChoices(weights=Weights.FAST)
    assert export_checkpoint(run, tmp_path / "fast", fast).weights is Weights.FAST
    slow, ours = tensors_of(tmp_path / "slow"), tensors_of(tmp_path / "fast")
    assert slow.keys() == ours.keys() and len(slow) == len(dict(model.named_parameters()))
    for name, tensor in slow.items():
        assert torch.equal(tensor, ours[name] + 1.0), name


def test_llama_in_gguf_has_its_rows_in_the_order_of_llama_cpp(tmp_path: Path) -> None:
    import gguf

    model = trained(MODELS["llama3"])
    run = saved(tmp_path / "run", model)
    export_checkpoint(run, tmp_path / "out", ExportChoices(Format.GGUF))
    (file,) = (tmp_path / "out").glob("*.gguf")
    tensors = {one.name: torch.tensor(one.data) for one in gguf.GGUFReader(file).tensors}
    ours = dict(model.named_parameters())["blocks.0.attention.key.weight"].detach()
    # Channels i and i + 8 of a head, which turn together, lie side by side.
    assert torch.equal(tensors["blk.0.attn_k.weight"][:4], ours[[0, 8, 1, 9]])
    assert torch.equal(
        tensors["blk.0.attn_v.weight"][1],
        dict(model.named_parameters())["blocks.0.attention.value.weight"][1],
    )
    assert tensors["rope_freqs.weight"].shape == (8,)
    assert float(tensors["rope_freqs.weight"][-1]) == 8.0


@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.Q8_0])
def test_gguf_holds_every_tensor_and_a_tokenizer(tmp_path: Path, dtype: Dtype) -> None:
    import gguf

    run = saved(tmp_path / "run", trained())
    export_checkpoint(run, tmp_path / "out", ExportChoices(Format.GGUF, dtype))
    (file,) = (tmp_path / "out").glob("tea-*.gguf")
    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "qwen3"
    assert len(fields["tokenizer.ggml.tokens"]) == 256
    assert fields["tokenizer.ggml.merges"], "llama.cpp opens no file without a merge"
    assert len(reader.tensors) == len(dict(trained().named_parameters()))
    assert all("norm" not in one.name or one.tensor_type.name == "F32" for one in reader.tensors)
    kinds = {one.tensor_type.name for one in reader.tensors}
    # Norms stay float32, and so does a matrix whose rows the blocks of Q8_0 do not divide.
    assert kinds == {"F32", {"float32": "F32", "bfloat16": "BF16", "q8_0": "Q8_0"}[dtype]}
    assert (tmp_path / "out" / "Modelfile").read_text().startswith(f"FROM ./{file.name}\n")


# The mean of several nodes


def given(folder: Path, model: Model, shift: float, scale: float = 1.0) -> Path:
    """A file of a peer: slow weights as its state has them."""
    sync = spec_of(model).sync
    plan = plan_fragments(tensor_specs(model), sync.fragments, sync.pattern)
    weights = {name: one.detach() for name, one in model.named_parameters()}
    parts = [
        weights[one.tensor][one.start : one.stop].flatten()
        for fragment in plan.fragments
        for one in fragment.slices
    ]
    (torch.cat(parts) * scale + shift).numpy().tofile(folder)
    return folder


def test_the_mean_is_of_ours_and_of_all_peers_that_are_near(tmp_path: Path) -> None:
    model = trained()
    run = saved(tmp_path / "run", model)
    near = {
        "a": given(tmp_path / "a", model, 0.003),
        "b": given(tmp_path / "b", model, 0.006),
    }
    far = {
        "liar": given(tmp_path / "liar", model, 0.0, -1.0),
        "nan": given(tmp_path / "nan", model, float("nan")),
        "infinity": given(tmp_path / "infinity", model, float("inf")),
        "short": tmp_path / "short",
    }
    (tmp_path / "short").write_bytes(b"1234")
    exported = export_checkpoint(run, tmp_path / "mean", ExportChoices(), near | far)
    assert (exported.weights, exported.peers) == (Weights.AVERAGE, ("a", "b"))
    export_checkpoint(run, tmp_path / "slow", ExportChoices(weights=Weights.SLOW), near)
    mean, slow = tensors_of(tmp_path / "mean"), tensors_of(tmp_path / "slow")
    for name, tensor in mean.items():
        torch.testing.assert_close(tensor, slow[name] + 0.003, rtol=0, atol=1e-6)
    assert (
        "the mean of the slow weights of this node and 2 of its peers"
        in (tmp_path / "mean" / "README.md").read_text()
    )


# How a model begins and ends


def with_tokenizer(folder: Path, begins: bool, more: str = "", **change: Any) -> Path:
    """A home's folder of a run with a tokenizer of its own; ``more``: sections of the run;
    ``change``: of the tokenizer's file."""
    model = trained({"qk_norm": False, "vocab": 340})
    tokenizer = folder / "tokenizer.json"
    folder.mkdir()
    write_tokenizer(tokenizer, begins=begins)
    tokenizer.write_text(
        json.dumps(json.loads(tokenizer.read_text()) | {"normalizer": {"type": "NFC"}} | change)
    )
    marks = f"begin_tokens = {[0] if begins else []}\nend_token = 1\n"
    told = {"run": {"name": "tea"}, "model": model.settings.model_dump()}
    data = f'[data]\ntokenizer = "local"\n{marks}'
    run = sign_run(parse_toml(f"{tomlkit.dumps(told)}\n{data}{more}"), CREATOR)
    opened = open_tokenizer(str(tokenizer), run.spec.data.begin_tokens, run.spec.data.end_token)
    meta = {"model": model.settings.model_dump(), "run_id": run.run_id}
    weights = {name: one.detach() for name, one in model.named_parameters()}
    meta["tokenizer"] = identify(opened)
    CheckpointStore(folder / "checkpoints").save(STEP, {"weights": weights}, meta, 1.7e9)
    (folder / "run.json").write_bytes(run.to_bytes())
    return folder


SAYS = f"""
[export]
bos_token_id = 0
eos_token_id = [1, 2]
pad_token_id = 3
positions = 131072
chat_template = {json.dumps(CHAT)}
[export.generation]
temperature = 0.6
eos_token_id = [2, 1]
"""


def test_an_export_says_what_the_open_weights_said(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    run = with_tokenizer(tmp_path / "run", begins=True, more=SAYS)
    export_checkpoint(run, tmp_path / "out", ExportChoices(weights=Weights.FAST))
    config, generation, words = (
        json.loads((tmp_path / "out" / f"{name}.json").read_text())
        for name in ("config", "generation_config", "tokenizer_config")
    )
    ends = {"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": 3}
    assert {name: config[name] for name in ends} == ends
    assert config["max_position_embeddings"] == words["model_max_length"] == 131072
    assert generation == {**ends, "eos_token_id": [2, 1], "temperature": 0.6}
    opened = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (opened.bos_token, opened.eos_token, opened.pad_token) == ("<s>", "</s>", "<pad>")
    assert opened.chat_template == CHAT
    text = " a ".join((*ADDED, *SPECIAL))
    ours = open_tokenizer(str(run / "tokenizer.json"))
    assert opened(text)["input_ids"] == [0, *ours.encode(text.encode()).tolist()]


SPACED = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "NFKC"}]}},
        {"pre_tokenizer": SPACED},
    ],
)
def test_gguf_is_refused_where_llama_cpp_would_read_another_text(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    run = with_tokenizer(tmp_path / "run", begins=False, **change)
    with pytest.raises(ConfigError, match="convert_hf_to_gguf"):
        export_checkpoint(run, tmp_path / "out", ExportChoices(Format.GGUF, weights=Weights.FAST))


@pytest.mark.parametrize("begins", [True, False])
def test_gguf_tells_tokens_apart_and_how_a_text_begins_and_ends(
    tmp_path: Path, begins: bool
) -> None:
    import gguf

    run = with_tokenizer(tmp_path / "run", begins, SAYS)
    export_checkpoint(run, tmp_path / "out", ExportChoices(Format.GGUF, weights=Weights.FAST))
    [file] = (tmp_path / "out").glob("*.gguf")
    fields = gguf.GGUFReader(file).fields
    kinds = fields["tokenizer.ggml.token_type"].contents()
    content = json.loads((run / "tokenizer.json").read_text())
    for one in content["added_tokens"]:
        wanted = gguf.TokenType.CONTROL if one["special"] else gguf.TokenType.USER_DEFINED
        assert kinds[one["id"]] == wanted, one["content"]
    assert kinds[-1] == gguf.TokenType.UNUSED
    told = {name: fields[f"tokenizer.{name}"].contents() for name in (
        "ggml.add_bos_token", "ggml.bos_token_id", "ggml.eos_token_id", "ggml.eot_token_id",
        "ggml.padding_token_id", "chat_template",
    )}  # fmt: skip
    assert [*told.values()] == [begins, 0, 1, 2, 3, CHAT]
    assert fields["llama.context_length"].contents() == 131072
    assert "TEMPLATE" not in (tmp_path / "out" / "Modelfile").read_text()
