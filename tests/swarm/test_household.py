"""What must hold for machines of one owner: by two commands a machine computes for another, which
stays one peer of its swarm, also when the machine that lends itself is gone and comes back."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import START, Process, Swarm, free_port, lonely_swarm, run, until_exchanged
from helpers.waiting import until

LONG = 120.0
pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with lonely_swarm(tmp_path / "swarm") as swarm:
        yield swarm


class Lender(Process):
    """A machine that lends itself; started again it has the same port and identity."""

    def __init__(self, folder: Path, port: int, *more: str) -> None:
        self.address = f"127.0.0.1:{port}"
        at = ("--home", str(folder), "--port", str(port), *more)
        super().__init__(folder, "lowcomm_node", "lend", *at)


def pair(lender: Lender, home: Path) -> None:
    code = until(lambda: re.search(r"^  (\w{4}(-\w{4}){3})$", lender.output, re.M), START, "a code")
    assert code
    ours = ("--home", str(home), "--code", code[1])
    done = run("lowcomm_node", "pair", lender.address, *ours)
    assert done.returncode == 0, done.stderr


def seen(status: dict[str, Any]) -> dict[str, Any]:
    """What a status says of the only lender."""
    found = status["trainer"]["lenders"]
    return found[0] if found else {"away": "no step yet", "moved": 0}


def test_a_household_is_one_peer_also_when_a_lender_is_pulled_out_and_returns(
    swarm: Swarm, tmp_path: Path
) -> None:
    lender = Lender(tmp_path / "lender", free_port())
    swarm.processes.append(lender)
    pair(lender, swarm.folder / "head")
    swarm.bootstrap("--run", str(swarm.spec()))
    plain = swarm.node("plain")
    head = swarm.node("head", "--with", lender.address)
    head.until(lambda status: seen(status)["moved"], "the lender computes windows", LONG)
    until_exchanged((plain, head), 1, LONG)
    head.until(lambda status: status["peers"] == 1, "the lender is no peer")
    lender.end(signal.SIGKILL)
    gone = head.until(lambda status: seen(status)["away"], "status says that it is away", LONG)
    steps = gone["trainer"]["steps"] + 5
    head.until(lambda status: status["trainer"]["steps"] > steps, "training goes on", LONG)
    swarm.processes.append(Lender(tmp_path / "lender", int(lender.address.rpartition(":")[2])))
    before = seen(gone)["moved"]
    back = head.until(lambda status: seen(status)["moved"] > before, "it computes again", LONG)
    assert not seen(back)["away"] and back["trainer"]["failures"] == 0
    until_exchanged((plain, head), 1, LONG)
    assert head.end() == 0
    assert not swarm.defects()


LARGE = """
[run]
name = "large"
steps = 1000000
start_peers = 2
[model]
layers = 8
width = 512
heads = 8
feed_forward = 2048
context = 64
[train]
batch = 4
evaluate_every = 100000
[sync]
method = "noloco"
interval = 32
fragments = 32
"""
"""34 million parameters: a node alone needs 1.1 GiB."""
LIMITS = {"small": ((), ()), "large": (("--max-memory", "0.9"), ("--max-memory", "0.8"))}


@pytest.mark.parametrize("size", ["small", pytest.param("large", marks=pytest.mark.soak)])
def test_a_model_in_two_stages_is_one_peer_and_waits_for_a_lender_that_is_gone(
    swarm: Swarm, tmp_path: Path, size: str
) -> None:
    of_head, of_lender = LIMITS[size]
    lender = Lender(tmp_path / "lender", free_port(), *of_lender)
    swarm.processes.append(lender)
    pair(lender, swarm.folder / "head")
    run_file = swarm.spec(start_peers=2)
    if size == "large":
        run_file.write_text(LARGE)
    swarm.bootstrap("--run", str(run_file))
    if of_head:
        home = ("--home", str(tmp_path / "alone"))
        alone = run("lowcomm_node", "join", "--peers", swarm.address, *home, *of_head)
        assert alone.returncode == 78 and "needs about 1.1 GiB of memory" in alone.stderr
    plain = swarm.node("plain")
    way = "auto" if size == "large" else "stages"
    ours = ("--with", lender.address, "--household", way, "--checkpoint-every", "5", *of_head)
    head = swarm.node("head", *ours)
    first = head.until(lambda status: seen(status).get("blocks"), "it holds blocks", LONG)
    assert seen(first)["blocks"][1] == {"small": 1, "large": 8}[size]
    until_exchanged((plain, head), 2, LONG)
    head.until(lambda status: status["trainer"]["steps"] > 6, "there is a checkpoint", LONG)
    lender.end(signal.SIGKILL)
    gone = head.until(lambda s: s["waiting_code"] == "lender-awaited", "it is waited for", LONG)
    assert gone["trainer"]["last_failure"]["kind"] == "lender"
    port = int(lender.address.rpartition(":")[2])
    swarm.processes.append(Lender(tmp_path / "lender", port, *of_lender))
    steps = gone["trainer"]["steps"]
    head.until(lambda status: status["trainer"]["steps"] > steps, "training goes on", LONG)
    until_exchanged((plain, head), 1, LONG)
    assert head.end() == 0


def test_a_lender_that_is_not_paired_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = run("lowcomm_node", "join", "--home", str(tmp_path), "--with", "127.0.0.1:9")
    assert done.returncode == 78
    assert "lowcomm-node pair 127.0.0.1:9 --code CODE" in done.stderr
