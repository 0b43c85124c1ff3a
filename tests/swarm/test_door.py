"""A deployed bootstrap server: only the packages of its own lock, a name in DNS, clients that
nobody tells anything, two as one service, a copy on another machine.
"""

import asyncio
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers import frugal
from helpers.clients import Client, Crowd
from helpers.dht_peers import Dht
from helpers.processes import Process, Swarm, alive, descendants, free_port
from helpers.waiting import until, until_async
from lowcomm_node.dht.keys import RUNS_KEY
from lowcomm_node.swarm import rejoin
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.spec.run import parse_toml, sign_run

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]
RUN = sign_run(parse_toml('[run]\nname = "a"\n[sync]\nmethod = "noloco"\n'), Identity(b"c" * 32))
ROOT = Path(__file__).resolve().parents[2]
NAME = "/dns4/localhost"


def frugally(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a module of ours where nothing else is installed than what the server's lock lists."""
    python, _, *rest = command
    return subprocess.Popen(
        [python, frugal.__file__, str(ROOT / "bootstrap" / "requirements.lock"), *rest], **options
    )


class Server(Process):
    """A server at a port of its own, at this machine's address or under its name."""

    launch = staticmethod(frugally)

    def __init__(
        self, swarm: Swarm, name: str, port: int, *arguments: str, host: str = "/ip4/127.0.0.1"
    ) -> None:
        super().__init__(
            swarm.folder / name, "lowcomm_bootstrap", "serve", "--json", "--host", "127.0.0.1",
            "--port", str(port),
            "--home", str(swarm.folder / name), "--announce", f"{host}/tcp/{port}", *arguments,
        )  # fmt: skip
        self._told = self.output.count('"ready"')
        swarm.processes.append(self)

    async def address(self) -> str:
        """Where it is reached, once it is ready."""

        def ready() -> list[dict[str, Any]]:
            assert self.child.poll() is None, self.output[-3000:]
            return self.events("ready")[self._told :]

        (told,) = await asyncio.to_thread(until, ready, 90, f"{self.home.name} is ready")
        return told["addresses"][0]


@asynccontextmanager
async def crowd_of(count: int, folder: Path, *doors: str) -> AsyncIterator[list[Client]]:
    """Clients of these doors that have seen each other; ended in any case."""
    crowd = Crowd(folder / "clients", doors, RUN.run_id, 1.0)
    try:
        await crowd.grow(count)
        await until_all(crowd.clients, lambda client: len(client.seen) == count, "all see all")
        yield crowd.clients
    finally:
        await crowd.close()


async def until_all(
    clients: Iterable[Client], holds: Callable[[Client], bool], what: str, deadline: float = 60
) -> None:
    await until_async(lambda: all(holds(client) for client in clients), deadline, what)


async def names_the_run(dht: Dht, *doors: str) -> bool:
    """Whether a newcomer finds the run."""
    newcomer = await dht.peer(doors)
    try:
        return RUN.run_id in await newcomer.lookup(RUNS_KEY)
    finally:
        await newcomer.close()


async def kill_and_come_back(swarm: Swarm, dht: Dht, count: int) -> None:
    """A server with clients dies without a word, and is started again."""
    (swarm.folder / "run.json").write_bytes(RUN.to_bytes())
    port = free_port()
    server = Server(swarm, "server", port, "--run", str(swarm.folder / "run.json"), host=NAME)
    address = await server.address()
    door = address.rpartition("/")[2]
    assert address == f"{NAME}/tcp/{port}/p2p/{door}"
    async with crowd_of(count, swarm.folder, address) as clients:
        await asyncio.to_thread(
            until,
            lambda: [e for e in server.events("run.peers") if e["peers"] == count],
            60,
            "it counts them",
        )
        children = descendants(server.child.pid)
        server.end(signal.SIGKILL)
        await asyncio.to_thread(until, lambda: not alive(children), 15, "its p2pd ends with it")

        async def all_are_cut_off() -> bool:
            return not any([await client.connected_at(door) for client in clients])

        await until_async(all_are_cut_off, 60, "no connection is left")
        for client in clients:
            client.seen = frozenset()
        await until_all(
            clients, lambda client: len(client.seen) == count, "those who know each other go on"
        )

        again = Server(swarm, "server", port, host=NAME)
        assert await again.address() == address, "the same identity at the same place"

        async def all_are_connected() -> bool:
            return all(
                [await client.connected_at(door) and client.doors()[door] for client in clients]
            )

        await until_async(all_are_connected, 120, "all are back, by themselves")
        assert await names_the_run(dht, address)
        told = await asyncio.to_thread(
            until, lambda: again.events("run.peers"), 60, "it counts again"
        )
        assert told[-1]["peers"] == count


async def test_clients_of_a_killed_server_come_back_by_themselves_and_its_runs_are_there(
    swarm: Swarm, dht: Dht, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejoin, "HEARTBEAT", 2.0)
    await kill_and_come_back(swarm, dht, 5)


async def test_of_two_servers_either_may_be_replaced_though_only_one_was_told_of_a_run(
    swarm: Swarm, dht: Dht
) -> None:
    (swarm.folder / "run.json").write_bytes(RUN.to_bytes())
    ports = free_port(), free_port()
    first = Server(swarm, "first", ports[0], "--run", str(swarm.folder / "run.json"))
    door = await first.address()
    second = Server(swarm, "second", ports[1], "--peers", door)
    other = await second.address()
    await asyncio.to_thread(
        until, lambda: second.events("run.adopted"), 30, "the second keeps the run as well"
    )

    # An upgrade: stopped, replaced, started. Meanwhile newcomers enter at the other one.
    assert first.end() == 0
    assert await names_the_run(dht, door, other)
    # This time on another machine, with nothing but a copy of the key.
    (swarm.folder / "copy").mkdir()
    shutil.copy2(swarm.folder / "first" / "identity.key", swarm.folder / "copy" / "identity.key")
    first = Server(swarm, "copy", ports[0], "--peers", other)
    assert await first.address() == door, "a copy of the key is all that an address needs"
    await asyncio.to_thread(
        until, lambda: first.events("run.adopted"), 30, "it has the run from the other one"
    )
    second.end(signal.SIGKILL)
    assert await names_the_run(dht, door, other)
