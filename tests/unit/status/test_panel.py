"""The panels: from statuses, as nodes gave them, to what a person sees; at every width, whatever
strangers sent."""

from collections.abc import Sequence
from io import StringIO
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from lowcomm_node.status.model import Status, read
from lowcomm_node.status.panel import node_panel, swarm_panel
from lowcomm_node.sync.history import ExchangeEnded

WIDTHS = (60, 80, 120)
PEERS = [
    "12D3KooWL7ptdy7K5PReDZEH2UfJZ4rog4terkXZSMpUEFtSQY1c",
    "12D3KooW9sF5Q8P3vjgRwaLNwpd81opxLNkppxzGR8dZatPiqkwy",
    "12D3KooWHTYSuybeEreFnB4P33X5AHNBQkwPkNkTCQkhcRhRRdya",
    "12D3KooWSy8nzv2Y9LyaRamwqWrztugCTCpaA4r7g39xYqkzzVMF",
]
RUN = {
    "name": "demo",
    "run_id": "e1f145ac155ef1e9b3c2ce2b54f58a052d17fc8518de04d590f2bc47a1194604",
    "fingerprint": "e1f145ac155e",
    "method": "diloco",
    "creator": "12D3KooWFnwX6C2EPYF5SyEATLtEP74iGytMPpXcj3e2wqzMPa5Q",
    "steps": 400,
}
# Recorded from `lowcomm-node status --json` of a demo of four nodes.
JOINING: dict[str, Any] = {
    "peer_id": PEERS[0],
    "release": "0.1.0",
    "pid": 11131,
    "run": RUN,
    "phase": "joining",
    "waiting": "starting the trainer: text, model, newest checkpoint",
    "uptime": 6.950244489999932,
    "trainer": {
        "state": "joining",
        "device": None,
        "parameters": None,
        "total_steps": 400,
        "steps": None,
        "swarm_step": None,
        "tokens": None,
        "tokens_per_second": None,
        "loss": None,
        "learning_rate": None,
        "val_loss_first": None,
        "val_loss_last": None,
    },
    "exchanges_running": [],
    "exchanges": {"completed": 0, "refused": 0, "failed": 0, "no_partner": 0, "in_doubt": 0},
    "bytes_sent": 0,
    "bytes_received": 0,
    "peers": 0,
    "dht_peers": 0,
    "checkpoint": None,
    "addresses": [],
    "entry_points": [],
    "warnings": [],
}
TRADING: dict[str, Any] = {
    "fragment": 0,
    "round": 5,
    "stage": "trading",
    "partners": [PEERS[1]],
    "bytes_sent": 900_000,
    "bytes_received": 412_000,
    "bytes_expected": 1_873_408,
    "seconds": 1.5,
}
TRAINING: dict[str, Any] = JOINING | {
    "phase": "training",
    "waiting": None,
    "uptime": 75.3,
    "trainer": {
        "state": "training",
        "device": "cpu",
        "parameters": 234176,
        "total_steps": 400,
        "steps": 100,
        "swarm_step": 100,
        "tokens": 51200,
        "tokens_per_second": 5873.277596216536,
        "loss": 2.8033368587493896,
        "learning_rate": 0.0028191342951089924,
        "val_loss_first": 5.5627453327178955,
        "val_loss_last": 3.1234567,
    },
    "exchanges_running": [TRADING],
    "exchanges": {"completed": 4, "refused": 1, "failed": 2, "no_partner": 3, "in_doubt": 0},
    "bytes_sent": 11240448,
    "bytes_received": 9240448,
    "peers": 3,
    "dht_peers": 4,
}
FINISHED = TRAINING | {
    "phase": "finished",
    "exchanges_running": [],
    "warnings": ["step-0000000300 is damaged"],
}
APPLIED: dict[str, Any] = {
    "time": 1795231431.0460708,
    "fragment": 0,
    "round": 2,
    "outcome": "applied",
    "reason": "",
    "partners": [PEERS[1]],
    "swarm_step": 43,
    "bytes_sent": 2810112,
    "bytes_received": 2810112,
    "seconds": 0.425857244999861,
}
ALONE = APPLIED | {
    "outcome": "no-partner",
    "reason": "no partner: A1b2c3 is busy with this fragment",
    "code": "busy",
    "partners": [],
    "swarm_step": 63,
}


def node_box(status: dict[str, Any], rounds: Sequence[dict[str, Any]] = ()) -> RenderableType:
    return node_panel(read(Status, status), [read(ExchangeEnded, one) for one in rounds])


def swarm_box(
    title: str, statuses: Sequence[dict[str, Any] | None], elapsed: float
) -> RenderableType:
    read_statuses = [one if one is None else read(Status, one) for one in statuses]
    return swarm_panel(title, read_statuses, elapsed)


def lines(renderable: RenderableType, width: int = 80, color: bool = False) -> list[str]:
    """What a terminal of this width shows, line by line."""
    console = Console(
        file=StringIO(),
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
    )
    console.print(renderable)
    return console.file.getvalue().splitlines()


def text(renderable: RenderableType, width: int = 80) -> str:
    return "\n".join(lines(renderable, width))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_box_of_a_swarm_fills_its_width_and_never_exceeds_it(width: int) -> None:
    statuses = [TRAINING, None, JOINING, FINISHED | {"waiting": "no partner: " + "x" * 200}]
    shown = lines(swarm_box("diloco, 4 nodes, 400 steps", statuses, 75.0), width)
    assert {cell_len(line) for line in shown} == {width}


@pytest.mark.parametrize("width", WIDTHS)
def test_a_node_shows_what_matters_at_every_width(width: int) -> None:
    shown = text(node_box(TRAINING, [APPLIED]), width)
    for part in (
        "demo@e1f145ac155e",
        "training",
        "100 / 400",
        "2.8033",
        "3.1235",
        "5.9k tokens/s",
        "SQY1c",
    ):
        assert part in shown
    for part in (
        "trading",
        "1.3 MB",
        "4 applied",
        "3 without a partner",
        "↑ 11.2 MB",
        "↓ 9.2 MB",
        "applied",
    ):
        assert part in shown


def test_each_device_that_trains_has_a_line_and_one_that_holds_others_up_is_named() -> None:
    card = {"kind": "gpu", "name": "Large 9 of a very long name 80GB", "load": 0.981}
    memory = {"memory_taken": 61_200_000_000, "memory_total": 85_000_000_000, "temperature": 64}
    devices = [
        {**card, **memory, "device": f"cuda:{place}", "speed": speed}
        for place, speed in enumerate((1.0, 0.61, 0.8))
    ]
    named = {"device": "cuda:0,cuda:1,cuda:2", "accelerators": devices}
    shown = lines(node_box(TRAINING | {"trainer": TRAINING["trainer"] | named}))
    assert all(cell_len(line) == 80 for line in shown)
    for place in range(3):
        (line,) = (line for line in shown if f" cuda:{place} " in line and "%" in line)
        assert "98%   61.2 GB of 85.0 GB   64 °C   Large 9 of" in line
    assert "CUDA x 3" in "".join(shown)
    held = [line for line in shown if "times as fast" in line]
    assert len(held) == 1 and "cuda:1 computes 0.6 times as fast as the fastest: the" in held[0]
    alone = {"accelerators": [{"device": "cpu", "kind": "cpu", "name": "A 1", "load": None}]}
    shown = text(node_box(TRAINING | {"trainer": TRAINING["trainer"] | alone}))
    assert "cpu   –   A 1" in shown and "times as fast" not in shown


@pytest.mark.parametrize(
    "hostile", ["\x1b[2J\x1b]0;owned\x07", "a\r\nb\x00\x9b31m", "[bold red]x[/]"]
)
def test_what_strangers_wrote_can_not_steer_the_terminal(hostile: str) -> None:
    status = TRAINING | {"waiting": hostile, "warnings": [hostile], "run": RUN | {"name": hostile}}
    rounds = [ALONE | {"reason": hostile}, APPLIED | {"partners": [hostile]}]
    shown = lines(node_box(status, rounds)) + lines(swarm_box("x", [status], 1.0))
    assert all(line.isprintable() and cell_len(line) == 80 for line in shown)
    if hostile.isprintable():
        assert any(hostile in line for line in shown)


def test_a_swarm_that_is_not_there_is_told_and_of_one_that_is_only_the_addresses_that_are_not() -> (
    None
):
    shut = {
        "peer_id": "A", "address": "/ip4/203.0.113.7/tcp/1/p2p/A", "named": True, "answers": False,
        "reason": "connection refused", "next_attempt": None,
    }  # fmt: skip
    learned = shut | {"address": "/ip4/203.0.113.8/tcp/1/p2p/B", "named": False}
    good = shut | {"address": "/ip4/203.0.113.9/tcp/1/p2p/C", "answers": True, "reason": None}
    swarm = {"state": "connected", "seconds": 1.0, "reason": None, "doors": [shut, learned, good]}
    shown = text(node_box(TRAINING | {"swarm": swarm}))
    assert "203.0.113.7" in shown and "connection refused" in shown
    assert "203.0.113.8" not in shown and "203.0.113.9" not in shown
    lost = swarm | {"state": "lost", "reason": "no peer answers for 30 s"}
    assert "no peer answers for 30 s" in text(node_box(TRAINING | {"swarm": lost}))


def test_exchanges_without_a_partner_are_folded_and_no_fault() -> None:
    shown = text(node_box(TRAINING, [APPLIED, ALONE, ALONE, ALONE]))
    assert "3 x no partner: others were busy" in shown and "yellow" not in shown
    nobody = ALONE | {"code": "nobody-training", "reason": "no partner: nobody else is training"}
    shown = text(node_box(TRAINING, [ALONE, nobody, nobody]))
    assert "2 x no partner: nobody else is training" in shown and "busy" in shown


def test_the_time_that_is_left_is_shown_while_it_trains() -> None:
    trainer = TRAINING["trainer"] | {"remaining": 350.0}
    assert "5:50 left" in text(node_box(TRAINING | {"trainer": trainer}))
    assert "left" not in text(node_box(FINISHED | {"trainer": trainer}))


def test_all_that_can_be_wrong_fits_into_24_lines() -> None:
    warnings = [f"warning {number}" for number in range(20)]
    limits = {"max_up": 1e6, "max_down": 1e6, "up": 1.0, "down": 1.0, "max_peers": 64, "peers": 3}
    interval = {"written": 5, "effective": 14.0, "cause": "line", "reason": "the line is full"}
    run = RUN | {"description": "tales", "amendments": []}
    status = FINISHED | {
        "warnings": warnings, "limits": limits, "interval": interval, "run": run,
        "refusals": {"call.replayed": 3},
    }  # fmt: skip
    assert len(lines(node_box(status, [APPLIED] * 9))) <= 24
