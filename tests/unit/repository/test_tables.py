"""Tables in docs/ that come from the code are up to date: `make tables` writes them."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("lowcomm_doc_tables", DOCS / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_table_says_what_the_code_says(tables):
    stale = [page.name for page, now, wanted in tables.pages() if now != wanted]
    assert not stale, f"run `make tables`: {', '.join(stale)} do not say what the code says"


def test_every_table_has_a_place(tables):
    placed = {
        found["name"]
        for page in DOCS.glob("*.md")
        for found in tables.BLOCK.finditer(page.read_text())
    }
    assert placed == set(tables.TABLES)


def test_a_setting_that_changes_makes_its_table_stale(tables):
    page = (DOCS / "specification.md").read_text()
    assert (
        tables.filled(
            page.replace("| `model.layers` | integer 1 to 512", "| `model.layers` | integer")
        )
        == page
    )
