"""Tokenizers without a file as a tokenizer.json: a BPE that merges nothing.

Token n is byte n; words of the tiny stories follow. Files of BPE write each byte as a printable
character; the alphabet is that of GPT-2: printable Latin-1 stands for itself, the others for
characters from U+0100 on, in order.
"""

from typing import Any

from lowcomm_node.data.stories.words import PIECES, StoryTokenizer, words
from lowcomm_node.data.tokenizer import Tokenizer
from lowcomm_protocol.spec.sections import BYTES

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


def alphabet() -> list[str]:
    """The character that stands for each byte."""
    others = [byte for byte in range(BYTES) if byte not in _PRINTABLE]
    characters = {byte: chr(byte) for byte in _PRINTABLE}
    characters |= {byte: chr(BYTES + index) for index, byte in enumerate(others)}
    return [characters[byte] for byte in range(BYTES)]


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of the file of ``bytes``, or of the tiny stories.

    It names no special token: a text that spells one would no longer be read byte by byte.
    """
    byte_level: dict[str, Any] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    knows_words = isinstance(tokenizer, StoryTokenizer)
    letters = alphabet()
    vocab = {character: byte for byte, character in enumerate(letters)}
    if knows_words:
        spelled = ("".join(letters[byte] for byte in word.encode()) for word in words())
        vocab |= {word: BYTES + number for number, word in enumerate(spelled)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": _words_before(byte_level) if knows_words else byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": knows_words,
            "vocab": vocab,
            "merges": [],
        },
    }


def _words_before(byte_level: dict[str, Any]) -> dict[str, Any]:
    cut = {"type": "Split", "pattern": {"Regex": PIECES}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, byte_level]}
