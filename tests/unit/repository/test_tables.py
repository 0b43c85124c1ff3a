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
