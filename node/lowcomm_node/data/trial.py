"""Try a stranger's tokenizer.json in a process of its own, bounded in memory and time.

A file of a few kilobytes can take any amount of both: replacements that multiply one another,
long prefixes, regular expressions that backtrack. This script reads the file from its standard
input and prints what is wrong with it, or nothing. It imports nothing of lowcomm: it starts fast.
"""

import base64
import json
import re
import resource
import sys
from contextlib import suppress
from math import prod
from typing import Any

MEMORY_BYTES, MEMORY_TIMES = 512 << 20, 24
"""Address space: a base, and a multiple of the file's size. Gemma's file takes 13 times."""
CPU_SECONDS, BYTES_A_SECOND = 20, 512 << 10
"""Processor time: a base, and a second for each ``BYTES_A_SECOND`` bytes of the file."""
MOST_GROWTH = 16
"""How many times as long a text may become, before it is cut into tokens and after them."""
LONGEST_TOKEN, LONGEST_AFFIX, LONGEST_WORD = 1024, 64, 1000  # characters
MOST_ADDED = 64  # tokens that a template may add to a text
_LONGEST_MAPPED = 64  # bytes; the longest that Unicode itself puts in place of a character has 33
_PROBE = 16 << 10  # characters of each text that is tried
CHECKED = (
    "The quick brown fox can't jump over 13 lazy dogs...\n\n\tdef f(x_1):  # 3.14e-10\r\n"
    "        return x_1 ** 2 != 1234567890\n Größe, naïve œuvre, Ελλάδα, Жизнь прекрасна! "
    "中文字符、日本語のテキスト、한국어 — עברית, العربية, हिन्दी; ∑ x² ≤ √π "
    "\U0001f600\U0001f469\u200d\U0001f4bb e\u0301 \ufeff <|endoftext|></s>[SEP]  \u00a0 end   "
)
"""The text of ``data.tokenizer_check``: scripts, spaces, numbers, code, special tokens."""
_PROBES = (CHECKED, "a", " ", "\n", "1", ".", "ab ", "a1", "=-", "a\n", "中")
_AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")
_MAY_BE_EMPTY = re.compile(r"[*?|^$]|\\[bBAzZG]|\{[0,]|\(\)")


def find_problem(content: bytes) -> str | None:
    """The reason to refuse a file, if there is any. Raises whatever the library raises."""
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_str(content.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    model = tokenizer.model
    growth = _growth_of(tokenizer.normalizer) * _growth_of(tokenizer.pre_tokenizer)
    affixes = [getattr(model, one, None) or "" for one in _AFFIXES]
    if max(growth, _growth_of(tokenizer.decoder)) > MOST_GROWTH:
        return f"may make a text more than {MOST_GROWTH} times as long"
    if max(map(len, tokenizer.get_vocab()), default=0) > LONGEST_TOKEN:
        return f"has a token of more than {LONGEST_TOKEN} characters"
    if max(map(len, affixes)) > LONGEST_AFFIX:
        return f"has a prefix or suffix of more than {LONGEST_AFFIX} characters"
    if getattr(model, "max_input_chars_per_word", 0) > LONGEST_WORD:
        return f"looks at words of more than {LONGEST_WORD} characters"
    if len(tokenizer.encode("").ids) > MOST_ADDED:
        return f"adds more than {MOST_ADDED} tokens to a text"
    for probe in _PROBES:
        text = (probe * _PROBE)[:_PROBE]
        normalized = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        if len(normalized) > MOST_GROWTH * _PROBE:
            return f"makes a text more than {MOST_GROWTH} times as long"
        tokenizer.decode(tokenizer.encode(text).ids)
    return None


def _growth_of(component: Any) -> float:
    return growth(json.loads(component.__getstate__())) if component else 1.0


def growth(part: dict[str, Any]) -> float:
    """How many times as long a component makes a text, at most."""
    kind = part["type"]
    for name in ("normalizers", "pretokenizers", "decoders"):
        if name in part:
            return prod(map(growth, part[name]))
    if kind == "Replace":
        pattern, new = part["pattern"], len(part["content"])
        if "Regex" in pattern:
            return max(1, new + bool(_MAY_BE_EMPTY.search(pattern["Regex"])))
        return max(1, new / len(pattern["String"])) if pattern["String"] else 1 + new
    if kind == "Prepend":
        return 1 + len(part["prepend"])
    if kind == "Precompiled":
        mapped = base64.b64decode(part["precompiled_charsmap"])
        trie = int.from_bytes(mapped[:4], "little")
        longest = max(map(len, mapped[4 + trie :].split(b"\0")))
        return 1 if longest <= _LONGEST_MAPPED else longest
    return 2 if kind in ("ByteLevel", "Metaspace") else 1


def _limit(size: int) -> None:
    seconds = CPU_SECONDS + size // BYTES_A_SECOND
    for kind, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES + MEMORY_TIMES * size),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):  # it is lower already, or this system has none
            resource.setrlimit(kind, (most, most))


def main() -> None:
    """Print the problem of the file on the standard input."""
    content = sys.stdin.buffer.read()
    _limit(len(content))
    try:
        problem = find_problem(content)
    except MemoryError:
        problem = "takes too much memory"
    except BaseException as error:  # where Rust panics, it is no Exception
        problem = f"is not a tokenizer.json ({str(error)[:200]})"
    print((problem or "").encode("ascii", "replace").decode())


if __name__ == "__main__":
    main()
