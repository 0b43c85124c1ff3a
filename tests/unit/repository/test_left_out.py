"""What must hold for tests that a machine can't run: they are left out, counted and named."""

import shutil

import pytest

from helpers import skips
from helpers.browser import find_browser


def test_without_a_browser_its_tests_are_left_out_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda command: None)
    with pytest.raises(pytest.skip.Exception, match="make test-tools"):
        find_browser()


@pytest.mark.parametrize("count", [0, 3])
def test_the_end_says_how_many_were_left_out_and_how_to_have_them(count: int) -> None:
    class Reporter:
        stats = {"skipped": [object()] * count}  # noqa: RUF012
        lines: list[str] = []  # noqa: RUF012

        def write_line(self, line: str) -> None:
            self.lines.append(line)

    skips.pytest_terminal_summary(reporter := Reporter())
    assert [line.startswith(f"{count} tests were left out") for line in reporter.lines] == (
        [True] if count else []
    )
