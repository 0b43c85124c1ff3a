"""Records that name a third party: a swarm can't be aimed at somebody who is no part of it."""

import asyncio
import signal
import socket
from pathlib import Path

import pytest
from laboratory import Host, Lab
from residents import Swarm

from helpers.dht_peers import Dht
from helpers.sybils import store_sybils
from helpers.waiting import until

pytestmark = [pytest.mark.net, pytest.mark.timeout(300)]
RECORDS, PORTS, STEPS = 30, 10, 100
FEW = 3
"""Connections of one attempt: direct, and the tunnel over TCP and QUIC."""


class Victim:
    """A host that listens, and counts the connections which come."""

    def __init__(self, host: Host) -> None:
        self._sockets = [host.socket(socket.SOCK_STREAM) for _ in range(PORTS)]
        for one in self._sockets:
            one.listen(256)
            one.setblocking(False)
        self.places = [f"{host.address}:{one.getsockname()[1]}" for one in self._sockets]
        self.counted = 0

    def count(self) -> int:
        """How many connections have come so far."""
        for one in self._sockets:
            try:
                while True:
                    one.accept()[0].close()
                    self.counted += 1
            except BlockingIOError:
                continue
        return self.counted


def name_third_party(
    attacker: Host, folder: Path, address: str, run_id: str, victim: Victim
) -> None:
    """Store records that say of as many peers that they are at the victim."""

    async def store() -> None:
        dht = Dht(folder)
        try:
            client = await dht.peer([address], listen=[f"/ip4/{attacker.address}/tcp/0"])
            places = [victim.places[number % PORTS] for number in range(RECORDS)]
            assert await store_sybils(client, run_id, places, entry_points=True) == RECORDS
        finally:
            await dht.close()

    with attacker.inside():
        asyncio.run(store())


def test_thirty_records_that_name_a_third_party_draw_few_connections(
    lab: Lab, tmp_path: Path
) -> None:
    swarm = Swarm(tmp_path, method="noloco", start_peers=1)
    victim = Victim(lab.public("victim"))
    swarm.serve(lab.public("server"))
    node = swarm.node(lab.public("node"))
    run_id = node.until(lambda s: s["trainer"]["steps"], "it trains")["run"]["run_id"]
    name_third_party(lab.public("attacker"), tmp_path / "attacker", swarm.address, run_id, victim)
    until(lambda: victim.count() > 0, 120, "one connection to the named address")
    begin = node.until(bool, "an answer")["trainer"]["steps"]
    node.until(lambda s: s["trainer"]["steps"] >= begin + STEPS, f"{STEPS} steps more", 120)
    node.end(signal.SIGKILL)  # it would save its state first
    print(f"{victim.count()} connections to the third party for {RECORDS} records in {STEPS} steps")
    assert victim.count() <= FEW
