"""Do the tests see a defect? Mutants of the trainer, the protocol and the codecs, made by cosmic-ray.

    python benchmarks/mutants.py --sample 60          60 mutants of each module, always the same ones
    python benchmarks/mutants.py --sample 0 outer     all of the modules whose path contains "outer"
    python benchmarks/mutants.py --again              run those again that survived: after a new test

It works on a copy of the checkout under out/mutants, keeps every result there, and goes on where it was ended. Annotations are
not mutated: they would count as killed. A process that has imported torch and numba forks for each mutant, which saves seconds.
Kernels are tested without compiling (NUMBA_DISABLE_JIT). Results: benchmarks/results/mutants.json.
"""

import argparse
import ast
import json
import os
import random
import shlex
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out" / "mutants"
TREE = OUT / "tree"
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
SEED = 17
TIMEOUT = 120
SLOW = "not twelve_joiners and not hardly_ever and not swarm_of_64 and not fused_operations and not Thread"
PROTOCOL, TRAINER = "protocol/lowcomm_protocol/", "node/lowcomm_node/trainer/"
TESTS = {
    TRAINER + "state.py": "test_trainer_loop test_resuming",
    TRAINER + "replica.py": "test_trainer_loop test_resuming test_transfer",
    TRAINER + "loop.py": "test_trainer_loop test_resuming test_trainer_group test_slots",
    TRAINER + "transfer.py": "test_transfer test_trainer_loop",
    TRAINER + "capture.py": "test_capture test_trainer_loop test_trainer_group",
    TRAINER + "optimizer.py": "test_optimizer test_resuming",
    TRAINER + "saving.py": "test_saving",
    TRAINER + "arena.py": "test_slots",
    PROTOCOL + "outer.py": "test_outer",
    PROTOCOL + "outer_kernels.py": "test_outer",
    PROTOCOL + "outer_settings.py": "test_outer",
    PROTOCOL + "schedule.py": "test_schedule",
    PROTOCOL + "fragments.py": "test_fragments test_schedule",
    PROTOCOL + "robust.py": "test_robust",
    PROTOCOL + "trust.py": "test_trust",
    PROTOCOL + "repeats.py": "test_repeats",
    PROTOCOL + "pieces.py": "test_transfer",
    PROTOCOL + "clock.py": "test_clock",
    PROTOCOL + "balance.py": "test_fragments",
    PROTOCOL + "codecs/feedback.py": "test_feedback",
    PROTOCOL + "codecs/shards.py": "test_shards",
    PROTOCOL + "codecs/modulo.py": "test_modulo",
    PROTOCOL + "codecs/kernels.py": "test_codecs test_modulo test_feedback",
}
"""The tests of each module: those that are fast and about it."""


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="parts of the paths of modules; all if none is named")
    parser.add_argument("--sample", type=int, default=40, help="mutants of each module; 0: all")
    parser.add_argument("--again", action="store_true", help="run survivors again")
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process is left behind
    chosen = [path for path in TESTS if not told.modules or any(part in path for part in told.modules)]
    OUT.mkdir(parents=True, exist_ok=True)
    copy_tree()
    for path in chosen:
        with serving(path) as address:
            session = prepared(path, address, told.sample, told.again)
            if session is not None:
                command = [cosmic_ray(), "exec", str(session.with_suffix(".toml")), str(session)]
                subprocess.run(command, cwd=TREE, check=True)
                write_results()


def copy_tree() -> None:
    """What is mutated: never the checkout itself."""
    shutil.rmtree(TREE, ignore_errors=True)
    for folder in ("protocol", "node", "bootstrap", "tests"):
        shutil.copytree(ROOT / folder, TREE / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", TREE)


def cosmic_ray() -> str:
    """The program beside this interpreter."""
    return str(Path(sys.executable).with_name("cosmic-ray"))


def session_of(path: str) -> Path:
    """Results of a module as it stands: another version of it begins anew."""
    digest = sha256((ROOT / path).read_bytes()).hexdigest()[:12]
    return OUT / f"{Path(path).parent.name}-{Path(path).stem}-{digest}.sqlite"


def prepared(path: str, address: Path, sample: int, again: bool) -> Path | None:
    """The session of a module, with so many mutants that wait; None if its tests fail without any mutant."""
    tests = [f"tests/unit/{name}.py" for name in TESTS[path].split()]
    arguments = ["-x", "-q", "-p", "no:cacheprovider", "-o", "timeout=100", "-k", SLOW, *tests]
    command = shlex.join([sys.executable, "-S", str(Path(__file__).resolve()), "ask", str(address), *arguments])
    if subprocess.run(shlex.split(command), cwd=TREE).returncode != 0:
        print(f"{path}: its tests fail without a mutant, it is left out")
        return None
    session = session_of(path)
    settings = {"module-path": path, "timeout": float(TIMEOUT), "excluded-modules": [], "test-command": command}
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    session.with_suffix(".toml").write_text(
        "\n".join(["[cosmic-ray]", *lines, "[cosmic-ray.distributor]", 'name = "local"', ""])
    )
    if not session.exists():
        subprocess.run([cosmic_ray(), "init", str(session.with_suffix(".toml")), str(session)], cwd=TREE, check=True)
    choose(session, path, sample, again)
    return session


def choose(session: Path, path: str, sample: int, again: bool) -> None:
    """Leave a sample to be done: what is in no annotation, in an order that the seed alone decides."""
    spans = annotations((ROOT / path).read_text())
    with sqlite3.connect(session) as db:
        if again:
            db.execute("delete from work_results where test_outcome = 'SURVIVED'")
        db.execute("delete from work_results where worker_outcome = 'SKIPPED'")
        mutants = db.execute(
            "select job_id, start_pos_row, start_pos_col, operator_name, occurrence from mutation_specs"
        ).fetchall()
        real = sorted(one for one in mutants if not any(a <= (one[1], one[2]) < b for a, b in spans))
        real.sort(key=lambda one: (one[3], one[4], one[1], one[2]))
        random.Random(SEED).shuffle(real)
        wanted = {one[0] for one in (real[:sample] if sample else real)}
        done = {row[0] for row in db.execute("select job_id from work_results")}
        for job, *_ in mutants:
            if job not in wanted and job not in done:
                db.execute("insert into work_results (job_id, worker_outcome) values (?, 'SKIPPED')", (job,))


def annotations(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where annotations stand: line and column of the beginning and the end of each."""
    found: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign | ast.arg):
            found.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(node.returns)
    return [((n.lineno, n.col_offset), (n.end_lineno or 0, n.end_col_offset or 0)) for n in found if n is not None]


def write_results() -> None:
    """Everything that was run of the modules as they stand."""
    modules = {}
    for path in TESTS:
        if not session_of(path).exists():
            continue
        with sqlite3.connect(session_of(path)) as db:
            rows = db.execute(
                "select r.test_outcome, m.start_pos_row, m.operator_name, r.worker_outcome from work_results r "
                "join mutation_specs m on m.job_id = r.job_id"
            ).fetchall()
            made = db.execute("select count(*) from mutation_specs").fetchone()[0]
        ran = [row for row in rows if row[3] != "SKIPPED"]
        survived = [row for row in ran if row[0] == "SURVIVED"]
        modules[path] = {
            "mutants": made,
            "run": len(ran),
            "killed": len(ran) - len(survived),
            "survivors": sorted(f"line {row[1]}: {row[2].removeprefix('core/')}" for row in survived),
        }
    run, killed = (sum(one[key] for one in modules.values()) for key in ("run", "killed"))
    total = {
        "mutants": sum(one["mutants"] for one in modules.values()),
        "run": run,
        "killed": killed,
        "killed_percent": round(100 * killed / max(1, run), 1),
        "not_run": sorted(path for path in TESTS if path not in modules or not modules[path]["run"]),
    }
    RESULTS.write_text(json.dumps({"seed": SEED, "total": total, "modules": modules}, indent=1) + "\n")
    print(f"{killed} of {run} mutants killed, {total['killed_percent']} %")


# A process that has imported what takes long


@contextmanager
def serving(path: str) -> Iterator[Path]:
    """Such a process, which runs pytest in a fork of itself for whoever asks."""
    address = OUT / f"{os.getpid()}.sock"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(("protocol", "node", "bootstrap")),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "NUMBA_CACHE_DIR": str(OUT / "numba"),
    }
    if "kernels" in path:
        environment["NUMBA_DISABLE_JIT"] = "1"
    server = subprocess.Popen([sys.executable, __file__, "serve", str(address)], cwd=TREE, env=environment)
    try:
        yield address
    finally:
        server.kill()
        server.wait()
        with suppress(OSError):
            address.unlink()


def serve(address: str) -> None:
    """Fork for every connection; its lines are the arguments of pytest, the answer is the exit code."""
    import hypothesis  # noqa: F401
    import numba  # noqa: F401
    import pytest
    import safetensors.torch  # noqa: F401
    import torch  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.alarm(TIMEOUT)
                arguments = connection.makefile("r").readline()
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 1)
                code = int(pytest.main(json.loads(arguments)))
                connection.sendall(str(code).encode())
                os._exit(0)
            connection.close()


def ask(address: str, arguments: list[str]) -> int:
    """Have tests run; their exit code. One that dies has failed."""
    import time

    with socket.socket(socket.AF_UNIX) as connection:
        for _ in range(1200):
            try:
                connection.connect(address)
                break
            except OSError:
                time.sleep(0.1)
        connection.sendall(json.dumps(arguments).encode() + b"\n")
        return int(connection.recv(16) or b"99")


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
    elif sys.argv[1:2] == ["ask"]:
        sys.exit(ask(sys.argv[2], sys.argv[3:]))
    else:
        main()
