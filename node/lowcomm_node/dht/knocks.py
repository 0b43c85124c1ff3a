"""What is said of doors: peers at which a swarm can be entered, that were knocked at."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from lowcomm_node.dht.interface import Knock
from lowcomm_node.errors import ConfigError, Unhealthy
from lowcomm_node.libp2p.multiaddress import parse_entry_point

MAX_CLOCK_OFFSET = 3.0
"""Seconds; records live for seconds to minutes, and would seem dead or not yet issued."""


def by_peer(addresses: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Addresses of each peer; malformed ones are left out."""
    doors: dict[str, tuple[str, ...]] = {}
    for text in addresses:
        with suppress(ConfigError):
            entry = parse_entry_point(text)
            doors[entry.peer_id] = (*doors.get(entry.peer_id, ()), str(entry))
    return doors


def no_answer(addresses: Sequence[str], knocks: Mapping[str, Knock]) -> str:
    """Which addresses do not answer, and why, for whoever gave them."""
    told = [f"{text} ({knocks[peer].reason})" for text in addresses[:8] if (peer := text.rpartition("/")[2]) in knocks]
    return nobody_answers("; ".join(told))


def nobody_answers(where: str) -> str:
    """The same for addresses and reasons in words."""
    return f"No peer answers at {where}: check the address, and that the bootstrap server runs."


def check_clock(knocks: Mapping[str, Knock], most: float = MAX_CLOCK_OFFSET) -> None:
    """Raise Unhealthy if our clock differs from everybody's."""
    nearest = min((knock.ahead for knock in knocks.values() if knock.reason is None), key=abs, default=0.0)
    if abs(nearest) > most:
        where = "behind" if nearest > 0 else "ahead of"
        raise Unhealthy(
            f"This machine's clock is {abs(nearest):.0f} s {where} the swarm's; at most {most:.0f} s are "
            "allowed: set it right (`timedatectl set-ntp true`), or that of the bootstrap server."
        )
