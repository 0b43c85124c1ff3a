"""Findings on the network, as others see us: clock, router, calls from outside, UDP, IPv6, bandwidth. No I/O."""

import ipaddress
from collections.abc import Mapping
from statistics import median

from lowcomm_node.dht.knocks import MAX_CLOCK_OFFSET
from lowcomm_node.doctor import advice
from lowcomm_node.doctor.findings import Finding, State
from lowcomm_node.doctor.nat import Nat, infer, is_public
from lowcomm_node.doctor.sights import Subject, Survey
from lowcomm_node.system.formatting import place, rate
from lowcomm_protocol.peers.probes import Kind

CLOCK_WARNING = 1.0
"""Seconds."""
SLOW = 125_000
"""Bytes a second: 1 Mbit/s."""
_WAYS = {Kind.DIRECT: "direct calls", Kind.TCP: "libp2p over TCP", Kind.QUIC: "libp2p over UDP"}


def judge_reach(subject: Subject, survey: Survey) -> list[Finding]:
    """All of them."""
    return [look(subject, survey) for look in (_clock, _nat, _outside, _udp, _ipv6, _bandwidth)]


def _clock(subject: Subject, survey: Survey) -> Finding:
    offsets = [helper.offset for helper in survey.helpers]
    if not offsets:
        return _nobody("clock", survey)
    offset = median(offsets)
    state = (
        State.FAULT if abs(offset) > MAX_CLOCK_OFFSET else State.WARNING if abs(offset) > CLOCK_WARNING else State.OK
    )
    where = "behind" if offset > 0 else "ahead of"
    value = f"{abs(offset):.1f} s {where} {len(offsets)} that answered" if abs(offset) >= 0.05 else "right"
    remedy = advice.set_clock(offset, len(offsets)) if state is not State.OK else ""
    return Finding(name="clock", state=state, value=value, remedy=remedy, figures={"offset": offset})


def kind_of_nat(subject: Subject, survey: Survey) -> Nat:
    """What kind of router is in between."""
    reached = survey.reached
    came_in = survey.udp.gets_in if survey.udp is not None and survey.udp.gets_in is not None else None
    # A public machine may let some ports in only: its own ports say more than a scout's.
    if all(helper.sees in subject.hosts for helper in survey.helpers):
        came_in = any(reached.values()) if reached else came_in
    return infer(subject.hosts, survey.sights, came_in)


def _nat(subject: Subject, survey: Survey) -> Finding:
    if not survey.helpers:
        return _nobody("nat", survey)
    kind = kind_of_nat(subject, survey)
    first = next(iter(survey.helpers))
    sees = next((helper.sees for helper in survey.helpers if helper.sees), "")
    router = f"a router is in between ({survey.outward or 'this machine'} is seen as {sees})"
    seen_by = f"{len(survey.helpers)} that answered" if len(survey.helpers) > 1 else "the only one that answered"
    value = {
        Nat.NONE: f"none: {sees} is an address of this machine",
        Nat.FIREWALL: f"none, but a firewall: {sees} is an address of this machine, and calls do not arrive",
        Nat.OPEN: f"{router}, and lets calls in: a full cone, or ports are forwarded",
        Nat.RESTRICTED: f"{router}, port restricted: calls do not arrive, but holes can be punched",
        Nat.SYMMETRIC: f"{router}, symmetric: it takes another port for each peer, so holes can rarely be punched",
        Nat.BEHIND: f"{router}; of which kind, {seen_by} can't tell alone: give --peers of another",
        Nat.UNKNOWN: f"not known: {first.host} is in this network, or on this machine",
    }[kind]
    if kind is Nat.OPEN and survey.udp is not None and not survey.udp.by_stranger:
        value = f"{router}, and lets calls in from where we have called"
    states = {Nat.SYMMETRIC: State.WARNING, Nat.FIREWALL: State.WARNING, Nat.UNKNOWN: State.UNKNOWN}
    state = states.get(kind, State.OK)
    remedy = advice.let_calls_in(subject, survey, kind is Nat.SYMMETRIC) if state is State.WARNING else ""
    if state is State.UNKNOWN:
        remedy = "ask somebody on the internet: lowcomm-node doctor --peers ADDR"
    figures = {"kind": kind.value, "seen": [place(sight.host, sight.port) for sight in survey.sights]}
    return Finding(name="nat", state=state, value=value, remedy=remedy, figures=figures)


def _outside(subject: Subject, survey: Survey) -> Finding:
    reached = survey.reached
    if not reached:
        refused = next((helper.refused for helper in survey.helpers if helper.refused), "")
        return _nobody("outside", survey, f"nobody tried to call this machine: {refused}" if refused else "")
    yes, no = _named(reached, True), _named(reached, False)
    state, value, remedy = State.OK, f"{yes} arrive", ""
    behind = kind_of_nat(subject, survey) not in (Nat.NONE, Nat.FIREWALL, Nat.UNKNOWN)
    if reached.get(Kind.DIRECT):
        value += f"; {no} do not" if no else ""
        if sees := _not_told(subject, survey):
            state, value = State.WARNING, f"{value}, but others are not told of {place(sees, subject.direct)}"
            remedy = advice.announce(subject, sees)
    elif any(reached.values()):
        state, remedy = State.WARNING, advice.let_calls_in(subject, survey, behind)
        value += f"; {no} do not, so others reach this machine through tunnels, which cost more"
    else:
        state, remedy = State.WARNING if subject.relays else State.FAULT, advice.let_calls_in(subject, survey, behind)
        value = f"calls do not arrive ({no}); {_way_round(subject, survey)}"
    if not any(helper.is_outside for helper in survey.helpers):
        value += " (tried from within this network only)"
    figures = {kind.name.lower(): ok for kind, ok in reached.items()} | {"relays": list(subject.relays)}
    return Finding(name="outside", state=state, value=value, remedy=remedy, figures=figures)


def _way_round(subject: Subject, survey: Survey) -> str:
    """How others reach us although no call arrives."""
    relays = " or ".join(relay[-6:] for relay in subject.relays)
    if not relays:
        return "no relay has a place for this machine either, so nobody reaches it"
    hole = "" if kind_of_nat(subject, survey) is Nat.SYMMETRIC else ", or by a punched hole"
    return f"others reach this machine through the relay {relays}{hole}"


def _named(reached: Mapping[Kind, bool], wanted: bool) -> str:
    names = [_WAYS[kind] for kind, ok in reached.items() if ok is wanted]
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _not_told(subject: Subject, survey: Survey) -> str:
    """The address at which we can be called and of which nobody knows; empty if there is none."""
    seen = next((helper.sees for helper in survey.helpers if (Kind.DIRECT, True) in helper.reached), "")
    told = [_number(address.rpartition(":")[0].strip("[]")) for address in subject.told]
    return "" if not seen or seen in told or None in told or not told else seen


def _number(host: str) -> str | None:
    """An IP address as we write it; None for a name, which may lead anywhere."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


def _udp(subject: Subject, survey: Survey) -> Finding:
    udp = survey.udp
    if udp is None:
        return _nobody("udp", survey, "nobody that answered offers UDP over IPv4" if survey.helpers else "")
    figures = {"gets_out": udp.gets_out, "gets_in": udp.gets_in}
    if not udp.gets_out:
        value = f"nothing comes back from {udp.helper.rpartition('/p2p/')[0]}"
        return Finding(name="udp", state=State.WARNING, value=value, remedy=advice.let_udp_out(survey), figures=figures)
    told = {True: "gets out, and calls come in", False: "gets out; calls do not come in", None: "gets out"}
    return Finding(name="udp", state=State.OK, value=told[udp.gets_in], figures=figures)


def _ipv6(subject: Subject, survey: Survey) -> Finding:
    own = [host for host in subject.hosts if ":" in host and is_public(host)]
    ipv6 = survey.ipv6
    reached = dict(ipv6.reached) if ipv6 is not None else {}
    figures = {"addresses": own, "gets_out": ipv6.gets_out if ipv6 is not None else None}
    if ipv6 is not None and ipv6.gets_out:
        calls = f"; {yes} arrive" if (yes := _named(reached, True)) else "; calls do not arrive" if reached else ""
        value = f"works{calls}"
        return Finding(name="ipv6", state=State.OK, value=value, figures=figures)
    if not own:
        return Finding(name="ipv6", state=State.OK, value="none here, and none is needed", figures=figures)
    if ipv6 is None:
        value = f"{own[0]}; nobody that answered has IPv6, so it was not tried"
        return Finding(name="ipv6", state=State.UNKNOWN, value=value, figures=figures)
    remedy = f"let {own[0]} out in your router's firewall; without it peers use IPv4"
    value = f"{own[0]} does not get through to {ipv6.helper.rpartition('/p2p/')[0]}"
    return Finding(name="ipv6", state=State.WARNING, value=value, remedy=remedy, figures=figures)


def _bandwidth(subject: Subject, survey: Survey) -> Finding:
    speed = survey.speed
    if speed is None:
        return _nobody("bandwidth", survey, f"not measured: {survey.no_speed}" if survey.no_speed else "")
    slow = min(speed.up, speed.down) < SLOW
    value = f"up {rate(speed.up)}, down {rate(speed.down)}, round trip {1000 * speed.round_trip:.1f} ms, "
    value += f"with {survey.helpers[0].host}"
    remedy = (
        f"{rate(min(speed.up, speed.down))} lets few exchanges finish in time: end what else uses the line, or raise "
        "--exchange-deadline"
    )
    figures = {"up": speed.up, "down": speed.down, "round_trip": speed.round_trip}
    state = State.WARNING if slow else State.OK
    return Finding(name="bandwidth", state=state, value=value, remedy=remedy if slow else "", figures=figures)


def _nobody(name: str, survey: Survey, why: str = "") -> Finding:
    """Nobody could be asked."""
    reasons = "; ".join(f"{address} {reason}" for address, reason in survey.silent[:3])
    remedy = "ask another bootstrap server or peer: lowcomm-node doctor --peers ADDR"
    return Finding(name=name, state=State.UNKNOWN, value=why or f"nobody could be asked: {reasons}", remedy=remedy)
