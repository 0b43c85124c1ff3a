"""Badges of runs, for somebody's README."""

from html import escape
from typing import Any

HEIGHT = 20
LETTER = 6.5
"""Width of a letter, about: nobody measures the reader's font."""


def badge(view: dict[str, Any]) -> str:
    """An SVG that tells how many peers a run has, and how far it is."""
    name, _, _ = view["run"].partition("@")
    done = f"{min(1.0, view['swarm_step'] / view['steps']):.0%}"
    peers = view["peers"]
    right = f"{peers} peer{'' if peers == 1 else 's'}, {done}"
    left_width, right_width = (round(LETTER * len(text)) + 12 for text in (name, right))
    width = left_width + right_width
    colour = "#1d6b3a" if view["training"] else "#566068"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" role="img" '
        f'aria-label="{escape(name)}: {escape(right)}">'
        f'<rect width="{left_width}" height="{HEIGHT}" fill="#1c2226"/>'
        f'<rect x="{left_width}" width="{right_width}" height="{HEIGHT}" fill="{colour}"/>'
        '<g fill="#fff" font-family="Verdana,sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="{left_width / 2}" y="14">{escape(name)}</text>'
        f'<text x="{left_width + right_width / 2}" y="14">{escape(right)}</text></g></svg>'
    )
