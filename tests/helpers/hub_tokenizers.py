"""Small tokenizers that are made as those on the Hub: patterns, special and other added tokens."""

from pathlib import Path
from typing import Any

from helpers.open_weights import SENTENCES

SPECIAL = ("<s>", "</s>", "<|im_end|>", "<pad>")
ADDED = ("        ", "    ", "<think>", "</think>", "<tool_call>", "\n\n\n")
"""Tokens that are not special."""
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>\n{% endfor %}"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {"qwen2": _WORDS + _REST, "llama3": _WORDS + "{1,3}" + _REST}


def write_tokenizer(path: Path, kind: str = "gpt2", begins: bool = False) -> Any:
    """A byte-level BPE that cuts text as models of a kind do; ``begins``: its template puts
    ``<s>`` before a text."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind not in PATTERNS)
    first: list[Any] = []
    if kind in PATTERNS:
        first = [pre_tokenizers.Split(Regex(PATTERNS[kind]), "isolated")]
    elif kind == "smollm":
        first = [pre_tokenizers.Digits(individual_digits=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, bytes_]) if first else bytes_
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[*SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*SENTENCES, "it's 1234 def return text"] * 2, trainer)
    tokenizer.add_tokens([AddedToken(one, normalized=False, special=False) for one in ADDED])
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
        )
    tokenizer.save(str(path))
    return tokenizer
