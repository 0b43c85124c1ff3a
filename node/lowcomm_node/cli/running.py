"""Runs the daemon of ``join``: signals, the service manager, and what is printed meanwhile.

``join`` imports this once its trainer starts: it loads gRPC and the DHT, which takes a second."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from time import localtime, monotonic, strftime, time
from typing import Any

import psutil
from rich.console import Console
from rich.live import Live

from lowcomm_node.cli.common import run_async
from lowcomm_node.node.node import Node
from lowcomm_node.status.events import Contributed, Notice
from lowcomm_node.status.panel import ROUNDS, node_panel
from lowcomm_node.status.words import (
    condition,
    contribution,
    event_in_words,
    progress_in_words,
    summary,
    tell_farewell,
)
from lowcomm_node.system.command import ending_signals, say
from lowcomm_node.system.logs import log
from lowcomm_node.system.systemd import ServiceManager
from lowcomm_node.system.units import clean

REFRESH = 0.5
PROGRESS_EVERY = 10.0
"""Seconds between two lines on progress, where there is no terminal."""


def run_daemon(daemon: Node, manager: ServiceManager, as_json: bool, web: bool = False) -> int:
    """Run a node to its end and show what it does; its exit code. ``web``: print a link to its
    page."""
    show = _print_events if as_json else _show_panel if sys.stdout.isatty() else _print_words
    if web:
        daemon.control.on_link = lambda link: print(f"in a browser, once: {link}", file=sys.stderr)
    try:
        return run_async(_run(daemon, manager, show))
    finally:
        _tell_contribution(daemon, as_json)


def _tell_contribution(daemon: Node, as_json: bool) -> None:
    """At the end, whatever its cause, show where the model lies and what this node gave."""
    if daemon.part is None or daemon.part.training.ready is None:
        return
    given = contribution(daemon.controls.status())
    told = json.dumps(Notice(time(), Contributed(**vars(given))).to_json())
    say(told if as_json else tell_farewell(given, daemon.settings.home))


async def _run(
    daemon: Node, manager: ServiceManager, show: Callable[[Node], Coroutine[Any, Any, None]]
) -> int:
    _finish_on_signal(daemon, manager)
    attending = asyncio.create_task(manager.attend(lambda: condition(daemon.controls.status())))
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


def _finish_on_signal(daemon: Node, manager: ServiceManager) -> None:
    """SIGINT finishes. SIGTERM, whose sender may kill us in 10 s, and SIGHUP save and leave. A
    second: stop now."""
    loop = asyncio.get_running_loop()
    told: list[int] = []

    def on_signal(number: int) -> None:
        told.append(number)
        manager.stopping()
        if len(told) > 1:
            daemon.controls.request_stop()
        elif number == signal.SIGINT:
            daemon.controls.request_finish()
        else:
            daemon.controls.request_stop(now=False)

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


async def _print_events(daemon: Node) -> None:
    events = daemon.board.subscribe(every_step=False)
    while True:
        say(json.dumps((await events.get()).to_json()))


async def _print_words(daemon: Node) -> None:
    board = daemon.board
    events = board.subscribe(every_step=False)
    told_at = monotonic()
    told = None
    while True:
        line = None
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, told_at + PROGRESS_EVERY - monotonic())):
                line = event_in_words((await events.get()).event)
        if line is not None:
            _print_line(line)
        if monotonic() >= told_at + PROGRESS_EVERY:
            told_at = monotonic()
            status = daemon.controls.status()
            where = progress_in_words(status) if board.phase == "training" else summary(status)
            if where != told:
                told = where
                _print_line(clean(where))


def _print_line(text: str) -> None:
    say(f"{strftime('%H:%M:%S', localtime())} {text}")


async def _show_panel(daemon: Node) -> None:
    with Live(console=Console(), auto_refresh=False, transient=False) as live:
        try:
            while True:
                live.update(
                    node_panel(daemon.controls.status(), daemon.controls.rounds(ROUNDS)),
                    refresh=True,
                )
                await asyncio.sleep(REFRESH)
        finally:
            live.update(
                node_panel(daemon.controls.status(), daemon.controls.rounds(ROUNDS)), refresh=True
            )
