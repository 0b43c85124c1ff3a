"""The tokenizer ``bytes`` as a tokenizer.json: a BPE that knows 256 bytes and merges none.

Token n is byte n. Files of BPE write each byte as a printable character; the alphabet is that of
GPT-2: printable Latin-1 stands for itself, the others for characters from U+0100 on, in order.
"""

from typing import Any

from lowcomm_protocol.spec.settings import BYTES

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


def alphabet() -> list[str]:
    """The character that stands for each byte."""
    others = [byte for byte in range(BYTES) if byte not in _PRINTABLE]
    characters = {byte: chr(byte) for byte in _PRINTABLE}
    characters |= {byte: chr(BYTES + index) for index, byte in enumerate(others)}
    return [characters[byte] for byte in range(BYTES)]


def tokenizer_json() -> dict[str, Any]:
    """The content of the file.

    It names no special token: a text that spells one would no longer be read byte by byte.
    """
    byte_level: dict[str, Any] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
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
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(alphabet())},
            "merges": [],
        },
    }
