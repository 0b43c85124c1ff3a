"""``lowcomm-bootstrap serve``: from settings to a running server, and what it prints."""

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from lowcomm_bootstrap.health import SIGN, begin_sign
from lowcomm_bootstrap.registry import Registry
from lowcomm_bootstrap.server import BootstrapServer, Tell
from lowcomm_node.dht.hivemind import DhtSettings, Discovery
from lowcomm_node.errors import ConfigError
from lowcomm_node.net.addresses import host_of
from lowcomm_node.storage.files import home_lock, load_or_create_identity
from lowcomm_node.swarm.probes import FOR_A_BOOTSTRAP, Prober
from lowcomm_node.swarm.rejoin import Rejoin
from lowcomm_node.system.command import ending_signals, say
from lowcomm_node.system.systemd import ServiceManager
from lowcomm_node.system.units import place
from lowcomm_protocol.errors import SignatureError
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.spec.run import SignedRun, parse_toml, read_signed_run, sign_run

MAX_RUN_FILE = 1024**2


async def serve(
    home: Path,
    dht: DhtSettings,
    runs: Sequence[Path],
    closed: bool,
    max_runs: int,
    tell: Tell,
    web: tuple[str, int] | None,
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP. Raises LowcommError that ended it.

    ``web``: where the swarm's page listens; None: there is none.
    """
    manager = ServiceManager.of()
    with home_lock(home / "lock"):
        key_file = home / "identity.key"
        identity = load_or_create_identity(key_file)
        registry = Registry(home / "runs", max_runs)
        for file in runs:
            registry.add(read_run(file, identity), own=True)
        discovery = Discovery(identity, key_file, dht)
        # Peers that lost us dial us. Starting p2pd again would end all that it relays.
        rejoin = Rejoin(
            discovery, dht.initial_peers, lambda event: tell(event.to_json()), restarts=False
        )
        page = None
        if web is not None:
            from lowcomm_bootstrap.web import SwarmPage  # needs HTTP

            history = home / "web" / "history.json"
            page = SwarmPage(history, lambda: next(iter(discovery.addresses()), ""), *web)
        sign = home / SIGN
        server = BootstrapServer(discovery, registry, closed, tell, rejoin, sign=sign, page=page)
        prober = Prober(discovery, discovery.addresses, FOR_A_BOOTSTRAP, keep=server.keep)
        _stop_on_signal(asyncio.current_task(), manager)
        attending = asyncio.create_task(manager.attend(lambda: server.condition(monotonic())))
        try:
            await server.start()
            await prober.serve()
            if page is not None:
                page.open()
            own = f"/p2p/{identity.peer_id}"
            others = [address for address in dht.initial_peers if not address.endswith(own)]
            begin_sign(home)
            ready = {"event": "ready", "peer_id": identity.peer_id}
            ready |= {"addresses": list(discovery.addresses()), "others": others}
            tell(ready | {"web": page.port if page is not None else None})
            await server.run()
        except asyncio.CancelledError:
            tell({"event": "stopping"})
        finally:
            manager.stopping()
            attending.cancel()
            await asyncio.gather(attending, return_exceptions=True)
            sign.unlink(missing_ok=True)
            if page is not None:
                await page.close()
            await prober.close()
            await discovery.close()


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


def read_run(path: Path, creator: Identity) -> SignedRun:
    """Read a run.toml, which ``creator`` then signs, or a run that is signed already.

    Raises ConfigError, SpecError, SignatureError, VersionError; each names the file.
    """
    reason = "not text in UTF-8"
    try:
        with path.open("rb") as file:
            data = file.read(MAX_RUN_FILE)
        if data.lstrip().startswith(b"{"):
            return read_signed_run(data, str(path))
        return sign_run(parse_toml(data.decode("utf-8-sig"), str(path)), creator)
    except SignatureError as error:
        raise SignatureError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
    except OSError as error:
        reason = error.strerror
    except UnicodeError:
        pass
    raise ConfigError(f"{path}: {reason}: name a run.toml or a signed run.")


# output

_RUN = "run {name}@{fingerprint}"
_WORDS = {
    "run.adopted": f"keeping {_RUN} published",
    "run.peers": f"{_RUN} has {{peers}} peers",
    "run.over": f"{_RUN} is over: its peers have finished it at step {{swarm_step}}",
    "run.not_kept": f"warning: {_RUN}: {{reason}}",
    "run.not_published": f"warning: {_RUN}: {{reason}}",
    "door.closed": "warning: {address}: {reason}; tried again",
    "door.open": "connected to {address}",
    "swarm.lost": "warning: {reason}",
    "swarm.unlisted": "warning: {reason}",
    "run.damaged": "warning: {path} is not a sound signed run and not published; restore it or "
    "remove it",
    "run.other_version": "warning: {path} is of another version and not published; the release "
    "that wrote it can",
}
"""Lines for people, by event; others are shown by their names."""


def teller(as_json: bool, quiet: bool) -> Tell:
    """A function that prints events on stdout: JSON lines, or words; nothing if ``quiet``."""

    def tell(event: dict[str, Any]) -> None:
        if not quiet:
            say(json.dumps(event) if as_json else in_words(event))

    return tell


def in_words(event: dict[str, Any]) -> str:
    """The line for an event."""
    name: str = event["event"]
    if name != "ready":
        return _WORDS.get(name, name).format_map(event)
    addresses = event["addresses"]
    peers = " ".join(f"--peers {address}" for address in (*addresses[:1], *event["others"]))
    command = f"lowcomm-node join {peers}" if addresses else "no address can be reached"
    listed = [f"  {address}" for address in addresses]
    host = host_of(addresses[0]) if addresses else None
    link = f"http://{place(host or '127.0.0.1', event['web'])}/"
    page = [f"the swarm's page: {link}"] if event["web"] else []
    return "\n".join(["ready; peers can join at", *listed, "", command, *page])
