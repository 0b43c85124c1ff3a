"""What routers and firewalls do, as texts for iptables-restore.

Kinds of NAT by RFC 4787: where a *mapping* (inner address and port, outer port) comes from, and
whom the *filter* lets in.

| kind            | mapping                  | filter                                             |
|-----------------|--------------------------|----------------------------------------------------|
| full cone       | one for all destinations | everybody, to a port that has a mapping            |
| port restricted | one for all destinations | addresses and ports that were sent to              |
| symmetric       | a new one for each       | the address and port that the mapping was made for |
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

MAPPED = "mapped"
"""The ipset of the inner addresses and ports that a full cone has mapped."""
MAPPING_LIFE = 300
"""Seconds after the last packet from inside."""
REFUSE = "refuse"
"""The chain that drops, and so counts, what is not let through."""


class Nat(StrEnum):
    """What a home router does to IPv4."""

    FULL_CONE = "full-cone"
    PORT_RESTRICTED = "port-restricted"
    SYMMETRIC = "symmetric"


@dataclass(frozen=True)
class Block:
    """What a firewall drops, both ways."""

    protocol: str
    """"udp" or "tcp"."""
    except_ports: tuple[int, ...] = ()
    """Packets from or to these ports pass; 15 at most."""
    larger_than: int = 0
    """Only packets of more bytes, and without a word: an MTU black hole."""


def router_rules(
    nat: Nat, version: int, blocks: Iterable[Block] = (), only_host: str | None = None
) -> str:
    """The rules of a router between its interfaces ``lan`` and ``wan``; ``only_host`` is the
    address that a full cone serves. IPv6 is not translated: hosts inside reach all, and only
    answers are let in."""
    nating = []
    mapping = []
    admitted = []
    if version == 4:
        # Linux keeps the inner port where it is free outside, and keeps to it for all destinations.
        nating = [
            f"-A POSTROUTING -o wan -j MASQUERADE{' --random' if nat is Nat.SYMMETRIC else ''}"
        ]
        if nat is Nat.FULL_CONE:
            # What Linux knows of a mapping it applies to answers alone. So all goes to the one host
            # that is there, and a set tells which of its ports have sent something.
            nating.append(f"-A PREROUTING -i wan -j DNAT --to-destination {only_host}")
            mapping = [
                f"-A FORWARD -i lan -o wan -j SET --add-set {MAPPED} src,src --exist --timeout "
                f"{MAPPING_LIFE}"
            ]
            admitted = [f"-A FORWARD -i wan -m set --match-set {MAPPED} dst,dst -j ACCEPT"]
    return _table("nat", ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"), nating) + _table(
        "filter",
        ("INPUT", "FORWARD", "OUTPUT", REFUSE),
        [
            f"-A {REFUSE} -j DROP",
            # Also for the NAT's sake: a packet that the router itself took in would occupy its
            # port, and the answer that punches a hole for it would leave from another.
            f"-A INPUT -i wan -m conntrack --ctstate NEW -j {REFUSE}",
            *(
                f"-A FORWARD {way} wan {_matches(block)} -j {REFUSE}"
                for block in blocks
                for way in ("-i", "-o")
            ),
            # What Linux does not translate must not leave with its inner address.
            f"-A FORWARD -m conntrack --ctstate INVALID -j {REFUSE}",
            *mapping,
            "-A FORWARD -i lan -j ACCEPT",
            "-A FORWARD -i wan -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
            *admitted,
            f"-A FORWARD -j {REFUSE}",
        ],
    )


def host_rules(blocks: Iterable[Block]) -> str:
    """The rules of a host; its loopback is left alone."""
    ways = ("INPUT ! -i lo", "OUTPUT ! -o lo")
    return _table(
        "filter",
        ("INPUT", "FORWARD", "OUTPUT", REFUSE),
        [
            f"-A {REFUSE} -j DROP",
            *(f"-A {way} {_matches(block)} -j {REFUSE}" for block in blocks for way in ways),
        ],
    )


def _matches(block: Block) -> str:
    ports = ",".join(map(str, block.except_ports))
    large = f" -m length --length {block.larger_than + 1}:65535" if block.larger_than else ""
    return f"-p {block.protocol}" + (f" -m multiport ! --ports {ports}" if ports else "") + large


def _table(name: str, chains: Iterable[str], rules: Iterable[str]) -> str:
    heads = (f":{chain} {'-' if chain == REFUSE else 'ACCEPT'} [0:0]" for chain in chains)
    return "\n".join((f"*{name}", *heads, *rules, "COMMIT", ""))
