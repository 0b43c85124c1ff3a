"""Lines as SVG, which needs no script, prints sharp, and takes its colours from the page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 720, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 28
TICKS = 4
COLOURS = ("one", "two", "good", "bad", "quiet")

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    label: str
    """Empty: the title says what it is."""
    points: Sequence[Point]
    """From left to right."""


def chart(
    title: str,
    lines: Sequence[Line],
    show_x: Callable[[float], str],
    show_y: Callable[[float], str],
) -> str:
    """A chart with its legend; a sentence where there are fewer than two points."""
    known = [line for line in lines if len(line.points) > 1]
    if not known:
        return f"<h2>{escape(title)}</h2><p class=quiet>nothing was written down</p>"
    span_x = _span([x for line in known for x, _ in line.points])
    span_y = _span([y for line in known for _, y in line.points])
    drawn = [
        f'<polyline class="{_colour(place)}" points="{_path(line.points, span_x, span_y)}"/>'
        for place, line in enumerate(known)
    ]
    legend = "".join(
        f'<span class="{_colour(place)}">{escape(line.label)}</span> '
        for place, line in enumerate(known)
        if line.label
    )
    return (
        f"<h2>{escape(title)}</h2>{f'<p class=legend>{legend}</p>' if legend else ''}"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{_grid(span_x, span_y, show_x, show_y)}{''.join(drawn)}</svg>"
    )


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _x(value: float, span: tuple[float, float]) -> float:
    return LEFT + (value - span[0]) / (span[1] - span[0]) * (WIDTH - LEFT - RIGHT)


def _y(value: float, span: tuple[float, float]) -> float:
    return HEIGHT - BOTTOM - (value - span[0]) / (span[1] - span[0]) * (HEIGHT - TOP - BOTTOM)


def _path(points: Sequence[Point], span_x: tuple[float, float], span_y: tuple[float, float]) -> str:
    return " ".join(f"{_x(x, span_x):.1f},{_y(y, span_y):.1f}" for x, y in points)


def _grid(
    span_x: tuple[float, float],
    span_y: tuple[float, float],
    show_x: Callable[[float], str],
    show_y: Callable[[float], str],
) -> str:
    parts: list[str] = []
    for place in range(TICKS + 1):
        value = span_y[0] + (span_y[1] - span_y[0]) * place / TICKS
        at = _y(value, span_y)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">'
            f"{escape(show_y(value))}</text>"
        )
        along = span_x[0] + (span_x[1] - span_x[0]) * place / TICKS
        anchor = "end" if place == TICKS else "middle"
        parts.append(
            f'<text x="{_x(along, span_x):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">'
            f"{escape(show_x(along))}</text>"
        )
    return "".join(parts)


def rising(points: Sequence[tuple[float | None, float | None]]) -> list[Point]:
    """The points that are known, and lie to the right of the one before."""
    known = [(x, y) for x, y in points if x is not None and y is not None]
    return known[:1] + [now for before, now in pairwise(known) if now[0] > before[0]]
