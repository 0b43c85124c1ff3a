"""``join``: take part in a run. The command is the daemon: signals, the service manager, output."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from time import localtime, monotonic, strftime, time
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import psutil
import typer
from rich.live import Live

from lowcomm_node.cli.common import Here, command, read_settings, setting_options
from lowcomm_node.cli.lend import pair_unless_paired
from lowcomm_node.errors import ConfigError, NodeError
from lowcomm_node.net.p2pd import free_port
from lowcomm_node.node.process import Trainer
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.owner.sources import LoadedSettings
from lowcomm_node.status import words
from lowcomm_node.status.events import Notice
from lowcomm_node.system.app import run_async
from lowcomm_node.system.command import ending_signals, importing, say
from lowcomm_node.system.logs import log
from lowcomm_node.system.systemd import ServiceManager
from lowcomm_node.system.units import clean

if TYPE_CHECKING:
    from lowcomm_node.node.node import Node

REFRESH = 0.5
PROGRESS_EVERY = 10.0
"""Seconds between two lines on progress, where there is no terminal."""
LEAST_ROOM = bytes(64 * 1024)
"""What a home must have room for."""


@command(home=False, groups={"flags": setting_options()})
def join(
    here: Here, flags: dict[str, Any], web: Annotated[bool, typer.Option("--web")] = False
) -> None:
    """Join a run and train until it is over. Ctrl-C finishes cleanly; a second Ctrl-C stops at
    once.

    Example: lowcomm-node join --peers /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...

    Args:
        web: Print a link to the node's page, which works once.
    """
    live(here, read_settings(flags), web)


def live(here: Here, loaded: LoadedSettings, web: bool = False, trains: bool = True) -> NoReturn:
    """Be a node until it ends, and exit; ``trains``: else it gives packed text away."""
    from lowcomm_node.net.p2pd import find_p2pd
    from lowcomm_node.system.command import check_system, raise_descriptors

    settings = loaded.settings
    here.log()
    check_system(find_p2pd)
    raise_descriptors()
    from lowcomm_node.owner.availability import Availability, check_card

    check_card(settings)
    _refuse_at_once(settings)
    for address in settings.lenders:
        pair_unless_paired(settings.home, address)
    manager = ServiceManager.of()
    availability = Availability(settings)
    trainer = Trainer(settings.nice)
    if trains and availability.hold is None:
        trainer.launch()  # it imports torch while the daemon imports its own
    with importing():
        from lowcomm_node.node.node import Node
        from lowcomm_node.owner.limits import keep_settings

    if loaded.sources["name"].startswith("flag"):
        # Others know the node by it, also after a restart that does not name it again.
        with suppress(NodeError):  # a file that is read-only is its owner's choice
            settings.home.mkdir(parents=True, exist_ok=True, mode=0o700)
            keep_settings(settings.paths.config, {"name": settings.name})
    daemon = Node(settings, trainer, availability, trains)
    for warning in loaded.warnings:
        daemon.board.warn("settings", warning)
    if web:
        daemon.control.on_link = lambda link: print(f"in a browser, once: {link}", file=sys.stderr)
    show = _print_words
    if here.as_json or sys.stdout.isatty():
        show = _print_events if here.as_json else _show_panel
    try:
        code = run_async(_run(daemon, manager, show))
    finally:
        # At the end, whatever its cause, show where the model lies and what this node gave.
        if daemon.state.ready is not None:
            given = words.contribution(daemon.controls.status())
            news = Notice(time(), given).to_json()
            text = words.tell_farewell(given, settings.home)
            say(json.dumps(news) if here.as_json else text)
    raise SystemExit(code)


def _refuse_at_once(settings: NodeSettings) -> None:
    """Raise what would end the node only once its trainer has started: a home in use, a full disk,
    a file that is not there, a port in use. Raises NodeError."""
    from lowcomm_node.storage.files import home_lock, write_atomic  # not on Windows

    with home_lock(settings.paths.lock):
        room = settings.home / ".room"
        write_atomic(room, LEAST_ROOM)
        room.unlink()
    for option, named in (("tokenizer", settings.tokenizer), ("weights", settings.weights)):
        if named is not None and not Path(named).expanduser().exists():
            raise ConfigError(f"--{option} {named}: nothing is there: correct the path.")
    if settings.data is not None and not settings.data.startswith("builtin:"):
        from lowcomm_node.data.sources import is_there

        if not is_there(settings.data):
            raise ConfigError(f"--data {settings.data}: nothing is there: correct the path.")
    host = settings.host or "127.0.0.1"
    free_port(host, settings.port)
    free_port(host, settings.dht_port, choice="another with --dht-port")
    free_port("127.0.0.1", settings.control_port, choice="another with --control-port")


async def _run(
    daemon: "Node", manager: ServiceManager, show: Callable[["Node"], Coroutine[Any, Any, None]]
) -> int:
    _finish_on_signal(daemon, manager)
    status = daemon.controls.status
    attending = asyncio.create_task(manager.attend(lambda: words.condition(status())))
    showing = asyncio.create_task(show(daemon))
    try:
        return await daemon.run()
    finally:
        manager.stopping()
        # The last news is still shown.
        await asyncio.wait({showing}, timeout=REFRESH / 5)
        for task in (attending, showing):
            task.cancel()
        _, shown = await asyncio.gather(attending, showing, return_exceptions=True)
        if isinstance(shown, Exception):
            log.error("join.not_shown", error=repr(shown))


def _finish_on_signal(daemon: "Node", manager: ServiceManager) -> None:
    """SIGINT finishes. SIGTERM, whose sender may kill us in 10 s, and SIGHUP save and leave. A
    second: stop now."""
    loop = asyncio.get_running_loop()
    asked = False

    def on_signal(number: int) -> None:
        nonlocal asked
        manager.stopping()
        if asked:
            daemon.controls.request_stop()
        elif number == signal.SIGINT:
            daemon.controls.request_finish()
        else:
            daemon.controls.request_stop(now=False)
        asked = True

    for number in (signal.SIGINT, *ending_signals()):
        loop.add_signal_handler(number, on_signal, number)
    loop.add_signal_handler(signal.SIGTSTP, _suspend)


def _suspend() -> None:
    """Ctrl-Z: stop with trainer and p2pd, which the terminal does not reach, and go on with
    them."""
    children = psutil.Process().children()
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.suspend()
    os.kill(os.getpid(), signal.SIGSTOP)  # returns once we go on
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.resume()


async def _print_events(daemon: "Node") -> None:
    events = daemon.board.subscribe()
    while True:
        say(json.dumps((await events.get()).to_json()))


async def _print_words(daemon: "Node") -> None:
    """Print each event, and progress at times where it has changed."""
    events = daemon.board.subscribe()
    due, shown = monotonic() + PROGRESS_EVERY, ""
    while True:
        lines: list[str] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, due - monotonic())):
                lines.append(words.event_in_words((await events.get()).event) or "")
        if monotonic() >= due:
            due = monotonic() + PROGRESS_EVERY
            status = daemon.controls.status()
            is_training = status.phase == "training"
            progress = words.progress_in_words(status) if is_training else words.summary(status)
            if progress != shown:
                shown = progress
                lines.append(clean(progress))
        for line in filter(None, lines):
            say(f"{strftime('%H:%M:%S', localtime())} {line}")


async def _show_panel(daemon: "Node") -> None:
    from lowcomm_node.status.panel import EXCHANGES, node_panel

    controls = daemon.controls
    with Live(
        get_renderable=lambda: node_panel(controls.status(), controls.last_exchanges(EXCHANGES)),
        auto_refresh=False,
    ) as live:  # which shows the last state when it ends
        while True:
            live.refresh()
            await asyncio.sleep(REFRESH)
