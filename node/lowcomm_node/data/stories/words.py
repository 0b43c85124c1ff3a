"""The words of the tiny stories as tokens.

A token is a word of the grammar with the blank before it, or a byte: numbers below 256 are bytes,
as in the tokenizer ``bytes``, so that every text has tokens and comes back as it was.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowcomm_node.data.stories.grammar import CHARACTERS, RULES, TROUBLES
from lowcomm_node.data.stories.telling import NAME
from lowcomm_protocol.spec.sections import BYTES, STORY_TOKENS

PIECES = " ?[A-Za-z]+|[^A-Za-z]"
"""How text is cut, as a regular expression: into words, and single characters."""
_PIECES = re.compile(PIECES)
_SLOT = re.compile(r"\{\w+\}")
_NEWLINE = 10


@cache
def words() -> tuple[str, ...]:
    """The words, sorted; token ``256 + n`` is the one of number n."""
    found = {piece for text in _texts() for piece in _PIECES.findall(text) if len(piece) > 1}
    return tuple(sorted(found))


def _texts() -> Iterator[str]:
    """All texts of the grammar: after a blank, and those that a quotation or a story begins with
    as they are."""
    fixed = [text for rule in RULES.values() for text in rule]
    for one in TROUBLES:
        fixed += [one.thing, one.thing.capitalize(), one.short]
        fixed += [one.trouble, one.plea, one.help, one.after]
    for one in CHARACTERS:
        fixed += [one.name, one.she, one.her, one.hers, one.hers.capitalize(), one.animal, one.home]
    quoted = [one.plea for one in TROUBLES] + [one.thing.capitalize() for one in TROUBLES]
    for name in ("beginning", "hello", "question", "last"):
        quoted += RULES[name]
    for text in fixed:
        yield from (f" {part.strip()}" for part in _SLOT.split(text))
        yield from re.findall(r'"([A-Za-z]+)', text)
    yield from (re.split("[^A-Za-z]", text)[0] for text in quoted)


class StoryTokenizer:
    """Words of the tiny stories, and bytes for all else."""

    name = NAME
    vocab = STORY_TOKENS
    begins = ()
    separator = _NEWLINE
    """An empty line follows a story."""

    def __init__(self) -> None:
        self._tokens = {word: BYTES + number for number, word in enumerate(words())}
        self._bytes = [
            *(bytes([byte]) for byte in range(BYTES)),
            *(word.encode() for word in words()),
        ]
        self.sha256 = hashlib.sha256("\n".join(words()).encode()).hexdigest()

    def encode(self, text: bytes) -> NDArray[Any]:
        """See Tokenizer."""
        # Latin-1 has a character for each byte, so nothing is lost where a text is no UTF-8.
        return np.fromiter(self._numbers(text.decode("latin-1")), dtype=np.uint16)

    def encode_all(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """See Tokenizer."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """See Tokenizer."""
        # A model may know more tokens than there are; 255 never is text.
        known = (token if token < len(self._bytes) else 255 for token in tokens)
        return b"".join(self._bytes[token] for token in known).decode(errors="replace")

    def _numbers(self, text: str) -> Iterator[int]:
        for piece in _PIECES.findall(text):
            number = self._tokens.get(piece)
            yield from (number,) if number is not None else piece.encode("latin-1")
