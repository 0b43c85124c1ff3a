"""Claim: coding is never what a peer waits for. Speed and error of every codec, beside a plain
copy.

    python benchmarks/codecs.py [--numel 4000000] [--repeats 7]

MB/s are of float32 values, on one thread, the median of the repeats. Errors are mean squares
relative to the values'. Prints a table and writes out/codecs.json.
"""

import statistics
import time
from collections.abc import Callable

import kit
import numpy as np

from lowcomm_protocol.codecs import FixedCodec, codec
from lowcomm_protocol.spec.names import codecs_for_groups

OUT = kit.OUT / "codecs.json"


def megabytes_per_second(work: Callable[[], object], numel: int, repeats: int) -> float:
    """Median speed over ``repeats`` calls, after one that compiles and warms up."""
    work()
    seconds: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return 4e-6 * numel / statistics.median(seconds)


def relative_error(coding: FixedCodec, values: np.ndarray) -> float:
    """Mean square of what coding changes, relative to the mean square of the values."""
    data, restored = bytearray(coding.coded_size(values.size)), np.empty_like(values)
    coding.encode(values, memoryview(data))
    coding.decode(data, restored)
    exact = values.astype(np.float64)
    return float(np.mean((exact - restored) ** 2) / np.mean(exact**2))


def measure(
    coding: FixedCodec, gaussian: np.ndarray, student: np.ndarray, repeats: int
) -> dict[str, float]:
    """One row of the table."""
    data, restored = bytearray(coding.coded_size(gaussian.size)), np.empty_like(gaussian)
    target = memoryview(data)
    return {
        "bits_per_value": 8 * len(data) / gaussian.size,
        "encode_mb_s": megabytes_per_second(
            lambda: coding.encode(gaussian, target), gaussian.size, repeats
        ),
        "decode_mb_s": megabytes_per_second(
            lambda: coding.decode(data, restored), gaussian.size, repeats
        ),
        "error_gaussian": relative_error(coding, gaussian),
        "error_student_t3": relative_error(coding, student),
    }


def main() -> None:
    """Measure, print, write."""
    parser = kit.parser(__doc__)
    parser.add_argument("--numel", type=int, default=4_000_000, help="values in the vector")
    parser.add_argument("--repeats", type=int, default=7, help="timed calls; the median counts")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    gaussian = rng.standard_normal(arguments.numel).astype(np.float32)
    student = rng.standard_t(3, arguments.numel).astype(np.float32)
    copied = np.empty_like(gaussian)
    copy = megabytes_per_second(
        lambda: np.copyto(copied, gaussian), arguments.numel, arguments.repeats
    )
    rows = {
        name: measure(codec(name), gaussian, student, arguments.repeats)
        for name in codecs_for_groups()
    }

    print(
        f"{'codec':8}{'bits':>7}{'encode MB/s':>13}{'decode MB/s':>13}"
        f"{'error N(0,1)':>14}{'error t3':>11}"
    )
    print(f"{'memcpy':8}{32:7.2f}{copy:13.0f}{copy:13.0f}{0:14.2g}{0:11.2g}")
    for name, row in rows.items():
        print(
            f"{name:8}{row['bits_per_value']:7.2f}{row['encode_mb_s']:13.0f}{row['decode_mb_s']:13.0f}"
            f"{row['error_gaussian']:14.2g}{row['error_student_t3']:11.2g}"
        )
    about = {"machine": kit.machine(), **vars(arguments)}
    kit.write(OUT, {**about, "memcpy_mb_s": copy, "codecs": rows})
    print(f"written to {OUT}")


if __name__ == "__main__":
    main()
