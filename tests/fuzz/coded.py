"""Contributions as they travel: each codec, what is asked for again, shards, missed steps."""

from contextlib import suppress
from functools import partial
from itertools import pairwise

import numpy as np
from target import TARGETS, Made, Target, cut, fit, join

from lowcomm_node.trainer.capture import PastStep, read_steps
from lowcomm_protocol.codecs import CODECS, codec, coder, shard_coder
from lowcomm_protocol.codecs.shards import shard_bounds
from lowcomm_protocol.errors import CodecError, PlanError
from lowcomm_protocol.exchange.underway import KEPT

NUMEL = 700
"""Two whole blocks of 256 values, and a part of one."""


def vector(seed: int = 0, numel: int = NUMEL) -> np.ndarray:
    """Values such as a fragment has."""
    return np.random.default_rng(seed).normal(0.0, 0.02, numel).astype(np.float32)


def _codec(name: str) -> Made:
    def run(data: bytes) -> None:
        out = np.empty(NUMEL, dtype=np.float32)
        one = coder(name, NUMEL)
        body = fit(data[1:], one.max_size) if data[:1] > b"\x10" else data[1:]
        try:
            again = one.decode(memoryview(body), out)
        except CodecError:
            return
        assert again == b"" and np.isfinite(out).all(), "a decoded value that is not finite"

    out = bytearray(coder(name, NUMEL).max_size)
    seeds = []
    for values in (vector(), np.zeros(NUMEL, np.float32), np.full(NUMEL, 3e38, np.float32)):
        coder(name, NUMEL).encode(values.copy(), memoryview(out))
        seeds += [b"\xff" + bytes(out), b"\0" + bytes(out)]
    return run, seeds


def _modulo(name: str) -> Made:
    own = vector()
    known = {"range": np.array([1e-3, -1.0, 1e-2], dtype=np.float32)}

    def run(data: bytes) -> None:
        body, patch, blocks = [*cut(data), b"", b"", b""][:3]
        one, out = coder(name, NUMEL), np.empty(NUMEL, dtype=np.float32)
        coded = bytearray(one.max_size)
        one.restore(known)
        one.encode(own.copy(), memoryview(coded))
        try:
            again = one.decode(memoryview(body), out)
            if again:
                sizes = one.resent_sizes(again)
                one.patch(memoryview(fit(patch, sizes[1]) if len(patch) % 2 else patch), out)
        except CodecError:
            pass
        else:
            assert np.isfinite(out).all(), "a decoded value that is not finite"
        try:
            least, most = one.resent_sizes(blocks)
            assert most <= one.max_size, "what is sent again takes more than the whole"
            size = one.resend(blocks, own.copy(), memoryview(bytearray(most)))
            assert least <= size <= most, "what is sent again has another size than was told"
        except CodecError:
            pass

    seeds = []
    for other in (own, own + np.float32(0.001), own + np.float32(0.5), vector(1)):
        theirs, ours, out = (
            coder(name, NUMEL),
            coder(name, NUMEL),
            bytearray(coder(name, NUMEL).max_size),
        )
        theirs.restore(known)
        ours.restore(known)
        size, mine = theirs.encode(other.copy(), memoryview(out)), other.copy()
        ours.encode(own.copy(), memoryview(bytearray(ours.max_size)))
        again = ours.decode(memoryview(out)[:size], np.empty(NUMEL, np.float32))
        patch = bytearray(ours.max_size)
        del patch[theirs.resend(again, mine, memoryview(patch)) if again else 0 :]
        seeds.append(join(bytes(out[:size]), bytes(patch), again or b"\xe0"))
    return run, seeds


def _shards(name: str) -> Made:
    def run(data: bytes) -> None:
        if len(data) < 3:
            return
        try:
            bounds = shard_bounds(int.from_bytes(data[:2]) % 1000, data[2] % 12)
        except PlanError:
            return
        assert bounds[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(bounds))
        one = shard_coder(name, bounds[-1][1]).codec
        for start, stop in bounds:
            out = np.empty(stop - start, dtype=np.float32)
            try:
                one.decode(memoryview(fit(data[3:], codec(name).coded_size(stop - start))), out)
            except CodecError:
                continue
            assert np.isfinite(out).all(), "a decoded value that is not finite"

    out = bytearray(codec(name).coded_size(256))
    codec(name).encode(vector(numel=256), memoryview(out))
    return run, [
        (numel).to_bytes(2) + bytes([count]) + bytes(out)
        for numel, count in ((700, 2), (3, 3), (999, 8))
    ]


def _missed() -> Made:
    def run(data: bytes) -> None:
        if not data:
            return
        steps, one = 1 + data[0] % KEPT, shard_coder("q2", NUMEL)
        with suppress(CodecError):
            for moved, mean in read_steps(memoryview(data)[1:], one, NUMEL, steps):
                for start, stop in moved:
                    assert mean[start:stop].isfinite().all(), "a mean that is not finite"

    one, means = shard_coder("q2", NUMEL), []
    for shard, (start, stop) in enumerate(shard_bounds(NUMEL, 3)):
        out = bytearray(one.codec.coded_size(stop - start))
        one.reduce(vector(numel=stop - start), start, memoryview(out))
        means.append((shard, bytes(out)))
    seeds = [PastStep(3, means[:count]).pack() for count in (1, 3)]
    return run, [b"\0" + seeds[0], b"\0" + seeds[1], b"\1" + b"".join(seeds)]


for _name, _entry in CODECS.items():
    coder(_name, 1)  # loads it while imports are instrumented
    _decode = _modulo if _entry.only_in_pairs else _codec
    TARGETS[f"codec-{_name}"] = Target(f"codec-{_name}", partial(_decode, _name))
TARGETS["missed"] = Target("missed", _missed)
for _name in ("q2", "e3m0"):
    TARGETS[f"shards-{_name}"] = Target(f"shards-{_name}", partial(_shards, _name))
