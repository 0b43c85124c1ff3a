"""Fixtures of the tests in a laboratory of network namespaces."""

import tempfile
from collections.abc import Iterator

import pytest
from laboratory import Lab
from namespaces import missing


@pytest.fixture(autouse=True)
def needs_a_laboratory(request: pytest.FixtureRequest) -> None:
    """Skip tests marked ``net`` where there can be none."""
    if request.node.get_closest_marker("net") and (reason := missing()):
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of control sockets for this test alone, a short one, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="lc-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield


@pytest.fixture
def lab(needs_a_laboratory: None) -> Iterator[Lab]:
    """An internet without hosts; whatever is made and started in it is removed and ended, also when
    the test fails."""
    with Lab() as lab:
        yield lab
