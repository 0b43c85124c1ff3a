"""A folder that transformers, vLLM and llama.cpp's converter open.

config.json, generation_config.json          what the model is
model.safetensors                            its weights; in shards beyond 5 GB, with an index
tokenizer.json, tokenizer_config.json        text to tokens
README.md                                    where it comes from
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowcomm_node.data.tokenizer import FileTokenizer
from lowcomm_node.export.byte_tokenizer import tokenizer_json
from lowcomm_node.export.card import card
from lowcomm_node.export.contents import Contents
from lowcomm_node.storage.state_file import write_state

SHARD_BYTES = 5_000_000_000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def write_folder(contents: Contents, folder: Path, dtype: str, most: int = SHARD_BYTES) -> None:
    """Write everything into a folder that exists. ``dtype`` is a key of `DTYPES`, ``most`` the
    bytes of a shard."""
    says, eos = contents.says, contents.says.eos_token_id
    ends = {
        "bos_token_id": says.bos_token_id,
        "eos_token_id": [*eos] if len(eos) > 1 else next(iter(eos), None),
        "pad_token_id": says.pad_token_id,
    }
    config = {**contents.form.config, **ends, "dtype": dtype}
    if "max_position_embeddings" in config:
        config["max_position_embeddings"] = contents.positions
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", ends | says.generation)
    _write_weights(contents.tensors, folder, DTYPES[dtype], most)
    write_tokenizer(contents, folder)
    (folder / "README.md").write_text(card(contents), encoding="utf-8")


def write_tokenizer(contents: Contents, folder: Path) -> None:
    """Write tokenizer.json, and what transformers needs to open it."""
    tokenizer, says = contents.tokenizer, contents.says
    told: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": contents.positions,
        "clean_up_tokenization_spaces": False,
    }
    if isinstance(tokenizer, FileTokenizer):
        (folder / "tokenizer.json").write_bytes(tokenizer.content)
        # transformers adds a token that is not among the added ones, which would change others.
        added = {one["id"]: one["content"] for one in json.loads(tokenizer.content)["added_tokens"]}
        numbers = (says.bos_token_id, next(iter(says.eos_token_id), None), says.pad_token_id)
        names = zip(("bos_token", "eos_token", "pad_token"), numbers, strict=True)
        told |= {name: added[number] for name, number in names if number in added}
    else:
        _write_json(folder / "tokenizer.json", tokenizer_json(tokenizer))
    if says.chat_template:
        told["chat_template"] = says.chat_template
    _write_json(folder / "tokenizer_config.json", told)


def _write_weights(
    tensors: Mapping[str, Tensor], folder: Path, dtype: torch.dtype, most: int
) -> None:
    shards = list(_shards(tensors, dtype.itemsize, most))
    files = [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    if len(shards) == 1:
        files = ["model.safetensors"]
    for file, names in zip(files, shards, strict=True):
        shard = {name: tensors[name].to(dtype) for name in names}
        # transformers opens only files that name their framework.
        write_state(folder / file, shard, {"format": "pt"})
    if len(shards) > 1:
        total = sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize
        homes = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": homes}
        _write_json(folder / "model.safetensors.index.json", index)


def _shards(tensors: Mapping[str, Tensor], itemsize: int, most: int) -> Iterator[list[str]]:
    """Names by shard, in their order; a tensor is never cut."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        bytes_ = tensor.numel() * itemsize
        if names and size + bytes_ > most:
            yield names
            names, size = [], 0
        names.append(name)
        size += bytes_
    yield names


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
