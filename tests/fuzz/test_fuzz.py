"""What must hold for every fuzz target: its corpus passes, and so does what is like it. ``make fuzz`` looks for hours.

Every input that was ever found to break something is a test of its own, here or beside what it broke.
"""

import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from target import TARGETS

import fuzz
from lowcomm_node.discovery import guard
from lowcomm_node.trainer import state

fuzz.load(instrumented=False)
MUTANTS = 60
"""Of each seed. No coverage guides them: `fuzz.py` does that."""
SLICE = ("record", "pair-link", "group", "introduction", "dht-value", "tunnel", "run-specification", "manifest")
"""Targets that a fuzzer runs for a second each; all of them would take CI longer than everything else."""


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
                changed[at : at + 4] = rng.choice([b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"\x80\0\0\0"])
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


def test_a_fuzzer_that_is_guided_by_coverage_finds_no_more_in_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("atheris", reason="atheris is not installed here")
    monkeypatch.setattr(fuzz, "OUT", tmp_path)
    script = "import sys, fuzz, pathlib; fuzz.OUT = pathlib.Path(sys.argv.pop(1)); sys.exit(fuzz.main())"
    command = [sys.executable, "-c", script, str(tmp_path), "--seconds", "1", "--seed", "7", *SLICE]
    done = subprocess.run(
        command, cwd=Path(fuzz.__file__).parent, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    for name in SLICE:
        line = next(line for line in done.stdout.splitlines() if line.startswith(name))
        assert int(line.split()[1].replace(",", "")) > 100, line
