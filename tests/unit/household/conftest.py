"""A lender that looks often at what changes by itself."""

import pytest

from lowcomm_node.household import lender


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lender, "LOOK", 0.05)
