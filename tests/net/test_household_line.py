"""A head and its lender on a line of a home, which may be pulled out: what crosses it is secret."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from laboratory import Host, Lab
from residents import Lender, Resident, Swarm
from shaping import Link

from helpers.processes import until_exchanged
from helpers.waiting import until

pytestmark = [pytest.mark.net, pytest.mark.timeout(400)]

LONG = 120.0
SPEC = """
[run]
name = "household"
steps = {steps}
start_peers = {start_peers}
[model]
layers = 2
width = 32
heads = 4
feed_forward = 64
context = 256
[train]
batch = 8
evaluate_every = {evaluate_every}
[sync]
method = "{method}"
interval = {interval}
"""
"""Its windows take longer to compute than its weights to cross a line."""
PLAIN = (
    *(b'{"windows"', b'{"spec"', b'{"here"', b'{"loss"', b'{"refusal"'),
    *(b'{"stage"', b'{"do"', b'{"alive"', b'{"answer"'),
)
"""How headers of a link and of a worker begin."""
_EVERY_PROTOCOL = 3


class Tap:
    """What crosses the device of a host, in both directions."""

    def __init__(self, host: Host) -> None:
        self.size = 0
        self.plain = set[bytes]()
        with host.inside():
            every = socket.htons(_EVERY_PROTOCOL)
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, every)
            self._socket.bind((host.device, _EVERY_PROTOCOL))
        self._socket.settimeout(0.2)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        while not self._ends.is_set():
            try:
                piece = self._socket.recv(1 << 17)
            except TimeoutError:
                continue
            self.size += len(piece)
            self.plain.update(one for one in PLAIN if one in piece)

    @contextmanager
    def listening(self) -> Iterator["Tap"]:
        """Look at what crosses it meanwhile."""
        self._thread.start()
        try:
            yield self
        finally:
            self._ends.set()
            self._thread.join()
            self._socket.close()


def seen(status: dict[str, Any]) -> dict[str, Any]:
    """What a status says of the only lender."""
    found = status["trainer"]["lenders"]
    return found[0] if found else {"away": "no step yet", "moved": 0}


@pytest.mark.soak
@pytest.mark.parametrize("rate", [1e9, 100e6])
def test_stages_on_a_line_that_is_pulled_out_go_on_once_it_is_back(
    rate: float, lab: Lab, tmp_path: Path
) -> None:
    host, others = lab.public("head"), lab.public("others")
    far = lab.public("lender", link=Link(rate=rate, delay=0.0002))
    swarm = Swarm(tmp_path, SPEC, start_peers=3)
    lender = Lender(far, tmp_path / "lender")
    with Tap(far).listening() as tap:
        swarm.serve(others)
        lender.pair(host, tmp_path / "head")
        ours = ("--with", lender.address, "--household", "stages", "--checkpoint-every", "5")
        head = swarm.node(host, *ours)
        nodes = [
            Resident(others, tmp_path / f"plain{k}", swarm.address, "--port", str(31350 + k))
            for k in range(2)
        ]
        head.until(lambda s: seen(s).get("blocks"), "the lender holds blocks", LONG)
        until_exchanged((head, *nodes), 2, LONG)
        far.link.outage(True)
        gone = head.until(lambda s: s["waiting_code"] == "lender-awaited", "it is silent", LONG)
        head.until(lambda s: s["trainer"]["failures"], "the step has ended", LONG)
        until_exchanged(tuple(nodes), 1, LONG)
        far.link.outage(False)
        steps = gone["trainer"]["steps"] + 5
        head.until(lambda s: s["trainer"]["steps"] > steps, "training goes on", LONG)
        until_exchanged((head, *nodes), 1, LONG)
        assert not tap.plain


def moves_more(head: Resident, than: int, what: str) -> dict[str, Any]:
    """The first status in which the lender has computed since."""
    return head.until(lambda s: seen(s)["moved"] > than and not seen(s)["away"], what, LONG)


@pytest.mark.parametrize(
    ("rate", "plain"),
    [
        (1e9, 1),
        pytest.param(1e9, 2, marks=pytest.mark.soak),
        pytest.param(100e6, 2, marks=pytest.mark.soak),
    ],
)
def test_a_household_keeps_its_secrets_and_outlives_a_line_that_is_pulled_out(
    rate: float, plain: int, lab: Lab, tmp_path: Path
) -> None:
    host, others = lab.public("head"), lab.public("others")
    far = lab.public("lender", link=Link(rate=rate, delay=0.0002))
    swarm = Swarm(tmp_path, SPEC, start_peers=1 + plain)
    lender = Lender(far, tmp_path / "lender")
    with Tap(far).listening() as tap:
        host.socket().sendto(PLAIN[0], (far.address, 9))
        until(lambda: tap.plain, 20, "the tap sees what is plain")
        tap.plain.clear()
        swarm.serve(others)
        lender.pair(host, tmp_path / "head")
        head = swarm.node(host, "--with", lender.address)
        nodes = [
            Resident(others, tmp_path / f"plain{k}", swarm.address, "--port", str(31350 + k))
            for k in range(plain)
        ]
        moves_more(head, 0, "the lender computes windows")
        until_exchanged((head, *nodes), 1, LONG)
        far.link.outage(True)
        gone = head.until(lambda s: seen(s)["away"], "status says that it is away", LONG)
        steps = gone["trainer"]["steps"] + 5
        head.until(lambda s: s["trainer"]["steps"] > steps, "training goes on", LONG)
        far.link.outage(False)
        back = moves_more(head, seen(gone)["moved"], "it takes part again")
        until_exchanged((head, *nodes), 1, LONG)
        assert back["trainer"]["failures"] == 0
        assert tap.size > seen(back)["moved"], "the tap misses what crosses the line"
        assert not tap.plain
