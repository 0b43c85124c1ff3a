"""A lender that looks often at what changes by itself, and has no defects."""

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from lowcomm_node.household import lender


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lender, "LOOK", 0.05)


@pytest.fixture(autouse=True)
def has_no_defects() -> Iterator[None]:
    with capture_logs() as logs:
        yield
    assert [entry for entry in logs if entry["event"] == "task.defect"] == []
