"""One file that llama.cpp, ollama and LM Studio open, and a Modelfile for ollama.

Weights keep the names that the library ``gguf`` gives those of transformers. Norms stay float32, as
llama.cpp's own converter keeps them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowcomm_node.data.tokenizer import FileTokenizer, Tokenizer
from lowcomm_node.errors import ConfigError
from lowcomm_node.export.contents import ExportContents
from lowcomm_node.export.huggingface import tokenizer_json
from lowcomm_node.models.transformer import frequencies
from lowcomm_node.system.command import load_optional
from lowcomm_protocol.spec.models import TransformerSettings

TYPES = {"float32": "F32", "bfloat16": "BF16", "q8_0": "Q8_0"}
"""gguf's names of dtypes."""
_CONVERT = "export with --format hf, and convert that with llama.cpp's convert_hf_to_gguf.py."
_BLOCK = 32
"""Values that share a scale in Q8_0."""
_SETTINGS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "key_length": "head_dim",
    "value_length": "head_dim",
    "rope_dimension_count": "head_dim",
    "rope_freq_base": "rope_theta",
    "layer_norm_rms_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
"""gguf's settings, by the keys of config.json."""
_PRE_TOKENIZERS = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
}
"""How the pattern begins by which a tokenizer cuts text into words, by llama.cpp's name of it."""


def write_file(contents: ExportContents, folder: Path, dtype: str) -> None:
    """Write the file and a Modelfile into a folder that exists. ``dtype`` is a key of `TYPES`.

    Raises ConfigError if the library is missing, or llama.cpp knows no such tokenizer.
    """
    if not isinstance(contents.settings, TransformerSettings):
        raise ConfigError(
            f"--format gguf does not write models of kind {contents.settings.kind!r}: {_CONVERT}"
        )
    library = load_optional("gguf", "--format gguf", "gguf")
    path = folder / f"{contents.name}-{TYPES[dtype].lower()}.gguf"
    writer = library.GGUFWriter(path, str(contents.form.config["model_type"]))
    writer.add_name(contents.name)
    writer.add_context_length(contents.positions)
    for name, key in _SETTINGS.items():
        getattr(writer, f"add_{name}")(contents.form.config[key])
    kind = "ALL_F32" if dtype == "float32" else f"MOSTLY_{TYPES[dtype]}"
    writer.add_file_type(library.LlamaFileType[kind].value)
    writer.add_quantization_version(library.GGML_QUANT_VERSION)
    _add_tokenizer(writer, library, contents)
    _add_tensors(writer, library, contents, TYPES[dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    # Without a template of its own the model continues text; one for chats would only confuse it.
    plain = "" if contents.says.chat_template else 'TEMPLATE "{{ .Prompt }}"\n'
    (folder / "Modelfile").write_text(f"FROM ./{path.name}\n{plain}", encoding="utf-8")


def _add_tensors(writer: Any, library: Any, contents: ExportContents, kind: str) -> None:
    config = contents.form.config
    architecture = library.MODEL_ARCH[str(config["model_type"]).upper()]
    names = library.get_tensor_name_map(architecture, config["num_hidden_layers"])
    if config["rope_parameters"]["rope_type"] == "llama3":
        settings = cast("TransformerSettings", contents.settings)
        plain = frequencies(settings.model_copy(update={"rope_scaling": "none"}))
        slowing = (plain / frequencies(settings)).float().numpy()  # llama.cpp divides by it
        writer.add_tensor("rope_freqs.weight", slowing)
    for name, tensor in contents.tensors.items():
        values: NDArray[np.float32] = _rows(name, tensor.to(torch.float32), config).numpy()
        # A row that the blocks of Q8_0 do not divide stays as it is.
        whole = kind != "Q8_0" or values.shape[-1] % _BLOCK == 0
        form = library.GGMLQuantizationType[kind if values.ndim > 1 and whole else "F32"]
        coded = library.quants.quantize(values, form)
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(theirs, coded, raw_dtype=form)


def _rows(name: str, values: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Rows in llama.cpp's order: for a Llama it turns neighbouring channels of a head, where we
    turn channels half a head apart."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    key = heads.get(name.split(".")[-2])
    if config["model_type"] != "llama" or key is None:
        return values
    halves = values.view(config[key], 2, config["head_dim"] // 2, *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape).contiguous()


def _add_tokenizer(writer: Any, library: Any, contents: ExportContents) -> None:
    tokenizer, numbers = contents.tokenizer, range(contents.settings.vocab)
    if isinstance(tokenizer, FileTokenizer):
        content = json.loads(tokenizer.content)
    else:
        content = tokenizer_json(tokenizer)
    model = content["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        why = "is no byte-level BPE, which is all that this export writes"
        raise ConfigError(f"{tokenizer.file} {why}: {_CONVERT}")
    added = {one["id"]: one for one in content["added_tokens"]}
    tokens = {number: token for token, number in model["vocab"].items()}
    tokens |= {number: one["content"] for number, one in added.items()}
    kinds = library.TokenType

    def kind_of(number: int) -> int:
        if number not in added:
            return kinds.NORMAL if number in tokens else kinds.UNUSED
        # llama.cpp prints no CONTROL token, and reads one only where it is asked to.
        return kinds.CONTROL if added[number]["special"] else kinds.USER_DEFINED

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(content, tokenizer))
    # A model may have room for more tokens than its tokenizer has.
    writer.add_token_list([tokens.get(number, f"[unused{number}]") for number in numbers])
    writer.add_token_types([kind_of(number) for number in numbers])
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    # llama.cpp opens no file without any: one whose product is no token changes nothing.
    writer.add_token_merges(merges or ["! !"])
    _add_ends(writer, contents, [number for number in numbers if number not in tokens])


def _add_ends(writer: Any, contents: ExportContents, unused: list[int]) -> None:
    """The tokens that begin and end a text, by llama.cpp's names, and the template of chats."""
    says, begins = contents.says, contents.tokenizer.begins
    writer.add_add_bos_token(len(begins) == 1)
    # Without an end llama.cpp takes token 11: one that no text has is better.
    ends = says.eos_token_id or unused[:1]
    values = {"bos": begins[0] if len(begins) == 1 else says.bos_token_id, "pad": says.pad_token_id}
    values |= dict(zip(("eos", "eot", "eom"), ends, strict=False))
    for name, number in values.items():
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    if says.chat_template:
        writer.add_chat_template(says.chat_template)


def _pre_tokenizer(content: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """llama.cpp's name of the way in which text is cut into words. Raises ConfigError."""
    outer = content["pre_tokenizer"] or {}
    parts = outer.get("pretokenizers", [outer])
    patterns = [part["pattern"].get("Regex", "") for part in parts if part["type"] == "Split"]
    spaced = any(part.get("add_prefix_space") for part in parts)
    normalizer = content.get("normalizer") or {}
    changes = {one["type"] for one in normalizer.get("normalizers", [normalizer]) if one}
    if spaced or changes - {"NFC"}:  # llama.cpp takes a text as it is
        patterns = [""]
    # Without merges the cut does not matter, so "bytes" may name any.
    plain = {("ByteLevel",): "gpt-2", ("Digits", "ByteLevel"): "smollm"}
    kinds = tuple(part["type"] for part in parts)
    if not patterns and kinds in plain:
        return plain[kinds]
    for name, begins in _PRE_TOKENIZERS.items():
        if len(patterns) == 1 and patterns[0].startswith(begins):
            return name
    why = "cuts text into words in a way that this export does not know"
    raise ConfigError(f"{tokenizer.file} {why}: {_CONVERT}")
