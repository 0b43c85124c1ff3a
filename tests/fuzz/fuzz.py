"""Fuzz decoders and message handlers, guided by the coverage of our own packages (atheris).

    make fuzz                          every target for 600 s, two at a time
    make fuzz SECONDS=30
    python tests/fuzz/fuzz.py --seconds 60 record pair-link
    python tests/fuzz/fuzz.py --again out/fuzz/record/crash-...    one input, with its traceback

Corpora and crashes are kept under out/fuzz/TARGET: what was found there goes on from. What came of
each target is written to benchmarks/results/fuzz.json, from a minute on: the longest time of each.
Exits with 1 if there is a finding."""

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUT = ROOT / "out" / "fuzz"
RESULTS = ROOT / "benchmarks" / "results" / "fuzz.json"
SLOWEST = 5
"""Seconds for one input."""
MEMORY = 3000
"""MB of a whole process, of which libraries take 600."""
WORTH = 60.0
"""Seconds from which on what came of a target is written down."""
MODULES = ("coded", "told", "machines", "stored", "opened", "paired")
"""Where targets are."""
sys.path.append(str(ROOT / "tests"))  # helpers that they share with tests
PROTOCOL = ROOT / "protocol" / "lowcomm_protocol"
COMPILED = [
    path
    for path in PROTOCOL.rglob("*.py")
    if "\n@part" in path.read_text() or "\n@kernel" in path.read_text()
]
UNTOUCHED = [
    *(".".join(path.relative_to(PROTOCOL.parent).with_suffix("").parts) for path in COMPILED),
    "lowcomm_protocol.messages",
]
"""Compiled by numba, which can't where functions are instrumented; made by protoc."""


@dataclass(frozen=True)
class Found:
    """What came of fuzzing one target."""

    name: str
    runs: int
    coverage: int
    corpus: int
    seconds: float
    crash: str

    def line(self) -> str:
        return (
            f"{self.name:18} {self.runs:>11,} {self.coverage:>6} {self.corpus:>6} "
            f"{self.seconds:>7.0f}  {self.crash}"
        )


def load(instrumented: bool) -> None:
    """Import all targets."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not instrumented:
        for module in MODULES:
            import_module(module)
        return
    import atheris

    with atheris.instrument_imports(
        include=["lowcomm_protocol", "lowcomm_node"], exclude=UNTOUCHED
    ):
        for module in MODULES:
            import_module(module)


def names() -> list[str]:
    """All targets."""
    from target import TARGETS

    return list(TARGETS)


def warm_up(chosen: Sequence[str]) -> None:
    """Compile once, for all children, what is compiled at its first call: it takes longer than an
    input may."""
    from target import TARGETS

    for name in chosen:
        run, seeds = TARGETS[name].make()
        for one in seeds:
            with contextlib.suppress(Exception):  # the child finds it again, and writes it down
                run(one)


def fuzz(name: str, seconds: float, runs: int, seed: int) -> None:
    """Fuzz one target in this process, for so long or so many inputs; does not return."""
    import atheris
    from target import MAX_BYTES, TARGETS

    run, seeds = TARGETS[name].make()
    corpus = OUT / name / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, one in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(one)
    flags = [
        f"-max_total_time={max(1, round(seconds))}",
        f"-runs={runs}",
        f"-max_len={MAX_BYTES // 4}",
        f"-timeout={SLOWEST}",
        "-print_final_stats=1",
        f"-rss_limit_mb={MEMORY}",
        f"-seed={seed}",
        f"-artifact_prefix={OUT / name}/",
        "-report_slow_units=5",
        "-len_control=20",
    ]

    def kept(data: bytes) -> None:
        try:
            run(data)
        except Exception:
            path = OUT / name / f"crash-{sha256(data).hexdigest()[:16]}"
            path.write_bytes(data)
            print(f"Test unit written to {path}", flush=True)
            raise

    for one in seeds:
        kept(one)
    atheris.Setup([sys.argv[0], *flags, str(corpus)], kept, enable_python_coverage=True)
    atheris.Fuzz()


def fuzz_in_child(name: str, seconds: float, runs: int, seed: int) -> Found:
    """Fuzz one target in a child process; what came of it."""
    folder = OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with (folder / "log").open("wb") as log:
        pid = os.fork()
        if pid == 0:
            try:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                fuzz(name, seconds, runs, seed)
            except BaseException:
                import traceback

                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
    return read_log(name, status, time.monotonic() - began)


def read_log(name: str, status: int, seconds: float) -> Found:
    """What libFuzzer has said."""
    text = (OUT / name / "log").read_text(errors="replace")
    coverage = re.findall(r"cov: (\d+)", text)
    corpus = re.findall(r"corp: (\d+)", text)
    runs = re.findall(r"stat::number_of_executed_units: +(\d+)", text) or re.findall(
        r"^#(\d+)", text, re.MULTILINE
    )
    crash = ""
    if status != 0:
        written = re.findall(r"Test unit written to (\S+)", text)
        told = (
            written[-1]
            if written
            else f"ended with {os.waitstatus_to_exitcode(status)}: see {OUT / name / 'log'}"
        )
        crash = told.replace(f"{ROOT}/", "")
    last = [int(found[-1]) if found else 0 for found in (runs, coverage, corpus)]
    return Found(name, last[0], last[1], last[2], seconds, crash)


def note(found: Found) -> None:
    """Write down what came of a target, beside what came of others, unless it was fuzzed for longer
    before."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if known.get(found.name, {"seconds": 0})["seconds"] > found.seconds and not found.crash:
        return
    known[found.name] = {name: value for name, value in asdict(found).items() if name != "name"}
    RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def again(path: Path) -> None:
    """Run one input, whose target its folder names."""
    load(instrumented=False)
    from target import TARGETS

    name = next(part for part in reversed(path.resolve().parts) if part in TARGETS)
    run, _ = TARGETS[name].make()
    run(path.read_bytes())
    print(f"{name}: nothing is wrong with {path}")


def main() -> int:
    """Fuzz; 1 if there is a finding."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", nargs="*", help="default: all")
    parser.add_argument("--seconds", type=float, default=600.0, help="for each target")
    parser.add_argument("--runs", type=int, default=-1, help="inputs of each target; -1: no limit")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--seed", type=int, default=0, help="0: another each time")
    parser.add_argument("--again", type=Path, help="run one input that was found")
    arguments = parser.parse_args()
    if arguments.again is not None:
        again(arguments.again)
        return 0
    load(instrumented=True)
    unknown = set(arguments.target) - set(names())
    if unknown:
        parser.error(f"no such target: {', '.join(unknown)}; there are {', '.join(names())}")
    print(
        f"{'target':18} {'executions':>11} {'edges':>6} {'corpus':>6} {'seconds':>7}  finding",
        flush=True,
    )
    crashed, shared = 0, Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(
            prefix="lowcomm-fuzz-", dir=shared if shared.is_dir() else None
        ) as scratch,
        ThreadPoolExecutor(arguments.processes) as pool,
    ):
        tempfile.tempdir = scratch
        chosen = arguments.target or names()
        warm_up(chosen)
        for found in pool.map(
            lambda name: fuzz_in_child(name, arguments.seconds, arguments.runs, arguments.seed),
            chosen,
        ):
            print(found.line(), flush=True)
            if arguments.seconds >= WORTH:
                note(found)
            crashed += bool(found.crash)
    print(f"{crashed} findings" if crashed else "no findings")
    return int(crashed > 0)


if __name__ == "__main__":
    sys.exit(main())
