"""A run specification as the document that is signed, and documents of other releases.

A document is JSON: keys sorted, no spaces, UTF-8, numbers as Python writes them. Its bytes are the
truth: the signature is over them, their SHA-256 is the run id, and they travel and are stored as
they came.

No release may strand a run that another release has signed:

- The settings of 0.1 are in every document.
- A setting that came later is in ``ADDED``. A document without it means what releases did that did
  not know the setting. A document leaves the setting out where it has just this value, so that
  those releases can still read it.
- A setting that this release does not know ends the reading with the advice to upgrade, unless the
  document lists its name in ``optional`` (``sync.pairing``, or ``rewards`` for a whole section):
  then a peer that does not know it does without.
- Bounds on what a creator may choose can be narrowed for new runs only (``run.check_new_run``),
  never for documents.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from lowcomm_protocol.errors import SpecError, VersionError

Content = dict[str, Any]
Known = Mapping[str, frozenset[str]]
"""The settings that this release knows, by section; a setting at the top is a section without
settings."""


@dataclass(frozen=True)
class Added:
    """A setting that came after 0.1."""

    since: str
    """The first release that knows it."""
    before: Any
    """The value that says what releases did that did not know it."""


ADDED: Mapping[str, Added] = MappingProxyType(
    {
        "optional": Added(since="0.2.0", before=()),
        "model.kv_heads": Added(since="0.2.0", before=0),
        "model.head_width": Added(since="0.2.0", before=0),
        "model.qkv_bias": Added(since="0.2.0", before=False),
        "model.qk_norm": Added(since="0.2.0", before=True),
        "model.norm_epsilon": Added(since="0.2.0", before=1e-6),
        "model.rope_scaling": Added(since="0.2.0", before="none"),
        "model.rope_factor": Added(since="0.2.0", before=8.0),
        "model.rope_low": Added(since="0.2.0", before=1.0),
        "model.rope_high": Added(since="0.2.0", before=4.0),
        "model.rope_original": Added(since="0.2.0", before=8192),
        "data.tokenizer_sha256": Added(since="0.2.0", before=""),
        "data.tokenizer_size": Added(since="0.2.0", before=0),
        "data.tokenizer_pieces": Added(since="0.2.0", before=""),
        "data.tokenizer_check": Added(since="0.2.0", before=""),
        "data.begin_tokens": Added(since="0.2.0", before=()),
        "data.end_token": Added(since="0.2.0", before=None),
        "start.files": Added(since="0.2.0", before=()),
        "export.bos_token_id": Added(since="0.2.0", before=None),
        "export.eos_token_id": Added(since="0.2.0", before=()),
        "export.pad_token_id": Added(since="0.2.0", before=None),
        "export.positions": Added(since="0.2.0", before=0),
        "export.chat_template": Added(since="0.2.0", before=""),
        "export.generation": Added(since="0.2.0", before={}),
        "train.schedule": Added(since="0.2.0", before="cosine"),
        "train.decay": Added(since="0.2.0", before=0.2),
        "sync.pairing": Added(since="0.2.0", before="hypercube"),
        "sync.slice_rounds": Added(since="0.2.0", before=1),
        "sync.memory": Added(since="0.2.0", before=0.0),
    }
)
"""By ``SECTION.SETTING``. A new setting needs a line here (CONTRIBUTING.md)."""

MAX_OPTIONAL = 32
MAX_NAME = 80
"""Characters of the name of a setting in ``optional``."""


def encode(content: Mapping[str, Any]) -> bytes:
    """The one encoding of a content.

    Raises ValueError for numbers that are not finite, or text that is none.
    """
    return json.dumps(
        content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def write_document(settings: Mapping[str, Any]) -> bytes:
    """The document of these settings, which are all that there are: those that say what older
    releases do are left out."""
    content: Content = {}
    for section, values in settings.items():
        if not isinstance(values, dict):
            if not _says_nothing_new(section, values):
                content[section] = values
            continue
        kept = {
            name: value
            for name, value in cast("Content", values).items()
            if not _says_nothing_new(f"{section}.{name}", value)
        }
        if kept:
            content[section] = kept
    return encode(content)


def read_content(text: str, source: str) -> Content:
    """The content of a document, as it is. Raises SpecError if it is no JSON object."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise SpecError(f"{source}: not the document of a run.")
    return cast("Content", content)


def fill(content: Content, known: Known, source: str) -> Content:
    """All settings that this release knows, from the content of a document of any release.

    Raises VersionError if it has settings that this release must know and does not, SpecError if it
    lacks settings of 0.1.
    """
    optional = _optional(content, source)
    for name in _unknown(content, known):
        if name not in optional:
            raise VersionError(
                f"{source}: this release does not know the setting {name[:MAX_NAME]!r}: install "
                "the release that the run's creator names."
            )
    filled: Content = {}
    for section, names in known.items():
        if not names:
            filled[section] = _value_of(content, section, section, source)
            continue
        given = content.get(section, {})
        if not isinstance(given, dict):
            raise SpecError(f"{source}: {section!r} is not a table of settings.")
        there = cast("Content", given)
        filled[section] = {
            name: _value_of(there, name, f"{section}.{name}", source) for name in names
        }
    return filled


def is_encoding(text: str, content: Content, settings: Mapping[str, Any], known: Known) -> bool:
    """Whether a document is the one encoding of its content, where ``settings`` are what was read
    of it."""
    same: Content = {}
    for section, values in content.items():
        if section not in known:
            same[section] = values
        elif not known[section]:
            same[section] = settings[section]
        else:
            read = cast("Content", settings[section])
            same[section] = {
                name: read.get(name, value) for name, value in cast("Content", values).items()
            }
    try:
        return encode(same) == text.encode()
    except (ValueError, RecursionError):
        return False


def _optional(content: Content, source: str) -> frozenset[str]:
    names = content.get("optional", [])
    listed = cast("list[object]", names) if isinstance(names, list) else None
    if (
        listed is None
        or len(listed) > MAX_OPTIONAL
        or not all(isinstance(name, str) and len(name) <= MAX_NAME for name in listed)
    ):
        raise SpecError(
            f"{source}: optional must be a list of at most {MAX_OPTIONAL} names of settings, of at "
            f"most {MAX_NAME} characters each."
        )
    return frozenset(cast("list[str]", listed))


def _unknown(content: Content, known: Known) -> Iterator[str]:
    for section, values in content.items():
        if section not in known:
            yield section
        elif known[section] and isinstance(values, dict):
            yield from (
                f"{section}.{name}"
                for name in cast("Content", values)
                if name not in known[section]
            )


def _value_of(there: Content, name: str, path: str, source: str) -> Any:
    if name in there:
        return there[name]
    if path in ADDED:
        return ADDED[path].before
    raise SpecError(f"{source}: the document lacks {path!r}: its creator must sign it anew.")


def _says_nothing_new(path: str, value: object) -> bool:
    return path in ADDED and value == ADDED[path].before and type(value) is type(ADDED[path].before)


_NUMBER, _WHOLE, _TABLE = "a number", "a whole number", "a table, such as [train]"
_EXPECTED = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_parsing_size": "a smaller number",
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "a finite number",
    "string_type": "text",
    "string_unicode": "text in UTF-8",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": _TABLE,
    "model_type": _TABLE,
    "model_attributes_type": _TABLE,
}
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
    """What is expected in place of an invalid value; ``error``: one of those of a
    ValidationError."""
    kind, context = error["type"], error.get("ctx", {})
    expected = _EXPECTED.get(kind) or _PATTERNS.get(context.get("pattern", ""))
    if kind in ("string_too_short", "string_too_long"):
        length = context.get("min_length", context.get("max_length"))
        expected = f"at {'least' if kind == 'string_too_short' else 'most'} {length} characters"
    elif kind == "too_long":
        expected = f"at most {context['max_length']} items"
    if expected:
        return f"expected {expected}"
    message = str(error["msg"]).removeprefix("Value error, ")
    return message.replace("Input should be ", "expected ")
