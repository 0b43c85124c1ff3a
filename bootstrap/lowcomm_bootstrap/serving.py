"""``lowcomm-bootstrap serve``: from settings to a running server, and what it prints."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from lowcomm_bootstrap.health import SignOfLife
from lowcomm_bootstrap.registry import Registry
from lowcomm_bootstrap.server import BootstrapServer
from lowcomm_node.dht.hivemind import DhtSettings, Discovery
from lowcomm_node.errors import ConfigError
from lowcomm_node.net.p2pd import RelayLimits, listeners, numeric
from lowcomm_node.storage.files import home_lock, load_or_create_identity
from lowcomm_node.swarm.probes import FOR_A_BOOTSTRAP, Prober
from lowcomm_node.swarm.rejoin import Rejoin
from lowcomm_node.system.command import ending_signals, say
from lowcomm_node.system.logs import log
from lowcomm_node.system.systemd import ServiceManager
from lowcomm_protocol.errors import SignatureError
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.spec.run import SignedRun, parse_toml, read_signed_run, sign_run

if TYPE_CHECKING:
    from lowcomm_bootstrap.web import SwarmDoor

MAX_RUN_FILE = 1024**2


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The flags of ``serve``."""

    home: Path
    host: str
    port: int
    announce: tuple[str, ...]
    peers: tuple[str, ...]
    runs: tuple[Path, ...]
    closed: bool
    max_runs: int
    json: bool
    quiet: bool
    relay: RelayLimits
    web: int | None
    """Port of the swarm's page; None: it is off."""


def run_server(settings: ServeSettings) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP; the exit code. Raises LowcommError that ended it."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_serve(settings))
    return uvloop.run(_serve(settings))


async def _serve(settings: ServeSettings) -> int:
    manager = ServiceManager.of()
    with home_lock(settings.home / "lock"):
        identity = load_or_create_identity(settings.home / "identity.key")
        registry = Registry(settings.home / "runs", settings.max_runs)
        for file in settings.runs:
            registry.add(read_run(file, identity), own=True)
        host = numeric(settings.host)
        discovery = Discovery(
            identity,
            settings.home / "identity.key",
            DhtSettings(
                listen=listeners(host, settings.port),
                initial_peers=settings.peers,
                require_peers=False,
                announce=settings.announce,
                relay=settings.relay,
            ),
        )
        printer = Printer(settings.json, settings.quiet)
        # Peers that lost us dial us. Starting p2pd again would end all that it relays.
        rejoin = Rejoin(
            discovery,
            settings.peers,
            None,
            lambda event: printer.tell(event.to_json()),
            restarts=False,
        )
        sign = SignOfLife(settings.home)
        door = _door_of(settings, host, discovery.addresses)
        server = BootstrapServer(
            discovery,
            registry,
            settings.closed,
            printer.tell,
            rejoin,
            looked=sign.renew,
            watcher=door.page if door is not None else None,
        )
        prober = Prober(discovery, discovery.addresses, FOR_A_BOOTSTRAP, keep=server.keep)
        _stop_on_signal(asyncio.current_task(), manager)
        attending = asyncio.create_task(manager.attend(lambda: server.condition(monotonic())))
        try:
            await server.start()
            await prober.serve()
            if door is not None:
                door.open()
            own = f"/p2p/{identity.peer_id}"
            sign.begin()
            printer.tell(
                {
                    "event": "ready",
                    "peer_id": identity.peer_id,
                    "addresses": list(discovery.addresses()),
                    "others": [address for address in settings.peers if not address.endswith(own)],
                    "web": door.port if door is not None else None,
                }
            )
            await server.run()
        except asyncio.CancelledError:
            printer.tell({"event": "stopping"})
        finally:
            manager.stopping()
            attending.cancel()
            await asyncio.gather(attending, return_exceptions=True)
            sign.end()
            if door is not None:
                await door.close()
            await prober.close()
            await server.close()
    return 0


def _door_of(
    settings: ServeSettings, host: str, addresses: Callable[[], Sequence[str]]
) -> "SwarmDoor | None":
    """The swarm's page, if the operator wants one. Raises PortInUse."""
    if settings.web is None:
        return None
    from lowcomm_bootstrap.web import SeriesFile, SwarmDoor, SwarmPage  # most servers need no HTTP

    history = SeriesFile(settings.home / "web" / "history.json")
    if history.damaged:
        log.warning("web.history", reason="history.json could not be read, and was set aside")
    return SwarmDoor(SwarmPage(history, lambda: next(iter(addresses()), "")), host, settings.web)


def read_run(path: Path, creator: Identity) -> SignedRun:
    """Read a run.toml, which ``creator`` then signs, or a run that is signed already.

    Raises ConfigError, SpecError, SignatureError, VersionError; each names the file.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_RUN_FILE)
        if data.lstrip().startswith(b"{"):
            return read_signed_run(data, str(path))
        return sign_run(parse_toml(data.decode("utf-8-sig"), str(path)), creator)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: name a run.toml or a signed run.") from None
    except SignatureError as error:
        raise SignatureError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
    except UnicodeError:
        raise ConfigError(f"{path}: not text in UTF-8: name a run.toml or a signed run.") from None


class Printer:
    """Prints events on stdout: JSON lines, or words."""

    def __init__(self, as_json: bool, quiet: bool) -> None:
        self._as_json = as_json
        self._quiet = quiet

    def tell(self, event: dict[str, Any]) -> None:
        """Print one event."""
        if not self._quiet:
            say(json.dumps(event) if self._as_json else _in_words(event))


def _stop_on_signal(serving: asyncio.Task[Any] | None, manager: ServiceManager) -> None:
    """The first signal stops cleanly, the second at once (p2pd ends with us)."""
    assert serving is not None
    loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, *ending_signals())

    def stop() -> None:
        for number in numbers:
            loop.add_signal_handler(number, os._exit, 128 + number)
        manager.stopping()
        serving.cancel()

    for number in numbers:
        loop.add_signal_handler(number, stop)


def _in_words(event: dict[str, Any]) -> str:
    run = f"{event.get('name')}@{event.get('fingerprint')}"
    match event["event"]:
        case "ready":
            addresses = event["addresses"]
            peers = " ".join(f"--peers {address}" for address in (*addresses[:1], *event["others"]))
            command = f"lowcomm-node join {peers}" if addresses else "no address can be reached"
            listed = [f"  {address}" for address in addresses]
            page = [f"the swarm's page: port {event['web']}"] if event["web"] else []
            return "\n".join(["ready; peers can join at", *listed, "", command, *page])
        case "run.adopted":
            return f"keeping run {run} published"
        case "run.peers":
            return f"run {run} has {event['peers']} peers"
        case "run.over":
            return f"run {run} is over: its peers have finished it at step {event['swarm_step']}"
        case "run.not_kept" | "run.not_published":
            return f"warning: run {run}: {event['reason']}"
        case "door.closed":
            return f"warning: {event['address']}: {event['reason']}; tried again"
        case "door.open":
            return f"connected to {event['address']}"
        case "swarm.lost" | "swarm.unlisted":
            return f"warning: {event['reason']}"
        case "run.damaged":
            damaged = f"{event['path']} is not a sound signed run and not published"
            return f"warning: {damaged}; restore it or remove it"
        case "run.other_version":
            other = f"{event['path']} is of another version and not published"
            return f"warning: {other}; the release that wrote it can"
        case other:
            return str(other)
