"""Tables of a page that a benchmark writes: each stands between ``<!-- measured: NAME -->`` and
``<!-- end -->``."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

BLOCK = re.compile(r"(<!-- measured: (?P<name>[a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
MISSING = "not measured"


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def filled(text: str, tables: Mapping[str, str]) -> str:
    """A page with these tables in place of those that it has; others stay."""

    def replace(found: re.Match[str]) -> str:
        made = tables.get(found["name"])
        return found[0] if made is None else f"{found[1]}{made}{found[3]}"

    return BLOCK.sub(replace, text)


def names(text: str) -> set[str]:
    """Of the tables that a page has."""
    return {found["name"] for found in BLOCK.finditer(text)}


def write(page: Path, tables: Mapping[str, str]) -> None:
    """Fill in those of a page."""
    page.write_text(filled(page.read_text(), tables))
