"""The model, fragments, partners and codecs once more: written from docs/*.md alone, in plain
Python, one value at a time.

Nothing of ours is imported here: what these functions need and the pages lack is a gap in the
pages."""

import hashlib
import itertools
import json
import math
import struct
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

F = np.float32
BLOCK = 256
GOLDEN = 0x9E3779B97F4A7C15
WORD = 2**64


# docs/specification.md


def start(seed: int, name: str, shape: tuple[int, ...], layers: int) -> np.ndarray:
    """The first weights of one tensor."""
    if len(shape) == 1:
        return np.ones(shape, dtype=F)
    stream = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest(), "big")
    into_residual = "attention.output" in name or "feed_forward.down" in name
    factor = F(0.02 / math.sqrt(2 * layers) if into_residual else 0.02)
    return np.random.default_rng(stream).standard_normal(shape, dtype=F) * factor


def logits(
    weights: dict[str, np.ndarray], tokens: np.ndarray, heads: int, rope_base: float
) -> np.ndarray:
    """Of an untied model, [token, vocab]."""
    x = weights["embedding.weight"][tokens]
    layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks"))
    for layer in range(layers):
        part = {
            name.split(".", 2)[2]: one
            for name, one in weights.items()
            if name.startswith(f"blocks.{layer}.")
        }
        x = x + attention(normed(x, part["attention_norm.weight"]), part, heads, rope_base)
        n = normed(x, part["feed_forward_norm.weight"])
        gate = n @ part["feed_forward.gate.weight"].T
        inside = gate / (1 + np.exp(-gate)) * (n @ part["feed_forward.up.weight"].T)
        x = x + inside @ part["feed_forward.down.weight"].T
    return normed(x, weights["norm.weight"]) @ weights["head.weight"].T


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * weight


def attention(
    x: np.ndarray, part: dict[str, np.ndarray], heads: int, rope_base: float
) -> np.ndarray:
    length, width = x.shape
    d = width // heads
    angle = np.arange(length)[:, None] * rope_base ** (-2 * np.arange(d // 2) / d)
    mixed = []
    for head in range(heads):
        rows = slice(head * d, (head + 1) * d)
        query, key, value = (
            x @ part[f"attention.{one}.weight"][rows].T for one in ("query", "key", "value")
        )
        query, key = (
            turned(normed(one, part[f"attention.{name}_norm.weight"]), angle)
            for one, name in ((query, "query"), (key, "key"))
        )
        scores = np.where(
            np.tril(np.ones((length, length))) > 0, query @ key.T / math.sqrt(d), -np.inf
        )
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        mixed.append(shares / shares.sum(axis=1, keepdims=True) @ value)
    return np.concatenate(mixed, axis=1) @ part["attention.output.weight"].T


def turned(x: np.ndarray, angle: np.ndarray) -> np.ndarray:
    first, second = np.split(x, 2, axis=1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)


def learning_rate(step: int, steps: int, train: Mapping[str, Any]) -> float:
    peak, warmup, decay = train["learning_rate"], train["warmup"], train["decay"]
    if step < warmup:
        return peak * (step + 1) / warmup
    d = min(1.0, (step - warmup) / max(1, steps - warmup))
    if train["schedule"] == "cosine":
        left = (1 + math.cos(math.pi * d)) / 2
    elif train["schedule"] == "constant" or d < 1 - decay:
        left = 1.0
    else:
        left = 1 - math.sqrt((d - (1 - decay)) / decay) if decay else 0.0
    f = train["final_learning_rate"]
    return peak * (f + (1 - f) * left)


# docs/fragments.md


def cut_column(sizes: list[tuple[int, int]], count: int) -> list[list[tuple[int, int, int]]]:
    """Cut tensors of (rows, width) into ``count`` parts: for each the (tensor, first row, row after
    the last)."""
    total = sum(rows * width for rows, width in sizes)
    all_rows = sum(rows for rows, _ in sizes)
    cuts = [0]
    for k in range(1, count):
        target = Fraction(total * k, count)
        row = value = 0
        found = (0, 0, 1)
        for rows, width in sizes:
            if value <= target:
                found = (row, value, width)
            row, value = row + rows, value + rows * width
        at = found[0] + round((target - found[1]) / found[2])
        cuts.append(min(max(at, cuts[-1] + 1), all_rows - (count - k)))
    cuts.append(all_rows)
    parts = []
    for start, stop in itertools.pairwise(cuts):
        part, row = [], 0
        for index, (rows, _) in enumerate(sizes):
            low, high = max(start, row), min(stop, row + rows)
            if low < high:
                part.append((index, low - row, high - row))
            row += rows
        parts.append(part)
    return parts


def plan(
    tensors: list[tuple[str, int, int, str, int]], count: int, pattern: str
) -> list[list[tuple[str, int, int, int]]]:
    """Slices (tensor, start, stop, values) of each fragment; tensors are (name, rows, width, role,
    layer)."""
    place = {name: index for index, (name, *_) in enumerate(tensors)}
    layers = sorted({layer for *_, role, layer in tensors if role == "block"})
    parts: list[list[tuple[str, int, int, int]]] = [[] for _ in range(count)]
    if len(layers) < count or pattern == "even":
        for index, spans in enumerate(
            cut_column([(rows, width) for _, rows, width, *_ in tensors], count)
        ):
            parts[index] = [(tensors[t][0], a, b, (b - a) * tensors[t][2]) for t, a, b in spans]
    else:
        parts = whole_layers(tensors, layers, count, pattern)
    return [sorted(part, key=lambda one: (place[one[0]], one[1])) for part in parts]


def whole_layers(tensors, layers, count, pattern):
    if pattern == "strided":
        home = {layer: layer % count for layer in layers}
    else:
        values = [
            sum(r * w for _, r, w, role, of in tensors if role == "block" and of == layer)
            for layer in layers
        ]
        runs = cut_column([(1, size) for size in values], count)
        home = {layers[t]: index for index, spans in enumerate(runs) for t, _, _ in spans}
    parts: list[list[tuple[str, int, int, int]]] = [[] for _ in range(count)]
    load = [0] * count
    limit = Fraction(5 * sum(r * w for _, r, w, *_ in tensors), 4 * count)
    aside = []
    for wanted in ("block", "embedding", "norm", "head"):
        for name, rows, width, role, layer in tensors:
            if role != wanted:
                continue
            fragment = home[layer] if role == "block" else 0 if role == "embedding" else count - 1
            if role != "block" and load[fragment] + rows * width > limit:
                aside.append((name, rows, width))
                continue
            parts[fragment].append((name, 0, rows, rows * width))
            load[fragment] += rows * width
    left = poured(load, sum(rows * width for _, rows, width in aside))
    for name, rows, width in aside:
        before, filled = 0, Fraction(0)
        for fragment in range(count):
            amount = min(left[fragment], rows * width - filled)
            left[fragment] -= amount
            filled += amount
            stop = round(filled / width)
            if stop > before:
                parts[fragment].append((name, before, stop, (stop - before) * width))
            before = stop
    return parts


def poured(load: list[int], volume: int) -> list[Fraction]:
    heights = sorted(load)
    for used in range(len(heights), 0, -1):
        level = Fraction(volume + sum(heights[:used]), used)
        if level >= heights[used - 1]:
            return [max(Fraction(0), level - one) for one in load]
    raise AssertionError


def digest(parts, pattern: str) -> str:
    text = json.dumps(
        ["lowcomm fragment plan 1", pattern, [[list(one) for one in part] for part in parts]]
    )
    return hashlib.sha256(text.replace(", ", ",").encode("ascii")).hexdigest()


def offset(fragment: int, count: int, interval: int) -> int:
    return round(Fraction(interval * (fragment + 1), count)) % interval


# docs/outer.md


def permutation(seed: int, fragment: int, number: int, peers) -> list[str]:
    return sorted(
        set(peers),
        key=lambda one: hashlib.sha256(f"{seed}/{fragment}/{number}/{one}".encode()).digest(),
    )


def hypercube_partner(seed: int, fragment: int, round_: int, me: str, peers) -> str | None:
    everybody = {me, *peers}
    levels = max(1, math.ceil(math.log2(len(everybody))))
    line = permutation(seed, fragment, round_ // levels, everybody)
    bit = 2 ** (round_ % levels)
    if line.index(me) ^ bit < len(line):
        return line[line.index(me) ^ bit]
    alone = [one for place, one in enumerate(line) if place ^ bit >= len(line)]
    pairs = [alone[k : k + 2] for k in range(0, len(alone), 2)]
    return next((other for pair in pairs if me in pair for other in pair if other != me), None)


def random_partner(seed: int, fragment: int, round_: int, me: str, peers) -> str | None:
    line = permutation(seed, fragment, round_, {me, *peers})
    pairs = [line[k : k + 2] for k in range(0, len(line), 2)]
    return next((other for pair in pairs if me in pair for other in pair if other != me), None)


# docs/codecs.md


def bits_of(value) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def float_of(bits: int) -> np.float32:
    return F(struct.unpack("<f", struct.pack("<I", bits))[0])


def to_bf16(value) -> int:
    bits = bits_of(value)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def of_bf16(code: int) -> np.float32:
    return float_of(code << 16)


def blocks(vector) -> list:
    return [vector[start : start + BLOCK] for start in range(0, len(vector), BLOCK)]


def pack(codes: list[int], bits: int) -> bytes:
    """Codes one after the other, the first in the lowest bits."""
    whole = sum(int(code) << (bits * place) for place, code in enumerate(codes))
    return whole.to_bytes(-(-len(codes) * bits // 8), "little")


def unpack(data: bytes, bits: int, count: int) -> list[int]:
    whole = int.from_bytes(data, "little")
    return [(whole >> (bits * place)) & (2**bits - 1) for place in range(count)]


def encode_fp32(vector) -> bytes:
    return b"".join(struct.pack("<f", value) for value in vector)


def decode_fp32(data: bytes, count: int) -> list:
    return [F(one) for one in struct.unpack(f"<{count}f", data)]


def encode_bf16(vector) -> bytes:
    return b"".join(struct.pack("<H", to_bf16(value)) for value in vector)


def decode_bf16(data: bytes, count: int) -> list:
    return [of_bf16(one) for one in struct.unpack(f"<{count}H", data)]


def encode_int8(vector) -> bytes:
    out = b""
    for block in blocks(vector):
        scale = float_of((bits_of(F(max(abs(block)) / F(127))) + 0x40) & 0xFFFFFF80)
        if scale < 2.0**-100:
            out += bytes(4 + len(block))
            continue
        codes = [max(-127, min(127, int(np.rint(F(value / scale))))) for value in block]
        out += struct.pack("<f", scale) + struct.pack(f"{len(codes)}b", *codes)
    return out


def decode_int8(data: bytes, count: int) -> list:
    out = []
    for start in range(0, count, BLOCK):
        at, size = start // BLOCK * (4 + BLOCK), min(BLOCK, count - start)
        scale = F(struct.unpack_from("<f", data, at)[0])
        out += [F(F(code) * scale) for code in struct.unpack_from(f"{size}b", data, at + 4)]
    return out


E3M0 = [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0]


def encode_e3m0(vector) -> bytes:
    out = b""
    for block in blocks(vector):
        scale = F(max(abs(block)) / F(16))
        if scale < 2.0**-100:
            out += bytes(4 + -(-len(block) // 2))
            continue
        codes = []
        for value in block:
            ratio = F(value / scale)
            code = max(range(8), key=lambda e: (-abs(abs(float(ratio)) - E3M0[e]), E3M0[e]))
            codes.append(code + (8 if code and ratio < 0 else 0))
        out += struct.pack("<f", scale) + pack(codes, 4)
    return out


def decode_e3m0(data: bytes, count: int) -> list:
    out = []
    for start in range(0, count, BLOCK):
        at, size = start // BLOCK * (4 + BLOCK // 2), min(BLOCK, count - start)
        scale = F(struct.unpack_from("<f", data, at)[0])
        for code in unpack(data[at + 4 : at + 4 + -(-size // 2)], 4, size):
            magnitude = F(scale * F(E3M0[code & 7]))
            out.append(-magnitude if code & 8 else magnitude)
    return out


def integers(block) -> tuple[list[int], np.float32]:
    top = float_of(bits_of(max(abs(block))) & 0x7F800000)
    factor = F(F(2.0**23) / top)
    return [int(F(abs(value) * factor)) for value in block], top


def short_scale(upper: int, lower: int, top, largest: float) -> int:
    """Bits of a bf16; 0 where the scale is too small."""
    scale = min(
        of_bf16(to_bf16(F(np.float64(upper) / np.float64(lower) * (np.float64(top) * 2.0**-23)))),
        F(largest),
    )
    return to_bf16(scale) if scale >= 2.0**-100 else 0


def encode_q2(vector) -> bytes:
    out = b""
    for block in blocks(vector):
        empty = bytes(2 + -(-len(block) // 4))
        if max(abs(block)) < 2.0**-100:
            out += empty
            continue
        whole, top = integers(block)
        total, count = sum(whole), len(block)
        threshold = total // count
        for _ in range(3):
            outer = sum(one > threshold for one in whole)
            outside = sum(one for one in whole if one > threshold)
            upper, lower = 4 * total + 10 * outside, 4 * count + 45 * outer
            threshold = 9 * upper // (4 * lower)
        code = short_scale(upper, lower, top, 146 * 2.0**119)
        if all(abs(value) >= F(of_bf16(code) * F(2.25)) for value in block):
            code = short_scale(total, count, top, 146 * 2.0**119)
        if not code:
            out += empty
            continue
        edge = F(of_bf16(code) * F(2.25))
        out += struct.pack("<H", code) + pack(
            [2 * (value < 0) + (abs(value) >= edge) for value in block], 2
        )
    return out


def decode_q2(data: bytes, count: int) -> list:
    out = []
    for start in range(0, count, BLOCK):
        at, size = start // BLOCK * (2 + BLOCK // 4), min(BLOCK, count - start)
        scale = of_bf16(struct.unpack_from("<H", data, at)[0])
        for code in unpack(data[at + 2 : at + 2 + -(-size // 4)], 2, size):
            level = F(scale * F(3.5)) if code & 1 else scale
            out.append(-level if code & 2 else level)
    return out


def encode_q1(vector) -> bytes:
    out = b""
    for block in blocks(vector):
        code = 0
        if max(abs(block)) >= 2.0**-100:
            whole, top = integers(block)
            code = short_scale(sum(whole), len(block), top, 255 * 2.0**120)
        signs = [int(value < 0) if code else 0 for value in block]
        out += struct.pack("<H", code) + pack(signs, 1)
    return out


def decode_q1(data: bytes, count: int) -> list:
    out = []
    for start in range(0, count, BLOCK):
        at, size = start // BLOCK * (2 + BLOCK // 8), min(BLOCK, count - start)
        scale = of_bf16(struct.unpack_from("<H", data, at)[0])
        out += [
            -scale if code else scale
            for code in unpack(data[at + 2 : at + 2 + -(-size // 8)], 1, size)
        ]
    return out


def step_of(code: int) -> np.float32:
    k = code - 1
    return F(F((1, 1.189207, 1.414214, 1.681793)[k % 4]) * F(2.0 ** (k // 4 - 40)))


def inverse_of(code: int) -> np.float32:
    return F(F(1) / step_of(code))


def steps_in(value, code: int) -> np.float32:
    """A value in steps, before it is rounded."""
    return F(value * inverse_of(code))


def key_of(place: int) -> int:
    x = place * 0x9E3779B9 % 2**32
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    return 2**30 + ((x ^ (x >> 13)) >> 1)


def hash_of(number: int, points: list[int]) -> int:
    keyed = [
        (points[place] if place < len(points) else 0) % 2**32 ^ key_of(place)
        for place in range(BLOCK)
    ]
    products = [one * other for one, other in zip(keyed[::2], keyed[1::2], strict=True)]
    value = number
    for part in (sum(products), sum(one ^ (one >> 29) for one in products)):
        value = (value ^ (part % WORD)) * GOLDEN % WORD
        value ^= value >> 29
    return value


def groups_of(bits: int) -> tuple[int, int]:
    """Rows of a group, and bytes of its words."""
    rows = {3: 8, 4: 2, 6: 4, 8: 1}[bits]
    return rows, rows * bits // 8


def pack_rows(codes: list[int], bits: int) -> bytes:
    stride, (rows, size) = -(-len(codes) // 8), groups_of(bits)
    padded, out = [*codes, *[0] * (8 * stride - len(codes))], b""
    for row in range(0, 8, rows):
        words = [
            sum(padded[(row + k) * stride + j] << (bits * k) for k in range(rows))
            for j in range(stride)
        ]
        out += bytes((word >> (8 * k)) % 256 for k in range(size) for word in words)
    return out


def unpack_rows(data: bytes, bits: int, count: int) -> list[int]:
    stride, (rows, size) = -(-count // 8), groups_of(bits)
    codes = []
    for row in range(8):
        group = data[row // rows * size * stride :]
        words = [sum(group[k * stride + j] << (8 * k) for k in range(size)) for j in range(stride)]
        codes += [(word >> (row % rows * bits)) % 2**bits for word in words]
    return codes[:count]


def check_of(hashes: list[int]) -> bytes:
    total = 1
    for one in hashes:
        total = (total ^ one) * GOLDEN % WORD
        total ^= total >> 32
    return total.to_bytes(8, "little")


def encode_modulo(vector, ranges, bits: int) -> tuple[bytes, list]:
    """What travels, and what the others decode."""
    out, hashes, decoded = b"", [], []
    for number, (block, range_) in enumerate(zip(blocks(vector), ranges, strict=True), 1):
        peak, wanted = max(abs(block)), F(range_ * F(4 / 2**bits))
        fits = [c for c in range(1, 256) if step_of(c) >= max(wanted, F(peak / F(2.0**21)))]
        code = fits[0] if range_ >= 0 and fits else 0
        if code and step_of(code) > F(peak * F(2.0 ** (2 - bits))):
            code = 0
        if code:
            points = [int(np.rint(steps_in(value, code))) for value in block]
            hashes.append(hash_of(number, points))
            body = pack_rows([point % 2**bits for point in points], bits)
            decoded += [F(F(point) * step_of(code)) for point in points]
        else:
            hashes.append(0)
            body = encode_bf16(block)
            decoded += decode_bf16(body, len(block))
        out += bytes([code]) + (hashes[-1] % 2**24).to_bytes(3, "little") + body
    return out + check_of(hashes), decoded


def decode_modulo(data: bytes, own, bits: int) -> tuple[list, list[int]]:
    """Values, and the numbers of the blocks that wrapped, from 0."""
    at, out, wrapped, hashes = 0, [], [], []
    for number, block in enumerate(blocks(own)):
        code, sent = data[at], int.from_bytes(data[at + 1 : at + 4], "little")
        size = -(-len(block) // 8) * bits if code else 2 * len(block)
        body, at = data[at + 4 : at + 4 + size], at + 4 + size
        if not code:
            hashes.append(0)
            out += decode_bf16(body, len(block))
            continue
        points, far = [], False
        for value, rest in zip(block, unpack_rows(body, bits, len(block)), strict=True):
            steps = steps_in(value, code)
            near = int(np.rint(steps))
            away = (rest - near + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
            points.append(near + away)
            far |= abs(steps) >= 2**22
        hashes.append(hash_of(number + 1, points))
        if far or hashes[-1] % 2**24 != sent:
            wrapped.append(number)
        out += [F(F(point) * step_of(code)) for point in points]
    if not wrapped and check_of(hashes) != data[at:]:
        wrapped = list(range(len(blocks(own))))
    return out, wrapped


def answer_modulo(vector, codes: list[int], wrapped: list[int], bits: int) -> bytes:
    """What is sent again of these blocks, by the step codes of all; its check is left out."""
    out = b""
    for number, block in enumerate(blocks(vector)):
        if number not in wrapped:
            continue
        code, row_bytes = codes[number], -(-len(block) // 8) * bits
        points = [int(np.rint(steps_in(value, code))) for value in block] if code else []
        fit = [
            digits
            for digits in range(1, 2 * len(block) // row_bytes + 1)
            if code and digits * row_bytes < 2 * len(block)
            if all(
                -(2 ** ((digits + 1) * bits)) <= 2 * p < 2 ** ((digits + 1) * bits) for p in points
            )
        ]
        if not fit:
            out += b"\0" + encode_bf16(block)
            continue
        out += bytes([fit[0]])
        for digit in range(1, fit[0] + 1):
            out += pack_rows([(point >> (digit * bits)) % 2**bits for point in points], bits)
    return out


def patch_modulo(answer: bytes, data: bytes, own, wrapped: list[int], bits: int) -> dict[int, list]:
    """The values of the blocks that came again, by number."""
    at, again, out = 0, 0, {}
    for number, block in enumerate(blocks(own)):
        code, count = data[at], len(block)
        size = -(-count // 8) * bits if code else 2 * count
        body, at = data[at + 4 : at + 4 + size], at + 4 + size
        if number not in wrapped:
            continue
        digits, again = answer[again], again + 1
        if not digits:
            out[number] = decode_bf16(answer[again : again + 2 * count], count)
            again += 2 * count
            continue
        points = unpack_rows(body, bits, count)
        for digit in range(1, digits + 1):
            higher = unpack_rows(answer[again : again + size], bits, count)
            points = [p + (h << (digit * bits)) for p, h in zip(points, higher, strict=True)]
            again += size
        whole = 2 ** ((digits + 1) * bits)
        out[number] = [
            F(F(point - whole if 2 * point >= whole else point) * step_of(code)) for point in points
        ]
    return out
