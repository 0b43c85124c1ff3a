"""``lend``, ``pair``: machines of one owner on one network, which act as one peer."""

import asyncio
import ipaddress
import json
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from time import localtime, strftime, time
from typing import TYPE_CHECKING, Annotated

import typer

from lowcomm_node.cli.common import Here, command, setting
from lowcomm_node.errors import ConfigError
from lowcomm_node.household import PORT
from lowcomm_node.system.app import run_async
from lowcomm_node.system.command import ending_signals, raise_descriptors, say
from lowcomm_node.system.machine import GIB
from lowcomm_node.system.tasks import first_of

if TYPE_CHECKING:
    from lowcomm_node.household.lender import Lender

_MEMORY = "Memory for what is computed here; a worker that takes more is ended"


@command()
def lend(
    here: Here,
    pair: Annotated[bool, typer.Option("--pair")] = False,
    forget: str | None = None,
    port: Annotated[int, typer.Option(min=1, max=65535)] = PORT,
    max_memory: Annotated[str | None, setting("max_memory", f"{_MEMORY}; default: all.")] = None,
    device: Annotated[str | None, setting("device")] = None,
) -> None:
    """Lend this machine to another one of yours, which trains with `lowcomm-node join --with`.

    Both machines are paired once, by a code that this one shows. Only paired machines get
    in, over TLS. Ctrl-C ends it.

    Example: lowcomm-node lend --max-memory 8

    Args:
        pair: Show a code although a machine is paired already.
        forget: Name of a machine to be paired with no more; the command ends.
        port: TCP port to listen on.
    """
    here.log()
    settings = here.settings(max_memory=max_memory, device=device)
    from lowcomm_node.household.lender import Lender, listen
    from lowcomm_node.household.machines import Household

    household = Household(settings.home)
    if forget is not None:
        household.forget(forget)
        here.show({"forgotten": forget}, f"{forget} is paired with this machine no longer.")
        return

    def tell(event: str, text: str) -> None:
        if here.as_json:
            say(json.dumps({"event": event, "text": text}))
        elif event == "code":
            say(f"To pair a machine with this one, type there by {_in_ten_minutes()}:\n  {text}")
        else:
            say(f"{strftime('%H:%M:%S')} {text}")

    limit = settings.max_memory
    lender = Lender(
        household, tell, pairs=pair, device=settings.device,
        max_bytes=None if limit is None else int(limit * GIB),
    )  # fmt: skip
    with listen(port) as listener:
        raise_descriptors()
        targets = [at if port == PORT else f"{at}:{port}" for at in _addresses()]
        lines = "\n".join(f"  lowcomm-node join --with {target}" for target in targets)
        tell("lends", f"{household.name} lends itself. On your machine that trains:\n{lines}")
        run_async(_serve(lender, listener))


async def _serve(lender: "Lender", listener: socket.socket) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, *ending_signals()):
        loop.add_signal_handler(number, stop.set)
    await first_of(lender.run(listener), stop.wait())


def _in_ten_minutes() -> str:
    from lowcomm_node.household.pairing import LIFE

    return strftime("%H:%M", localtime(time() + LIFE))


def _addresses() -> Iterator[str]:
    """Addresses of this machine in its own network, the usual one first."""
    from lowcomm_node.net.targets import held_addresses, outward_address

    usual = outward_address("192.0.2.1")  # nobody's, so the one of the way out
    yield from filter(None, [usual])
    for held in held_addresses():
        try:
            address = ipaddress.IPv4Address(held)
        except ValueError:
            continue
        if held != usual and address.is_private and not address.is_loopback:
            yield held


@command("pair")
def pair_with(here: Here, address: str, code: str | None = None) -> None:
    """Pair this machine with one that runs `lowcomm-node lend --pair`.

    Example: lowcomm-node pair 192.168.1.20 --code 7KQ2-M0XD-9T4V-BW3H

    Args:
        address: Address that the other machine shows.
        code: Code that the other machine shows; asked for if it is not given.
    """
    name = pair_by_code(here.folder, address, code)
    here.show({"name": name, "address": address}, f"{name} at {address} is paired.")


def pair_by_code(home: Path, address: str, code: str | None = None) -> str:
    """Pair with a lender, and ask for its code at the terminal; its name. Raises ConfigError where
    there is no terminal, LinkLost."""
    from lowcomm_node.household.link import pair

    return asyncio.run(pair(address, home, code or _ask_code(address))).name


def pair_unless_paired(home: Path, address: str) -> None:
    """Pair with a lender that this machine does not know yet. Raises ConfigError, LinkLost."""
    from lowcomm_node.household.machines import Household

    try:
        Household(home).lender(address)
    except ConfigError:
        pair_by_code(home, address)


def _ask_code(address: str) -> str:
    if not sys.stdin.isatty():
        raise ConfigError(
            f"{address} is not paired with this machine: `lowcomm-node lend --pair` there shows a "
            f"code, and `lowcomm-node pair {address} --code CODE` pairs them."
        )
    print(f"Code that {address} shows: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip()
