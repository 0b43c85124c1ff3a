"""What kind of router is between this machine and the internet, as far as it shows. No I/O.

| kind        | what shows it                                                                                   |
|-------------|-------------------------------------------------------------------------------------------------|
| NONE        | we are seen at an address of our own, and calls come in                                         |
| FIREWALL    | we are seen at an address of our own, but calls do not come in                                  |
| OPEN        | we are seen at another address, and a call from somebody we never called comes in: a full cone  |
| RESTRICTED  | two that see us name the same port, and calls do not come in                                    |
| SYMMETRIC   | two that see us name different ports for the same one of ours                                   |
| BEHIND      | only one sees us, and calls do not come in: one of the two above                                |
| UNKNOWN     | nobody sees us from outside of our own network                                                  |
"""

import ipaddress
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Nat(StrEnum):
    """A kind of router."""

    NONE = "none"
    FIREWALL = "firewall"
    OPEN = "open"
    RESTRICTED = "port-restricted"
    SYMMETRIC = "symmetric"
    BEHIND = "behind-nat"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Sight:
    """How one helper sees one port of ours."""

    helper: str
    """IP address of the helper."""
    socket: str
    """Which port of ours; any name."""
    host: str
    """IP address that it sees."""
    port: int


def infer(own_hosts: Iterable[str], sights: Iterable[Sight], calls_come_in: bool | None) -> Nat:
    """The kind of router. ``calls_come_in``: whether a call did from somebody we had not called; None if not known."""
    outside = [sight for sight in sights if is_public(sight.host)]
    if not outside:
        return Nat.UNKNOWN
    own = set(own_hosts)
    if all(sight.host in own for sight in outside):
        return Nat.FIREWALL if calls_come_in is False else Nat.NONE
    if calls_come_in:
        return Nat.OPEN
    ports: defaultdict[str, dict[str, tuple[str, int]]] = defaultdict(dict)
    for sight in outside:
        ports[sight.socket][sight.helper] = (sight.host, sight.port)
    seen_twice = [set(by_helper.values()) for by_helper in ports.values() if len(by_helper) > 1]
    if any(len(places) > 1 for places in seen_twice):
        return Nat.SYMMETRIC
    return Nat.RESTRICTED if seen_twice and calls_come_in is False else Nat.BEHIND


def is_public(host: str) -> bool:
    """Whether an IP address is one of the internet."""
    return ipaddress.ip_address(host).is_global
