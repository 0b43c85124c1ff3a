"""Sizes, rates and durations as owners write them: ``20Mbit``, ``2.5MB``, ``4GiB``, ``30m``.

No other spelling is accepted. ``k``, ``M``, ``G`` are powers of 1000, ``Ki``, ``Mi``, ``Gi`` of
1024. ``20Mb`` and ``20mbit`` are refused with a suggestion, because a wrong guess between bits and
bytes is off by eight.
"""

import re
from typing import Any

_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_PREFIXES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_BYTES = {f"{prefix}B": float(factor) for prefix, factor in _PREFIXES.items()}
_BITS = {f"{prefix}bit": factor / 8 for prefix, factor in _PREFIXES.items()}
_TIMES = {"w": 7 * 86400, "d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION = re.compile("".join(rf"(?:(\d{{1,6}}){unit})?" for unit in _TIMES))
_QUANTITY = re.compile(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*")
_COUNT = re.compile(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([kMBT]?)\s*")
_COUNTS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
NONE = "none"
"""An owner's word for no limit."""
LEAST_RATE = 8_000.0
"""Bytes a second. Below 64 kbit/s even messages without contents would be late."""


def read_rate(text: str) -> float | None:
    """Parse a rate such as ``20Mbit`` or ``2.5MB/s`` into bytes a second; None for ``none``.

    Raises ValueError with what to write.
    """
    text = text.strip()
    if text == NONE:
        return None
    examples = "20Mbit or 2.5MB, a second, or none"
    rate = _read(text.removesuffix("/s"), _BITS | _BYTES, examples, ("Mbit", "MB"))
    if rate < LEAST_RATE:
        least = write_rate(LEAST_RATE)
        raise ValueError(f"{text} is too little to take part: at least {least}, or none")
    return rate


def read_size(text: str) -> int:
    """Parse a size such as ``4GiB``, ``500MB`` or ``1048576`` into bytes.

    Raises ValueError with what to write.
    """
    if text.strip().isdecimal():
        text = f"{text}B"
    return int(_read(text, _BYTES, "4GiB, 500MB or a number of bytes", ("MB", "MiB")))


def read_count(text: str) -> int:
    """Parse a number such as ``234k``, ``10M`` or ``1.3B``; 0 for anything else."""
    match = _COUNT.fullmatch(text)
    return round(float(match[1]) * _COUNTS[match[2]]) if match else 0


def _read(text: str, known: dict[str, float], examples: str, usual: tuple[str, str]) -> float:
    """The value of a number with a known unit. Raises ValueError with what to write."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a number and a unit, such as {examples}")
    number, unit = float(match[1]), match[2]
    if unit in known:
        return number * known[unit]
    shown = f"{number:g}"
    if not unit:
        raise ValueError(f"{shown} of what? Write {shown}{usual[0]} or {shown}{usual[1]}")
    # "Mb", "mb", "Mbps", "MBit": bits or bytes? Only the writer knows.
    meant = [name for name in known if name.lower() == unit.lower()][:1]
    if not meant or unit.lower().endswith("b"):
        longest_first = sorted(filter(None, _PREFIXES), key=len, reverse=True)
        prefix = next((p for p in longest_first if unit.lower().startswith(p.lower())), "M")
        meant = [name for name in (f"{prefix}bit", f"{prefix}B") if name in known]
    suggestion = " or ".join(f"{shown}{name}" for name in meant)
    raise ValueError(f"{shown}{unit} is not a unit: write {suggestion}")


def read_duration(text: str) -> float:
    """Parse a duration such as ``90s``, ``30m``, ``2h`` or ``1h30m`` into seconds.

    Raises ValueError with what to write.
    """
    text = text.strip()
    match = _DURATION.fullmatch(text)
    if match is None or not text:
        meant = f": write {text}m or {text}h" if text.isdecimal() else ""
        raise ValueError(f"{text!r} is not a duration such as 90s, 30m, 2h or 1h30m{meant}")
    parts = zip(match.groups("0"), _TIMES.values(), strict=True)
    total = sum(float(number) * unit for number, unit in parts)
    if not total:
        raise ValueError(f"{text} is no time at all: write such as 90s, 30m or 2h")
    return total


def write_duration(seconds: float) -> str:
    """Format a duration for ``read_duration``; whole seconds, at least 1."""
    left, text = max(1, round(seconds)), ""
    for unit, length in _TIMES.items():
        count, left = divmod(left, length)
        text += f"{count}{unit}" if count else ""
    return text


def write_rate(rate: float | None) -> str:
    """Format bytes a second for ``read_rate``: in bits, as providers do."""
    if rate is None:
        return NONE
    bits = 8 * rate
    prefix = next((prefix for prefix in ("T", "G", "M", "k") if bits >= _PREFIXES[prefix]), "")
    return f"{bits / _PREFIXES[prefix]:.4g}{prefix}bit" if bits < 1e15 else f"{bits:.0f}bit"


def write_size(size: int) -> str:
    """Format a size for ``read_size``, without rounding."""
    fitting = [(factor, unit) for unit, factor in _BYTES.items() if size >= factor]
    factor, unit = max((one for one in fitting if size % one[0] == 0), default=(1, "B"))
    return f"{size // int(factor)}{unit}"


MISSING = "–"


def short_peer(peer_id: str) -> str:
    """The last six characters of a peer id: the first ones are the same for all."""
    return clean(peer_id)[-6:]


def clean(text: Any, keep: str = "") -> str:
    """Text from others without control characters, which could rewrite a terminal.

    ``keep``: those that stay, such as line ends.
    """
    return "".join(one if one.isprintable() or one in keep else " " for one in str(text))


def place(host: str, port: int | None) -> str:
    """``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def size(count: float | None) -> str:
    """Bytes in decimal units: ``920 kB``, ``12.4 MB``."""
    if count is None:
        return MISSING
    for unit, digits in (("B", 0), ("kB", 0), ("MB", 1), ("GB", 1)):
        if abs(count) < 1000:
            return f"{count:.{digits}f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def rate(value: float | None) -> str:
    """Bytes a second in bits, as limits are written: ``99.2Mbit/s``."""
    return MISSING if value is None else f"{write_rate(value)}/s"


def milliseconds(value: float | None) -> str:
    """A short time, from seconds: ``0.4 ms``, ``35 ms``."""
    if value is None:
        return MISSING
    return f"{1000 * value:.1f} ms" if value < 0.01 else f"{1000 * value:.0f} ms"


def quantity(count: float | None) -> str:
    """A short count: ``950``, ``11.2k``, ``3.4M``."""
    if count is None:
        return MISSING
    for limit, divisor, unit in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if abs(count) < limit:
            return f"{count:.0f}" if divisor == 1 else f"{count / divisor:.1f}{unit}"
    return f"{count / 1e9:.1f}G"


def loss(value: float | None, digits: int = 4) -> str:
    """A loss in nats."""
    return MISSING if value is None else f"{value:.{digits}f}"


def seconds(value: float | None) -> str:
    """A time span: ``0.4 s``, ``1:05``, ``2:03:10``."""
    if value is None:
        return MISSING
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
