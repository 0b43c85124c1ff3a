"""Conversations as text: a tokenizer's chat template, and the parts that are answers.

A template is a program, and may come from a stranger: Jinja's sandbox gives it no attribute that
leads out of its data, and nothing that it could change (``rendering.py``).
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from lowcomm_node.data import rendering
from lowcomm_node.data.pack import MASKED
from lowcomm_node.data.rendering import compile_template, render
from lowcomm_node.data.tokenizer import FileTokenizer, Tokenizer
from lowcomm_node.errors import ConfigError, DataError
from lowcomm_node.system.command import load_optional
from lowcomm_node.system.units import clean
from lowcomm_protocol.spec.sections import ExportSettings

RENDER_SECONDS = 60.0
"""For the process that renders a stranger's template. It also bounds its processor time itself: its
parent may be killed meanwhile."""


class ChatTemplate:
    """Renders conversations as a tokenizer's template has it."""

    def __init__(self, template: str, tokens: Mapping[str, str]) -> None:
        """``tokens``: texts such as ``bos_token``. Raises ConfigError."""
        self.source = template
        errors = load_optional("jinja2", "A chat template", "hf")
        try:
            compiled = compile_template(template)
        except errors.TemplateError as error:
            raise ConfigError(
                f"The chat template is not read ({error}): use that of another tokenizer."
            ) from None
        self._render = partial(render, compiled, words=tokens)

    def read(self, value: object, field: str, where: str) -> list[bytes]:
        """A conversation as text for `encode_chat`. Several, one for each answer, where the
        template writes messages otherwise once others follow. Raises DataError."""
        try:
            messages = cast("list[dict[str, Any]]", value)
            answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        except (TypeError, KeyError):
            raise DataError(
                f"{where}: {field!r} is no list of messages with role and content: name another "
                "field with --field."
            ) from None
        try:
            spans = [(self._span(messages, place), messages[: place + 1]) for place in answers]
            whole = self._render(messages, False)
            together = [span for (span, text), _ in spans if whole.startswith(text)]
            if len(together) == len(spans):
                rendered = [(whole, together)] if spans else []
            else:
                rendered = [(text, [span]) for (span, text), _ in spans]
        except Exception as error:  # whatever a template may raise
            raise DataError(
                f"{where}: the chat template refuses these messages ({error}): correct or remove "
                "them."
            ) from None
        # JSON can hold half of a surrogate pair, which UTF-8 can't.
        return [
            json.dumps([text.encode(errors="replace").decode(), learned]).encode()
            for text, learned in rendered
        ]

    def _span(self, messages: Sequence[dict[str, Any]], place: int) -> tuple[tuple[int, int], str]:
        """First and last character of an answer in the text up to it, and that text."""
        before = self._render(messages[:place], True)
        text = self._render(messages[: place + 1], False)
        same = (n for n, pair in enumerate(zip(before, text, strict=False)) if pair[0] != pair[1])
        first = len(before) if text.startswith(before) else next(same, len(text))
        return (first, len(text)), text


def words_of(tokenizer: Tokenizer, export: ExportSettings) -> dict[str, str]:
    """The texts of tokens that a template may name."""
    numbers = {"bos_token": export.bos_token_id, "eos_token": next(iter(export.eos_token_id), None)}
    known = tokenizer.token_of if isinstance(tokenizer, FileTokenizer) else lambda _: None
    return {name: "" if number is None else known(number) or "" for name, number in numbers.items()}


def render_apart(
    template: str, words: Mapping[str, str], talks: Sequence[tuple[Sequence[object], bool]]
) -> list[str]:
    """The texts of conversations by a stranger's template, rendered in a process of its own.

    ``talks``: the messages of each, and whether what begins an answer follows. Raises ConfigError.
    """
    load_optional("jinja2", "A chat template", "hf")
    asked = json.dumps({"template": template, "words": words, "talks": talks})
    command = [sys.executable, "-P", str(Path(rendering.__file__))]
    try:
        done = subprocess.run(
            command, input=asked.encode(), capture_output=True, timeout=RENDER_SECONDS, check=False
        )
        found = json.loads(done.stdout) if done.returncode == 0 else {}
    except (subprocess.TimeoutExpired, OSError):
        found = {}
    if "texts" not in found:
        why = clean(found.get("why", "takes too much memory or time"))
        raise ConfigError(
            f"The chat template of this model {why}: let the model continue a text instead."
        )
    # JSON can hold half of a surrogate pair, which UTF-8 can't.
    return [text.encode(errors="replace").decode() for text in found["texts"]]


def encode_chat(tokenizer: FileTokenizer, texts: Sequence[bytes]) -> list[NDArray[np.uint32]]:
    """Tokens of conversations, and the tokenizer's separator behind them, masked unless they lie in
    an answer."""
    read, end = list(map(json.loads, texts)), tokenizer.separator
    tokens: list[NDArray[np.uint32]] = []
    for (_, spans), (numbers, starts) in zip(
        read, tokenizer.encode_placed([text for text, _ in read]), strict=True
    ):
        learned = np.zeros(len(numbers), dtype=bool)
        for first, last in spans:
            learned |= (starts >= first) & (starts < last)
        numbers = np.where(learned, numbers, numbers | np.uint32(MASKED))
        if end is not None and not (len(numbers) and numbers[-1] % MASKED == end):
            numbers = np.append(numbers, np.uint32(end | MASKED))
        tokens.append(numbers.astype(np.uint32))
    return tokens
