"""One file that llama.cpp, ollama and LM Studio open, and a Modelfile for ollama.

Weights keep the names that the library ``gguf`` gives those of transformers. Norms stay float32, as
llama.cpp's own converter keeps them.
"""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowcomm_node.data.tokenizer import FileTokenizer, Tokenizer, describe
from lowcomm_node.errors import ConfigError
from lowcomm_node.export.contents import ExportContents
from lowcomm_node.export.huggingface import tokenizer_json
from lowcomm_node.models.transformer import frequencies
from lowcomm_node.system.command import install
from lowcomm_protocol.spec.models import TransformerSettings

TYPES = {"float32": "F32", "bfloat16": "BF16", "q8_0": "Q8_0"}
"""gguf's name of each dtype."""
_BLOCK = 32
"""Values that share a scale in Q8_0."""
_PRE_TOKENIZERS = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
}
"""How the pattern begins by which a tokenizer cuts text into words, by llama.cpp's name of it."""


def write_file(contents: ExportContents, folder: Path, dtype: str) -> None:
    """Write the file and a Modelfile into a folder that exists. ``dtype`` is a key of `TYPES`.

    Raises ConfigError if the library is missing, or llama.cpp does not know such a tokenizer.
    """
    if not isinstance(contents.settings, TransformerSettings):
        raise ConfigError(
            f"--format gguf does not write models of kind {contents.settings.kind!r}: export with "
            "--format hf, and convert that with llama.cpp's convert_hf_to_gguf.py."
        )
    library = _library()
    path = folder / f"{contents.name}-{TYPES[dtype].lower()}.gguf"
    writer = library.GGUFWriter(path, str(contents.form.config["model_type"]))
    _add_settings(writer, library, contents, dtype)
    _add_tokenizer(writer, library, contents)
    _add_tensors(writer, library, contents, TYPES[dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    # Without a template of its own the model continues text; one for chats would only confuse it.
    plain = "" if contents.says.chat_template else 'TEMPLATE "{{ .Prompt }}"\n'
    (folder / "Modelfile").write_text(f"FROM ./{path.name}\n{plain}", encoding="utf-8")


def _add_settings(writer: Any, library: Any, contents: ExportContents, dtype: str) -> None:
    config = contents.form.config
    writer.add_name(contents.name)
    writer.add_context_length(contents.positions)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    kind = TYPES[dtype]
    writer.add_file_type(
        library.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"].value
    )
    writer.add_quantization_version(library.GGML_QUANT_VERSION)


def _add_tensors(writer: Any, library: Any, contents: ExportContents, kind: str) -> None:
    config = contents.form.config
    architecture = library.MODEL_ARCH[str(config["model_type"]).upper()]
    names = library.get_tensor_name_map(architecture, config["num_hidden_layers"])
    if config["rope_parameters"]["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _slowing(contents))
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


def _slowing(contents: ExportContents) -> NDArray[np.float32]:
    """By what llama.cpp divides each frequency."""
    settings = cast("TransformerSettings", contents.settings)
    plain = frequencies(settings.model_copy(update={"rope_scaling": "none"}))
    return (plain / frequencies(settings)).float().numpy()


def _add_tokenizer(writer: Any, library: Any, contents: ExportContents) -> None:
    told = _content_of(contents.tokenizer)
    model = told["model"]
    added = {one["id"]: one for one in told["added_tokens"]}
    tokens = {number: token for token, number in model["vocab"].items()}
    tokens |= {number: one["content"] for number, one in added.items()}
    size = contents.settings.vocab
    kinds = library.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(told, contents.tokenizer))
    # A model may have room for more tokens than its tokenizer has.
    writer.add_token_list([tokens.get(number, f"[unused{number}]") for number in range(size)])
    writer.add_token_types([_token_type(number, tokens, added, kinds) for number in range(size)])
    writer.add_token_merges(_merges(model))
    _add_ends(writer, contents, [number for number in range(size) if number not in tokens])


def _add_ends(writer: Any, contents: ExportContents, unused: list[int]) -> None:
    """The tokens that begin and end a text, by llama.cpp's names, and the template of chats."""
    says, begins = contents.says, contents.tokenizer.begins
    writer.add_add_bos_token(len(begins) == 1)
    bos = begins[0] if len(begins) == 1 else says.bos_token_id
    if bos is not None:
        writer.add_bos_token_id(bos)
    # Without an end llama.cpp takes token 11: one that no text has is better.
    ends = says.eos_token_id or unused[:1]
    adds = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    for number, add in zip(ends, adds, strict=False):
        add(number)
    if says.pad_token_id is not None:
        writer.add_pad_token_id(says.pad_token_id)
    if says.chat_template:
        writer.add_chat_template(says.chat_template)


def _token_type(
    number: int, tokens: Mapping[int, str], added: Mapping[int, dict[str, Any]], kinds: Any
) -> int:
    if number not in tokens:
        return kinds.UNUSED
    if number not in added:
        return kinds.NORMAL
    # llama.cpp prints no CONTROL token, and reads one only where it is asked to.
    return kinds.CONTROL if added[number]["special"] else kinds.USER_DEFINED


def _merges(model: Mapping[str, Any]) -> list[str]:
    """The merges of a BPE. llama.cpp opens no file without any: one whose product is no token
    changes nothing."""
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    return merges or ["! !"]


def _content_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of its tokenizer.json. Raises ConfigError if it is no byte-level BPE."""
    if not isinstance(tokenizer, FileTokenizer):
        return tokenizer_json(tokenizer)
    told = json.loads(tokenizer.content)
    if told["model"].get("type") != "BPE" or told["model"].get("byte_fallback"):
        raise ConfigError(
            f"{describe(tokenizer)} is no byte-level BPE, which is all that this export writes: "
            "export with --format hf, and convert that with llama.cpp's convert_hf_to_gguf.py."
        )
    return told


def _pre_tokenizer(told: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """llama.cpp's name of the way in which text is cut into words. Raises ConfigError."""
    outer = told["pre_tokenizer"] or {}
    parts = outer.get("pretokenizers", [outer])
    patterns = [part["pattern"].get("Regex", "") for part in parts if part["type"] == "Split"]
    spaced = any(part.get("add_prefix_space") for part in parts)
    normalizer = told.get("normalizer") or {}
    changes = {one["type"] for one in normalizer.get("normalizers", [normalizer]) if one}
    if spaced or changes - {"NFC"}:  # llama.cpp takes a text as it is
        patterns = [""]
    if not patterns:
        # Without merges the cut does not matter, so "bytes" may name any.
        if [part["type"] for part in parts] == ["ByteLevel"]:
            return "gpt-2"
        if [part["type"] for part in parts] == ["Digits", "ByteLevel"]:
            return "smollm"
    for name, begins in _PRE_TOKENIZERS.items():
        if len(patterns) == 1 and patterns[0].startswith(begins):
            return name
    raise ConfigError(
        f"{describe(tokenizer)} cuts text into words in a way that this export does not know: "
        "export with --format hf, and convert that with llama.cpp's convert_hf_to_gguf.py."
    )


def _library() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise ConfigError(f"--format gguf needs the library gguf: {install('[gguf]')}.") from None
