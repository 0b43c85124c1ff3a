"""``--no-skips``: a test that is skipped fails, with the reason. What a machine can't have at all
is excepted."""

from collections.abc import Iterator
from typing import Any

import pytest

OPTION = "make test OPTIONS=-rs"
EXCEPTED = (
    "atheris is not installed here",  # a fuzzer that has no wheel for every Python
    "this machine has no IPv6",
)
"""What reasons may begin with: of the kernel, or of what no package manager has."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--no-skips", action="store_true", help="a test that is skipped fails; for CI")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tests were left out, and how to have them."""
    if skipped := terminalreporter.stats.get("skipped"):
        terminalreporter.write_line(
            f"{len(skipped)} tests were left out ({OPTION} says why each): `make test-tools`, as "
            "root on Debian, installs what the system lacks"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    """Turn a skip into a failure."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("--no-skips"):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if not reason.startswith(EXCEPTED):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid}: skipped, which --no-skips forbids: {reason}"
    return report
