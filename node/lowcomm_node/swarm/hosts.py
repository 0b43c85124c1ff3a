"""The hosts that this node listens on and announces."""

import asyncio
import ipaddress
import socket
from collections.abc import Sequence

from lowcomm_node.errors import ConfigError
from lowcomm_node.net.p2pd import ANY_HOSTS, has_ipv6, numeric
from lowcomm_node.net.targets import held_addresses, outward_address
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_protocol.peers.records import MAX_ADDRESSES


def listening(
    settings: NodeSettings, remembered: Sequence[str] = ()
) -> tuple[str, tuple[str, ...]]:
    """The host to listen on, and the hosts to announce: loopback only if all known peers are on
    loopback.

    ``remembered``: earlier addresses of the swarm, which decide if the owner gave none. Raises
    ConfigError for a name that can't be looked up.
    """
    peers = settings.peers or tuple(remembered)
    if settings.host is not None:
        number = numeric(settings.host)
        host = f"[{number}]" if ":" in number else number
        return host, _own_hosts() if number in ANY_HOSTS else (host,)
    if peers and all("/ip4/127." in peer or "/ip6/::1/" in peer for peer in peers):
        return "127.0.0.1", ("127.0.0.1",)
    return "0.0.0.0", _own_hosts()


async def in_numbers(announced: Sequence[str]) -> tuple[str, ...]:
    """Resolve the names in ``host:port``, since records contain IP addresses only. Raises
    ConfigError for a name that can't be resolved."""
    found: list[str] = []
    for address in announced:
        host, _, port = address.rpartition(":")
        try:
            answers = await asyncio.get_running_loop().getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM
            )
        except OSError as error:
            raise ConfigError(
                f"--announce {address}: {host} can't be looked up ({error.strerror}): correct it, "
                "or give its IP address."
            ) from None
        numbers = [answer[4][0] for answer in answers]
        found += [f"[{one}]:{port}" if ":" in str(one) else f"{one}:{port}" for one in numbers]
    return tuple(dict.fromkeys(found))[:MAX_ADDRESSES]


def any_host() -> str:
    """The wildcard address: IPv6 includes IPv4, if the machine has it."""
    return "[::]" if has_ipv6() else "0.0.0.0"


def _own_hosts() -> tuple[str, ...]:
    numbers = [ipaddress.ip_address(text) for text in own_addresses()]
    # Public addresses first, since most peers are outside our network; of those IPv4 first, which
    # everybody has.
    numbers.sort(key=lambda address: (not address.is_global, address.version))
    return tuple(str(one) if one.version == 4 else f"[{one}]" for one in numbers[:8]) or (
        "127.0.0.1",
    )


def own_addresses() -> tuple[str, ...]:
    """Addresses by which others may reach this machine: all of IPv4, and the IPv6 address in
    use."""
    # Of an interface the system names hardware addresses, too, which have no dots.
    numbers = [text for text in held_addresses() if "." in text and not text.startswith("127.")]
    # The kernel picks the IPv6 address in use: machines change their temporary ones daily, and keep
    # the old ones for a while.
    numbers += filter(None, [outward_address("2001:db8::1")])
    return tuple(sorted(set(numbers)))
