"""A report tells what the journal tells, in one file that loads and runs nothing."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from helpers import journals
from helpers.families import section, tiny
from helpers.journals import NOW
from helpers.statuses import make_exchange
from lowcomm_node.errors import ConfigError
from lowcomm_node.status.events import Warned
from lowcomm_node.status.figures import Sample
from lowcomm_node.status.report import write_report
from lowcomm_node.storage.paths import Paths
from lowcomm_node.system.logs import Event
from lowcomm_protocol.exchange.events import Outcome
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.spec.run import SignedRun, parse_toml, sign_run

RUN = sign_run(
    parse_toml('[run]\nname = "tea"\ndescription = "a <b>run</b>"\n'), Identity(b"1" * 32)
)
EVIL = '<script src="https://example.org/x.js">alert(1)</script>\u202e'


def sample(place: int, **told: Any) -> Sample:
    shown = {"val_loss": 4.0 if place > 2 else None, "bytes_received": 1000 * place}
    return journals.sample(place, **{**shown, "memory": None, **told})


def lay_down(
    home: Path,
    events: list[Event],
    samples: list[Sample],
    run: SignedRun = RUN,
    signed: bool = True,
) -> None:
    journals.write_down(home, [(NOW, event) for event in events], samples, run)
    if not signed:
        Paths(home).signed_run(run.fingerprint).unlink()


def report(home: Path) -> str:
    file = home.parent / "out" / "report.html"
    write_report(home, file)
    return file.read_text(encoding="utf-8")


class Tags(HTMLParser):
    """Collects tags and what they refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loads += [f"{tag}.{name}" for name, _ in attrs if name in ("src", "href", "action")]
        assert not [name for name, _ in attrs if name.startswith("on")]


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))


def test_it_tells_loss_waits_exchanges_peers_warnings_and_settings(tmp_path: Path) -> None:
    events: list[Event] = [
        *(make_exchange(partners=["12D3KooWabcdef"]) for _ in range(3)),
        make_exchange(outcome=Outcome.FAILED, reason="the line broke", partners=["12D3KooWabcdef"]),
        Warned(text="the disk is nearly full"),
    ]
    samples = [sample(place) for place in range(8)]
    samples[4] = replace(samples[4], waiting="no partner")
    lay_down(tmp_path / "home", events, samples)
    told = text_of(report(tmp_path / "home"))
    assert f"tea@{RUN.fingerprint}" in told
    for words in (
        "applied 3 ",
        "failed the line broke 1 ",
        "abcdef 3 1 ",
        "the disk is nearly full",
        "training: no partner 10.0 s 14.3 %",
        "One node trained from",
        "swarm step 70 of 400",
        "sent 7 kB: 14051 times less traffic than all-reduce at every step (98.4 MB)",
    ):
        assert words in told, words
    assert told.index("One node trained") < told.index("Held-out loss, nats a token")


def test_texts_of_others_stay_texts_and_nothing_is_loaded_or_run(tmp_path: Path) -> None:
    events: list[Event] = [
        make_exchange(outcome=Outcome.FAILED, reason=EVIL, partners=[EVIL]),
        Warned(text=EVIL),
    ]
    lay_down(tmp_path / "home", events, [sample(0, waiting=EVIL, phase=EVIL), sample(1)])
    page = report(tmp_path / "home")
    tags = Tags()
    tags.feed(page)
    assert "script" not in tags.tags
    assert "b" not in tags.tags
    assert not tags.loads
    assert "\u202e" not in page
    assert "@import" not in page
    assert "url(" not in page
    assert "default-src 'none'" in page
    assert "&lt;script" in page


def test_a_home_of_which_little_is_known_is_told_all_the_same(tmp_path: Path) -> None:
    lay_down(tmp_path / "home", [], [], signed=False)
    told = text_of(report(tmp_path / "home"))
    assert "no longer holds the specification" in told
    assert "nothing was written down" in told


def test_a_run_of_a_model_of_the_library_is_told(tmp_path: Path) -> None:
    text = f'[run]\nname = "tea"\nsteps = 77\n[model]\n{section(tiny("llama"))}'
    run = sign_run(parse_toml(text), Identity(b"1" * 32))
    lay_down(tmp_path / "home", [], [sample(0), sample(1)], run)
    told = text_of(report(tmp_path / "home"))
    assert "run.steps 77 400" in told and "hidden_size" not in told


def test_a_folder_of_homes_is_one_report(tmp_path: Path) -> None:
    for name in ("node-1", "node-2"):
        lay_down(tmp_path / "demo" / name, [make_exchange()], [sample(1), sample(2), sample(4)])
    told = text_of(report(tmp_path / "demo"))
    assert "2 nodes trained" in told and "node-2: training, 1 exchanges" in told
    assert "from 2 journals" in told


def test_a_home_without_a_journal_is_refused_with_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name the home of a node"):
        write_report(tmp_path, tmp_path / "report.html")
