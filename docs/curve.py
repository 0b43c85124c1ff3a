"""Draws docs/curve.svg from benchmarks/results/convergence.json: `make picture`."""

import json
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "convergence.json"
LINES = {
    "one replica alone": ("wire/calm/single/muon/4/1000/", "#8a8f93"),
    "lowcomm, 1/59 of the bytes": ("wire/calm/lowcomm, 1/50/muon/4/1000/", "#0b6e99"),
    "streaming-diloco, 1/62": ("wire/calm/streaming-diloco, 1/50/muon/4/1000/", "#b3480b"),
    "all-reduce at every step": ("wire/calm/allreduce/muon/4/1000/", "#1c2226"),
}
"""Beginning of the keys of each line, of which there is one a seed, and its colour."""
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 760, 300, 52, 40, 12
LOW, HIGH = 1.3, 2.3
"""Nats a byte."""


def main() -> None:
    """Draw the mean of all seeds of each line."""
    results = json.loads(RESULT.read_text(encoding="utf-8"))
    parts: list[str] = []
    for loss in (1.4, 1.6, 1.8, 2.0, 2.2):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{_down(loss)}" y2="{_down(loss)}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{_down(loss) + 4}" class="mark">{loss}</text>')
    for number, (label, (begin, colour)) in enumerate(LINES.items()):
        curves = [one["curve"] for key, one in results.items() if key.startswith(begin)]
        assert curves, begin
        points = zip(*curves, strict=True)
        most = curves[0][-1]["tokens"]
        places = [
            (LEFT + (WIDTH - LEFT) * one[0]["tokens"] / most, _down(mean(o["loss"] for o in one)))
            for one in points
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline stroke="{colour}" points="{path}"/>')
        parts.append(f'<text x="{WIDTH - 8}" y="{28 + 18 * number}" fill="{colour}">{label}</text>')
    title = "text of a replica, in 1,000 steps; held-out loss, nats a byte: lower is better"
    parts.append(f'<text x="{WIDTH - 8}" y="{HEIGHT - 10}" fill="#566068">{title}</text>')
    style = (
        "text{font:13px system-ui,sans-serif;text-anchor:end}.mark{fill:#566068}"
        "line{stroke:#d8dcd9}polyline{fill:none;stroke-width:2.5;stroke-linejoin:round}"
    )
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 8} {HEIGHT}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(parts)}</svg>"
    )
    (ROOT / "docs" / "curve.svg").write_text(svg, encoding="utf-8")


def _down(loss: float) -> float:
    share = (HIGH - min(loss, HIGH)) / (HIGH - LOW)
    return round(TOP + share * (HEIGHT - TOP - BOTTOM), 1)


if __name__ == "__main__":
    main()
