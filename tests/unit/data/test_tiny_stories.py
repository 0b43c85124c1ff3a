"""The tiny stories: the same everywhere, consistent in themselves, and too many to remember."""

import hashlib
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lowcomm_node.data.stories import tell
from lowcomm_node.data.tokenizer import StoryTokenizer, identify, open_tokenizer
from lowcomm_node.errors import ConfigError
from lowcomm_node.export.huggingface import tokenizer_json
from lowcomm_node.models.inference import tokenizer_of

SOURCE = "builtin:stories"


@cache
def stories() -> tuple[str, ...]:
    return tuple(map(tell, range(600)))


def test_the_stories_and_their_tokens_are_the_same_bytes_on_every_machine() -> None:
    told = hashlib.sha256("".join(stories()).encode()).hexdigest()
    assert told == "ac2df3e141506da9f993216118355f712e66e6a9688d83aaa45f88e1fdde29e0"
    assert (
        StoryTokenizer().sha256
        == "c028afabb3541d4022e550e65732106d744c8637c229df7af3da54e532cd8e80"
    )


@pytest.mark.parametrize(
    "text", [b"", b"Once upon a time", b"\x00\xff Mira", "Größe, 中文".encode(), b"a  fox\n\n"]
)
def test_every_text_comes_back_from_its_tokens(text: bytes) -> None:
    tokenizer = open_tokenizer(SOURCE)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode([int(token) for token in tokens]) == text.decode(errors="replace")
    assert all(0 <= token < tokenizer.vocab for token in tokens)


def test_a_checkpoint_finds_its_words_without_a_file(tmp_path: Path) -> None:
    ours = StoryTokenizer()
    path = tmp_path / "checkpoints" / "step-0000000001"
    info = SimpleNamespace(path=path)
    checkpoint = SimpleNamespace(meta={"tokenizer": identify(ours)}, info=info)
    assert tokenizer_of(cast("Any", checkpoint)).name == ours.name
    checkpoint.meta = {"tokenizer": identify(ours) | {"sha256": "0" * 64}}
    with pytest.raises(ConfigError, match="was trained with builtin:stories"):
        tokenizer_of(cast("Any", checkpoint))


def test_transformers_reads_the_same_tokens_from_an_export() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(StoryTokenizer())))
    for text in (*stories()[:50], "Größe  {x} Mira's"):
        ours = [int(token) for token in StoryTokenizer().encode(text.encode())]
        assert theirs.encode(text).ids == ours
        assert theirs.decode(ours) == text
