"""The DHT holds among strangers, through deaths and returns: real p2pd processes on loopback."""

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from time import monotonic, time

import psutil
import pytest

from helpers.dht_peers import KEY, Dht, Peer, record_of
from helpers.processes import free_port
from helpers.waiting import until, until_async
from lowcomm_node.dht.keys import RUNS_KEY, pack
from lowcomm_node.errors import NodeError, NoPeers, Unhealthy
from lowcomm_node.net.hivemind_parts import DHTID, DHTLocalStorage, MSGPackSerializer
from lowcomm_node.net.p2pd import runtime_folder
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.spec.run import parse_toml, sign_run

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(180)]
STRANGER = Identity(b"s" * 32)


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the control sockets, of this test alone; a short one, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="lc-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder) / "lowcomm"


@pytest.fixture
async def dht(tmp_path: Path, sockets: Path) -> AsyncIterator[Dht]:
    dht = Dht(tmp_path)
    try:
        yield dht
    finally:
        await dht.close()
        assert names_in(sockets) == [], "nothing is left behind"


def names_in(folder: Path) -> list[str]:
    """What lies in a folder."""
    return [path.name for path in folder.iterdir()]


def pid_of(peer: Peer) -> int:
    assert peer._daemon is not None
    assert peer._daemon.pid is not None
    return peer._daemon.pid


async def force(
    peer: Peer, value: bytes, subkey: str, life: float, **options: bool
) -> list[bool] | None:
    """Make others store what ``peer`` itself would not: what one of them answers, asked past all
    checks of ours."""

    protocol = peer.node.protocol
    other = next(iter(protocol.routing_table.peer_id_to_uid))
    key = DHTID.generate(source=KEY)
    return await protocol.call_store(
        other, [key], [MSGPackSerializer.dumps(value)], [time() + life], subkeys=[subkey], **options
    )


async def test_peers_see_each_others_records_through_a_third(dht: Dht) -> None:
    door = await dht.peer()
    ada, bob = await dht.peer(door.addresses()), await dht.peer(door.addresses())
    assert await ada.tell() and await bob.tell()
    everybody = {ada.peer_id, bob.peer_id}
    for peer in (ada, bob, door):
        assert await peer.sees() == everybody
    assert await ada.check_connection() >= 1
    new = record_of(ada.identity, step=7)
    assert await ada.publish(KEY, ada.peer_id, new, 60)
    assert (await bob.lookup(KEY))[ada.peer_id] == new, "the newest"


async def test_a_record_under_someone_elses_name_is_refused_by_the_storer(dht: Dht) -> None:
    ada = await dht.peer()
    evil = await dht.peer(ada.addresses())
    assert await ada.tell()
    # The control: a sound record of a stranger is taken on the same way.
    assert await force(evil, pack(KEY, record_of(STRANGER)), STRANGER.peer_id, 59) == [True]
    forged = pack(KEY, record_of(evil.identity))
    assert await force(evil, forged, ada.peer_id, 500) == [False], "another's subkey"
    assert await force(evil, b"X" + forged, evil.peer_id, 500) == [False], "another kind"
    assert await force(evil, pack(KEY, record_of(evil.identity, life=500)), evil.peer_id, 9e9) == [
        False
    ], "for centuries"
    assert await force(evil, pack(KEY, record_of(evil.identity, life=5)), evil.peer_id, 500) == [
        False
    ], "too long"
    assert await force(
        evil, pack(KEY, record_of(evil.identity, life=500)), evil.peer_id, 499, in_cache=True
    ) == [False], "in a cache"
    run = sign_run(parse_toml('[run]\nname = "a"\n'), STRANGER)
    assert await force(evil, pack(RUNS_KEY, run.to_bytes()), run.run_id, 60) == [False], (
        "under another key"
    )
    assert await ada.sees() == {ada.peer_id, STRANGER.peer_id}


async def test_a_forged_record_is_refused_by_the_reader_and_hides_no_other(dht: Dht) -> None:

    ada = await dht.peer()
    evil, reader = await dht.peer(ada.addresses()), await dht.peer(ada.addresses())
    # A storer without any scruples, the only one that has ada's record; it claims that nothing
    # could be newer.
    storage = evil.node.protocol.storage = DHTLocalStorage()
    forged = MSGPackSerializer.dumps(pack(KEY, record_of(evil.identity)))
    sound = MSGPackSerializer.dumps(pack(KEY, record_of(ada.identity)))
    key = DHTID.generate(source=KEY)
    storage.store_subkey(key, reader.peer_id, forged, time() + 50)
    storage.store_subkey(key, ada.peer_id, sound, time() + 50)
    storage.store_subkey(key, evil.peer_id, MSGPackSerializer.dumps(7), time() + 50)
    storage.data[key] = type(storage.data[key])(storage.data[key].value, float("inf"))
    assert await reader.sees() == {ada.peer_id}
    answer = (await reader.node.protocol.call_find(evil._p2p.peer_id, [key]))[key][0]
    assert answer.expiration_time < time() + 60, "its claim would end the search for better answers"


async def test_a_record_that_expires_on_the_way_hides_no_other(dht: Dht) -> None:
    ada = await dht.peer()
    storer, reader = await dht.peer(ada.addresses()), await dht.peer(ada.addresses())
    assert await ada.tell()
    # The storer lets it live longer than its signer does; the reader must mind only that one.
    assert await force(storer, pack(KEY, record_of(STRANGER, life=1)), STRANGER.peer_id, 30) == [
        True
    ]
    began = time()
    await until_async(lambda: time() - began > 1, 5, "the stranger's record expires")
    protocol = reader.node.protocol

    key = DHTID.generate(source=KEY)
    for other in protocol.routing_table.peer_id_to_uid:
        found = (await protocol.call_find(other, [key]))[key][0]
        assert found is not None
        assert set(found.value.data) == {ada.peer_id}


async def test_p2pd_that_dies_is_started_again(dht: Dht) -> None:
    door = await dht.peer()
    ada, bob = await dht.peer(door.addresses()), await dht.peer(door.addresses())
    first = pid_of(ada)
    os.kill(first, signal.SIGKILL)

    async def back() -> bool:
        connected = await ada.check_connection()
        return connected > 0 and pid_of(ada) != first and await ada.tell()

    await until_async(back, 60, "a new p2pd is connected")
    assert await bob.sees() == {ada.peer_id}


async def test_leaving_takes_no_time_when_p2pd_is_dead(dht: Dht) -> None:
    ada = await dht.peer()
    os.kill(pid_of(ada), signal.SIGKILL)
    began = monotonic()
    await ada.close()
    assert monotonic() - began < 15
    assert await ada.lookup(KEY) == {}
    assert not await ada.tell()


async def test_no_entry_point_answers(dht: Dht) -> None:
    address = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{STRANGER.peer_id}"
    with pytest.raises(NoPeers) as caught:
        await dht.peer([address])
    assert address in str(caught.value)
    assert caught.value.exit_code == 6
    alone = await dht.peer([address], require_peers=False)
    assert await alone.tell()
    assert await alone.sees() == {alone.peer_id}
    assert await alone.check_connection() == 0


async def test_p2pd_that_is_missing_or_mute_is_one_clear_error(
    dht: Dht, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from lowcomm_node.net import p2pd

    script = tmp_path / "p2pd"
    monkeypatch.setattr(p2pd, "find_p2pd", lambda: script)
    with pytest.raises(NodeError, match="can't run on this machine"):
        await dht.peer()
    script.write_text("#!/bin/sh\necho broken as promised\nexit 3\n")
    script.chmod(0o755)
    with pytest.raises(NodeError, match="broken as promised"):
        await dht.peer()
    script.write_text("#!/bin/sh\nkill -ABRT $$\n")
    with pytest.raises(NodeError, match=r"a signal ended it \(6\)"):
        await dht.peer()
    script.write_text("#!/bin/sh\nexec sleep 1000\n")
    monkeypatch.setattr(p2pd, "START_DEADLINE", 0.5)
    with pytest.raises(NodeError, match=r"did not start within 0\.5 s"):
        await dht.peer()
    assert not [child for child in psutil.Process().children() if "sleep" in child.cmdline()]


async def test_a_p2pd_that_is_aborted_before_it_says_a_word_is_started_once_more(
    dht: Dht, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from lowcomm_node.net import p2pd

    script, real = tmp_path / "p2pd", p2pd.find_p2pd()
    script.write_text(
        f'#!/bin/sh\nif mkdir {tmp_path}/tried; then kill -ABRT $$; fi\nexec {real} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(p2pd, "find_p2pd", lambda: script)
    assert (await dht.peer()).addresses()


def test_the_folder_of_sockets_must_be_ours_alone(sockets: Path) -> None:
    assert runtime_folder().stat().st_mode & 0o777 == 0o700
    sockets.chmod(0o755)
    with pytest.raises(NodeError, match="open to other users"):
        runtime_folder()
    sockets.rmdir()
    sockets.symlink_to("/tmp")
    with pytest.raises(NodeError, match="open to other users"):
        runtime_folder()
    sockets.unlink()


def test_a_socket_folder_with_a_long_name_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp/" + "x" * 100)
    assert len(str(runtime_folder() / ("x" * 30))) < 108


SKEWED = """
import sys, time
real = time.time
time.time = lambda: real() + float(sys.argv.pop(1))  # before anything has imported it
OFFSET = time.time() - real()
time.time = lambda: real() + OFFSET
from lowcomm_bootstrap.cli import main
main()
"""


async def test_a_clock_that_is_off_is_named(dht: Dht, tmp_path: Path) -> None:
    place = ("--host", "127.0.0.1", "--port", "0", "--home", str(tmp_path / "door"))
    door = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SKEWED, "20", "serve", "--json", *place),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert door.stdout is not None
        async with asyncio.timeout(90):
            addresses = json.loads(await door.stdout.readline())["addresses"]
        with pytest.raises(Unhealthy, match=r"20 s behind.*set it right"):
            await dht.peer(addresses)
    finally:
        door.terminate()
        await door.wait()


CHILD = """
import asyncio, json, sys
sys.path[:0] = json.loads(sys.argv[1])
from lowcomm_node.system.logs import configure_logs
configure_logs()
from pathlib import Path
from helpers.dht_peers import Peer
async def live():
    peer = Peer(Path(sys.argv[2]))
    await peer.start()
    print(json.dumps({"pid": peer._daemon.pid, "socket": str(peer._daemon.control)}), flush=True)
    await asyncio.sleep(1000)
asyncio.run(live())
"""


async def test_p2pd_and_its_socket_go_when_their_parent_is_killed(
    tmp_path: Path, sockets: Path
) -> None:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CHILD, json.dumps(sys.path), str(tmp_path)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        async with asyncio.timeout(90):
            started = json.loads(await child.stdout.readline())
        assert names_in(sockets) == [Path(started["socket"]).name]
        assert psutil.pid_exists(started["pid"])
    finally:
        child.kill()
        await child.wait()
    until(lambda: not psutil.pid_exists(started["pid"]), 15, "p2pd ends")
    until(lambda: not names_in(sockets), 5, "its socket goes")
