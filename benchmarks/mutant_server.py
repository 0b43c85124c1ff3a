"""For mutants.py: a process that has imported what takes long, and runs the tests of a mutant in a
fork of itself.

First it runs the tests without a mutant, and notes which functions each of them enters and what it
takes. Of a mutant it runs those that enter the changed function, the fastest first, until one
fails; all of them if there is none."""

import ast
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Generator, Iterable
from contextlib import suppress
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from time import monotonic, process_time, sleep
from types import CodeType, FrameType

import numba
import psutil
import pytest
import safetensors.torch  # noqa: F401
import torch  # noqa: F401
from hypothesis import settings
from mutants import OUT, TESTS, TREE

from lowcomm_node.trainer.rehearsal import rehearse
from lowcomm_protocol.spec.presets import PRESETS
from lowcomm_protocol.spec.run import parse_toml

LEAST, MANY = 10.0, 2.0
"""A mutant hangs once it has taken so many seconds of a processor, and so many times what the tests
take without one."""
MOST = 20.0
"""Seconds of a processor, about, for the tests of a mutant, the fastest first."""
TRIED = 0.5
"""Seconds of a processor for trying tests in a fork without a mutant, the fastest first: a fork
must not be what fails."""
EXAMPLES = 20
"""Of hypothesis in the first run, which only looks what each test enters."""
IDLE = 120
"""It hangs too once it has taken next to nothing for so many seconds. How busy the machine is must
not decide."""
NODE = TREE / "node" / "lowcomm_node"
OURS = (str(TREE / "protocol"), *(str(NODE / room) for room in ("trainer", "node")))
ARGUMENTS = [
    "-x",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-o",
    "timeout=0",
]
SLOW = (
    "not twelve_joiners and not hardly_ever and not swarm_of_64 and not fused_operations and not "
    "Thread"
)


class Recorder:
    """A plugin of pytest: which functions of ours each test enters, and what it takes of a
    processor."""

    def __init__(self) -> None:
        self.told: dict[str, tuple[float, list[str]]] = {}

    def pytest_collection(self) -> None:
        """See the hook: before the tests are imported."""
        settings.register_profile("look", max_examples=EXAMPLES, deadline=None)
        settings.load_profile("look")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item
    ) -> Generator[None, bool | None, bool | None]:
        """Note the functions; what fixtures enter counts too."""
        entered: set[CodeType] = set()

        def called(frame: FrameType, event: str, _: object) -> None:
            entered.add(frame.f_code)

        begun = process_time()
        sys.settrace(called)
        threading.settrace(called)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            ours = {
                name(code.co_filename, code.co_qualname)
                for code in entered
                if code.co_filename.startswith(OURS)
            }
            self.told[item.nodeid] = process_time() - begun, sorted(ours)


def name(file: str, function: str) -> str:
    """How a function is called here."""
    return f"{file.removeprefix(str(TREE) + '/')}::{function}"


class Chooser:
    """A plugin of pytest: those tests alone, in that order; who fails is written to a pipe."""

    def __init__(self, wanted: list[str], pipe: int) -> None:
        self.turn = {name: turn for turn, name in enumerate(wanted)}
        self.pipe = pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """See the hook."""
        if report.failed:
            os.write(self.pipe, report.nodeid.encode()[-300:])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """See the hook."""
        items[:] = sorted(
            (one for one in items if one.nodeid in self.turn), key=lambda one: self.turn[one.nodeid]
        )


def serve(address: str, path: str) -> None:
    """Fork for every connection, and answer with the exit code of the tests that the mutant
    concerns."""
    source = (TREE / path).read_text()
    numba.config.DISABLE_JIT = is_plain = path.endswith("outer_kernels.py")
    if "@kernel" in source or "@part" in source:
        numba.config.CACHE_DIR = str(
            OUT / "numba-mutants"
        )  # what mutants compile to must not replace what is loaded elsewhere
    forget(path)
    told: dict[str, tuple[float, list[str]]] = {}
    for test in TESTS[path].split():
        told |= looked_at(file_of(test), is_plain)
    took = {test: seconds for test, (seconds, _) in told.items()}
    entered = {test: set(functions) for test, (_, functions) in told.items()}
    limit = LEAST + MANY * sum(took.values())
    tried = run_tests(within(sorted(took, key=took.__getitem__), took, TRIED), limit)
    print(
        f"{path}: {len(took)} tests, {sum(took.values()):.1f} s of a processor; without a mutant: "
        f"{tried}",
        flush=True,
    )
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        while True:
            connection, _ = server.accept()
            answer = tried
            if tried.startswith("0 ") and (after := (TREE / path).read_text()) != source:
                changed = name(path, function_of(source, after))
                chosen = [test for test in took if changed in entered[test]] or list(took)
                answer = run_tests(within(sorted(chosen, key=took.__getitem__), took, MOST), limit)
            connection.sendall(answer.encode())
            connection.close()


def file_of(test: str) -> str:
    """Where the tests of one name are."""
    (found,) = (TREE / "tests" / "unit").rglob(f"{test}.py")
    return str(found.relative_to(TREE))


def looked_at(file: str, is_plain: bool) -> dict[str, tuple[float, list[str]]]:
    """Of each test in a file: what it takes, and the functions that it enters; kept for as long as
    the file stays as it is."""
    digest = sha256((TREE / file).read_bytes()).hexdigest()[:12]
    kept = OUT / f"{Path(file).stem}-{digest}{'-plain' if is_plain else ''}.json"
    if not kept.exists():
        child = os.fork()
        if child == 0:
            recorder = Recorder()
            code = pytest.main([*ARGUMENTS, "-k", SLOW, file], plugins=[recorder])
            if code == 0:
                kept.write_text(json.dumps(recorder.told))
            os._exit(0)
        os.waitpid(child, 0)
    return json.loads(kept.read_text()) if kept.exists() else {}


def within(tests: list[str], took: dict[str, float], seconds: float) -> list[str]:
    """The first of these tests, which take so long together; one at least."""
    sums = accumulate(took[test] for test in tests)
    return [
        test
        for number, (test, so_far) in enumerate(zip(tests, sums, strict=True))
        if so_far <= seconds or not number
    ]


def forget(path: str) -> None:
    """What the mutant could change is imported again: its module, all that import that, and the
    tests."""
    files = {
        name: str(getattr(module, "__file__", None) or "") for name, module in sys.modules.items()
    }
    ours = {name: file for name, file in files.items() if file.startswith(str(TREE))}
    stale = {
        name
        for name, file in ours.items()
        if file == str(TREE / path) or file.startswith(str(TREE / "tests"))
    }
    imports = {name: imported(name, file, ours) for name, file in ours.items()}
    while more := {name for name in ours if name not in stale and imports[name] & stale}:
        stale |= more
    for name in stale:
        module = sys.modules.pop(name)
        parent, _, last = name.rpartition(".")
        if parent in sys.modules and getattr(sys.modules[parent], last, None) is module:
            delattr(sys.modules[parent], last)


def imported(name: str, file: str, ours: Iterable[str]) -> set[str]:
    """Our modules that one imports, anywhere in its text."""
    found = set()
    package = name if file.endswith("__init__.py") else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    [
                        *package.split(".")[: len(package.split(".")) - node.level + 1],
                        *filter(None, [base]),
                    ]
                )
            found |= {base} | {f"{base}.{one.name}" for one in node.names}
    return {one for one in ours if one in found}


def function_of(before: str, after: str) -> str:
    """The qualified name of the function in whose body they differ; empty if it is in none."""
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    row = next((row for row, (old, new) in enumerate(pairs, 1) if old != new), 0)
    return inner(ast.parse(before), row, "")


def inner(node: ast.AST, row: int, found: str, prefix: str = "") -> str:
    """The innermost function around a row, below a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if child.body[0].lineno <= row <= (child.end_lineno or 0):
                return inner(child, row, prefix + child.name, f"{prefix}{child.name}.<locals>.")
        elif isinstance(child, ast.ClassDef):
            found = inner(child, row, found, f"{prefix}{child.name}.")
        else:
            found = inner(child, row, found, prefix)
    return found


def run_tests(wanted: list[str], limit: float) -> str:
    """The exit code of those tests in a fork, and why. Tests that use far too much CPU time, or
    none for long, hang."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        files = sorted({name.split("::")[0] for name in wanted})
        os._exit(int(pytest.main([*ARGUMENTS, *files], plugins=[Chooser(wanted, writing)])))
    process, used, since, hangs = psutil.Process(child), 0.0, monotonic(), ""
    while True:
        with suppress(psutil.Error):
            family = [process, *process.children(recursive=True)]
            now = sum(sum(one.cpu_times()) for one in family)
            if now > used + 0.05:
                used, since = now, monotonic()
        if used > limit:
            hangs = f"takes more than {limit:.0f} s of a processor"
        elif monotonic() > since + IDLE:
            hangs = f"does nothing for {IDLE} s"
        if hangs:
            for one in family:
                with suppress(psutil.Error):
                    one.kill()
        done, status = os.waitpid(child, 0 if hangs else os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            os.close(writing)
            os.set_blocking(reading, False)
            failed = os.read(reading, 1000).decode(errors="replace")
            os.close(reading)
            return (
                f"{99 if hangs else code} {hangs or failed or f'{len(wanted)} tests'}, {used:.1f} s"
            )
        sleep(0.05)


def main() -> None:
    """Serve one module after the other, each in a fork, as the lines of standard input say."""
    for method in PRESETS:  # what it takes to load kernels is no test's
        rehearse(parse_toml(f'[run]\nname = "mutants"\n[sync]\nmethod = "{method}"').sync)
    child = 0
    for line in sys.stdin:
        end(child)
        path, address = line.split()
        child = os.fork()
        if child == 0:
            serve(address, path)
    end(child)


def end(child: int) -> None:
    """End such a fork."""
    if child:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
