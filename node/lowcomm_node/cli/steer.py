"""``pause``, ``resume``, ``limits``, ``finish``, ``stop``: steer the running node."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from lowcomm_node.cli.common import Here, command, seconds_of, setting_options
from lowcomm_node.errors import NodeError, Unhealthy
from lowcomm_node.owner.settings import CHANGEABLE
from lowcomm_node.status.words import contribution, tell_farewell
from lowcomm_node.storage.paths import Paths
from lowcomm_node.system.units import write_rate
from lowcomm_node.web.client import ControlClient

PAUSE_DEADLINE = 90.0
END_DEADLINE = 60.0
"""Minimum seconds to wait for the end; a node with long steps or checkpoints asks for more."""
POLL = 0.2
"""Seconds between two looks at the status: no event says that the trainer's process ended."""


@command()
def pause(here: Here, duration: Annotated[str | None, typer.Argument()] = None) -> None:
    """Save, then free the memory of training, on the GPU too. The node stays in its swarm, paused.

    A pause survives a restart of the node.

    Example: lowcomm-node pause 30m

    Args:
        duration: Such as 30m, 2h or 1h30m; without: until `resume`.
    """
    seconds = None if duration is None else seconds_of(duration)
    with here.node() as client:
        client.pause(seconds)
        deadline = time.monotonic() + PAUSE_DEADLINE
        while True:
            now = client.status()
            if now.trainer.pid is None and (now.phase == "paused" or now.run is None):
                break
            if now.pause is None:
                raise NodeError("The node does not pause: it was resumed meanwhile.")
            if time.monotonic() > deadline:
                raise Unhealthy(
                    f"The node has not paused within {PAUSE_DEADLINE:.0f} s: it is {now.phase}; "
                    "see its logs."
                )
            time.sleep(POLL)
    kept = f"saved at swarm step {now.checkpoint.step}" if now.checkpoint else "nothing to save yet"
    reason = now.pause.reason if now.pause else "paused"
    content = {"paused": True, "pause": now.pause, "checkpoint": now.checkpoint}
    here.show(content, f"{reason}; {kept}")


@command()
def resume(here: Here) -> None:
    """Train again, even against a schedule or another rule, until that rule next changes."""
    with here.node() as client:
        client.resume()
    here.show({"resumed": True}, "trains again, once the trainer has started")


@command(groups={"flags": setting_options(CHANGEABLE)})
def limits(here: Here, flags: dict[str, Any]) -> None:
    """Show the network limits of the running node and their use, or change them.

    A change holds at once. It is kept in config.toml of the home, so it survives
    a restart, unless an option of `join` or a variable overrides it.

    Example: lowcomm-node limits --max-up 5Mbit
    """
    with here.node() as client:
        now = client.limits({name: value for name, value in flags.items() if value is not None})
    rows = [
        ("up", write_rate(now.up), write_rate(now.max_up)),
        ("down", write_rate(now.down), write_rate(now.max_down)),
        ("peers", str(now.peers), str(now.max_peers)),
    ]
    here.show(now, "\n".join(f"{name:<7}{used:>10} of {most}" for name, used, most in rows))


@command()
def finish(here: Here) -> None:
    """Save, let running exchanges end, evaluate, say goodbye, leave."""
    _end(here, lambda client: client.finish(), "finished, saved, said goodbye")


@command()
def stop(here: Here, now: Annotated[bool, typer.Option("--now")] = False) -> None:
    """Save, give running exchanges 2 s, say goodbye, leave; --now does not save.

    Args:
        now: Without saving.
    """
    text = "stopped without saving" if now else "saved and stopped"
    _end(here, lambda client: client.stop(now), text)


def _end(here: Here, ask: Callable[[ControlClient], None], text: str) -> None:
    """Ask the node to end, wait until it has, and show what it leaves behind."""
    with here.node() as client:
        last = client.status()

        def look() -> None:
            nonlocal last
            with suppress(NodeError):  # it ends just now
                last = client.status()

        ask(client)
        look()
        deadline = max(END_DEADLINE, last.leaving or 0.0)
        if not client.wait_ended(deadline, look):
            pid = client.endpoint.pid
            raise Unhealthy(
                f"The node (process {pid}) did not end within {deadline:.0f} s: end it with `kill "
                f"{pid}`."
            )
    given, home = contribution(last), here.folder
    if last.run is not None:
        from lowcomm_node.storage.checkpoint import CheckpointStore

        # The last status may have missed some steps: the newest checkpoint has all.
        saved = Paths(home).checkpoints(last.run.fingerprint)
        if saved.is_dir() and (newest := CheckpointStore(saved).latest()) is not None:
            steps, tokens = newest.meta.get("steps"), newest.meta.get("tokens")
            known = {"steps": steps, "tokens": tokens, "checkpoint": str(newest.path)}
            given = replace(given, **{key: one for key, one in known.items() if one is not None})
        text += f"\n{tell_farewell(given, home)}"
    here.show({"ended": True, **asdict(given)}, text)
