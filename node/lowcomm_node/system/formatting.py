"""Formats figures for people: short, of constant width, and safe where other peers wrote the
text."""

from typing import Any

MISSING = "–"
_PEER_DIGITS = 6


def short_peer(peer_id: str) -> str:
    """The last six characters of a peer id: the first ones are the same for all."""
    return clean(peer_id)[-_PEER_DIGITS:]


def clean(text: Any) -> str:
    """Text from others without control characters, which could rewrite a terminal."""
    return "".join(character if character.isprintable() else " " for character in str(text))


def clean_text(text: str) -> str:
    """The same for several lines: line ends and tabs stay."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else " " for character in text
    )


def place(host: str, port: int | None) -> str:
    """``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def size(count: float | None) -> str:
    """Bytes in decimal units: ``920 kB``, ``12.4 MB``."""
    if count is None:
        return MISSING
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit in ("B", "kB") else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def rate(value: float | None) -> str:
    """Bytes a second: ``12.4 MB/s``."""
    return MISSING if value is None else f"{size(value)}/s"


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
