"""Whoever measures comes to an end, whatever becomes of the ends."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from helpers.scripts import load_benchmark

DEAF = (
    "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('{}', flush=True); "
    "sys.stdin.read()"
)


benchmark = load_benchmark("ends")


@contextmanager
def end(code: str) -> Iterator[subprocess.Popen[str]]:
    """One that is ended in any case."""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.timeout(60)
def test_an_end_that_says_nothing_is_not_waited_for_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(benchmark, "ANSWER_DEADLINE", 0.2)
    with (
        end("import sys; sys.stdin.read()") as child,
        pytest.raises(RuntimeError, match="ended with -9"),
    ):
        benchmark.ask(child, {})


@pytest.mark.timeout(60)
def test_one_that_does_not_end_keeps_none_of_the_others_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(benchmark, "END_DEADLINE", 0.2)
    with end(DEAF) as first, end(DEAF) as second:
        assert benchmark.answer(first) == benchmark.answer(second) == {}, "they run, and are deaf"
        benchmark.end_all([first, second])
        assert (first.returncode, second.returncode) == (-9, -9)
