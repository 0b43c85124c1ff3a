"""Do the tests see a defect? Mutants of the trainer, the protocol and the codecs, made by
cosmic-ray.

    python benchmarks/mutants.py --sample 60          60 mutants of each module, always the same
    python benchmarks/mutants.py --sample 0 outer     all of the modules whose path contains "outer"
    python benchmarks/mutants.py --again              those that survived: after a new test

It works on a copy of the checkout under out/mutants, keeps every result there, and goes on where it
was ended. Not counted are mutants of annotations and those that compare by identity instead of
equality, which change nothing here. mutant_server.py runs the tests. Results:
benchmarks/results/mutants.json."""

import ast
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from time import sleep
from typing import IO, Any

import kit

ROOT = kit.ROOT
OUT = ROOT / "out" / "mutants"
TREE = OUT / "tree"
ADDRESS = OUT / f"{os.getpid()}.sock"
RESULTS = kit.RESULTS / "mutants.json"
SAME = ("_Eq_Is", "_Is_Eq", "_NotEq_IsNot", "_IsNot_NotEq")
"""Operators that change nothing for what is compared here: small integers, names, None."""
EQUIVALENT = ROOT / "benchmarks" / "equivalent_mutants.toml"
SEEN = "create table if not exists seen (job_id text primary key)"
"""Those that survived when they were run first."""
NO_PYTHON = re.compile(r"[1-9]\d* \d+ tests")
"""What mutant_server.py says where it ended without a test that failed: the module can't be
imported, so it is no mutant."""
COUNTS = ("mutants", "run", "killed", "equivalent", "killed_at_first", "hung")
SERVER = Path(__file__).with_name("mutant_server.py")
SEED = 17
TIMEOUT = 7200.0
"""Seconds for cosmic-ray. mutant_server.py ends a mutant that hangs earlier, by its CPU time, so
that load does not decide."""
PROTOCOL, NODE = "protocol/lowcomm_protocol/", "node/lowcomm_node/"
TRAINER = NODE + "trainer/"
TESTS = {
    TRAINER + "state.py": "test_trainer_loop test_resuming test_transfer",
    TRAINER + "replica.py": "test_replica test_trainer_loop test_resuming test_transfer"
    " test_trainer_amendments",
    TRAINER
    + "loop.py": "test_trainer_loop test_resuming test_trainer_telling test_trainer_amendments",
    TRAINER
    + "exchanges.py": "test_trainer_loop test_resuming test_trainer_telling test_trainer_group",
    TRAINER + "building.py": "test_trainer_telling test_slots test_resuming",
    TRAINER + "transfer.py": "test_transfer test_trainer_loop",
    TRAINER
    + "capture.py": "test_capture test_replica test_trainer_loop test_trainer_group test_resuming",
    TRAINER + "optimizer.py": "test_optimizer test_resuming test_transfer",
    PROTOCOL + "peers/trust.py": "test_trust test_standing",
    PROTOCOL + "exchange/outer.py": "test_outer test_robust",
    PROTOCOL + "exchange/robust.py": "test_robust test_capture",
    PROTOCOL + "exchange/judging.py": "test_plausible test_repeats test_capture",
    PROTOCOL + "spec/outer_settings.py": "test_outer test_run",
    PROTOCOL + "exchange/nesterov.py": "test_outer",
    PROTOCOL + "exchange/noloco.py": "test_outer",
    PROTOCOL + "exchange/outer_kernels.py": "test_outer",
    PROTOCOL + "codecs/feedback.py": "test_feedback",
    PROTOCOL + "codecs/coder.py": "test_capture test_feedback test_modulo",
    PROTOCOL + "codecs/shards.py": "test_shards test_codecs",
    PROTOCOL + "codecs/modulo.py": "test_modulo test_pieces",
    PROTOCOL + "codecs/base.py": "test_codecs test_feedback test_shards",
    PROTOCOL + "plan/fragments.py": "test_fragments test_schedule",
    PROTOCOL + "plan/rows.py": "test_fragments",
    PROTOCOL + "plan/partition.py": "test_fragments",
    PROTOCOL + "plan/schedule.py": "test_schedule",
    PROTOCOL + "plan/clock.py": "test_clock",
    PROTOCOL + "state/pieces.py": "test_transfer test_state",
    PROTOCOL + "state/values.py": "test_transfer test_state",
    PROTOCOL + "state/snapshot.py": "test_transfer test_state",
    PROTOCOL + "peers/admission.py": "test_admission test_roster test_work",
    PROTOCOL + "spec/amendments.py": "test_amendments",
    PROTOCOL + "spec/names.py": "test_matching test_codecs test_modulo",
    PROTOCOL + "spec/document.py": "test_document test_amendments",
    PROTOCOL + "exchange/pair.py": "test_pair_machine test_pair_table test_deadlines test_history",
    PROTOCOL + "exchange/group.py": "test_group_machine test_group_table test_group_driver",
    PROTOCOL + "identity.py": "test_identity test_records",
    PROTOCOL + "peers/invites.py": "test_admission test_roster",
    PROTOCOL + "peers/liveness.py": "test_liveness test_roster",
    PROTOCOL + "plan/hypercube.py": "test_matching",
    PROTOCOL + "plan/random_pairs.py": "test_matching",
    PROTOCOL + "plan/pairing.py": "test_matching",
    PROTOCOL + "plan/matching.py": "test_matching test_pair_machine",
    PROTOCOL + "peers/probes.py": "test_probes",
    PROTOCOL + "peers/records.py": "test_records test_registry test_work",
    PROTOCOL + "peers/removals.py": "test_roster test_admission",
    PROTOCOL + "peers/roster.py": "test_roster",
    PROTOCOL + "spec/settings.py": "test_run test_document",
    PROTOCOL + "spec/transformer.py": "test_run",
    PROTOCOL + "spec/run.py": "test_run test_run_size test_document test_work",
    PROTOCOL + "exchange/tally.py": "test_tally test_group_machine",
    PROTOCOL + "work.py": "test_work",
    PROTOCOL + "codecs/__init__.py": "test_codecs",
    PROTOCOL + "codecs/bf16.py": "test_codecs",
    PROTOCOL + "codecs/e3m0.py": "test_codecs",
    PROTOCOL + "codecs/fp32.py": "test_codecs",
    PROTOCOL + "codecs/int8.py": "test_codecs",
    PROTOCOL + "codecs/blocks.py": "test_codecs test_feedback test_pieces",
    PROTOCOL + "codecs/q1.py": "test_codecs",
    PROTOCOL + "codecs/q2.py": "test_codecs",
    PROTOCOL + "codecs/modulo_kernels.py": "test_modulo test_golden test_pieces",
    PROTOCOL + "exchange/base.py": "test_table test_codecs",
    PROTOCOL + "codecs/kernels.py": "test_codecs test_modulo test_feedback",
    TRAINER + "saving.py": "test_saving test_trainer_loop",
    NODE + "node/ipc.py": "test_messages test_slots test_trainer_loop test_supervisor",
    NODE + "models/evaluation.py": "test_evaluation",
    NODE + "node/messages.py": "test_supervisor test_trainer_loop test_trainer_telling",
    NODE + "node/process.py": "test_supervisor test_saving test_tokenizers",
    TRAINER + "memory.py": "test_memory",
}
"""The tests of each module: those that are fast and about it."""


def main() -> None:
    """See the module."""
    parser = kit.parser(__doc__)
    parser.add_argument(
        "modules", nargs="*", help="parts of the paths of modules; all if none is named"
    )
    parser.add_argument("--sample", type=int, default=40, help="mutants of each module; 0: all")
    parser.add_argument("--again", action="store_true", help="run survivors again")
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process is left behind
    chosen = [
        path for path in TESTS if not told.modules or any(part in path for part in told.modules)
    ]
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
    for folder in ("protocol", "node", "bootstrap", "tests", "docs"):
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
    settings = {
        "module-path": path,
        "timeout": TIMEOUT,
        "excluded-modules": [],
        "test-command": command,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    session.with_suffix(".toml").write_text(
        "\n".join(["[cosmic-ray]", *lines, "[cosmic-ray.distributor]", 'name = "local"', ""])
    )
    if not session.exists():
        subprocess.run(
            [cosmic_ray(), "init", str(session.with_suffix(".toml")), str(session)],
            cwd=TREE,
            check=True,
        )
    return session if choose(session, path, sample, again) else None


def choose(session: Path, path: str, sample: int, again: bool) -> int:
    """Leave a sample to be done; how many of it wait."""
    with sqlite3.connect(session) as db:
        db.execute(SEEN)
        db.execute(
            "insert or ignore into seen select job_id from work_results where test_outcome = "
            "'SURVIVED'"
        )
        survivors = {
            row[0]
            for row in db.execute("select job_id from work_results where test_outcome = 'SURVIVED'")
        }
        if again:
            db.execute("delete from work_results where test_outcome = 'SURVIVED'")
        db.execute("delete from work_results where worker_outcome = 'SKIPPED'")
        ordered = population(db, path)
        wanted = set(ordered[:sample] if sample else ordered) | survivors
        done = {row[0] for row in db.execute("select job_id from work_results")}
        for (job,) in db.execute("select job_id from mutation_specs").fetchall():
            if job not in wanted and job not in done:
                db.execute(
                    "insert into work_results (job_id, worker_outcome) values (?, 'SKIPPED')",
                    (job,),
                )
    return len(wanted - done)


def population(db: sqlite3.Connection, path: str) -> list[str]:
    """The mutants of a module that count, in an order that the seed alone decides."""
    spans = annotations((ROOT / path).read_text())
    query = (
        "select operator_name, occurrence, start_pos_row, start_pos_col, job_id from mutation_specs"
    )
    counted = [
        one
        for one in sorted(db.execute(query).fetchall())
        if not one[0].endswith(SAME) and not any(start <= one[2:4] < stop for start, stop in spans)
    ]
    random.Random(SEED).shuffle(counted)
    return [one[4] for one in counted]


def annotations(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where annotations stand: line and column of the beginning and the end of each."""
    found: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign | ast.arg):
            found.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(node.returns)
    return [
        ((n.lineno, n.col_offset), (n.end_lineno or 0, n.end_col_offset or 0))
        for n in found
        if n is not None
    ]


def write_results() -> None:
    """Everything that was run of the modules as they stand."""
    modules = {path: result(path) for path in TESTS if session_of(path).exists()}
    modules = {path: one for path, one in modules.items() if one["run"]}
    total = {key: sum(one[key] for one in modules.values()) for key in COUNTS}
    total |= estimate(list(modules.values())) | {
        "not_run": [path for path in TESTS if path not in modules]
    }
    kit.write(RESULTS, {"seed": SEED, "total": total, "modules": modules})
    print(
        f"{total['killed']} of {total['run']} mutants killed, {total['equivalent']} equivalent: "
        f"{total['killed_percent']} % of all, {total['from_percent']} to {total['to_percent']} %",
        flush=True,
    )


def result(path: str) -> dict[str, Any]:
    """What became of the mutants of a module."""
    known = tomllib.loads(EQUIVALENT.read_text()).get(path, {})
    with sqlite3.connect(session_of(path)) as db:
        db.execute(SEEN)
        mutants = len(population(db, path))
        ran = db.execute(
            "select r.test_outcome, r.diff, r.output, r.job_id in (select job_id from seen) from "
            "work_results r where r.worker_outcome != 'SKIPPED'"
        ).fetchall()
    ran = [one for one in ran if not NO_PYTHON.match(one[2] or "")]
    alive = sorted(changed(diff) for outcome, diff, *_ in ran if outcome == "SURVIVED")
    equivalent = [one for one in alive if one[1] in known]
    return {
        "mutants": mutants,
        "run": len(ran),
        "killed": len(ran) - len(alive),
        "equivalent": len(equivalent),
        "killed_at_first": sum(outcome != "SURVIVED" and not seen for outcome, _, _, seen in ran),
        "hung": sum(
            "of a processor" in (output or "") or "does nothing" in (output or "")
            for _, _, output, _ in ran
        ),
        "survivors": [f"{was} -> {now}" for was, now in alive if now not in known],
        "equivalents": {f"{was} -> {now}": known[now] for was, now in equivalent},
    }


def changed(diff: str) -> tuple[str, str]:
    """The first line that a mutant changes, before and after."""
    lines = [
        line
        for line in diff.splitlines()
        if line[:1] in "-+" and line[:3] not in ("---", "+++") and line[1:].strip()
    ]
    was, now = ([line[1:].strip() for line in lines if line[0] == sign] for sign in "-+")
    return " ".join(was[:1]), " ".join(now[:1]) or "(nothing)"


def estimate(modules: list[dict[str, Any]]) -> dict[str, float]:
    """The part of all mutants of these modules that is killed, in percent, and its interval of 95
    %: a stratified sample.

    Each module counts by its mutants, less the part of its sample that is equivalent. ``at_first``:
    by the tests as they were when each mutant was run first, so that tests written for survivors of
    the sample flatter nothing."""
    strata = []
    for one in modules:
        counted = one["run"] - one["equivalent"]
        if counted:
            strata.append(
                (
                    one["mutants"] * counted / one["run"],
                    counted,
                    one["killed"],
                    one["killed_at_first"],
                )
            )
    whole = max(1.0, sum(weight for weight, *_ in strata))
    killed = sum(weight * killed / counted for weight, counted, killed, _ in strata) / whole
    at_first = sum(weight * first / counted for weight, counted, _, first in strata) / whole
    variance = sum(
        (weight / whole) ** 2 * variance_of(killed, counted)
        for weight, counted, killed, _ in strata
    )
    spread = 1.96 * math.sqrt(variance)
    low, high = max(0.0, killed - spread), min(1.0, killed + spread)
    parts = {"killed": killed, "from": low, "to": high, "at_first": at_first}
    return {f"{name}_percent": round(100 * part, 1) for name, part in parts.items()}


def variance_of(killed: int, counted: int) -> float:
    """Of the part that is killed, where so many were counted; not 0 where all were (Agresti and
    Coull)."""
    part = (killed + 2) / (counted + 4)
    return part * (1 - part) / (counted + 4)


# A process that has imported what takes long


@contextmanager
def warm() -> Iterator[IO[str]]:
    """Such a process: for each line, a path and an address, it runs the tests of that module for
    whoever asks there."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(("protocol", "node", "bootstrap")),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "NUMBA_CACHE_DIR": str(OUT / "numba"),
    }
    server = subprocess.Popen(
        [sys.executable, SERVER], stdin=subprocess.PIPE, text=True, cwd=TREE, env=environment
    )
    assert server.stdin is not None
    try:
        yield server.stdin
    finally:
        with suppress(OSError):
            server.stdin.close()
        server.wait()


def ask(address: str) -> int:
    """Have tests run; their exit code. cosmic-ray keeps the output."""
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
