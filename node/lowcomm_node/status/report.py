"""A run as one HTML file, from the journals of one home or of several.

All texts are escaped: many come from the network. A policy in the page forbids scripts and loads,
in case one is not.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from lowcomm_node.errors import ConfigError
from lowcomm_node.status.events import RunAmended, Warned
from lowcomm_node.status.journal import Journal, Sample
from lowcomm_node.storage.files import write_atomic
from lowcomm_node.storage.paths import Paths
from lowcomm_node.sync.records import ExchangeEnded
from lowcomm_node.system.release import describe
from lowcomm_node.system.units import clean, loss, quantity, seconds, short_peer, size
from lowcomm_protocol import PROTOCOL_VERSION
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.spec.run import MAX_SPEC_BYTES, SignedRun, read_signed_run
from lowcomm_protocol.spec.sections import ModelSettings

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


SAMPLES = 600
"""Points of a chart, at most."""
MOST_HOMES = 16
MOST_REASONS, MOST_PEERS, MOST_WARNINGS, MOST_CHANGES = 30, 50, 30, 30
LONGEST = 200
"""Characters of a text that is counted; the rest is cut."""
GAP = 900.0
"""Seconds between two samples beyond which the node did not run: samples of a week ago are 600 s
apart."""


@dataclass
class Dealings:
    """Exchanges with one peer."""

    applied: int = 0
    others: int = 0
    last: float = 0.0
    """When the last one ended (Unix seconds)."""


@dataclass
class Exchanges:
    """All exchanges of a journal, counted."""

    outcomes: Counter[str] = field(default_factory=Counter[str])
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """By outcome and reason, of those that have one."""
    peers: dict[str, Dealings] = field(default_factory=dict[str, Dealings])

    def take(self, event: ExchangeEnded) -> None:
        """Count one."""
        outcome = str(event.outcome)
        self.outcomes[outcome] += 1
        if event.reason:
            self.reasons[outcome, event.reason[:LONGEST]] += 1
        for peer in event.partners:
            known = self.peers.setdefault(peer[:LONGEST], Dealings())
            known.applied += outcome == "applied"
            known.others += outcome != "applied"
            known.last = event.time


@dataclass(frozen=True)
class Story:
    """One home and one run."""

    name: str
    """Of the folder of the home."""
    fingerprint: str
    run: SignedRun | None
    """None where the home does not hold it."""
    samples: Sequence[Sample]
    exchanges: Exchanges
    warnings: Sequence[tuple[float, str]]
    """Time and text of the last ones."""
    amendments: Sequence[tuple[float, str]] = ()
    """The same of what the creator has changed."""

    @property
    def steps(self) -> int:
        """Inner steps between the first and the last sample."""
        known = [one.steps for one in self.samples if one.steps is not None]
        return max(known, default=0) - min(known, default=0)

    @property
    def bytes_sent(self) -> int:
        """Of contents, over all starts."""
        return total(one.bytes_sent for one in self.samples)

    @property
    def peers(self) -> float:
        """Other peers, on average."""
        return sum(one.peers for one in self.samples) / max(1, len(self.samples))


def in_general(reason: str, peers: Collection[str]) -> str:
    """A reason without the names of these peers, each of its parts once: so that what happened with
    several of them counts as one thing."""
    for peer in peers:
        reason = reason.replace(short_peer(peer), "a peer")
    opening, colon, parts = reason.rpartition(": ")
    return opening + colon + "; ".join(sorted(set(parts.split("; "))))


def total(counts: Iterable[int]) -> int:
    """The growth of a count over all samples: it begins anew with each start of the node."""
    told = list(counts)
    return sum(max(now - before, 0) if now >= before else now for before, now in pairwise(told))


def waits(samples: Sequence[Sample], peers: Collection[str] = ()) -> list[tuple[str, float]]:
    """Seconds by what the node did or waited for, the longest first; without names of peers."""
    spent: dict[str, float] = {}
    for before, now in pairwise(samples):
        if now.time - before.time <= GAP:
            doing = f"{before.phase}: {before.waiting}" if before.waiting else before.phase
            key = in_general(doing[:LONGEST], peers)
            spent[key] = spent.get(key, 0.0) + now.time - before.time
    return sorted(spent.items(), key=lambda one: -one[1])[:MOST_REASONS]


def releases(samples: Sequence[Sample]) -> list[tuple[float, str, str]]:
    """When releases changed, the last times: since when, that of this node, those of its peers."""
    changes: list[tuple[float, str, str]] = []
    for one in samples:
        if one.release is None:  # written down by a node that did not tell
            continue
        told = (one.release[:LONGEST], (one.releases or "")[:LONGEST])
        if not changes or changes[-1][1:] != told:
            changes.append((one.time, *told))
    return changes[-MOST_CHANGES:]


def stories(home: Path, fingerprint: str | None = None) -> list[Story]:
    """The newest run of a home; of a folder that holds homes, as a demo leaves it, of each.

    Raises ConfigError if there is no journal, NodeError if one can't be read.
    """
    homes = [home, *sorted(path for path in home.glob("*") if path.is_dir())]
    found = [(one, journal) for one in homes if (journal := _journal(one, fingerprint))]
    if not found:
        whose = f" of run {fingerprint}" if fingerprint else ""
        raise ConfigError(
            f"{home} holds no journal{whose}: name the home of a node, or the folder of a demo."
        )
    return [_story(one, journal) for one, journal in found[:MOST_HOMES]]


def _journal(home: Path, fingerprint: str | None) -> Path | None:
    paths = Paths(home)
    runs = [folder.name for folder in paths.runs.glob("*") if folder.is_dir()]
    wanted = (run for run in runs if run.startswith(fingerprint or ""))
    found = [path for path in map(paths.journal, wanted) if path.exists()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _story(home: Path, path: Path) -> Story:
    journal = Journal(path)
    exchanges = Exchanges()
    for event in journal.each_exchange():
        exchanges.take(event)

    def last(kind: type[Warned | RunAmended]) -> list[tuple[float, str]]:
        return [
            (entry.notice.time, entry.notice.event.text)
            for entry in journal.last_notices(MOST_WARNINGS, kind.wire_name)
            if isinstance(entry.notice.event, kind)
        ]

    return Story(
        name=home.name,
        fingerprint=path.parent.name,
        run=_run(path.parent / "run.json"),
        samples=journal.samples(most=SAMPLES),
        exchanges=exchanges,
        warnings=last(Warned),
        amendments=last(RunAmended),
    )


def _run(path: Path) -> SignedRun | None:
    try:
        with path.open("rb") as file:
            return read_signed_run(file.read(2 * MAX_SPEC_BYTES + 1), str(path))
    except (LowcommError, OSError):
        return None


POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
FP32 = 4
PAGE_STYLE = Path(__file__).parents[1] / "web" / "page" / "page.css"
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
    style = (Path(__file__).parents[1] / "web" / "page" / "page.css").read_text(
        encoding="utf-8"
    ) + STYLE
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


def write_report(home: Path, file: Path, fingerprint: str | None = None) -> int:
    """Write the report of a home, or of a folder of homes; the number of homes in it.

    Raises ConfigError if there is nothing to tell, or the file can't be written; NodeError if a
    journal can't be read.
    """
    told = stories(home, fingerprint)
    page = render(told, f"lowcomm-node {describe(PROTOCOL_VERSION)}", time.time())
    try:
        write_atomic(file, page.encode())
    except OSError as error:
        raise ConfigError(
            f"{file} can't be written ({error.strerror}): name another file with --output."
        ) from None
    return len(told)
