"""The pages that people read: links lead somewhere, lines fit, and the index leads to every page."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])
COLUMNS = 100
LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Each link of a page into this repository: the file that it names, and the heading if it names one."""
    for found in LINK.finditer(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        yield (page.parent / found["path"]).resolve() if found["path"] else page, found["anchor"] or ""


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def overlong(text: str) -> list[str]:
    """Lines of prose and examples beyond 100 columns; a row of a table can't be broken."""
    return [line for line in text.splitlines() if len(line) > COLUMNS and not line.startswith("|")]


def reachable(page: Path) -> set[Path]:
    """The pages of this repository to which links lead from a page, over any number of pages."""
    found, waiting = {page}, [page]
    while waiting:
        for target, _ in links(waiting.pop()):
            if target.suffix == ".md" and target not in found:
                found.add(target)
                waiting.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = [
        f"{target.relative_to(ROOT)}#{anchor}"
        for target, anchor in links(page)
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]
    assert not broken
