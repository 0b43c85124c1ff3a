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

from lowcomm_node.data.stories import PIECES, words
from lowcomm_node.data.tokenizer import FileTokenizer, StoryTokenizer, Tokenizer
from lowcomm_node.export import Weights
from lowcomm_node.export.contents import ExportContents
from lowcomm_node.storage.state_file import write_state
from lowcomm_node.system.units import clean
from lowcomm_protocol.spec.sections import BYTES

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


def alphabet() -> list[str]:
    """The character that stands for each byte."""
    others = [byte for byte in range(BYTES) if byte not in _PRINTABLE]
    characters = {byte: chr(byte) for byte in _PRINTABLE}
    characters |= {byte: chr(BYTES + index) for index, byte in enumerate(others)}
    return [characters[byte] for byte in range(BYTES)]


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of the file of ``bytes``, or of the tiny stories.

    It names no special token: a text that spells one would no longer be read byte by byte.
    """
    byte_level: dict[str, Any] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    knows_words = isinstance(tokenizer, StoryTokenizer)
    letters = alphabet()
    vocab = {character: byte for byte, character in enumerate(letters)}
    if knows_words:
        spelled = ("".join(letters[byte] for byte in word.encode()) for word in words())
        vocab |= {word: BYTES + number for number, word in enumerate(spelled)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": _words_before(byte_level) if knows_words else byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": knows_words,
            "vocab": vocab,
            "merges": [],
        },
    }


def _words_before(byte_level: dict[str, Any]) -> dict[str, Any]:
    cut = {"type": "Split", "pattern": {"Regex": PIECES}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, byte_level]}


def card(contents: ExportContents) -> str:
    """Markdown that says what the model is, which run it comes from, and how to use it."""
    parameters = sum(tensor.numel() for tensor in contents.tensors.values())
    run_id = clean(str(contents.meta.get("run_id", "unknown")))[:64]
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [lowcomm]",
        "---",
        "",
        f"# {contents.name}",
        "",
        *_description(contents),
        "A language model that was trained with lowcomm by peers who exchanged small, coded pieces "
        "of it.",
        "",
        "| | |",
        "|---|---|",
        f"| parameters | {parameters:,} |",
        f"| context | {contents.settings.context:,} tokens |",
        f"| run | `{run_id}` |",
        f"| swarm step | {_number(contents.meta.get('swarm_step'))} |",
        f"| tokens that this node trained on | {_number(contents.meta.get('tokens'))} |",
        f"| weights | {_weights(contents)} of checkpoint {contents.step:,} |",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("FOLDER")',
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        "```",
        "",
        *_specification(contents),
    ]
    return "\n".join(lines)


def _description(contents: ExportContents) -> list[str]:
    told = contents.run.spec.run.description if contents.run else ""
    return [told, ""] if told else []


def _specification(contents: ExportContents) -> list[str]:
    if contents.run is None:
        return []
    document = contents.run.spec.model_dump_json(indent=2)
    return ["## Specification of the run", "", "```json", document, "```", ""]


def _weights(contents: ExportContents) -> str:
    if contents.weights is Weights.AVERAGE:
        return (
            f"the mean of the slow weights of this node and {len(contents.peers)} of its peers, as"
        )
    return f"{contents.weights.value} weights"


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "unknown"


SHARD_BYTES = 5_000_000_000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def write_folder(
    contents: ExportContents, folder: Path, dtype: str, most: int = SHARD_BYTES
) -> None:
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


def write_tokenizer(contents: ExportContents, folder: Path) -> None:
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
