"""What must hold for packed text in ``status``, metrics and report: numbers mean what they say."""

from pathlib import Path

import pytest
from rich.console import Console

from helpers.journals import sample as sample_of
from helpers.journals import write_down
from helpers.statuses import make_status
from lowcomm_node.status.figures import figures, sample
from lowcomm_node.status.model import TextStatus
from lowcomm_node.status.panel import node_panel
from lowcomm_node.status.report import write_report
from lowcomm_node.status.words import text_in_words

WIKI = {
    "name": "wiki", "share": 0.75, "tokens": 3_000_000, "pieces": 300, "epoch": 1,
    "pieces_read": 150, "own_pieces": 30, "held": 40, "missing": 2,
    "bytes_fetched": 640_000, "bytes_given": 160_000,
}  # fmt: skip
CODE = {"name": "code", "share": 0.25, "tokens": 1_000_000, "pieces": 100, "pieces_read": 10}
NOBODY = "waits for piece 7, which nobody gives"


def test_epochs_of_several_texts_weigh_them_by_their_tokens() -> None:
    told = {one.name: one.value for one in figures(make_status(text=[WIKI, CODE]))}
    assert told["lowcomm_text_epochs"] == pytest.approx({"all": (4.5 + 0.1) / 4, "own": 0.3 / 4})
    assert told["lowcomm_text_bytes_total"] == {"fetched": 640_000, "given": 160_000}
    assert told["lowcomm_text_missing_pieces"] == 2
    row = sample(1.0, make_status(text=[WIKI, CODE]))
    assert (row.text_epochs, row.text_fetched) == (pytest.approx(1.15), 640_000)


def test_a_run_without_packed_text_has_no_figures_of_it() -> None:
    assert not [one for one in figures(make_status()) if "text" in one.name]
    assert sample(1.0, make_status()).text_epochs is None


def test_people_read_how_far_a_text_is_and_why_training_waits_for_it() -> None:
    words = text_in_words(TextStatus(**WIKI))  # type: ignore[arg-type]
    assert words.startswith("epoch 2, 50 % read by all, 10 % by this node, 640 kB fetched")
    assert words.endswith("2 pieces to come")
    given = text_in_words(TextStatus(**WIKI), is_read=False)  # type: ignore[arg-type]
    assert given.startswith("40 pieces here, 640 kB fetched")
    console = Console(width=200, record=True)
    console.print(node_panel(make_status(text=[WIKI | {"waiting": NOBODY}, CODE])))
    shown = console.export_text()
    assert f"2 pieces to come, {NOBODY}" in shown and "code: epoch 1, 10 % read" in shown


def test_words_of_a_creator_move_no_cursor() -> None:
    console = Console(width=200, record=True)
    console.print(node_panel(make_status(text=[WIKI | {"name": "a\x1b[2Jb"}])))
    assert "a [2Jb: epoch 2" in console.export_text()


def test_a_report_says_how_often_all_read_the_text_and_what_was_fetched(tmp_path: Path) -> None:
    told = [{"text_epochs": 0.5 * k, "text_fetched": 1_000_000 * k} for k in range(3)]
    write_down(tmp_path, [], [sample_of(place, **one) for place, one in enumerate(told)])
    write_report(tmp_path, tmp_path / "report.html")
    report = (tmp_path / "report.html").read_text()
    assert "All peers read 1.00 epochs of the text; 2.0 MB came from peers." in report
