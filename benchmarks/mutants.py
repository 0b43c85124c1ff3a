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
from time import sleep
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out" / "mutants"
TREE = OUT / "tree"
ADDRESS = OUT / f"{os.getpid()}.sock"
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
SAME = ("_Eq_Is", "_Is_Eq", "_NotEq_IsNot", "_IsNot_NotEq")
"""Operators that change nothing for what is compared here: small integers, names, None."""
SERVER = Path(__file__).with_name("mutant_server.py")
SEED = 17
TIMEOUT = 7200.0
"""Of cosmic-ray. What hangs is ended before, by what it takes of a processor: how busy the machine is must not decide."""
PROTOCOL, TRAINER = "protocol/lowcomm_protocol/", "node/lowcomm_node/trainer/"
TESTS = {
    TRAINER + "state.py": "test_trainer_loop test_resuming test_transfer",
    TRAINER + "replica.py": "test_trainer_loop test_resuming test_transfer test_trainer_amendments",
    TRAINER + "loop.py": "test_trainer_loop test_resuming test_trainer_group test_slots test_trainer_amendments",
    TRAINER + "transfer.py": "test_transfer test_trainer_loop",
    TRAINER + "capture.py": "test_capture test_trainer_loop test_trainer_group test_resuming",
    TRAINER + "optimizer.py": "test_optimizer test_resuming",
    TRAINER + "muon.py": "test_optimizer",
    TRAINER + "saving.py": "test_saving test_trainer_loop",
    TRAINER + "arena.py": "test_slots test_trainer_loop",
    TRAINER + "evaluation.py": "test_evaluation",
    TRAINER + "interface.py": "test_slots test_trainer_group test_transfer test_history",
    TRAINER + "process.py": "test_supervisor test_saving test_tokenizers",
    TRAINER + "pipe.py": "test_trainer_loop test_supervisor",
    TRAINER + "reckoning.py": "test_reckoning",
    TRAINER + "text.py": "test_data test_trainer_loop",
    PROTOCOL + "outer.py": "test_outer test_robust",
    PROTOCOL + "outer_kernels.py": "test_outer",
    PROTOCOL + "outer_settings.py": "test_outer test_run",
    PROTOCOL + "schedule.py": "test_schedule",
    PROTOCOL + "fragments.py": "test_fragments test_schedule",
    PROTOCOL + "robust.py": "test_robust test_capture",
    PROTOCOL + "trust.py": "test_trust test_standing",
    PROTOCOL + "repeats.py": "test_repeats test_capture",
    PROTOCOL + "pieces.py": "test_transfer test_fetch",
    PROTOCOL + "clock.py": "test_clock",
    PROTOCOL + "balance.py": "test_fragments",
    PROTOCOL + "admission.py": "test_admission test_roster test_work",
    PROTOCOL + "amendments.py": "test_amendments",
    PROTOCOL + "choices.py": "test_matching test_codecs",
    PROTOCOL + "document.py": "test_document test_amendments",
    PROTOCOL + "exchange.py": "test_exchange test_timetable test_history",
    PROTOCOL + "group.py": "test_group test_group_round",
    PROTOCOL + "group_swap.py": "test_group_swap test_group_round",
    PROTOCOL + "identity.py": "test_identity test_records",
    PROTOCOL + "invites.py": "test_admission test_roster",
    PROTOCOL + "liveness.py": "test_liveness test_roster",
    PROTOCOL + "matching.py": "test_matching test_exchange",
    PROTOCOL + "probes.py": "test_probes",
    PROTOCOL + "records.py": "test_records test_registry test_work",
    PROTOCOL + "removals.py": "test_roster test_admission",
    PROTOCOL + "roster.py": "test_roster",
    PROTOCOL + "run.py": "test_run test_run_size test_document",
    PROTOCOL + "snapshot.py": "test_transfer test_fetch",
    PROTOCOL + "swap.py": "test_swap",
    PROTOCOL + "tally.py": "test_group test_exchange",
    PROTOCOL + "work.py": "test_work",
    PROTOCOL + "codecs/__init__.py": "test_codecs",
    PROTOCOL + "codecs/base.py": "test_codecs test_feedback test_shards",
    PROTOCOL + "codecs/bf16.py": "test_codecs",
    PROTOCOL + "codecs/coder.py": "test_capture test_feedback test_modulo",
    PROTOCOL + "codecs/e3m0.py": "test_codecs",
    PROTOCOL + "codecs/fp32.py": "test_codecs",
    PROTOCOL + "codecs/int8.py": "test_codecs",
    PROTOCOL + "codecs/q1.py": "test_codecs",
    PROTOCOL + "codecs/q2.py": "test_codecs",
    PROTOCOL + "codecs/feedback.py": "test_feedback",
    PROTOCOL + "codecs/shards.py": "test_shards test_codecs",
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
    with warm() as server:
        for path in chosen:
            if (session := wanting(path, told.sample, told.again)) is None:
                continue
            ADDRESS.unlink(missing_ok=True)  # of the module before
            server.write(f"{path} {ADDRESS}\n")
            server.flush()
            if ask(str(ADDRESS)) != 0:
                print(f"{path}: its tests fail without a mutant, it is left out", flush=True)
                continue
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


def wanting(path: str, sample: int, again: bool) -> Path | None:
    """The session of a module, with so many mutants that wait; None if none does."""
    command = shlex.join([sys.executable, "-S", str(Path(__file__).resolve()), "ask", str(ADDRESS)])
    session = session_of(path)
    settings = {"module-path": path, "timeout": TIMEOUT, "excluded-modules": [], "test-command": command}
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    session.with_suffix(".toml").write_text(
        "\n".join(["[cosmic-ray]", *lines, "[cosmic-ray.distributor]", 'name = "local"', ""])
    )
    if not session.exists():
        subprocess.run([cosmic_ray(), "init", str(session.with_suffix(".toml")), str(session)], cwd=TREE, check=True)
    return session if choose(session, path, sample, again) else None


def choose(session: Path, path: str, sample: int, again: bool) -> int:
    """Leave a sample to be done; how many wait: what is in no annotation, in an order that the seed alone decides."""
    spans = annotations((ROOT / path).read_text())
    with sqlite3.connect(session) as db:
        if again:
            db.execute("delete from work_results where test_outcome = 'SURVIVED'")
        db.execute("delete from work_results where worker_outcome = 'SKIPPED'")
        mutants = db.execute(
            "select job_id, start_pos_row, start_pos_col, operator_name, occurrence from mutation_specs"
        ).fetchall()
        real = [one for one in mutants if not any(a <= (one[1], one[2]) < b for a, b in spans)]
        real = [one for one in real if not one[3].endswith(SAME)]
        real.sort(key=lambda one: (one[3], one[4], one[1], one[2]))
        random.Random(SEED).shuffle(real)
        wanted = {one[0] for one in (real[:sample] if sample else real)}
        done = {row[0] for row in db.execute("select job_id from work_results")}
        for job, *_ in mutants:
            if job not in wanted and job not in done:
                db.execute("insert into work_results (job_id, worker_outcome) values (?, 'SKIPPED')", (job,))
    return len(wanted - done)


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
def warm() -> Iterator[IO[str]]:
    """Such a process: for each line, a path and an address, it runs the tests of that module for whoever asks there."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(("protocol", "node", "bootstrap")),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "NUMBA_CACHE_DIR": str(OUT / "numba"),
    }
    server = subprocess.Popen([sys.executable, SERVER], stdin=subprocess.PIPE, text=True, cwd=TREE, env=environment)
    assert server.stdin is not None
    try:
        yield server.stdin
    finally:
        with suppress(OSError):
            server.stdin.close()
        server.wait()


def ask(address: str) -> int:
    """Have tests run; their exit code. What is said is kept by cosmic-ray."""
    with socket.socket(socket.AF_UNIX) as connection:
        for _ in range(6000):
            try:
                connection.connect(address)
                break
            except OSError:
                sleep(0.1)
        answer = connection.recv(200).decode() or "99 died"
    print(answer)
    return 0 if answer.split()[0] == "0" else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["ask"]:
        sys.exit(ask(sys.argv[2]))
    else:
        main()
