"""The pages that people read: links work, lines fit, and the index lists every page."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowcomm_node.doctor.checks import CHECKS
from lowcomm_protocol.codecs import CODECS, codec
from lowcomm_protocol.spec.presets import PRESETS

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])
COLUMNS = 100
LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Each link of a page into this repository: its file, and its heading if it names one."""
    for found in LINK.finditer(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        target = (page.parent / found["path"]).resolve() if found["path"] else page
        yield target, found["anchor"] or ""


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def overlong(text: str) -> list[str]:
    """Lines beyond 100 columns. Neither a row of a table nor one word, such as a link, can be
    broken."""
    long = [line for line in text.splitlines() if len(line) > COLUMNS]
    return [line for line in long if line[0] != "|" and " " in line.strip()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = [
        f"{target.relative_to(ROOT)}#{anchor}"
        for target, anchor in links(page)
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_line_but_those_of_tables_and_bare_links_fits_100_columns(page: Path) -> None:
    assert not overlong(page.read_text())


def test_the_readme_can_be_read_in_one_sitting() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_index_lists_every_page() -> None:
    listed = {target for target, _ in links(DOCS / "README.md")}
    pages = {page for page in PAGES if page not in (DOCS / "README.md", ROOT / "README.md")}
    assert not {page.name for page in pages - listed}
    assert DOCS / "README.md" in {target for target, _ in links(ROOT / "README.md")}


def test_the_readme_shows_the_panel_and_every_command_that_it_takes_to_begin() -> None:
    text = (ROOT / "README.md").read_text()
    assert "](docs/page-training.png)" in text
    assert "make demo" in text and "lowcomm-node join --peers ADDR" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_and_test_that_a_page_names_exists(page: Path) -> None:
    spans = re.findall(r"`([^`\n]+)`", page.read_text())
    file = re.compile(r"(tests|benchmarks|docker|docs)/[\w./-]+\.\w+")
    files = [span for span in spans if file.fullmatch(span)]
    tests = [span for span in spans if re.fullmatch(r"test_\w+", span)]
    known = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert not [name for name in files if not (ROOT / name).exists()]
    assert not [name for name in tests if name not in known]


def test_the_page_of_the_doctor_lists_its_checks_in_their_order() -> None:
    listed = re.findall(
        r"^- \*\*`([a-z0-9]+)`\*\*:", (DOCS / "trouble.md").read_text(), re.MULTILINE
    )
    assert listed == [check.__name__ for check in CHECKS]


def test_the_documented_codec_and_method_of_your_own_work_as_they_stand() -> None:
    code = (DOCS / "methods.md").read_text().split("```python")[2].split("```")[0]
    names: dict[str, Any] = {"__name__": "docs"}
    try:
        exec(compile(code, "docs/methods.md", "exec"), names)
        sync, vector = names["spec"].sync, np.linspace(-1, 1, 300, dtype=np.float32)
        assert (sync.method, sync.codec) == ("mine", "eight")
        coded, decoded = bytearray(codec("eight").coded_size(300)), np.empty_like(vector)
        codec("eight").encode(vector, memoryview(coded))
        codec("eight").decode(memoryview(coded), decoded)
        assert np.abs(decoded - vector).max() <= 0.5 / 127 + 1e-6
    finally:
        for table, name in ((CODECS, "eight"), (PRESETS, "mine")):
            table.unregister(name)
