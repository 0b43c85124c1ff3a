"""Checks of calls from outside: what router is in between, and which of our ports they reach."""

import ipaddress
from collections import defaultdict
from collections.abc import Iterable, Mapping
from enum import StrEnum

from lowcomm_node.doctor.checks.network import asked_others, unknown
from lowcomm_node.doctor.observations import ObservedAddress, Subject, Survey, is_public
from lowcomm_node.doctor.report import Finding, State
from lowcomm_node.system.units import place
from lowcomm_protocol.peers.probes import Kind

_WAYS = {
    Kind.DIRECT: "direct calls",
    Kind.TCP: "libp2p over TCP",
    Kind.QUIC: "libp2p over UDP",
}


class Nat(StrEnum):
    """The kind of router between this machine and the internet, and what shows it."""

    NONE = "none"
    """We are seen at an address of our own, and calls arrive."""
    FIREWALL = "firewall"
    """We are seen at an address of our own, but calls do not arrive."""
    OPEN = "open"
    """We are seen at another address, and calls arrive: a full cone, or ports are forwarded."""
    RESTRICTED = "port-restricted"
    """Two helpers see the same port, and calls do not arrive."""
    SYMMETRIC = "symmetric"
    """Two helpers see different ports for the same one of ours."""
    BEHIND = "behind-nat"
    """One helper sees us, and calls do not arrive: one of the two above."""
    UNKNOWN = "unknown"
    """Nobody sees us from outside of our own network."""


def kind_of_nat(
    own_hosts: Iterable[str],
    observed: Iterable[ObservedAddress],
    calls_come_in: bool | None,
) -> Nat:
    """The kind of router.

    ``calls_come_in``: whether a call did from somebody we had not called; None if not known.
    """
    outside = [seen for seen in observed if is_public(seen.host)]
    if not outside:
        return Nat.UNKNOWN
    own = set(own_hosts)
    if all(seen.host in own for seen in outside):
        return Nat.FIREWALL if calls_come_in is False else Nat.NONE
    if calls_come_in:
        return Nat.OPEN
    by_socket: defaultdict[str, dict[str, tuple[str, int]]] = defaultdict(dict)
    for seen in outside:
        by_socket[seen.socket][seen.helper] = (seen.host, seen.port)
    seen_twice = [set(places.values()) for places in by_socket.values() if len(places) > 1]
    if any(len(places) > 1 for places in seen_twice):
        return Nat.SYMMETRIC
    return Nat.RESTRICTED if seen_twice and calls_come_in is False else Nat.BEHIND


def _nat_of(survey: Survey) -> Nat:
    reached, hosts = survey.reached, survey.subject.hosts
    came_in = survey.udp.gets_in if survey.udp is not None else None
    # A public machine may let some ports in only: its own ports say more than those of probes.
    if reached and all(helper.sees in hosts for helper in survey.helpers):
        came_in = any(reached.values())
    return kind_of_nat(hosts, survey.observed, came_in)


@asked_others
def nat(survey: Survey) -> Finding:
    """The kind of router in between."""
    if not survey.helpers:
        return unknown("nat", survey)
    kind = _nat_of(survey)
    sees = next((helper.sees for helper in survey.helpers if helper.sees), "")
    own = f"{sees} is an address of this machine"
    router = f"a router is in between ({survey.outward or 'this machine'} is seen as {sees})"
    count = len(survey.helpers)
    seen_by = f"{count} that answered" if count > 1 else "the only one that answered"
    each = "it takes another port for each peer, so holes can rarely be punched"
    is_cone = survey.udp is None or survey.udp.by_stranger
    value = {
        Nat.NONE: f"none: {own}",
        Nat.FIREWALL: f"none, but a firewall: {own}, and calls do not arrive",
        Nat.OPEN: f"{router}, and lets calls in: a full cone, or ports are forwarded"
        if is_cone
        else f"{router}, and lets calls in from where we have called",
        Nat.RESTRICTED: f"{router}, port restricted: calls do not arrive, but holes can be punched",
        Nat.SYMMETRIC: f"{router}, symmetric: {each}",
        Nat.BEHIND: f"{router}; of which kind, {seen_by} can't tell alone: give --peers of another",
        Nat.UNKNOWN: f"not known: {survey.helpers[0].host} is in this network, or on this machine",
    }[kind]
    state, remedy = State.OK, ""
    if kind in (Nat.SYMMETRIC, Nat.FIREWALL):
        state, remedy = State.WARNING, _let_calls_in(survey, kind)
    elif kind is Nat.UNKNOWN:
        state = State.UNKNOWN
        remedy = "ask somebody on the internet: lowcomm-node doctor --peers ADDR"
    seen = [place(address.host, address.port) for address in survey.observed]
    return Finding("nat", state, value, remedy, {"kind": kind.value, "seen": seen})


@asked_others
def outside(survey: Survey) -> Finding:
    """Whether calls arrive."""
    reached, subject = survey.reached, survey.subject
    if not reached:
        refused = next((helper.refused for helper in survey.helpers if helper.refused), "")
        why = f"nobody tried to call this machine: {refused}" if refused else ""
        return unknown("outside", survey, why)
    yes, no = _ways(reached, True), _ways(reached, False)
    kind = _nat_of(survey)
    state, value, remedy = State.WARNING, f"{yes} arrive", ""
    if reached.get(Kind.DIRECT):
        value += f"; {no} do not" if no else ""
        if sees := _not_told(survey):
            at = place(sees, subject.direct)
            value += f", but others are not told of {at}"
            start = f"start the node with {_flags(subject)} --announce {at}"
            remedy = f"{start}, so that others know where to call"
        else:
            state = State.OK
    else:
        remedy = _let_calls_in(survey, kind)
        if yes:
            value += f"; {no} do not, so others reach this machine through tunnels, which cost more"
        else:
            value = f"calls do not arrive ({no}); {_way_round(subject, kind)}"
            state = State.WARNING if subject.relays else State.FAULT
    if not any(helper.is_outside for helper in survey.helpers):
        value += " (tried from within this network only)"
    figures = {way.name.lower(): ok for way, ok in reached.items()}
    return Finding("outside", state, value, remedy, {**figures, "relays": list(subject.relays)})


def _ways(reached: Mapping[Kind, bool], wanted: bool) -> str:
    """The ways in that are reached, or are not, in words."""
    told = [_WAYS[kind] for kind, ok in reached.items() if ok is wanted]
    return " and ".join(filter(None, (", ".join(told[:-1]), *told[-1:])))


def _way_round(subject: Subject, kind: Nat) -> str:
    """How others reach us although no call arrives."""
    if not subject.relays:
        return "no relay has a place for this machine either, so nobody reaches it"
    hole = "" if kind is Nat.SYMMETRIC else ", or by a punched hole"
    relays = " or ".join(relay[-6:] for relay in subject.relays)
    return f"others reach this machine through the relay {relays}{hole}"


def _not_told(survey: Survey) -> str:
    """The address at which we can be called but that others are not told; empty if none."""
    callers = (helper.sees for helper in survey.helpers if helper.reached.get(Kind.DIRECT))
    sees = next(callers, "")
    told = [_number(address.rpartition(":")[0].strip("[]")) for address in survey.subject.told]
    return "" if not sees or sees in told or None in told or not told else sees


def _number(host: str) -> str | None:
    """An IP address in its usual spelling; None for a name, which may lead anywhere."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


def _let_calls_in(survey: Survey, kind: Nat) -> str:
    """What lets calls from outside in: ports to forward in a router, or to open in a firewall."""
    subject = survey.subject
    direct, dht = subject.direct, subject.dht_port
    if kind in (Nat.NONE, Nat.FIREWALL, Nat.UNKNOWN):
        rules = [f"{direct}/tcp"] if direct is not None else []
        rules += [f"{dht}/tcp", f"{dht}/udp"] if dht is not None else []
        commands = " && ".join(f"ufw allow {rule}" for rule in rules)
        return (
            f"let these ports in, in the firewall of this machine and of its provider (such as "
            f"`{commands}`), and start the node with {_flags(subject)}"
        )
    host = survey.outward or "this machine"
    rules = [f"TCP port {direct} to {host}"] if direct is not None else []
    rules += [f"TCP and UDP port {dht} to {host}"] if dht is not None else []
    sees = next((helper.sees for helper in survey.helpers if helper.sees), None)
    flags = _flags(subject)
    flags += f" --announce {place(sees, direct)}" if sees and direct is not None else ""
    return f"forward {' and '.join(rules)} in your router, and start the node with {flags}"


def _flags(subject: Subject) -> str:
    flags = {"--port": subject.direct, "--dht-port": subject.dht_port}
    return " ".join(f"{flag} {port}" for flag, port in flags.items() if port is not None)
