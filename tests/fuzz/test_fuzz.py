"""What must hold for every fuzz target: its corpus passes, and so does what is like it. ``make
fuzz`` looks for hours.

Every input that was ever found to break something is a test of its own, here or beside what it
broke."""

import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from target import TARGETS

import fuzz
from lowcomm_node.dht import guard
from lowcomm_node.trainer import state

fuzz.load(instrumented=False)
MUTANTS = 60
"""Of each seed. No coverage guides them: `fuzz.py` does that."""
RUNS, SECONDS = 200, 50
"""Of each target in CI: so many inputs, whatever else the processor does, and an end in any case.
`make fuzz` goes on for longer."""
SLOWEST = 5
"""Seconds that an input may take: at the lowest priority it may wait for seconds before it is
run."""


def mutant(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Something like a valid message."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0:
                changed[at:at] = rng.randbytes(rng.randint(1, 8))
            case 1:
                del changed[at : at + rng.randint(1, 16)]
            case 2:
                other = rng.choice(others)
                start = rng.randrange(len(other) + 1)
                changed[at:at] = other[start : start + rng.randint(1, 64)]
            case 3:
                changed[at : at + 4] = rng.choice(
                    [b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"\x80\0\0\0"]
                )
            case _ if changed:
                changed[at % len(changed)] ^= 1 << rng.randrange(8)
    return bytes(changed)


@pytest.mark.parametrize("name", TARGETS)
def test_what_strangers_send_is_taken_or_refused_in_words_and_nothing_else(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # Two targets replace these for good, in a process of their own; other tests go on in this one.
    monkeypatch.setattr(guard, "time", guard.time)
    monkeypatch.setattr(state, "_load", state._load)
    run, seeds = TARGETS[name].make()
    rng, corpus = random.Random(name), list(seeds)
    for seed in seeds:
        run(seed)
        for _ in range(MUTANTS):
            run(mutant(rng, seed, corpus))
    run(b"")


@pytest.mark.timeout(900)
def test_fuzzers_that_are_guided_by_coverage_find_no_more_in_hundreds_of_inputs_each(
    tmp_path: Path,
):
    pytest.importorskip("atheris", reason="atheris is not installed here")
    script = (
        "import pathlib, sys, fuzz; fuzz.OUT, fuzz.SLOWEST = pathlib.Path(sys.argv.pop(1)), "
        f"{SLOWEST}; sys.exit(fuzz.main())"
    )
    options = ("--runs", str(RUNS), "--seconds", str(SECONDS), "--seed", "7")
    with (tmp_path / "errors").open("wb") as errors:
        child = subprocess.Popen(
            ("nice", "-n", "19", sys.executable, "-c", script, str(tmp_path), *options),
            cwd=Path(fuzz.__file__).parent,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            table, _ = child.communicate(timeout=840)
        finally:
            if child.returncode is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    findings = {path.name: path.read_bytes().hex() for path in tmp_path.glob("*/*-*")}
    assert child.returncode == 0, (
        f"{findings}\n{table}\n{(tmp_path / 'errors').read_text()[-2000:]}"
    )
    lines = {line.split()[0]: line for line in table.splitlines() if line.strip()}
    for name in TARGETS:
        executions, edges = (int(text.replace(",", "")) for text in lines[name].split()[1:3])
        assert executions >= RUNS and edges > 0, lines[name]
