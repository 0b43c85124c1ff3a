"""How a model begins and ends is read from its folder, kept in its run, followed in training and
`generate`, and written out again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.hub_tokenizers import CHAT, write_tokenizer
from lowcomm_node.data import open_data, open_tokenizer
from lowcomm_node.data.tokenizer import FileTokenizer, prompt_of
from lowcomm_node.errors import ConfigError
from lowcomm_node.models.conventions import Conventions, conventions_of
from lowcomm_protocol.errors import SpecError
from lowcomm_protocol.spec.run import parse_toml
from lowcomm_protocol.spec.sections import MAX_CHAT_TEMPLATE

VOCAB = 340
RUN = '[run]\nname = "a"\n[model]\nvocab = 400\n[data]\ntokenizer = "local"\n'


def folder_of(folder: Path, begins: bool = True, **files: Any) -> Path:
    """A folder with a tokenizer and these files, ``.json`` unless they are text."""
    write_tokenizer(folder / "tokenizer.json", begins=begins)
    for name, content in files.items():
        is_text = isinstance(content, str)
        path = folder / f"{name}.{'jinja' if is_text else 'json'}"
        path.write_text(content if is_text else json.dumps(content))
    return folder


def read(folder: Path) -> Conventions:
    return conventions_of(folder, FileTokenizer(folder / "tokenizer.json"), VOCAB, 8192)


def test_all_that_a_folder_says_is_kept(tmp_path: Path) -> None:
    told = read(
        folder_of(
            tmp_path,
            config={"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": 3},
            generation_config={"eos_token_id": [2, 1], "temperature": 0.6, "do_sample": True},
            chat_template=CHAT,
        )
    )
    assert (told.begin_tokens, told.end_token) == ((0,), 1)
    export = told.export
    assert (export.bos_token_id, export.eos_token_id, export.pad_token_id) == (0, (1, 2), 3)
    assert (export.positions, export.chat_template) == (8192, CHAT)
    assert export.generation == {"eos_token_id": [2, 1], "temperature": 0.6, "do_sample": True}
    assert not told.warnings


def test_what_is_no_token_of_the_model_is_left_out_and_said(tmp_path: Path) -> None:
    config = {"pad_token_id": -1, "bos_token_id": 10**30, "eos_token_id": [1, "x"]}
    told = read(folder_of(tmp_path, config=config, generation_config={"custom_generate": "a/b"}))
    assert told.end_token == 1, "by its name"
    assert told.export.pad_token_id is None
    for part in ("pad_token_id = -1", "bos_token_id = 1000", "eos_token_id", "custom_generate"):
        assert any(part in warning for warning in told.warnings), part
    assert told.export.generation == {}


def test_chat_templates_are_found_in_all_their_places_and_bounded(tmp_path: Path) -> None:
    named = [{"name": "default", "template": CHAT}, {"name": "tool_use", "template": "x"}]
    told = read(folder_of(tmp_path, tokenizer_config={"chat_template": named}))
    assert told.export.chat_template == CHAT and "'tool_use'" in told.warnings[0]
    for long in ("x" * MAX_CHAT_TEMPLATE, "x" + "€" * 2 * MAX_CHAT_TEMPLATE):
        (tmp_path / "chat_template.jinja").write_text(long)
        told = read(tmp_path)
        assert told.export.chat_template == "" and "left out" in told.warnings[0]
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja can't be read"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("begin_tokens = [400]\n", "token 400 .* is not below model.vocab = 400"),
        ("end_token = -1\n", "end_token = -1"),
        ("[export]\neos_token_id = [401]\n", "token 401"),
        ("[export.generation]\neos_token_id = [1, 401]\n", "token 401"),
        ("[export.generation]\npad_token_id = 401\n", "token 401"),
        ("[export.generation]\ntrust_remote_code = true\n", "unknown key 'trust_remote_code'"),
        ('[export.generation]\ntemperature = "1"\n', "temperature"),
        ("[export.generation]\ntop_p = nan\n", "top_p"),
        (f'[export]\nchat_template = "{"x" * (MAX_CHAT_TEMPLATE + 1)}"\n', "chat_template"),
    ],
)
def test_tokens_and_settings_out_of_bounds_are_refused(text: str, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        parse_toml(RUN + text)


def test_documents_begin_and_end_as_the_run_says_and_prompts_begin_so(tmp_path: Path) -> None:
    path = str(folder_of(tmp_path) / "tokenizer.json")
    plain, marked = open_tokenizer(path), open_tokenizer(path, (0,), 2)
    lines = [json.dumps({"text": f"the tea of day {day} is ready"}) for day in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    texts = [f"the tea of day {day} is ready".encode() for day in range(40)]
    found = {}
    for tokenizer in (plain, marked):
        data = open_data(str(tmp_path / "text.jsonl"), tokenizer, tmp_path / "cache")
        splits = data.train.numbers, data.held_out.numbers
        found[tokenizer.name] = np.concatenate(splits).tolist()
    encoded = [token for text in texts for token in (0, *marked.encode(text).tolist(), 2)]
    assert sorted(found[marked.name]) == sorted(encoded)
    assert found[marked.name][0] == 0 and found[marked.name][-1] == 2
    assert 0 not in found[plain.name], "runs of 0.1 mean what they meant"
    assert prompt_of(marked, "tea") == [0, *marked.encode(b"tea").tolist()]
    assert prompt_of(marked, "") == [0]
    assert prompt_of(plain, "") == plain.encode(b"\n").tolist()
