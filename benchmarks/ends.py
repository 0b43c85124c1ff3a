"""The ends of a measurement: processes that do what a line says, and nodes that carry contents and
train nothing.

transport.py, links.py and limits.py differ in what they measure and over which line; their ends are
these."""

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Timer
from time import time
from typing import Any

import psutil

RUN = "ab" * 32
"""The id of a run that there is not."""
ANSWER_DEADLINE = 660.0
"""Seconds; ends that have a deadline of their own have a shorter one, and say more."""
END_DEADLINE = 30.0


def ask(child: subprocess.Popen[str], request: dict[str, Any]) -> dict[str, Any]:
    """Have an end do something."""
    assert child.stdin is not None
    child.stdin.write(json.dumps(request) + "\n")
    child.stdin.flush()
    return answer(child)


def answer(child: subprocess.Popen[str]) -> dict[str, Any]:
    """What an end says. Raises RuntimeError if it has gone; who says nothing within ANSWER_DEADLINE
    is killed."""
    assert child.stdout is not None
    watchdog = Timer(ANSWER_DEADLINE, child.kill)
    watchdog.start()
    try:
        line = child.stdout.readline()
    finally:
        watchdog.cancel()
    if not line:
        raise RuntimeError(f"an end of the measurement ended with {child.wait()}")
    return json.loads(line)


def end_all(children: Sequence[subprocess.Popen[str]]) -> None:
    """End these, the last one first, and then what they have started and left behind; who takes
    longer than END_DEADLINE is killed."""
    for child in reversed(children):
        started = below(child.pid)
        child.terminate()
        try:
            child.wait(END_DEADLINE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        for one in started:
            with suppress(psutil.NoSuchProcess):
                one.kill()


def below(pid: int) -> list[psutil.Process]:
    """What a process has started, and what that has; none if it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


class Ends:
    """The ends of one measurement, each a process of the script that measures."""

    def __init__(self, script: str, folder: str, *options: str) -> None:
        """``folder``: of their control sockets; ``options``: what all of them are given."""
        self._command = [sys.executable, script, *options]
        self._environment = {**os.environ, "XDG_RUNTIME_DIR": folder}
        self.children: list[subprocess.Popen[str]] = []

    @property
    def pids(self) -> list[int]:
        """Their processes, without what those have started."""
        return [child.pid for child in self.children]

    def start(
        self, role: str, told: dict[str, Any], popen: Any = subprocess.Popen
    ) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        """Start an end, and wait for what it says first; ``popen`` starts it elsewhere."""
        command = [*self._command, "--role", role, "--told", json.dumps(told)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        child = popen(command, env=self._environment, **pipes)
        self.children.append(child)
        return child, answer(child)


def add_roles(parser: argparse.ArgumentParser, *roles: str) -> None:
    """The options by which ``Ends`` tells a script that it is to be an end."""
    parser.add_argument("--role", choices=roles, help=argparse.SUPPRESS)
    parser.add_argument("--told", type=json.loads, default={}, help=argparse.SUPPRESS)


def say(message: dict[str, Any]) -> None:
    """A line to whoever measures."""
    print(json.dumps(message), flush=True)


def cpu_of(pids: Sequence[int], name: str = "") -> float:
    """Seconds of CPU of processes and their children, or of those of them with a name."""
    roots = [psutil.Process(pid) for pid in pids]
    every = roots + [below for root in roots for below in root.children(recursive=True)]
    chosen = [one for one in every if not name or one.name() == name]
    return sum(times.user + times.system for times in (one.cpu_times() for one in chosen))


def set_up() -> None:
    """As a node sets its process up."""
    from lowcomm_node.system.logs import configure_logs
    from lowcomm_node.system.machine import keep_freed_memory

    configure_logs(-1)
    keep_freed_memory()


class End:
    """The transport of a node: identity, p2pd, tunnels, server and channels.

    A subclass says what a ``Swap`` carries.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        listen: Sequence[str],
        host: str = "127.0.0.1",
        **discovery: Any,
    ) -> None:
        """``listen``: where p2pd listens; none: there is no p2pd, and peers are called directly
        alone."""
        # Not above: an end with plain sockets needs none of this.
        from lowcomm_node.dht.hivemind import DhtSettings, HivemindDiscovery
        from lowcomm_node.net.pipe import Pipes
        from lowcomm_node.net.tls import Gatekeeper, make_certificate
        from lowcomm_node.storage.files import load_or_create_identity

        key = folder / f"{name}.key"
        self.identity = load_or_create_identity(key)
        self.discovery = HivemindDiscovery(
            self.identity, key, DhtSettings(listen=listen, **discovery)
        )
        self.tunnels = Pipes(self.discovery, RUN)
        self.gatekeeper = Gatekeeper(self.identity, RUN, time)
        self.certificate = make_certificate()
        self.port = 0
        """For TLS, once it listens."""
        self._folder, self._host, self._has_p2pd = folder, host, bool(listen)
        self._listens = False
        self._watching: asyncio.Task[None] | None = None

    async def start(self, flow: Sequence[tuple[str, Any]] | None = None) -> None:
        """Listen; ``flow``: options of gRPC for what comes in."""
        from lowcomm_node.net.bandwidth import FREE_FLOW
        from lowcomm_node.net.channels import Channels
        from lowcomm_node.net.congestion import CongestionWatch
        from lowcomm_node.net.server import ExchangeServer, ExchangeService

        options = tuple(flow or FREE_FLOW)
        self.channels = Channels(
            self.gatekeeper, self.tunnels if self._has_p2pd else None, flow=options
        )
        service = ExchangeService(self.gatekeeper, self, self.tunnels)
        self.server = ExchangeServer(self.certificate, service, options)
        self._listens = True
        self._watching = asyncio.create_task(CongestionWatch().run())
        self.port = await self.server.start(self._host, 0)
        if self._has_p2pd:
            await self.discovery.start()
            await self.discovery.check_connection()
            await self.tunnels.serve(lambda: self.server.local)

    async def close(self) -> None:
        """End everything."""
        if self._watching is not None:
            self._watching.cancel()
        if self._listens:
            await self.channels.close()
            await self.server.close()
        await self.tunnels.close()
        await self.discovery.close()

    async def swap(self, peer: str, stream: Any) -> None:
        """What the service asks for a Swap."""
        from lowcomm_protocol.errors import ProtocolViolation

        raise ProtocolViolation("called an end that only calls")

    async def fetch(self, peer: str, stream: Any) -> None:
        """There is no state to copy here."""
        from lowcomm_protocol.errors import ProtocolViolation

        raise ProtocolViolation("wanted the state of an end that has none")

    def describe(self, peer: str, introduction: Any) -> Any:
        """Round trips are measured by this."""
        return introduction


def record_of(told: dict[str, Any], addresses: Sequence[str], entry_points: Sequence[str]) -> Any:
    """The record of an end in another process, by what that has told: ``peer``, and ``certificate``
    in hexadecimal."""
    from lowcomm_protocol.peers.records import PeerInfo, Phase

    return PeerInfo(
        peer_id=told["peer"],
        run_id=RUN,
        phase=Phase.TRAINING,
        issued=time(),
        expires=time() + 3600,
        addresses=tuple(addresses),
        certificate=bytes.fromhex(told["certificate"]),
        entry_points=tuple(entry_points),
    )


async def forever() -> None:
    """An end that is called stays until its process is ended."""
    await asyncio.Event().wait()
