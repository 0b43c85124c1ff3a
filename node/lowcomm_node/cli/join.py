"""``join``: take part in a run. The command is the daemon."""

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from time import localtime, monotonic, strftime, time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowcomm_node.cli.common import Home, Json, Quiet, Verbose, read_settings, run_async, tell_farewell
from lowcomm_node.system.formatting import clean
from lowcomm_node.system.logs import configure_logs, log
from lowcomm_node.system.systemd import ServiceManager
from lowcomm_node.trainer.process import TrainerProcess

if TYPE_CHECKING:
    from lowcomm_node.daemon.daemon import Daemon

REFRESH = 0.5
PROGRESS_EVERY = 10.0
"""Seconds between two lines on progress, where there is no terminal."""
Text = Annotated[str | None, typer.Option()]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("join")(join)


def join(
    peers: Annotated[
        list[str] | None, typer.Option(help="Address of a bootstrap server or peer; may be repeated.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="NAME or NAME@FINGERPRINT; default: the only run there is.")] = None,
    invite: Annotated[str | None, typer.Option(help="What the run's creator sent you; or set LOWCOMM_INVITE.")] = None,
    ephemeral: Annotated[
        bool | None, typer.Option("--ephemeral", help="A fresh identity, in memory only: for containers.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Your training text: file, folder or glob of text, JSON lines or Parquet.")
    ] = None,
    field: Annotated[
        str | None, typer.Option(help="Field of JSON lines, or column of Parquet, with the text; text.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Your tokenizer.json, where the run asks for it.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="TCP port for exchanges; 0: any.")] = None,
    dht_port: Annotated[int | None, typer.Option(help="TCP port for the DHT; 0: any.")] = None,
    announce: Annotated[list[str] | None, typer.Option(help="host:port at which others reach you.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the trainer.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Inner steps that a crash may cost at most.")] = None,
    keep: Annotated[int | None, typer.Option(help="Checkpoints to keep.")] = None,
    max_memory: Annotated[float | None, typer.Option(help="GiB that this node may use.")] = None,
    max_vram: Annotated[float | None, typer.Option(help="GiB of the GPU's memory that training may take.")] = None,
    max_disk: Annotated[float | None, typer.Option(help="GiB of the disk that the files of the home may take.")] = None,
    nice: Annotated[
        int | None, typer.Option(help="0 to 19: how far training steps back for other programs; 5.")
    ] = None,
    max_up: Annotated[
        str | None, typer.Option(help="Contents sent a second, such as 20Mbit or 2.5MB; none: no limit.")
    ] = None,
    max_down: Annotated[str | None, typer.Option(help="Contents received a second; as --max-up.")] = None,
    max_peers: Annotated[str | None, typer.Option(help="Peers to talk with at once; none: 64.")] = None,
    schedule: Annotated[
        str | None, typer.Option(help='When to train, such as 22:00-07:00 or "Mon-Fri 18:00-08:00"; none: always.')
    ] = None,
    only_idle: Annotated[bool | None, typer.Option(help="Train only while nobody uses this machine.")] = None,
    idle_after: Annotated[str | None, typer.Option(help="How long nobody must have used it; 10m.")] = None,
    on_battery: Annotated[str | None, typer.Option(help="Whether to train on battery: yes or no.")] = None,
    control_port: Annotated[int | None, typer.Option(help="Loopback port of the control API; 0: any.")] = None,
    stay: Annotated[bool | None, typer.Option(help="Serve the state to others after the run has finished.")] = None,
    record_life: Annotated[float | None, typer.Option(help="Seconds that others believe us alive.")] = None,
    poll: Annotated[
        float | None, typer.Option(help="Seconds between two looks at the DHT; more where there are many peers.")
    ] = None,
    join_deadline: Annotated[
        float | None, typer.Option(help="Seconds to look for the swarm at the first start.")
    ] = None,
    exchange_deadline: Annotated[float | None, typer.Option(help="Seconds one exchange may take, at most.")] = None,
    home: Home = None,
    json_: Json = False,
    quiet: Quiet = 0,
    verbose: Verbose = 0,
) -> None:
    """Join a run and train until it is over. Ctrl-C finishes cleanly; a second Ctrl-C stops at once.

    Example: lowcomm-node join --peers /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
    """
    flags = {key: value for key, value in locals().items() if key not in ("json_", "quiet", "verbose")}
    from lowcomm_node.libp2p.p2pd import find_p2pd
    from lowcomm_node.system.support import check_system, raise_descriptors

    loaded = read_settings(flags)
    settings = loaded.settings
    showing = _print_events if json_ else _show_panel if sys.stdout.isatty() else _print_words
    configure_logs(verbose - quiet - 1)
    check_system(find_p2pd)
    raise_descriptors()
    from lowcomm_node.owner.availability import Availability

    manager = ServiceManager.of()
    availability, trainer = Availability.of(settings), TrainerProcess(settings.nice)
    if availability.hold is None:
        trainer.launch()  # before the imports of the daemon: both load torch, each on a core of its own
    from lowcomm_node.daemon.daemon import Daemon

    daemon = Daemon(settings, trainer, availability)
    for warning in loaded.warnings:
        daemon.bulletin.warn(warning)
    try:
        code = run_async(_join(daemon, manager, showing))
    finally:
        _tell_contribution(daemon, json_)
    raise SystemExit(code)


def _tell_contribution(daemon: "Daemon", as_json: bool) -> None:
    """At the end, however it came: where the model lies, and what was given to the run."""
    from lowcomm_node.status.lines import contribution

    if daemon.training is None or daemon.training.ready is None:
        return
    given = contribution(daemon.status())
    told = json.dumps({"event": "contributed", "time": time(), **given})
    print(told if as_json else tell_farewell(given, daemon.settings.home), flush=True)


async def _join(
    daemon: "Daemon", manager: ServiceManager, show: "Callable[[Daemon], Coroutine[Any, Any, None]]"
) -> int:
    from lowcomm_node.daemon.report import condition

    _finish_on_signal(daemon, manager)
    attending = asyncio.create_task(manager.attend(lambda: condition(daemon)))
    showing = asyncio.create_task(show(daemon))
    try:
        return await daemon.run()
    finally:
        manager.stopping()
        # What was told last is still shown.
        await asyncio.wait({showing}, timeout=REFRESH / 5)
        for task in (attending, showing):
            task.cancel()
        _, shown = await asyncio.gather(attending, showing, return_exceptions=True)
        if isinstance(shown, Exception):
            log.error("join.not_shown", error=repr(shown))


def _finish_on_signal(daemon: "Daemon", manager: ServiceManager) -> None:
    """First SIGINT: finish; first SIGTERM, whose sender may kill us in 10 s: save and leave; the second: stop now."""
    loop = asyncio.get_running_loop()
    told: list[int] = []

    def on_signal(number: int) -> None:
        told.append(number)
        manager.stopping()
        if len(told) > 1:
            daemon.request_stop()
        elif number == signal.SIGTERM:
            daemon.request_stop(now=False)
        else:
            daemon.request_finish()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)


async def _print_events(daemon: "Daemon") -> None:
    events = daemon.bulletin.subscribe(every_step=False)
    while True:
        print(json.dumps(await events.get()), flush=True)


async def _print_words(daemon: "Daemon") -> None:
    from lowcomm_node.daemon.report import summary
    from lowcomm_node.status.lines import event_in_words, progress_in_words

    bulletin = daemon.bulletin
    events, told_at, told = bulletin.subscribe(every_step=False), monotonic(), None
    while True:
        line = None
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, told_at + PROGRESS_EVERY - monotonic())):
                line = event_in_words(await events.get())
        if line is not None:
            _print_line(line)
        if monotonic() >= told_at + PROGRESS_EVERY:
            told_at = monotonic()
            status = daemon.status()
            where = progress_in_words(status) if bulletin.phase == "training" else summary(status)
            if where != told:
                told = where
                _print_line(clean(where))


def _print_line(text: str) -> None:
    print(f"{strftime('%H:%M:%S', localtime())} {text}", flush=True)


async def _show_panel(daemon: "Daemon") -> None:
    from rich.console import Console
    from rich.live import Live

    from lowcomm_node.status.panel import ROUNDS, node_panel

    with Live(console=Console(), auto_refresh=False, transient=False) as live:
        try:
            while True:
                live.update(node_panel(daemon.status(), daemon.rounds(ROUNDS)), refresh=True)
                await asyncio.sleep(REFRESH)
        finally:
            live.update(node_panel(daemon.status(), daemon.rounds(ROUNDS)), refresh=True)
