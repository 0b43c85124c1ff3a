"""Words for settings that pydantic finds invalid: what is expected instead."""

from collections.abc import Mapping
from typing import Any

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


def in_words(error: Mapping[str, Any]) -> str:
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
