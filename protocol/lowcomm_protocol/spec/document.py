"""A run specification as the document that is signed, and documents of other releases.

A document is JSON: keys sorted, no spaces, UTF-8, numbers as Python writes them. Its bytes are the
truth: the signature is over them, their SHA-256 is the run id, and they travel and are stored as
they came. No release may strand a run that another has signed, so the settings of 0.1 are in every
document, a later one may be missing (``ADDED``), and one that this release does not know ends the
reading with the advice to upgrade, unless the document lists it in ``optional``.
"""

import json
from collections.abc import Container, Iterator, Mapping
from typing import Any, cast

from lowcomm_protocol.errors import SpecError, VersionError

Content = dict[str, Any]

ADDED: Mapping[str, Any] = {
    "optional": (),
    "run.tokens": 0,
    "model.kv_heads": 0,
    "model.head_width": 0,
    "model.qkv_bias": False,
    "model.qk_norm": True,
    "model.norm_epsilon": 1e-6,
    "model.rope_scaling": "none",
    "model.rope_factor": 8.0,
    "model.rope_low": 1.0,
    "model.rope_high": 4.0,
    "model.rope_original": 8192,
    "data.tokenizer_sha256": "",
    "data.tokenizer_size": 0,
    "data.tokenizer_pieces": "",
    "data.tokenizer_check": "",
    "data.begin_tokens": (),
    "data.end_token": None,
    "data.parts": (),
    "data.shuffle_bytes": 32 << 20,
    "start.files": (),
    "adapter": None,
    "export.bos_token_id": None,
    "export.eos_token_id": (),
    "export.pad_token_id": None,
    "export.positions": 0,
    "export.chat_template": "",
    "export.base": "",
    "export.licences": (),
    "export.generation": {},
    "train.schedule": "cosine",
    "train.decay": 0.2,
    "train.document_mask": False,
    "sync.pairing": "hypercube",
    "sync.cells": 1,
    "sync.memory": 0.0,
}
"""By ``SECTION.SETTING``: what a document without it means. A new setting needs a line."""

WHOLE = frozenset(("adapter",))
"""Sections that a document has with all of their settings, or not at all."""
MAX_OPTIONAL = 32


def encode(content: Mapping[str, Any]) -> bytes:
    """The one encoding of a content. Raises ValueError for infinite numbers and broken text."""
    return json.dumps(
        content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def write_document(settings: Mapping[str, Any]) -> bytes:
    """The document of all settings, without those that say what older releases do."""
    kept = {
        path: value
        for path, value in _by_path(settings, settings.keys())
        if path not in ADDED or value != ADDED[path] or type(value) is not type(ADDED[path])
    }
    return encode(_by_section(kept))


def read_content(text: str, source: str) -> Content:
    """The content of a document, as it is. Raises SpecError if it is no JSON object."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise SpecError(f"{source}: not the document of a run.")
    return cast("Content", content)


def fill(content: Content, known: frozenset[str], source: str) -> Content:
    """All ``known`` settings, from the content of a document of any release.

    Raises VersionError for a setting that must be known and is not, SpecError for a missing one.
    """
    optional = content.get("optional")
    ignored = cast("list[object]", optional)[:MAX_OPTIONAL] if isinstance(optional, list) else []
    absent = WHOLE - content.keys()
    known = frozenset(path for path in known if path.partition(".")[0] not in absent)
    sections = {path.partition(".")[0] for path in known if "." in path}
    for section in sections:
        if not isinstance(content.get(section, {}), dict):
            raise SpecError(f"{source}: {section!r} is not a table of settings.")
    given = dict(_by_path(content, sections))
    for path in sorted(given.keys() - known):
        if path not in ignored:
            raise VersionError(
                f"{source}: this release does not know the setting {path[:80]!r}: install the "
                "release that the run's creator names."
            )
    if missing := sorted(known - given.keys() - ADDED.keys()):
        raise SpecError(
            f"{source}: the document lacks {missing[0]!r}: its creator must sign it anew."
        )
    return _by_section({path: given[path] if path in given else ADDED[path] for path in known})


def is_encoding(text: str, content: Content, settings: Mapping[str, Any]) -> bool:
    """Whether a document is the one encoding of its content, of which ``settings`` were read."""
    read = dict(_by_path(settings, settings.keys()))
    same = {path: read.get(path, value) for path, value in _by_path(content, settings.keys())}
    try:
        return encode(_by_section(same)) == text.encode()
    except (ValueError, TypeError, RecursionError):  # TypeError: "version.x" beside "version"
        return False


def _by_path(content: Mapping[str, Any], sections: Container[str]) -> Iterator[tuple[str, Any]]:
    """Settings by ``SECTION.SETTING``; a value at the top, or in no known section, by its name."""
    for section, values in content.items():
        if section in sections and isinstance(values, dict):
            for name, value in cast("Content", values).items():
                yield f"{section}.{name}", value
        else:
            yield section, values


def _by_section(settings: Mapping[str, Any]) -> Content:
    content: Content = {}
    for path, value in settings.items():
        section, _, name = path.partition(".")
        if name:
            content.setdefault(section, {})[name] = value
        else:
            content[section] = value
    return content


_EXPECTED = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "tuple": "a list",
    "list": "a list",
    "dict": "a table, such as [train]",
    "model": "a table, such as [train]",
}
"""By the first word of the kind of an error."""
_HASH = "64 hexadecimal digits in lower case"
_PATTERNS = {
    r"^[0-9a-f]{64}$": _HASH,
    r"^([0-9a-f]{64})?$": _HASH,
    r"^[a-z0-9][a-z0-9._-]{0,63}$": "1 to 64 of a-z, 0-9, '.', '_' and '-', beginning with a "
    "letter or digit",
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.safetensors$": "a name such as model-1.safetensors, "
    "without a folder",
    r"^([0-9]{1,4}(\.[0-9]{1,4}){1,3})?$": "a release, such as 5.1.0",
}


def expected_in_words(error: Mapping[str, Any]) -> str:
    """The expected value, in words, for one of the errors of a ValidationError."""
    kind, context = error["type"], error.get("ctx", {})
    expected = _EXPECTED.get(kind.partition("_")[0]) or _PATTERNS.get(context.get("pattern", ""))
    if kind in ("string_type", "string_unicode"):
        expected = "text" if kind == "string_type" else "text in UTF-8"
    elif kind in ("string_too_short", "string_too_long"):
        bound, name = ("least", "min_length") if kind.endswith("short") else ("most", "max_length")
        expected = f"at {bound} {context[name]} characters"
    elif kind == "too_long":
        expected = f"at most {context['max_length']} items"
    if expected:
        return f"expected {expected}"
    message = str(error["msg"]).removeprefix("Value error, ")
    return message.replace("Input should be ", "expected ")
