"""A folder that transformers, vLLM and llama.cpp's converter open: config.json,
generation_config.json, model.safetensors (in shards beyond 5 GB), tokenizer.json,
tokenizer_config.json and README.md."""

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowcomm_node.data.stories import PIECES, words
from lowcomm_node.data.tokenizer import FileTokenizer, StoryTokenizer, Tokenizer
from lowcomm_node.errors import ConfigError
from lowcomm_node.export import Weights
from lowcomm_node.export.contents import ExportContents
from lowcomm_node.models.base import family_of
from lowcomm_node.storage.state_file import write_state
from lowcomm_node.system.units import clean
from lowcomm_protocol.spec.sections import BYTES

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(BYTES) if byte not in _PRINTABLE]
ALPHABET = [
    chr(byte if byte in _PRINTABLE else BYTES + _OTHERS.index(byte)) for byte in range(BYTES)
]
"""Character that stands for each byte."""
SHARD_BYTES = 5_000_000_000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of the file of ``bytes``, or of the tiny stories.

    It names no special token: a text that spells one would no longer be read byte by byte.
    """
    shared = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    byte_level: dict[str, Any] = {"type": "ByteLevel", **shared}
    vocab, before = {character: byte for byte, character in enumerate(ALPHABET)}, byte_level
    knows_words = isinstance(tokenizer, StoryTokenizer)
    if knows_words:
        spelled = ("".join(ALPHABET[byte] for byte in word.encode()) for word in words())
        vocab |= {word: BYTES + number for number, word in enumerate(spelled)}
        split = {"type": "Split", "pattern": {"Regex": PIECES}, "behavior": "Isolated"}
        before = {"type": "Sequence", "pretokenizers": [{**split, "invert": False}, byte_level]}
    return {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "added_tokens": [],
        "pre_tokenizer": before,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix")),
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": knows_words,
            "vocab": vocab,
            "merges": [],
        },
    }


USAGE = {
    "transformers": (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("FOLDER")'
    ),
    "peft": (
        "from peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'weights = AutoModelForCausalLM.from_pretrained("WEIGHTS")\n'
        'model = PeftModel.from_pretrained(weights, "FOLDER")'
    ),
}
"""How each library opens a folder."""


def card(contents: ExportContents, library: str = "transformers") -> str:
    """Markdown that says what the model is, which run it comes from, and how to use it."""
    meta, run, peers = contents.meta, contents.run, len(contents.peers)
    weights = f"{contents.weights.value} weights"
    if contents.weights is Weights.AVERAGE:
        weights = f"the mean of the slow weights of this node and {peers} of its peers, as"
    numbers = [meta.get("swarm_step"), meta.get("tokens")]
    step, tokens = (f"{one:,}" if isinstance(one, int) else "unknown" for one in numbers)
    document = run.spec.model_dump_json(indent=2) if run else ""
    about = run.spec.run.description if run else ""
    template = resources.files("lowcomm_node.export").joinpath("card.md")
    return template.read_text(encoding="utf-8").format(
        name=contents.name,
        description=f"{about}\n\n" if about else "",
        parameters=family_of(contents.settings).footprint(contents.settings).parameters,
        context=contents.settings.context,
        run=clean(str(meta.get("run_id", "unknown")))[:64],
        step=step,
        tokens=tokens,
        weights=weights,
        checkpoint=contents.step,
        origin=_origin(contents),
        library=library,
        usage=USAGE[library],
        specification=f"\n\n## Specification of the run\n\n```json\n{document}\n```" if run else "",
    )


def _origin(contents: ExportContents) -> str:
    """Rows of the card: the weights that the run began with, how it adapted them, and licences."""
    says, run = contents.says, contents.run
    adapter = run.spec.adapter if run else None
    began = (says.base or "open weights") if run and run.spec.start.files else ""
    if adapter and began:
        began += f", by an adapter of rank {adapter.rank} on {adapter.base}"
    rows = {"began with": began, "licences": ", ".join(says.licences)}
    shown = {name: clean(text).replace("|", "\\|") for name, text in rows.items() if text}
    return "".join(f"\n| {name} | {text} |" for name, text in shown.items())


def write_folder(
    contents: ExportContents, folder: Path, dtype: str, most: int = SHARD_BYTES
) -> None:
    """Write everything into a folder that exists. ``dtype``: key of `DTYPES`; ``most``: bytes of a
    shard."""
    says, eos = contents.says, contents.says.eos_token_id
    end = [*eos] if len(eos) > 1 else next(iter(eos), None)
    ends = {
        "bos_token_id": says.bos_token_id,
        "eos_token_id": end,
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


def write_adapter(contents: ExportContents, folder: Path, dtype: str) -> None:
    """Write an adapter for peft into a folder that exists. Raises ConfigError if a run has none, or
    trains weights whole."""
    run = contents.run
    adapter = run.spec.adapter if run else None
    if adapter is None or adapter.train_also:
        has = "trains whole weights beside its adapter" if adapter else "has no adapter"
        raise ConfigError(f"{contents.name} {has}: export the whole model with --format hf.")
    tensors: dict[str, Tensor] = {}
    linear = contents.model.named_modules()
    adapted = {name: one for name, one in linear if getattr(one, "lora_A", None) is not None}
    paths = {name: contents.form.names[f"{name}.weight"].rpartition(".")[0] for name in adapted}
    for name, path in paths.items():
        factors = adapted[name].get_buffer("lora_A"), adapted[name].get_parameter("lora_B")
        tensors[f"base_model.model.{path}.lora_A.weight"] = factors[0]
        tensors[f"base_model.model.{path}.lora_B.weight"] = factors[1].detach()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,  # a name without an owner is another's on the Hub
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": sorted({path.rpartition(".")[2] for path in paths.values()}),
        "fan_in_fan_out": any(getattr(one, "turned", False) for one in adapted.values()),
        "bias": "none",
        "inference_mode": True,
    }
    _write_json(folder / "adapter_config.json", config)
    kept = {name: one.to(DTYPES[dtype]).contiguous() for name, one in tensors.items()}
    write_state(folder / "adapter_model.safetensors", kept, {"format": "pt"})
    write_tokenizer(contents, folder)
    (folder / "README.md").write_text(card(contents, "peft"), encoding="utf-8")


def write_tokenizer(contents: ExportContents, folder: Path) -> None:
    """Write tokenizer.json, and what transformers needs to open it."""
    tokenizer, says = contents.tokenizer, contents.says
    config: dict[str, Any] = {
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
        config |= {name: added[number] for name, number in names if number in added}
    else:
        _write_json(folder / "tokenizer.json", tokenizer_json(tokenizer))
    if says.chat_template:
        config["chat_template"] = says.chat_template
    _write_json(folder / "tokenizer_config.json", config)


def _write_weights(
    tensors: Mapping[str, Tensor], folder: Path, dtype: torch.dtype, most: int
) -> None:
    shards: list[list[str]] = []  # names of each, in their order; a tensor is never cut
    size = most
    for name, tensor in tensors.items():
        bytes_ = tensor.numel() * dtype.itemsize
        if not shards or size + bytes_ > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += bytes_
    count, homes = len(shards), dict[str, str]()
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{count:05d}.safetensors"
        file = file if count > 1 else "model.safetensors"
        homes |= dict.fromkeys(names, file)
        shard = {name: tensors[name].to(dtype) for name in names}
        write_state(folder / file, shard, {"format": "pt"})  # transformers asks for the framework
    if count > 1:
        total = sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": homes}
        _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
