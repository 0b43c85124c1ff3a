"""``join``: take part in a run. The command is the daemon."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from lowcomm_node.cli.common import Here, command, read_settings
from lowcomm_node.errors import ConfigError, NodeError
from lowcomm_node.node.process import Trainer
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.system.command import check_port, importing
from lowcomm_node.system.systemd import ServiceManager

ROOM = 64 * 1024
"""Bytes that a home must have room for."""


@command(home=False, settings=())
def join(
    flags: dict[str, Any],
    web: Annotated[
        bool, typer.Option("--web", help="Print a link to the node's page, which works once.")
    ] = False,
    *,
    here: Here,
) -> None:
    """Join a run and train until it is over. Ctrl-C finishes cleanly; a second Ctrl-C stops at
    once.

    Example: lowcomm-node join --peers /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
    """
    from lowcomm_node.net.p2pd import find_p2pd
    from lowcomm_node.system.command import check_system, raise_descriptors

    loaded = read_settings(flags)
    settings = loaded.settings
    here.log()
    check_system(find_p2pd)
    raise_descriptors()
    from lowcomm_node.owner.availability import Availability

    _refuse_at_once(settings)
    manager = ServiceManager.of()
    availability = Availability.of(settings)
    trainer = Trainer(settings.nice)
    if availability.hold is None:
        trainer.launch()  # it imports torch while the daemon imports its own
    with importing():
        from lowcomm_node.catalogue import WarningCode
        from lowcomm_node.cli.running import run_daemon
        from lowcomm_node.node.node import Node
        from lowcomm_node.owner.limits import keep_settings

    if loaded.sources["name"].startswith("flag"):
        # Others know the node by it, also after a restart that does not name it again.
        with suppress(NodeError):  # a file that is read-only is its owner's choice
            settings.home.mkdir(parents=True, exist_ok=True, mode=0o700)
            keep_settings(settings.paths.config, {"name": settings.name})
    daemon = Node(settings, trainer, availability)
    for warning in loaded.warnings:
        daemon.board.warn(WarningCode.SETTINGS, warning)
    raise SystemExit(run_daemon(daemon, manager, here.as_json, web))


def _refuse_at_once(settings: NodeSettings) -> None:
    """Raise what would end the node only once its trainer has started: a home in use, a full disk,
    a file that is not there, a port in use. Raises NodeError."""
    from lowcomm_node.storage.files import home_lock, write_atomic  # not on Windows

    with home_lock(settings.paths.lock):
        room = settings.home / ".room"
        write_atomic(room, bytes(ROOM))
        room.unlink()
    for option, named in (("tokenizer", settings.tokenizer), ("weights", settings.weights)):
        if named is not None and not Path(named).expanduser().exists():
            raise ConfigError(f"--{option} {named}: nothing is there: correct the path.")
    if settings.data is not None and not settings.data.startswith("builtin:"):
        from lowcomm_node.data.documents import is_there  # loads numpy

        if not is_there(settings.data):
            raise ConfigError(f"--data {settings.data}: nothing is there: correct the path.")
    host = settings.host or "127.0.0.1"
    for option, port in (("port", settings.port), ("dht-port", settings.dht_port)):
        check_port(host, port, option)
    check_port("127.0.0.1", settings.control_port, "control-port")
