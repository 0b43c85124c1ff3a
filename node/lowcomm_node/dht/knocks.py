"""Results of knocking at entry points: whether somebody answers, and whose clock is wrong."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from lowcomm_node.dht.interface import Knock
from lowcomm_node.errors import ConfigError, Unhealthy
from lowcomm_node.net.addresses import parse_entry_point

MAX_CLOCK_OFFSET = 3.0
"""Seconds. Records live for seconds to minutes, so a larger offset makes them seem dead or not
issued."""


def by_peer(addresses: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The addresses of each peer. Malformed ones are skipped."""
    entries: dict[str, tuple[str, ...]] = {}
    for text in addresses:
        with suppress(ConfigError):
            entry = parse_entry_point(text)
            entries[entry.peer_id] = (*entries.get(entry.peer_id, ()), str(entry))
    return entries


def no_answer(addresses: Sequence[str], knocks: Mapping[str, Knock]) -> str:
    """An error text: which addresses do not answer, and why."""
    told = [
        f"{text} ({knocks[peer].reason})"
        for text in addresses[:8]
        if (peer := text.rpartition("/")[2]) in knocks
    ]
    return nobody_answers("; ".join(told))


def nobody_answers(where: str) -> str:
    """The same for addresses and reasons in words."""
    return f"No peer answers at {where}: check the address, and that the bootstrap server runs."


def check_clock(knocks: Mapping[str, Knock], most: float = MAX_CLOCK_OFFSET) -> None:
    """Raise Unhealthy if our clock differs from that of every peer."""
    nearest = min(
        (knock.ahead for knock in knocks.values() if knock.reason is None), key=abs, default=0.0
    )
    if abs(nearest) > most:
        where = "behind" if nearest > 0 else "ahead of"
        raise Unhealthy(
            f"This machine's clock is {abs(nearest):.0f} s {where} the swarm's; at most {most:.0f} "
            "s are allowed: set it right (`timedatectl set-ntp true`), or that of the bootstrap "
            "server."
        )
