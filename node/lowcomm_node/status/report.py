"""A run as one HTML file, from the journals of one home or of several.

All texts are escaped: many come from the network. A policy in the page forbids scripts and loads,
in case one is not.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import cycle, pairwise
from pathlib import Path
from statistics import mean
from time import localtime, strftime, time

import numpy as np

from lowcomm_node.errors import ConfigError
from lowcomm_node.status.events import RunAmended, Warned
from lowcomm_node.status.figures import Sample
from lowcomm_node.status.journal import Journal
from lowcomm_node.status.track import settings_of
from lowcomm_node.storage.files import kept_run, write_atomic
from lowcomm_node.storage.paths import Paths
from lowcomm_node.system.release import describe
from lowcomm_node.system.units import clean, loss, quantity, seconds, short_peer, size
from lowcomm_protocol import PROTOCOL_VERSION
from lowcomm_protocol.spec.run import RunSpec, SignedRun

SAMPLES = 600
"""Points of a chart, at most."""
MOST_HOMES = 16
MOST_ROWS, MOST_PEERS = 30, 50
LONGEST = 200
"""Characters of a text that is counted; the rest is cut."""
GAP = 900.0
"""Seconds between two samples beyond which the node did not run: samples of a week ago are 600 s
apart."""
WIDTH, HEIGHT = 720, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 28
TICKS = 4
COLOURS = ("one", "two", "good", "bad", "quiet")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
PAGE = Path(__file__).parents[1] / "web" / "page"
SHORT = 18
"""Characters of a cell that is not broken into lines."""
Point = tuple[float, float]
Rows = Sequence[Sequence[str]]
Show = Callable[[float], str]


def write_report(home: Path, file: Path, fingerprint: str | None = None, sample: str = "") -> int:
    """Write the report of a home, or of a folder of homes; the number of homes in it.

    ``sample``: text that the model wrote.

    Raises ConfigError if there is nothing to report, or the file can't be written; NodeError if a
    journal can't be read.
    """
    stories = read_stories(home, fingerprint)
    try:
        write_atomic(file, _page(stories, sample).encode())
    except OSError as error:
        raise ConfigError(
            f"{file} can't be written ({error.strerror}): name another file with --output."
        ) from None
    return len(stories)


# --- What a journal holds, in figures of bounded size ---------------------------------------------


@dataclass
class RunStory:
    """One home and one run."""

    name: str
    """Of the folder of the home."""
    fingerprint: str
    run: SignedRun | None
    """None where the home does not hold it."""
    samples: Sequence[Sample]
    warnings: Rows
    """Time and text of the last ones."""
    amendments: Rows
    """Time and text of the last changes by the creator."""
    outcomes: Counter[str] = field(default_factory=Counter[str])
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """Exchanges by outcome and reason, of those that have one."""
    applied: Counter[str] = field(default_factory=Counter[str])
    others: Counter[str] = field(default_factory=Counter[str])
    """Exchanges that were applied, and others, by peer."""
    last: dict[str, float] = field(default_factory=dict[str, float])
    """End of the last exchange with each peer (Unix seconds)."""

    @property
    def held_out(self) -> list[Point]:
        """Losses on held-out text by swarm step, where they changed, and the last."""
        points = rising((one.swarm_step, one.val_loss) for one in self.samples)
        changes = [now for before, now in pairwise(points) if now[1] != before[1]]
        return list(dict.fromkeys([*points[:1], *changes, *points[-1:]]))

    def in_general(self, reason: str) -> str:
        """Drop names of peers from a reason, and repetitions of its parts: equal ones count as
        one."""
        for peer in self.last:
            reason = reason.replace(short_peer(peer), "a peer")
        opening, colon, parts = reason.rpartition(": ")
        return opening + colon + "; ".join(sorted(set(parts.split("; "))))


def read_stories(home: Path, fingerprint: str | None = None) -> list[RunStory]:
    """Read the newest run of a home; of a folder that holds homes, as a demo leaves it, of each.

    Raises ConfigError if there is no journal, NodeError if one can't be read.
    """
    stories: list[RunStory] = []
    for one in [home, *sorted(path for path in home.glob("*") if path.is_dir())]:
        runs = Paths(one).runs.glob(f"{fingerprint or ''}*")
        journals = [path for run in runs if (path := Paths(one).journal(run.name)).exists()]
        if journals and len(stories) < MOST_HOMES:
            newest = max(journals, key=lambda path: path.stat().st_mtime)
            stories.append(_read_story(one.name, newest))
    if not stories:
        whose = f" of run {fingerprint}" if fingerprint else ""
        raise ConfigError(
            f"{home} holds no journal{whose}: name the home of a node, or the folder of a demo."
        )
    return stories


def _read_story(name: str, path: Path) -> RunStory:
    journal = Journal(path)

    def last(kind: type[Warned | RunAmended]) -> Rows:
        return [
            [_when(notice.time), notice.event.text]
            for notice in journal.last_notices(MOST_ROWS, kind.wire_name)
            if isinstance(notice.event, kind)
        ]

    samples, fingerprint = journal.samples(most=SAMPLES), path.parent.name
    run = kept_run(path.parent / "run.json")
    story = RunStory(name, fingerprint, run, samples, last(Warned), last(RunAmended))
    for event in journal.each_exchange():
        outcome = str(event.outcome)
        story.outcomes[outcome] += 1
        if event.reason:
            story.reasons[outcome, event.reason[:LONGEST]] += 1
        for peer in event.partners:
            (story.applied if outcome == "applied" else story.others)[peer[:LONGEST]] += 1
            story.last[peer[:LONGEST]] = event.time
    return story


def rising(points: Iterable[tuple[float | None, float | None]]) -> list[Point]:
    """The points that are known, and lie to the right of the one before."""
    known = [(x, y) for x, y in points if x is not None and y is not None]
    return known[:1] + [now for before, now in pairwise(known) if now[0] > before[0]]


# --- The page -------------------------------------------------------------------------------------


def _page(stories: Sequence[RunStory], sample: str) -> str:
    first = stories[0]
    run = first.run.spec if first.run else None
    title = f"{clean(run.run.name if run else first.fingerprint)}@{first.fingerprint}"
    about = "The home no longer holds the specification of this run."
    if run is not None:
        about = clean(" · ".join(filter(None, [run.run.description, run.sync.method])))
    sections = [f"<p class=lead>{escape(clean(_lead(stories)))}</p>"]
    held_out = [(story.name, story.held_out) for story in stories]
    training = [
        (story.name, rising((one.swarm_step, one.loss) for one in story.samples))
        for story in stories
    ]
    for what, lines in (("Held-out loss", held_out), ("Training loss", training)):
        head = f"{what}, nats a token, by swarm step: lower is better"
        sections.append(_chart(head, lines, lambda step: quantity(round(step)), "{:.3g}".format))
    if first.amendments:
        sections.append(_table("Changes of the run by its creator", "when|what", first.amendments))
    if sample:
        quote = f"<blockquote>{escape(clean(sample))}</blockquote>"
        sections.append(f"<section><h2>What the model writes</h2>{quote}</section>")
    if run is not None:
        heads = "setting|value|usual"
        sections.append(_table("Settings that differ from the usual", heads, list(_own(run))))
    for story in stories:
        last = story.samples[-1].phase if story.samples else "unknown"
        head = f"{story.name}: {last}, {story.outcomes['applied']} exchanges"
        sections.append(f"<details><summary>{escape(clean(head))}</summary>")
        sections += [*_node(story), "</details>"]
    style = "".join(
        (PAGE / name).read_text(encoding="utf-8") for name in ("page.css", "report.css")
    )
    journals = f"{len(stories)} {'journal' if len(stories) == 1 else 'journals'}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>"
        f"<style>{style}</style></head><body>"
        f"<header><div><h1>{escape(title)}</h1><p class=quiet>{escape(about)}</p></div></header>"
        f"<main>{''.join(sections)}</main><footer class=quiet>written {_when(time())} by "
        f"{escape(clean(f'lowcomm-node {describe(PROTOCOL_VERSION)}'))} from {journals}</footer>"
        "</body></html>\n"
    )


def _lead(stories: Sequence[RunStory]) -> str:
    """Tell in sentences who trained, when, how far, and what it cost."""
    many = f"{len(stories)} nodes" if len(stories) > 1 else "One node"
    samples = [one for story in stories for one in story.samples]
    if not samples:
        return f"{many} took part, and nothing was written down."
    began, ended = min(one.time for one in samples), max(one.time for one in samples)
    span = f"from {_when(began)} to {_when(ended)} ({seconds(ended - began)})"
    steps = max(one.swarm_step or 0 for one in samples)
    run = stories[0].run
    total = f" of {run.spec.run.steps}" if run else ""
    text = f"{many} trained {span} and came to swarm step {steps}{total}."
    if held_out := [story.held_out for story in stories if story.held_out]:
        first, last = (mean(one[place][1] for one in held_out) for place in (0, -1))
        text += f" The held-out loss went from {loss(first, 2)} to {loss(last, 2)} nats a token."
    sent = sum(_grown(story, "bytes_sent") for story in stories)
    reduced = sum(map(_all_reduced, stories))
    tokens = sum(story.samples[-1].tokens or 0 for story in stories if story.samples)
    text += f" They gave {quantity(tokens)} tokens and sent {size(sent)}"
    if sent and reduced:
        text += f": {reduced / sent:.0f} times less traffic than all-reduce at every step"
        text += f" ({size(reduced)})"
    if epochs := max(one.text_epochs or 0.0 for one in samples):
        fetched = sum(_grown(story, "text_fetched") for story in stories)
        text += f". All peers read {epochs:.2f} epochs of the text; {size(fetched)} came from peers"
    return f"{text}."


def _own(run: RunSpec) -> Iterator[Sequence[str]]:
    """Settings other than those of the method and of a run without any, beside those."""
    # Models of the library have no usual sizes.
    model = run.model.model_dump(include=None if hasattr(run.model, "type") else {"kind"})
    least = {"run": {"name": run.run.name}, "sync": {"method": run.sync.method}}
    usual = RunSpec.model_validate(least | {"model": model})
    own, others = (dict(settings_of(one.model_dump(mode="json"))) for one in (run, usual))
    differing = (name for name, value in own.items() if value != others.get(name))
    yield from ((name, str(own[name]), str(others.get(name))) for name in differing)


def _node(story: RunStory) -> Iterator[str]:
    samples = story.samples
    began = samples[0].time if samples else 0.0
    speed = rising((one.time - began, one.tokens_per_second) for one in samples)
    yield _chart("Tokens a second", [("", speed)], seconds, quantity)
    heads = "what|time|share"
    yield _table("What the node did, and what it waited for", heads, list(_spent(story)))
    heads = "outcome|reason|number"
    yield _table("Exchanges by outcome and reason", heads, list(_exchanges(story)))
    yield _table("Peers", "peer|applied|not applied|last", list(_peers(story)))
    yield _table("Warnings, the newest last", "when|what", story.warnings)


def _grown(story: RunStory, column: str) -> float:
    """Growth over all samples of a count that begins at 0 with each start of the node."""
    counts = [getattr(one, column) or 0 for one in story.samples]
    return sum(now - before if now >= before else now for before, now in pairwise(counts))


def _all_reduced(story: RunStory) -> float:
    """Bytes that a ring of all peers sends of fp32 gradients in as many steps; 0: not known."""
    if story.run is None:
        return 0.0
    from lowcomm_node.trainer.memory import count_trained  # loads torch

    steps = [one.steps for one in story.samples if one.steps is not None] or [0]
    peers = 1 + sum(one.peers for one in story.samples) / max(1, len(story.samples))
    parameters = count_trained(story.run.spec)
    return 2 * 4 * parameters * (max(steps) - min(steps)) * (peers - 1) / peers


def _spent(story: RunStory) -> Iterator[Sequence[str]]:
    """Time by what the node did or waited for, the longest first; without names of peers."""
    spent = Counter[str]()
    for before, now in pairwise(story.samples):
        if (lasted := now.time - before.time) <= GAP:
            doing = f"{before.phase}: {before.waiting}" if before.waiting else before.phase
            spent[story.in_general(doing[:LONGEST])] += lasted  # type: ignore[assignment]
    for doing, lasted in spent.most_common(MOST_ROWS):
        yield doing, seconds(lasted), f"{100 * lasted / (spent.total() or 1.0):.1f} %"


def _exchanges(story: RunStory) -> Iterator[Sequence[str]]:
    plain, reasons = story.outcomes.copy(), Counter[tuple[str, str]]()
    for (outcome, reason), count in story.reasons.items():
        plain[outcome] -= count
        reasons[outcome, story.in_general(reason)] += count
    yield from ((outcome, "", str(count)) for outcome, count in plain.most_common() if count > 0)
    shown = reasons.most_common(MOST_ROWS)
    yield from ((outcome, reason, str(count)) for (outcome, reason), count in shown)
    if rest := reasons.total() - sum(count for _, count in shown):
        yield "", "other reasons", str(rest)


def _peers(story: RunStory) -> Iterator[Sequence[str]]:
    peers = sorted(story.last, key=lambda peer: -story.applied[peer])
    for peer in peers[:MOST_PEERS]:
        counts = str(story.applied[peer]), str(story.others[peer])
        yield short_peer(peer), *counts, _when(story.last[peer])
    if len(peers) > MOST_PEERS:
        yield f"and {len(peers) - MOST_PEERS} more", "", "", ""


def _table(title: str, heads: str, rows: Rows) -> str:
    def cell(text: str) -> str:
        short = " class=short" if len(text) <= SHORT else ""
        return f"<td{short}>{escape(clean(text))}</td>"

    top = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads.split("|"))
    lines = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    body = f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>"
    return (
        f"<section><h2>{escape(title)}</h2>{body if rows else '<p class=quiet>none</p>'}</section>"
    )


def _chart(
    title: str, lines: Sequence[tuple[str, Sequence[Point]]], show_x: Show, show_y: Show
) -> str:
    """A section with labelled lines as SVG, which needs no script and prints sharp."""
    known = [(label, np.array(points)) for label, points in lines if len(points) > 1]
    head = f"<section><h2>{escape(title)}</h2>"
    if not known:
        return f"{head}<p class=quiet>nothing was written down</p></section>"
    every = np.vstack([points for _, points in known])
    low, high = every.min(axis=0), every.max(axis=0)
    low, high = np.where(high > low, [low, high], [low - 0.5, high + 0.5])
    begin, end = np.array([LEFT, HEIGHT - BOTTOM]), np.array([WIDTH - RIGHT, TOP])
    legend, parts = "", list[str]()
    for share in np.linspace(0.0, 1.0, TICKS + 1):
        x, y = low + share * (high - low)
        at_x, at_y = begin + share * (end - begin)
        anchor = "end" if at_x >= WIDTH - RIGHT else "middle"
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at_y:.1f}" y2="{at_y:.1f}"/>',
            f'<text x="{LEFT - 6}" y="{at_y + 4:.1f}" text-anchor="end">{escape(show_y(y))}</text>',
            f'<text x="{at_x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{escape(show_x(x))}'
            "</text>",
        ]
    for colour, (label, points) in zip(cycle(COLOURS), known):
        places = begin + (points - low) / (high - low) * (end - begin)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline style="stroke: var(--{colour})" points="{path}"/>')
        legend += f'<span style="color: var(--{colour})">{escape(label)}</span> ' if label else ""
    return (
        f"{head}{f'<p class=legend>{legend}</p>' if legend else ''}"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg></section>"
    )


def _when(moment: float) -> str:
    return strftime("%Y-%m-%d %H:%M", localtime(moment))
