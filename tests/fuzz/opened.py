"""Files of open weights and tokenizers: what a creator's folder holds, and what peers send."""

import json
from hashlib import sha256
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import save
from stored import folder
from target import Made, target

from lowcomm_node.data import trial
from lowcomm_node.data.tokenizer import _TRIED, BytesTokenizer, FileTokenizer, check_of
from lowcomm_node.errors import ConfigError
from lowcomm_node.export.huggingface import tokenizer_json
from lowcomm_node.models.base import family_of
from lowcomm_node.models.configs import read_config
from lowcomm_node.models.conventions import conventions_of
from lowcomm_node.models.open_weights import check_weights, files_of
from lowcomm_node.models.transformer import FAMILY
from lowcomm_protocol.spec.models import TransformerSettings
from lowcomm_protocol.spec.sections import MAX_CHAT_TEMPLATE, ExportSettings, read_model

SMALL = TransformerSettings(
    vocab=8, layers=1, width=8, heads=2, kv_heads=1, feed_forward=8, context=8, qk_norm=False
)
SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@target
def open_config() -> Made:
    """A config.json: settings within their bounds, or a reason."""
    form = FAMILY.huggingface(SMALL)
    assert form is not None

    def run(data: bytes) -> None:
        try:
            config = json.loads(data)
        except (ValueError, RecursionError):
            return
        if not isinstance(config, dict):
            return
        try:
            read = read_config(config, "config.json")
        except ConfigError as error:
            assert len(str(error)) < 2000
            return
        assert 8 <= read.settings.context <= read.longest
        assert read.settings == read_model(read.settings.model_dump())

    changes: list[dict[str, object]] = [
        {},
        {"model_type": "mistral", "sliding_window": 64},
        {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]},
        {"rope_parameters": {**SCALED, "rope_theta": 10_000.0}},
        {"rope_parameters": None, "rope_scaling": SCALED},
        {"auto_map": {"AutoModel": "a.B"}, "num_hidden_layers": 10**9},
        {"head_dim": -1, "hidden_size": True, "vocab_size": 1e300},
    ]
    return run, [json.dumps({**form.config, **change}).encode() for change in changes]


@target
def open_weights() -> Made:
    """A file of weights, or an index of several: the small model, or a reason."""
    home = folder()
    form = FAMILY.huggingface(SMALL)
    assert form is not None
    model = family_of(SMALL).blank(SMALL)
    tensors = {form.names[name]: torch.zeros(one.shape) for name, one in model.named_parameters()}

    def run(data: bytes) -> None:
        index, weights = home / "model.safetensors.index.json", home / "model.safetensors"
        is_index = data[:1] == b"\1"
        index.unlink(missing_ok=True)
        (index if is_index else weights).write_bytes(data[1:])
        try:
            files = files_of(home)
            assert all(file.parent == home for file in files)
            check_weights(SMALL, files)
        except ConfigError as error:
            assert len(str(error)) < 2000

    whole = save(tensors, {"format": "pt"})
    halves = save({name: one.bfloat16() for name, one in tensors.items()})
    less = save(dict(list(tensors.items())[:-1]))
    listed = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    outside = {"weight_map": {"lm_head.weight": "../model.safetensors"}}
    return run, [
        *(b"\0" + one for one in (whole, halves, less)),
        *(b"\1" + json.dumps(one).encode() for one in (listed, outside)),
    ]


@target
def folder_conventions() -> Made:
    """One of the files that say how a model begins and ends: tokens of the model, or a reason."""
    home = folder()
    tokenizer = home / "tokenizer.json"
    tokenizer.write_text(json.dumps(tokenizer_json(BytesTokenizer())))
    opened = FileTokenizer(tokenizer)
    names = (
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    )

    def run(data: bytes) -> None:
        for name in names:
            (home / name).unlink(missing_ok=True)
        (home / names[data[0] % len(names) if data else 0]).write_bytes(data[1:])
        try:
            read = conventions_of(home, opened, 300)
        except ConfigError as error:
            assert len(str(error)) < 2000
            return
        told = [*read.begin_tokens, *read.export.eos_token_id, read.export.pad_token_id or 0]
        assert max(told) < 300 and len(read.export.chat_template) <= MAX_CHAT_TEMPLATE
        assert ExportSettings.model_validate(read.export.model_dump()) == read.export

    ends = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": -1}
    chat = [{"name": "default", "template": "{{ messages }}"}, {"name": "tools", "template": ""}]
    words = {"eos_token": {"content": "a"}, "chat_template": chat}
    says = {**ends, "temperature": 0.6, "suppress_tokens": [1], "cache_implementation": "hybrid"}
    told = [json.dumps(one).encode() for one in (ends, says, words)]
    return run, [bytes([place]) + one for place, one in enumerate((*told, b"{{ messages }}"))]


def _multiplies(data: bytes) -> bool:
    """Whether the trial refuses a file. It runs here, on short texts: a process for each input
    would take most of the time."""
    with patch.object(trial, "_PROBE", 64):
        try:
            return trial.find_problem(data) is not None
        except KeyboardInterrupt:
            raise
        except BaseException:  # where the library panics, it is no Exception
            return False


@target
def tokenizer_file() -> Made:
    """A tokenizer.json: tokens below its vocabulary, or a reason."""
    path: Path = folder() / "tokenizer.json"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        if _multiplies(data):
            return
        digest = sha256(data).digest()
        _TRIED.add(digest)
        try:
            found = FileTokenizer(path)
            tokens = found.encode(b"a text of 12 words, or so\n")
        except ConfigError as error:
            assert len(str(error)) < 2000
            return
        finally:
            _TRIED.discard(digest)
        assert all(token < found.vocab for token in tokens.tolist())
        assert isinstance(found.decode(tokens.tolist()), str)
        assert len(check_of(found)) == 64

    plain = tokenizer_json(BytesTokenizer())
    merged = json.loads(json.dumps(plain))
    merged["model"]["vocab"]["ab"] = 256
    merged["model"]["merges"] = [["a", "b"]]
    words = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 7}, "unk_token": "[UNK]"}
    added = [{"id": 300, "content": "<eos>", "special": True, "normalized": False,
              "single_word": False, "lstrip": False, "rstrip": False}]  # fmt: skip
    seeds = [plain, merged, {**plain, "model": words}, {**plain, "added_tokens": added}]
    small = {**plain, "model": {**words, "vocab": {}}}
    return run, [json.dumps(one).encode() for one in (*seeds, small)]
