"""Tokens that begin and end texts, chat template and settings of generation of a model of the Hub.

They are in up to five files of a folder, all optional and all a stranger's: config.json,
generation_config.json, tokenizer_config.json, chat_template.jinja, and the template of
tokenizer.json.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from lowcomm_node.data.tokenizer import FileTokenizer
from lowcomm_node.errors import ConfigError
from lowcomm_node.models.open_weights import CONFIG, MAX_CONFIG, MAX_INDEX, read_json
from lowcomm_protocol.spec.sections import (
    GENERATION,
    GENERATION_TOKENS,
    MAX_CHAT_TEMPLATE,
    DataSettings,
    ExportSettings,
    shown,
)

_TOKENS = ("bos", "eos", "pad")
_OF_A_FILE = ("_from_model_config", "transformers_version")


@dataclass(frozen=True)
class Conventions:
    """The part that a run keeps."""

    begin_tokens: tuple[int, ...]
    end_token: int | None
    export: ExportSettings
    warnings: tuple[str, ...]
    """Reports of what a run can't keep."""


def conventions_of(
    folder: Path, tokenizer: FileTokenizer, vocab: int, positions: int = 0
) -> Conventions:
    """Read a folder; ``vocab``, ``positions``: tokens that the model knows, and reads at most.

    Raises ConfigError for a file that can't be read, or a template of too many tokens.
    """
    config, generation = (_read(folder / name) for name in (CONFIG, "generation_config.json"))
    words = _read(folder / "special_tokens_map.json") | _read(folder / "tokenizer_config.json")
    before, after = tokenizer.template
    warnings: list[str] = []
    marks: dict[str, tuple[int, ...]] = {}
    for name in _TOKENS:
        marks[name] = ()
        for source in (config, generation):
            value = source.get(f"{name}_token_id")
            numbers = _within(value, vocab)
            marks[name] = marks[name] or numbers
            if value is not None and not numbers:
                text = f"{name}_token_id = {shown(value, 60)} names no token of the model: left out"
                warnings.append(text)
        word = words.get(f"{name}_token")
        word = word.get("content") if isinstance(word, dict) else word
        number = tokenizer.number_of(word) if isinstance(word, str) and word else None
        if not marks[name] and number is not None:
            marks[name] = (number,)
    ends = after[-1:] or marks["eos"]
    end = ends[0] if ends else tokenizer.separator
    template, more = _chat_template(folder, words)
    kept, others = _generation(generation, vocab)
    try:
        return Conventions(
            DataSettings(tokenizer="local", begin_tokens=before).begin_tokens,
            end,
            ExportSettings(
                bos_token_id=next(iter(marks["bos"] or before), None),
                eos_token_id=marks["eos"][:16] or (() if end is None else (end,)),
                pad_token_id=next(iter(marks["pad"]), None),
                positions=positions,
                chat_template=template,
                generation=kept,
            ),
            (*warnings, *more, *others),
        )
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]
        where = ".".join(map(str, reason["loc"]))
        raise ConfigError(f"{folder}: {where}: {reason['msg']}: use another tokenizer.") from None


def _read(path: Path) -> dict[str, Any]:
    most = MAX_CONFIG if path.name == CONFIG else MAX_INDEX
    return read_json(path, most) if path.exists() else {}


def _within(value: object, vocab: int) -> tuple[int, ...]:
    """Tokens that a value names, or none if one is outside the vocabulary."""
    numbers = cast("list[object]", value) if isinstance(value, list) else [value]
    if all(type(one) is int and 0 <= one < vocab for one in numbers):
        return tuple(cast("list[int]", numbers))
    return ()


def _chat_template(folder: Path, words: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The template, and warnings."""
    beside = _read(folder / "chat_template.json")
    text: Any = beside.get("chat_template", words.get("chat_template"))
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            with path.open("rb") as file:
                data = file.read(4 * MAX_CHAT_TEMPLATE + 1)
            # Of a template that is too long anyway the last character may be cut.
            text = data.decode(errors="strict" if len(data) <= 4 * MAX_CHAT_TEMPLATE else "ignore")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} can't be read ({error}): load it again.") from None
    warnings: list[str] = []
    if isinstance(text, list):
        named: dict[str, Any] = {}
        for entry in text[:16]:
            if isinstance(entry, dict) and isinstance(entry.get("name"), str):
                named[entry["name"]] = entry.get("template")
        text = named.pop("default", None)
        warnings = [f"chat template {name[:40]!r}: only the default is kept" for name in named]
    if not isinstance(text, str):
        return "", warnings
    # As it lies in a signed run: text within a text.
    size = len(json.dumps(json.dumps(text)))
    if size > MAX_CHAT_TEMPLATE:
        long = f"the chat template takes {size:,} bytes, more than {MAX_CHAT_TEMPLATE:,}"
        return "", [*warnings, f"{long}: left out, add it to exports yourself"]
    return text, warnings


def _generation(content: Mapping[str, Any], vocab: int) -> tuple[dict[str, Any], list[str]]:
    """The settings that a run keeps, and warnings."""
    kept: dict[str, Any] = {}
    left: list[str] = []
    for name, value in content.items():
        if value is None or name in _OF_A_FILE:
            continue
        if name in GENERATION_TOKENS and not _within(value, vocab):
            continue
        try:
            kept[name] = GENERATION[name].validate_python(value)
        except (KeyError, ValidationError):
            left.append(f"{name[:40]} = {shown(value, 60)}")
    return kept, [f"generation_config.json: left out {', '.join(left[:20])}"] if left else []
