"""The panels: from statuses, as nodes gave them, to what a person sees; at every width, whatever
strangers sent."""

from collections.abc import Sequence
from io import StringIO
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from lowcomm_node.status.model import Status, read
from lowcomm_node.status.panel import ROUNDS, node_panel, swarm_panel
from lowcomm_node.sync.records import ExchangeEnded
from lowcomm_node.system.units import (
    clean,
    clean_text,
    loss,
    quantity,
    seconds,
    short_peer,
    size,
)

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
STARTING = JOINING | {"run": None, "waiting": "looking for the swarm"}
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
    "reason": "1 peer alive, it is busy",
    "partners": [],
    "swarm_step": 63,
}


def node_box(status: dict[str, Any], rounds: Sequence[dict[str, Any]] = ()) -> RenderableType:
    return node_panel(read(Status, status), [read(ExchangeEnded, one) for one in rounds])


def swarm_box(
    title: str, statuses: Sequence[dict[str, Any] | None], elapsed: float, width: int = 80
) -> RenderableType:
    return swarm_panel(
        title, [one if one is None else read(Status, one) for one in statuses], elapsed, width
    )


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
@pytest.mark.parametrize("status", [STARTING, JOINING, TRAINING, FINISHED])
def test_the_box_of_a_node_fills_its_width_and_never_exceeds_it(
    status: dict[str, Any], width: int
) -> None:
    assert {cell_len(line) for line in lines(node_box(status, [APPLIED, ALONE]), width)} == {width}


@pytest.mark.parametrize("width", WIDTHS)
def test_the_box_of_a_swarm_fills_its_width_and_never_exceeds_it(width: int) -> None:
    statuses = [TRAINING, None, JOINING, FINISHED | {"waiting": "no partner: " + "x" * 200}]
    shown = lines(swarm_box("diloco, 4 nodes, 400 steps", statuses, 75.0, width), width)
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
        "4 completed",
        "3 no partner",
        "↑ 11.2 MB",
        "↓ 9.2 MB",
        "applied",
    ):
        assert part in shown


@pytest.mark.parametrize("width", WIDTHS)
def test_the_reason_of_a_wait_is_shown_whole(width: int) -> None:
    reason = (
        "no partner: 3 peers are alive, one is busy, two are at another round of this fragment, "
        "since step 340"
    )
    shown = " ".join(
        line.strip("│ ") for line in lines(node_box(TRAINING | {"waiting": reason}), width)
    )
    assert reason in " ".join(shown.split())


def test_peer_ids_are_shown_by_their_last_six_characters() -> None:
    shown = text(node_box(TRAINING, [APPLIED]), 120) + text(
        swarm_box("x", [TRAINING, None], 1.0, 120), 120
    )
    assert "tSQY1c" in shown
    assert "Piqkwy" in shown
    assert "12D3KooW" not in shown


def test_the_newest_round_comes_first_and_older_ones_drop_out() -> None:
    rounds = [APPLIED | {"swarm_step": 1000 + number} for number in range(ROUNDS + 3)]
    steps = [
        int(line.split("step")[1].split()[0])
        for line in lines(node_box(TRAINING, rounds))
        if "applied" in line
    ]
    assert steps == [1000 + number for number in range(ROUNDS + 2, 2, -1)]


def test_a_round_that_was_not_applied_says_why() -> None:
    assert "no-partner 1 peer alive, it is busy" in text(node_box(TRAINING, [ALONE]))


def test_rows_stay_where_they_are_while_exchanges_and_rounds_come_and_go() -> None:
    idle = TRAINING | {"exchanges_running": []}
    heights = {
        len(lines(node_box(status, rounds), 80))
        for status in (idle, TRAINING)
        for rounds in ([], [APPLIED], [APPLIED, ALONE] * ROUNDS)
    }
    assert len(heights) == 1
    meeting = [TRAINING, TRAINING | {"peer_id": PEERS[1]}]
    waiting = [idle | {"waiting": "no partner"}, None]
    assert len({len(lines(swarm_box("x", two, 1.0, 80), 80)) for two in (meeting, waiting)}) == 1


def test_between_exchanges_it_says_how_long_ago_the_last_was_applied() -> None:
    idle = TRAINING | {"exchanges_running": []}
    recent = idle | {"exchanges": TRAINING["exchanges"] | {"since_applied": 75.2}}
    assert "none under way; the last was applied 1:15 ago" in text(node_box(recent), 60)
    assert "applied" not in text(node_box(idle))


def test_warnings_are_shown() -> None:
    assert "step-0000000300 is damaged" in text(node_box(FINISHED))


def test_what_a_run_is_about_and_what_has_changed_of_it_is_shown() -> None:
    amendments = [
        {
            "number": number,
            "at": 9,
            "settings": {},
            "text": f"amendment {number}",
            "in_force": number == 1,
        }
        for number in (1, 2)
    ]
    shown = text(
        node_box(
            TRAINING
            | {"run": RUN | {"description": "Fables of\x1b[2J Berlin", "amendments": amendments}}
        )
    )
    for line in ("Fables of", "amendment 1 (in force)", "amendment 2 (to come)"):
        assert line in shown
    assert "\x1b[2J" not in shown


def test_an_interval_is_shown_where_something_makes_it_longer() -> None:
    told = {"written": 4, "effective": 9.2, "cause": None, "reason": ""}
    assert "interval" not in text(node_box(TRAINING | {"interval": told}))
    told |= {"cause": "line", "reason": "contents take 2.9 s"}
    shown = text(node_box(TRAINING | {"interval": told}), 80)
    assert "every 9 steps, written 4: contents take 2.9 s" in shown


def test_refusals_are_shown_by_their_reason_once_there_are_any() -> None:
    assert "refused" not in text(node_box(TRAINING | {"refusals": {}}))
    shown = text(node_box(TRAINING | {"refusals": {"call.replayed": 2, "record.expired": 1}}))
    assert "call.replayed 2" in shown and "record.expired 1" in shown


def test_a_bar_is_as_full_as_the_run_is_far() -> None:
    def filled(step: int) -> float:
        status = TRAINING | {
            "trainer": TRAINING["trainer"] | {"swarm_step": step},
            "exchanges_running": [],
        }
        row = next(line for line in lines(node_box(status), 80, color=True) if "/ 400" in line)
        green = row.split("\x1b[32m")[1].split("\x1b")[0] if "\x1b[32m" in row else ""
        return green.count("━") + green.count("╸") / 2

    assert filled(0) == 0
    assert filled(200) == pytest.approx(filled(400) / 2, abs=0.5)
    assert filled(400) == filled(999) > 20


def test_a_meeting_of_two_nodes_is_shown_once() -> None:
    partner = TRADING | {"partners": [PEERS[0]]}
    statuses = [TRAINING, TRAINING | {"peer_id": PEERS[1], "exchanges_running": [partner]}]
    assert text(swarm_box("x", statuses, 1.0)).count("1 ⇄ 2 fragment 0") == 1


def test_a_swarm_is_as_far_as_its_slowest_node() -> None:
    def at(step: int) -> dict[str, Any]:
        return TRAINING | {"trainer": TRAINING["trainer"] | {"swarm_step": step}}

    assert "120 / 400" in text(swarm_box("x", [at(300), at(120)], 1.0))
    assert "0 / 400" in text(swarm_box("x", [at(300), None], 1.0))


def test_the_totals_add_up() -> None:
    other = TRAINING | {
        "trainer": TRAINING["trainer"] | {"val_loss_last": 3.3234567},
        "bytes_sent": 1_000_000,
    }
    last = next(
        line for line in lines(swarm_box("x", [TRAINING, other, None], 1.0)) if "mean" in line
    )
    assert last.split("mean")[1].split()[:4] == ["3.2235", "11.7k", "12.2", "MB"]


def test_every_waiting_node_is_named_with_its_reason() -> None:
    statuses = [TRAINING, JOINING, None, TRAINING | {"waiting": "no partner: 1 peer alive"}]
    shown = text(swarm_box("x", statuses, 1.0))
    assert "node 2: starting the trainer" in shown
    assert "node 4: no partner: 1 peer alive" in shown
    assert "node 1:" not in shown


def test_a_node_that_has_finished_waits_for_nothing_in_a_demo() -> None:
    assert "serving" not in text(
        swarm_box("x", [FINISHED | {"waiting": "serving its state to others"}], 1.0)
    )


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


def test_what_a_model_writes_can_not_steer_the_terminal_and_keeps_its_lines() -> None:
    assert clean_text("a\n\tb\x1b[2J\x9b31m\x08\r c") == "a\n\tb [2J 31m   c"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (size(0), "0 B"),
        (size(999), "999 B"),
        (size(920_400), "920 kB"),
        (size(12_440_000), "12.4 MB"),
        (size(5.5e12), "5.5 TB"),
        (size(None), "–"),
        (quantity(950), "950"),
        (quantity(11_234.5), "11.2k"),
        (quantity(3_400_000), "3.4M"),
        (quantity(7e9), "7.0G"),
        (quantity(None), "–"),
        (loss(2.41309), "2.4131"),
        (loss(None), "–"),
        (seconds(0.42), "0.4 s"),
        (seconds(65), "1:05"),
        (seconds(7390), "2:03:10"),
        (short_peer(PEERS[0]), "tSQY1c"),
        (clean("a\tb\x1b[1m"), "a b [1m"),
    ],
)
def test_figures_are_short(shown: str, expected: str) -> None:
    assert shown == expected


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
