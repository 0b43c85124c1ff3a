"""Claim: coding is never what a peer waits for. Speed and error of every codec, beside a plain
copy.

    python benchmarks/codecs.py [--numel 10000000] [--repeats 7]

Shares are of the speed of memcpy, of float32 values on one thread, in CPU seconds, so that other
programs disturb less. Copies and codecs take turns; medians of the repeats count. A warm buffer was
written before, a fresh one comes from the system and costs its page faults. `pair` is what a coder
does for an exchange in a pair: code, and keep what the other end decodes; `group` the same for a
group of four with error feedback. Errors are mean squares relative to the values'. Prints a table
and writes benchmarks/results/codecs.json.
"""

import statistics
import time
from collections.abc import Callable

import kit
import numpy as np

from lowcomm_protocol.codecs import CODECS, Coder, FixedCodec, codec, coder, shard_coder
from lowcomm_protocol.codecs.shards import shard_bounds
from lowcomm_protocol.spec.names import codecs_for_groups

OUT = kit.RESULTS / "codecs.json"
GROUP = 4

Work = tuple[Callable[[], object], Callable[[], object]]
"""What comes before, untimed, and what is timed."""


def nothing() -> None:
    """Nothing comes before."""


def seconds_in_turns(works: dict[str, Work], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each, after one turn that compiles and warms up."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats + 1):
        for name, (prepare, work) in works.items():
            prepare()
            start = time.thread_time()
            work()
            taken[name].append(time.thread_time() - start)
    return {name: statistics.median(each[1:]) for name, each in taken.items()}


def relative_error(coding: FixedCodec, values: np.ndarray) -> float:
    """Mean square of what coding changes, relative to the mean square of the values."""
    data, restored = bytearray(coding.coded_size(values.size)), np.empty_like(values)
    coding.encode(values, memoryview(data))
    coding.decode(data, restored)
    exact = values.astype(np.float64)
    return float(np.mean((exact - restored) ** 2) / np.mean(exact**2))


def ready(name: str, values: np.ndarray) -> tuple[Coder, memoryview, memoryview]:
    """A coder that has encoded once, a buffer for it, and what a partner that is near has sent.

    Modulo codecs have learned from a first exchange.
    """
    near = values + np.random.default_rng(1).normal(0, 1e-4, values.size).astype(np.float32)
    ours, theirs = coder(name, values.size), coder(name, values.size)
    out, came = (memoryview(bytearray(ours.max_size)) for _ in range(2))
    for _ in range(2):
        own = ours.encode(values.copy(), out)
        size = theirs.encode(near.copy(), came)
        ours.decode(came[:size], np.empty_like(values))
        theirs.decode(out[:own], np.empty_like(values))
        ours.commit()
        theirs.commit()
    ours.encode(values.copy(), out)
    theirs.forget()
    return ours, out, came[: theirs.encode(near.copy(), came)]


def works_of(name: str, values: np.ndarray) -> dict[str, Work]:
    """What is timed of one codec; ``memcpy`` stands beside it."""
    numel, (one, out, came) = values.size, ready(name, values)
    vector, restored, copied, kept = (values.copy() for _ in range(4))

    def given() -> None:
        np.copyto(vector, values)

    works: dict[str, Work] = {
        "memcpy": (nothing, lambda: np.copyto(copied, values)),
        "memcpy_fresh": (nothing, values.copy),
        "pair": (given, lambda: one.encode(vector, out)),
        "decode": (nothing, lambda: one.decode(came, restored)),
        "decode_fresh": (nothing, lambda: one.decode(came, np.empty_like(values))),
    }
    if name in codecs_for_groups():
        fixed, sharded = codec(name), shard_coder(name, numel, feedback=True)
        bounds = shard_bounds(numel, GROUP)
        room = memoryview(bytearray(fixed.coded_size(numel) + 4 * numel))
        exact = out[: fixed.coded_size(numel)]
        works |= {
            "encode": (nothing, lambda: fixed.encode(values, exact)),
            "encode_fresh": (
                nothing,
                lambda: fixed.encode(values, memoryview(bytearray(exact.nbytes))),
            ),
            "group": (given, lambda: sharded.encode(vector, 0, bounds, room, kept)),
        }
    return works


def measure(name: str, values: np.ndarray, student: np.ndarray, repeats: int) -> dict[str, float]:
    """One row of the table."""
    row = seconds_in_turns(works_of(name, values), repeats)
    shares = {
        work: row["memcpy"] / seconds
        for work, seconds in row.items()
        if not work.startswith("memcpy")
    }
    row = {f"{work}_gb_s": 4e-9 * values.size / seconds for work, seconds in row.items()} | shares
    row["bits_per_value"] = 8 * len(ready(name, values[:100_000])[2]) / 100_000
    if name in codecs_for_groups():
        row["error_gaussian"] = relative_error(codec(name), values)
        row["error_student_t3"] = relative_error(codec(name), student)
    return row


COLUMNS = ("encode", "encode_fresh", "pair", "group", "decode", "decode_fresh")


def main() -> None:
    """Measure, print, write."""
    parser = kit.parser(__doc__)
    parser.add_argument("--numel", type=int, default=10_000_000, help="values in the vector")
    parser.add_argument("--only", nargs="*", choices=list(CODECS), default=list(CODECS))
    parser.add_argument("--repeats", type=int, default=7, help="timed calls; the median counts")
    parser.add_argument("--out", type=kit.Path, default=OUT, help="where the results go")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    values = 0.02 * rng.standard_normal(arguments.numel, dtype=np.float32)
    student = rng.standard_t(3, arguments.numel).astype(np.float32)
    print(f"{'codec':8}{'bits':>6}{'memcpy':>8}" + "".join(f"{one:>14}" for one in COLUMNS))
    rows = {}
    for name in arguments.only:
        row = rows[name] = measure(name, values, student, arguments.repeats)
        shares = "".join(f"{row[one]:14.2f}" if one in row else f"{'':14}" for one in COLUMNS)
        print(f"{name:8}{row['bits_per_value']:6.2f}{row['memcpy_gb_s']:8.1f}{shares}", flush=True)
    about = {"machine": kit.loaded_machine(), "numel": values.size, "repeats": arguments.repeats}
    known = kit.read(arguments.out).get("codecs", {})
    kit.write(arguments.out, {**about, "codecs": known | rows})
    print(f"GB/s of memcpy, and shares of it. Written to {arguments.out}")


if __name__ == "__main__":
    main()
