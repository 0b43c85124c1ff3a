"""What the journal of a home tells of its run, in figures of bounded size."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from lowcomm_node.errors import ConfigError
from lowcomm_node.journal.reader import Journal
from lowcomm_node.journal.sample import Sample
from lowcomm_node.status.events import RunAmended, Warned
from lowcomm_node.storage.paths import Paths
from lowcomm_node.sync.records import ExchangeEnded
from lowcomm_node.system.units import short_peer
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.spec.run import MAX_SPEC_BYTES, SignedRun, read_signed_run

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
            for entry in journal.last_notices_named(kind.wire_name, MOST_WARNINGS)
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
