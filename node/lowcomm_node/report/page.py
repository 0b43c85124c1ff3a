"""The file: figures, charts and tables of one home or of several, with nothing from elsewhere.

All texts are escaped: many come from the network. A policy in the page forbids scripts and loads,
in case one is not.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from lowcomm_node.control.page import FOLDER
from lowcomm_node.report.chart import Line, chart, rising
from lowcomm_node.report.story import (
    MOST_PEERS,
    MOST_REASONS,
    Story,
    in_general,
    releases,
    waits,
)
from lowcomm_node.system.units import clean, loss, quantity, seconds, short_peer, size
from lowcomm_protocol.spec.sections import ModelSettings

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
FP32 = 4
SHORT = 18
"""Characters of a cell that is not broken into lines."""
STYLE = """
svg { width: 100%; height: auto; }
svg line { stroke: var(--line); }
svg text { fill: var(--quiet); font-size: 12px; }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
polyline.one { stroke: var(--one); } polyline.two { stroke: var(--two); }
polyline.good { stroke: var(--good); } polyline.bad { stroke: var(--bad); }
polyline.quiet { stroke: var(--quiet); }
.legend .one { color: var(--one); } .legend .two { color: var(--two); }
td { white-space: normal; padding-right: 0.75rem; overflow-wrap: anywhere; vertical-align: top; }
@media (min-width: 40rem) { td.short { white-space: nowrap; } }
h2.node { margin: 2rem 0 0; font-size: 1.2rem; }
@media print {
  :root { --ground: #fff; --ink: #000; --quiet: #444; --line: #ccc; --card: #fff;
    --one: #0b6e99; --two: #b3480b; --good: #1d6b3a; --bad: #a3211b; }
  body { max-width: none; padding: 0; }
  section { break-inside: avoid; }
}
"""


def render(stories: Sequence[Story], release: str, now: float) -> str:
    """The report as HTML. ``release``: of this program; ``now``: Unix seconds."""
    first = stories[0]
    name = first.run.spec.run.name if first.run else first.fingerprint
    title = f"{clean(name)}@{first.fingerprint}"
    style = (FOLDER / "page.css").read_text(encoding="utf-8") + STYLE
    sections = [_together(stories)] if len(stories) > 1 else []
    sections += [part for story in stories for part in _node(story, len(stories) > 1)]
    sections.append(_settings(first))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>"
        f"<header><h1>{escape(title)}</h1><p class=quiet>{escape(_about(first))}</p></header>"
        f"<main>{''.join(sections)}</main>"
        f"<footer class=quiet>written {_when(now)} by {escape(clean(release))} from "
        f"{len(stories)} {'journal' if len(stories) == 1 else 'journals'}</footer></body></html>\n"
    )


def _about(story: Story) -> str:
    if story.run is None:
        return "The home no longer holds the specification of this run."
    spec = story.run.spec
    return clean(" · ".join(filter(None, [spec.run.description, spec.sync.method])))


def _together(stories: Sequence[Story]) -> str:
    lines = [Line(f"{story.name} held-out", _held_out(story)) for story in stories]
    return f"<section>{chart('Held-out loss of all nodes', lines, _whole, _loss)}</section>"


def _node(story: Story, named: bool) -> Iterator[str]:
    if named:
        yield f"<h2 class=node>{escape(clean(story.name))}</h2>"
    yield f"<section><dl class=figures>{''.join(_figures(story))}</dl></section>"
    losses = [
        Line("training", rising([(one.swarm_step, one.loss) for one in story.samples])),
        Line("held-out", _held_out(story)),
    ]
    yield f"<section>{chart('Loss (nats a token) by swarm step', losses, _whole, _loss)}</section>"
    began = story.samples[0].time if story.samples else 0.0
    speed = [(one.time - began, one.tokens_per_second) for one in story.samples]
    others = [(one.time - began, one.peers) for one in story.samples]
    for title, points, show in (
        ("Tokens a second", speed, quantity),
        ("Other peers alive", others, _count),
    ):
        yield f"<section>{chart(title, [Line('', rising(points))], seconds, show)}</section>"
    yield _waits(story)
    yield _exchanges(story)
    yield _peers(story)
    changes = [[_when(when), own, others] for when, own, others in releases(story.samples)]
    heads = ["since", "this node", "other peers, as they tell"]
    yield _table("Releases over time", heads, changes)
    amended = [[_when(when), text] for when, text in story.amendments]
    yield _table("Changes of the run by its creator", ["when", "what"], amended)
    told = [[_when(when), text] for when, text in story.warnings]
    yield _table("Warnings, the newest last", ["when", "what"], told)


def _figures(story: Story) -> Iterator[str]:
    last = story.samples[-1] if story.samples else None
    lasted = last.time - story.samples[0].time if last else None
    outcomes = story.exchanges.outcomes
    applied = outcomes["applied"]
    figures: list[tuple[str, str]] = [
        ("last phase", last.phase if last else "unknown"),
        ("swarm step", str(last.swarm_step) if last else "unknown"),
        ("loss", loss(last.loss if last else None)),
        ("held-out loss", loss(last.val_loss if last else None)),
        ("tokens", quantity(last.tokens if last else None)),
        ("from first to last sample", seconds(lasted)),
        ("exchanges applied", f"{applied} of {outcomes.total()}"),
        ("sent", size(story.bytes_sent)),
    ]
    reduced = _all_reduced(story)
    if reduced:
        figures.append(("all-reduce at every step would have sent", size(reduced)))
    if reduced and story.bytes_sent:
        figures.append(("times as much", f"{reduced / story.bytes_sent:.0f}"))
    for name, value in figures:
        yield f"<div><dt>{escape(name)}</dt><dd>{escape(clean(value))}</dd></div>"


def _all_reduced(story: Story) -> float:
    """Bytes that a ring of all peers sends of fp32 gradients in as many steps; 0: not known."""
    if story.run is None:
        return 0.0
    peers = story.peers + 1
    return 2 * FP32 * _parameters(story.run.spec.model) * story.steps * (peers - 1) / peers


def _parameters(model: ModelSettings) -> int:
    from lowcomm_node.trainer.memory import count_parameters  # loads torch

    return count_parameters(model)


def _waits(story: Story) -> str:
    spent = waits(story.samples, story.exchanges.peers)
    whole = sum(lasted for _, lasted in spent) or 1.0
    rows = [[doing, seconds(lasted), f"{100 * lasted / whole:.1f} %"] for doing, lasted in spent]
    return _table("What the node did, and what it waited for", ["what", "time", "share"], rows)


def _exchanges(story: Story) -> str:
    exchanges = story.exchanges
    plain = exchanges.outcomes.copy()
    for (outcome, _), count in exchanges.reasons.items():
        plain[outcome] -= count
    rows = [[outcome, "", str(count)] for outcome, count in plain.most_common() if count > 0]
    reasons: Counter[tuple[str, str]] = Counter()
    for (outcome, reason), count in exchanges.reasons.items():
        reasons[outcome, in_general(reason, exchanges.peers)] += count
    told = reasons.most_common(MOST_REASONS)
    rows += [[outcome, reason, str(count)] for (outcome, reason), count in told]
    rest = reasons.total() - sum(count for _, count in told)
    rows += [["", "other reasons", str(rest)]] if rest else []
    return _table("Exchanges by outcome and reason", ["outcome", "reason", "number"], rows)


def _peers(story: Story) -> str:
    met = sorted(story.exchanges.peers.items(), key=lambda one: -one[1].applied)
    rows = [
        [short_peer(peer), str(known.applied), str(known.others), _when(known.last)]
        for peer, known in met[:MOST_PEERS]
    ]
    if len(met) > MOST_PEERS:
        rows.append([f"and {len(met) - MOST_PEERS} more", "", "", ""])
    return _table("Peers", ["peer", "applied", "not applied", "last"], rows)


def _settings(story: Story) -> str:
    if story.run is None:
        return ""
    told: dict[str, Any] = story.run.spec.model_dump()
    rows = [
        [f"{section}.{name}", str(value)[:500]]
        for section, values in told.items()
        if isinstance(values, dict)
        for name, value in values.items()
        if value not in ("", (), [])
    ]
    return _table("Settings of the run", ["setting", "value"], rows)


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    lines = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    body = f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>"
    return (
        f"<section><h2>{escape(title)}</h2>{body if rows else '<p class=quiet>none</p>'}</section>"
    )


def _cell(text: str) -> str:
    short = " class=short" if len(text) <= SHORT else ""
    return f"<td{short}>{escape(clean(text))}</td>"


def _held_out(story: Story) -> list[tuple[float, float]]:
    points = rising([(one.swarm_step, one.val_loss) for one in story.samples])
    # It stays known until the next evaluation: a point where it changed, and where it ended.
    return [
        point
        for place, point in enumerate(points)
        if place in (0, len(points) - 1) or point[1] != points[place - 1][1]
    ]


def _when(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def _count(value: float) -> str:
    """Between two counts the grid has a line, and nothing to say of it."""
    return quantity(value) if value == round(value) else ""


def _whole(value: float) -> str:
    return quantity(round(value))


def _loss(value: float) -> str:
    return f"{value:.3g}"
