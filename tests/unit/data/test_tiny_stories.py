"""The tiny stories: the same everywhere, consistent in themselves, and too many to remember."""

import hashlib
import json
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from lowcomm_node.data.corpus import open_corpus
from lowcomm_node.data.stories import (
    CHARACTERS,
    HELD_OUT_EVERY,
    STORIES,
    TROUBLES,
    StoryTokenizer,
    count_rules,
    tell,
    words,
)
from lowcomm_node.data.tokenizer import identify, open_tokenizer
from lowcomm_node.errors import ConfigError
from lowcomm_node.export.huggingface import tokenizer_json
from lowcomm_node.models.inference import tokenizer_of

SOURCE = "builtin:stories"


@cache
def stories() -> tuple[str, ...]:
    return tuple(tell(number)[0] for number in range(600))


def test_the_stories_and_their_tokens_are_the_same_bytes_on_every_machine() -> None:
    told = hashlib.sha256("".join(stories()).encode()).hexdigest()
    assert told == "ac2df3e141506da9f993216118355f712e66e6a9688d83aaa45f88e1fdde29e0"
    assert (
        StoryTokenizer().sha256
        == "c028afabb3541d4022e550e65732106d744c8637c229df7af3da54e532cd8e80"
    )


def test_what_helps_is_what_was_found_and_nobody_else_comes_in() -> None:
    names = {one.name for one in CHARACTERS}
    for story in stories():
        assert sum(one.thing in story for one in TROUBLES) == 1
        assert len(names.intersection(re.findall("[A-Z][a-z]+", story))) == 2


def test_a_model_can_hardly_remember_them_but_can_learn_them() -> None:
    nats = [tell(number)[1] for number in range(len(stories()))]
    assert min(nats) > 2 * np.log(STORIES), "far more stories than are told"
    tokens = sum(len(StoryTokenizer().encode(story.encode())) for story in stories())
    assert sum(nats) / tokens < 0.3
    assert count_rules() < 200


def test_one_story_in_twenty_is_held_out() -> None:
    documents = [next(open_corpus(SOURCE).documents())]
    assert documents[0].held_out
    assert documents[0].text.decode() == stories()[0]
    assert STORIES % HELD_OUT_EVERY == 0


@pytest.mark.parametrize(
    "text", [b"", b"Once upon a time", b"\x00\xff Mira", "Größe, 中文".encode(), b"a  fox\n\n"]
)
def test_every_text_comes_back_from_its_tokens(text: bytes) -> None:
    tokenizer = open_tokenizer(SOURCE)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode([int(token) for token in tokens]) == text.decode(errors="replace")
    assert all(0 <= token < tokenizer.vocab for token in tokens)


def test_a_story_is_words_not_bytes_and_a_model_may_know_more_tokens() -> None:
    tokenizer = StoryTokenizer()
    tokens = [int(token) for token in tokenizer.encode(stories()[0].encode())]
    letters = [token for token in tokens if chr(token).isalpha() and token < 256]
    assert {chr(letter) for letter in letters} <= set("AIa")
    assert 256 + len(words()) <= tokenizer.vocab
    assert tokenizer.decode([tokenizer.vocab - 1, tokenizer.vocab + 5]) == "\ufffd\ufffd"


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
