"""Writes the tables in docs/*.md that the code knows best: `make tables`. A test holds that they are up to date.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; what is there is replaced as a whole.
"""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lowcomm_protocol.document import ADDED
from lowcomm_protocol.run import PRESETS, RunSpec

DOCS = Path(__file__).parent
BLOCK = re.compile(r"(<!-- table: (?P<name>[a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
BOUNDS: dict[type, tuple[str, str]] = {
    Ge: ("ge", "at least"),
    Gt: ("gt", "above"),
    Le: ("le", "at most"),
    Lt: ("lt", "below"),
}


def settings() -> Iterator[str]:
    """Every setting of a specification, its values, its default, and what it is."""
    yield from ("| setting | values | if missing | what it is |", "|---|---|---|---|")
    for section, field in RunSpec.model_fields.items():
        model = field.annotation
        if not (inspect.isclass(model) and issubclass(model, BaseModel)):
            continue
        texts = _docstrings(model)
        for name, one in model.model_fields.items():
            yield f"| `{section}.{name}` | {_values(one)} | {_default(one)} | {texts.get(name, '')} |"


def presets() -> Iterator[str]:
    """What each method sets."""
    names = sorted({name for preset in PRESETS.values() for name in preset})
    yield "| | " + " | ".join(f"`{method}`" for method in PRESETS) + " |"
    yield "|---" * (len(PRESETS) + 1) + "|"
    for name in names:
        cells = (_plain(preset[name]) if name in preset else "" for preset in PRESETS.values())
        yield f"| `{name}` | " + " | ".join(cells) + " |"


def added() -> Iterator[str]:
    """The settings that came after 0.1, and what a document without them means."""
    yield from ("| setting | since | a document without it means |", "|---|---|---|")
    for name, one in ADDED.items():
        value = list(one.before) if isinstance(one.before, tuple) else one.before
        yield f"| `{name}` | {one.since} | {_plain(value)} |"


TABLES: dict[str, Callable[[], Iterator[str]]] = {"settings": settings, "presets": presets, "added": added}


def filled(text: str) -> str:
    """A page with its tables as the code has them now."""
    return BLOCK.sub(lambda found: f"{found[1]}{chr(10).join(TABLES[found['name']]())}\n{found[3]}", text)


def pages() -> Iterator[tuple[Path, str, str]]:
    """Each page with tables: where it is, as it is, and as it should be."""
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text()
        if BLOCK.search(text):
            yield page, text, filled(text)


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """What stands below each field in the source, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            texts[field.target.id] = " ".join(str(after.value.value).split()).replace("|", "\\|").replace("``", "`")
    return texts


def _values(field: FieldInfo) -> str:
    kind: Any = field.annotation
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return ", ".join(_plain(one) for one in get_args(kind))
    name = {int: "integer", float: "number", str: "text", bool: "`true`, `false`"}.get(kind, "list of texts")
    told = [f"{word} {_number(getattr(one, key))}" for one in field.metadata for key, word in _bounds(one)]
    patterns = [f"`{one.pattern}`" for one in field.metadata if getattr(one, "pattern", None)]
    return " ".join([name, " and ".join(told), *patterns]).strip()


def _bounds(one: object) -> Iterator[tuple[str, str]]:
    if isinstance(one, MaxLen):
        yield "max_length", "of at most"
    elif type(one) in BOUNDS:
        yield BOUNDS[type(one)]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "the method's"
    return _plain(list(field.default) if isinstance(field.default, tuple) else field.default)


def _number(value: float) -> str:
    text = f"{value:,}" if isinstance(value, int) else f"{value:g}"
    return "2^63" if value == 2**63 else text


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if not isinstance(value, str) else f'`"{value}"`'


def main() -> None:
    """Write what has changed."""
    for page, before, after in pages():
        if before != after:
            page.write_text(after)
            sys.stdout.write(f"{page.name} written\n")


if __name__ == "__main__":
    main()
