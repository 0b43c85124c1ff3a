"""A tokenizer.json comes from a run's creator, a stranger: one that multiplies text, memory or time
is refused in a process of its own, and those that models have are not."""

import base64
import json
import resource
from pathlib import Path
from typing import Any

import pytest

from lowcomm_node.data.tokenizer import open_tokenizer
from lowcomm_node.data.trial import find_problem
from lowcomm_node.errors import ConfigError

pytestmark = pytest.mark.slow

VOCAB = {letter: number for number, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz .")}


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, object]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(*parts: dict[str, object], name: str = "normalizers") -> dict[str, object]:
    return {"type": "Sequence", name: list(parts)}


def mapped(normalized: bytes) -> dict[str, object]:
    """SentencePiece's table, without a character that leads to its entries."""
    table = (4).to_bytes(4, "little") + bytes(4) + normalized
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def template(count: int) -> dict[str, object]:
    start = {"SpecialToken": {"id": "a", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [*[start] * count, text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"a": {"id": "a", "ids": [1] * count, "tokens": ["a"] * count}},
    }


def added(content: str) -> dict[str, object]:
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "special"], False)
    return {"id": 1, "content": content, "normalized": True, **flags}


def tokenizer_json(**changes: object) -> bytes:
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer"))
    rest = {"added_tokens": [], "post_processor": None, "decoder": None}
    bpe = {"type": "BPE", "vocab": VOCAB, "merges": []}
    return json.dumps({"version": "1.0", **parts, **rest, "model": bpe} | changes).encode()


BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": True,
    "trim_offsets": True,
    "use_regex": True,
}
LLAMA_2 = sequence({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"))
HARMLESS: dict[str, dict[str, object]] = {
    "llama 2": {
        "normalizer": LLAMA_2,
        "decoder": sequence(
            replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}, name="decoders"
        ),
        "post_processor": template(1),
    },
    "t5": {
        "normalizer": sequence({"type": "NFKC"}, replace(" {2,}", "▁", "Regex")),
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "always",
            "split": True,
        },
    },
    "clip": {
        "normalizer": sequence(
            {"type": "NFC"}, replace(r"\s+", " ", "Regex"), {"type": "Lowercase"}
        ),
        "model": {
            "type": "BPE",
            "vocab": VOCAB,
            "merges": [],
            "end_of_word_suffix": "</w>",
        },
    },
    "bert": {
        "model": {
            "type": "WordPiece",
            "vocab": VOCAB,
            "unk_token": "a",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        }
    },
}

GROWS = "may make a text more than 16 times as long"
HOSTILE: dict[str, tuple[str, dict[str, object]]] = {
    "one replacement": (GROWS, {"normalizer": replace("e", "x" * 99)}),
    "nested": (GROWS, {"normalizer": sequence(sequence(replace("Ω", "b" * 50)))}),
    "nothing": (GROWS, {"normalizer": replace("", "x" * 40)}),
    "between all characters": (GROWS, {"normalizer": replace("q*", "x" * 32, "Regex")}),
    "prefix": (GROWS, {"normalizer": {"type": "Prepend", "prepend": "x" * 99}}),
    "table": (GROWS, {"normalizer": mapped(b"a\0" + b"x" * 99 + b"\0")}),
    "bytes of bytes": (
        GROWS,
        {"pre_tokenizer": sequence(*[BYTE_LEVEL] * 9, name="pretokenizers")},
    ),
    "decoder": (GROWS, {"decoder": replace("a", "x" * 99)}),
    "token": (
        "a token of more than 1024",
        {"model": {"type": "BPE", "vocab": {"a" * 5000: 0}, "merges": []}},
    ),
    "affix": (
        "prefix or suffix of more",
        {"model": {"type": "BPE", "vocab": VOCAB, "merges": [], "end_of_word_suffix": "x" * 99}},
    ),
    "words": (
        "words of more than 1000",
        {
            "model": {
                "type": "WordPiece",
                "vocab": VOCAB,
                "unk_token": "a",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 10**9,
            }
        },
    ),
    "template": ("adds more than 64 tokens", {"post_processor": template(30)}),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_tokenizer_as_models_have_it_is_taken(name: str) -> None:
    assert find_problem(tokenizer_json(**HARMLESS[name])) is None


@pytest.mark.parametrize("name", HOSTILE)
def test_a_tokenizer_that_multiplies_is_refused_with_the_reason(name: str) -> None:
    reason, changes = HOSTILE[name]
    assert reason in str(find_problem(tokenizer_json(**changes)))


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        open_tokenizer(str(path))
    return str(caught.value)


def test_a_tokenizer_that_takes_gigabytes_takes_them_from_nobody(tmp_path: Path) -> None:
    """A tokenizer of 12 kB whose own token becomes 32 million letters as the file is parsed."""
    bomb = sequence(replace("a", "b" * 4000), replace("b", "c" * 8000))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told = refusal(tmp_path / "t.json", tokenizer_json(normalizer=bomb, added_tokens=[added("a")]))
    assert "t.json takes too much memory or time: name another file" in told
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (64 << 10)


def test_a_pattern_that_takes_the_square_of_a_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern: dict[str, Any] = {"type": "Split", "invert": False, "behavior": "Isolated"}
    endless = pattern | {"pattern": {"Regex": r"[\s\S]*(?<=zz)"}}
    monkeypatch.setattr("lowcomm_node.data.tokenizer.TRIAL_SECONDS", 2.0)
    told = refusal(tmp_path / "t.json", tokenizer_json(pre_tokenizer=endless))
    assert "t.json can't be read within 2 s" in told
