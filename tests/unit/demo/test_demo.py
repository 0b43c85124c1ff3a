"""What a demo prints and leaves: counts mean what their headings say, commands work as they are
shown."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.statuses import make_status
from lowcomm_node.demo.result import DemoResult, node_result, render, tidy
from lowcomm_node.status.model import Status

PEER = "12D3KooWL7ptdy7K5PReDZEH2UfJZ4rog4terkXZSMpUEFtSQY1c"


def status(phase: str = "training", step: int | None = 40, **more: Any) -> Status:
    trainer = {
        "swarm_step": step,
        "steps": step,
        "total_steps": 400,
        "tokens": 20_480,
        "tokens_per_second": 6000.0,
        "loss": 3.125,
    }
    losses = {"val_loss_first": 5.6, "val_loss_last": 3.25}
    exchanges = {"completed": 14, "refused": 1057, "no_partner": 265, "failed": 4}
    return make_status(
        peer_id=PEER,
        phase=phase,
        trainer=trainer | losses,
        exchanges=exchanges,
        bytes_sent=340_000,
        bytes_received=1,
        **more,
    )


def result(home: Path, **more: Any) -> DemoResult:
    checkpoint = home / "node-1" / "runs" / "93ae026233a6" / "checkpoints" / "step-0000000400"
    made = DemoResult(
        method="lowcomm",
        optimizer="muon",
        text="python",
        seed=0,
        steps=400,
        seconds=52.0,
        parameters=234_176,
        val_loss_average_weights=1.7,
        weight_spread_rms=5e-3,
        nodes=(node_result(status()),),
        sample="def a():\n",
        checkpoint=str(checkpoint),
        home=str(home),
        report=str(home / "report.html"),
        bytes=7_900_000,
    )
    return replace(made, **more)


def test_it_says_what_stays_where_and_how_to_be_rid_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "a demo"
    shown = render(result(home))
    assert f"folder:     '{home}'   (7.9 MB)" in shown
    assert f"rm -r '{home}'" in shown
    assert f"--home '{home}/node-1'" in shown
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "rm -r ~/'a demo'\n" in render(result(home)) + "\n"


def test_a_sample_is_shown_in_lines_that_fit_without_control_characters(tmp_path: Path) -> None:
    sample = "def \x1b[2J\x9b" + "x" * 200 + "\n\tend"
    lines = [
        line
        for line in render(result(tmp_path, sample=sample)).splitlines()
        if line.startswith("  | ")
    ]
    assert len(lines) == 4
    assert all(line.isprintable() and len(line) <= 80 for line in lines)
    words = render(result(tmp_path, sample="    " + "def word " * 20)).splitlines()
    assert all(line.endswith(("def", "word")) for line in words if line.startswith("  | ")), (
        "cut within a word"
    )
    assert "".join(line[4:] for line in lines).count("x") == 200
    broken = [line for line in words if line.startswith("  | ")][1:]
    assert broken and not any(line.startswith("  |  ") for line in broken), "begins with a space"


def test_only_what_somebody_may_use_stays(tmp_path: Path) -> None:
    node = tmp_path / "node-1"
    run = node / "runs" / "93ae026233a6"
    last = run / "checkpoints" / "step-0000000400"
    gone = [node / "data", run / "snapshots" / "a", run / "checkpoints" / "step-0000000200"]
    for folder in (last, *gone):
        folder.mkdir(parents=True)
        (folder / "file").write_text("x" * 100)
    (node / "log.jsonl").write_text("x")
    tidy([node], [last])
    left = sorted(
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()
    )
    assert left == ["node-1/log.jsonl", (last / "file").relative_to(tmp_path).as_posix()]
