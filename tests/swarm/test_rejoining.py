"""How a node finds its swarm, and gets back to it: real processes, doors that close, and none of
the nodes is restarted."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.dht_peers import KEY, Dht
from helpers.processes import Swarm, environment
from helpers.waiting import until, until_async
from lowcomm_node.dht.keys import RUNS_KEY
from lowcomm_protocol.identity import Identity

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
NOBODY = Identity(b"n" * 32).peer_id


async def test_two_halves_of_a_swarm_are_one_when_a_peer_knows_both(dht: Dht) -> None:
    door, other_door = await dht.peer(), await dht.peer()
    ada, bob = await dht.peer(door.addresses()), await dht.peer(other_door.addresses())
    assert await ada.tell() and await bob.tell()
    assert await ada.sees() == {ada.peer_id} and await bob.sees() == {bob.peer_id}
    assert await ada.held_by_others(KEY, bob.peer_id) is None
    await dht.peer(door.addresses(), other_door.addresses())

    async def merged() -> bool:
        return [await peer.sees() for peer in (ada, bob)] == 2 * [{ada.peer_id, bob.peer_id}]

    await until_async(merged, 30, "all see both")


async def test_what_others_keep_of_us_is_told_from_what_we_keep_ourselves(dht: Dht) -> None:
    door = await dht.peer()
    ada = await dht.peer(door.addresses())
    assert await ada.held_by_others(KEY, ada.peer_id) is None
    assert await ada.tell()
    assert await ada.held_by_others(KEY, ada.peer_id) == (await ada.lookup(KEY))[ada.peer_id]
    door.node.protocol.storage._kept.clear()
    assert ada.peer_id in await ada.sees(), "our own copy says nothing"
    assert await ada.held_by_others(KEY, ada.peer_id) is None


async def test_a_fresh_p2pd_listens_where_the_old_one_did(dht: Dht) -> None:
    door = await dht.peer()
    ada = await dht.peer(
        door.addresses(), listen=["/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1"]
    )
    before = ada.addresses()
    assert len(before) >= 2
    assert await ada.revive(restart=True)
    assert ada.addresses() == before
    doors = {door.peer_id: door.addresses()}
    assert (await ada.knock(doors))[door.peer_id].reason is None
    assert ada.known_peers() == 1


class HivemindDht:
    """hivemind's own ``hivemind-dht``."""

    def __init__(self, log: Path, *arguments: str) -> None:
        program = Path(sys.executable).with_name("hivemind-dht")
        self.log = log
        with log.open("wb") as file:
            self.child = subprocess.Popen(
                [program, "--host_maddrs", "/ip4/127.0.0.1/tcp/0", "--refresh_period", "2",
                    *arguments],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env=environment() | {"HIVEMIND_LOGLEVEL": "INFO"},
            )  # fmt: skip

    @property
    def address(self) -> str:
        """Where it listens; empty until it does."""
        assert self.child.poll() is None, self.log.read_text()
        found = re.search(r"--initial_peers (\S+)", self.log.read_text())
        return found[1] if found else ""

    def end(self) -> None:
        if self.child.poll() is None:
            self.child.terminate()
        try:
            self.child.wait(20)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


@pytest.fixture
def hivemind_dht(tmp_path: Path, swarm: Swarm) -> Iterator[HivemindDht]:
    # With a key file it has an RSA key, and so a peer id of another form than ours.
    program = HivemindDht(tmp_path / "hivemind.log", "--identity_path", str(tmp_path / "rsa.key"))
    try:
        yield program
    finally:
        program.end()


async def test_what_hiveminds_own_program_keeps_is_checked_when_it_is_read(
    dht: Dht, hivemind_dht: HivemindDht
) -> None:
    from lowcomm_node.net.hivemind_parts import DHTID, MSGPackSerializer, PeerID

    await asyncio.to_thread(until, lambda: hivemind_dht.address, 90, "hivemind-dht is ready")
    address = hivemind_dht.address
    ada, evil = await dht.peer([address]), await dht.peer([address])
    assert await ada.tell()
    # It carries no checks of ours, and takes whatever it is given.
    forged = MSGPackSerializer.dumps(b"P" + b"forged")
    key = DHTID.generate(source=KEY)
    peer = PeerID.from_base58(address.rpartition("/")[2])
    options = {"subkeys": [NOBODY], "in_cache": False}
    assert await evil.node.protocol.call_store(peer, [key], [forged], [4e9], **options) == [True]
    reader = await dht.peer([address])
    assert await reader.sees() == {ada.peer_id}, "the forged one is dropped, and hides no other"
    assert await reader.lookup(RUNS_KEY) == {}
