"""Checks of the line, as others see it: clock, UDP, IPv6, bandwidth, large packets."""

from collections.abc import Callable
from functools import wraps
from statistics import median

from lowcomm_node.dht.interface import MAX_CLOCK_OFFSET
from lowcomm_node.doctor.checks.access import replies, reply_of
from lowcomm_node.doctor.observations import Observations, Survey, is_public
from lowcomm_node.doctor.report import Finding, State
from lowcomm_node.net.addresses import host_of, port_of
from lowcomm_node.system.units import place, rate

CLOCK_WARNING = 1.0
"""Seconds."""
SLOW = 125_000
"""Bytes a second: 1 Mbit/s."""
GREETING = b"\x13/multistream/1.0.0\n"
"""What libp2p says first, to whoever calls."""
MAX_TRIED = 3
"""Addresses of IPv6."""


def asked_others(check: Callable[[Survey], Finding]) -> Callable[[Observations], Finding | None]:
    """A check that has nothing to say if the network was not looked at."""

    @wraps(check)
    def checked(seen: Observations) -> Finding | None:
        return check(seen.survey) if seen.survey is not None else None

    return checked


def unknown(name: str, survey: Survey, why: str = "") -> Finding:
    """A check that nobody could help with."""
    reasons = "; ".join(f"{at} {reason}" for at, reason in list(survey.silent.items())[:3])
    remedy = "ask another bootstrap server or peer: lowcomm-node doctor --peers ADDR"
    return Finding(name, State.UNKNOWN, why or f"nobody could be asked: {reasons}", remedy)


@asked_others
def clock(survey: Survey) -> Finding:
    """Whether our clock agrees with theirs."""
    if not survey.helpers:
        return unknown("clock", survey)
    count = len(survey.helpers)
    offset = median(helper.offset for helper in survey.helpers)
    off = f"{abs(offset):.1f} s {'behind' if offset > 0 else 'ahead of'}"
    value = f"{off} {count} that answered" if abs(offset) >= 0.05 else "right"
    if abs(offset) <= CLOCK_WARNING:
        return Finding("clock", State.OK, value, "", {"offset": offset})
    state = State.FAULT if abs(offset) > MAX_CLOCK_OFFSET else State.WARNING
    whom = (
        "the peer that answered; if it is that one's clock that is wrong, tell its owner, else"
        if count == 1
        else f"{count} peers:"
    )
    remedy = f"this clock is {off} {whom} run `timedatectl set-ntp true`"
    return Finding("clock", state, value, remedy, {"offset": offset})


@asked_others
def udp(survey: Survey) -> Finding:
    """Whether UDP gets out, and calls over it get in."""
    seen = survey.udp
    if seen is None:
        why = "nobody that answered offers UDP over IPv4" if survey.helpers else ""
        return unknown("udp", survey, why)
    figures = {"gets_out": seen.gets_out, "gets_in": seen.gets_in}
    if seen.gets_out:
        untried = f"; nobody tried to call ({seen.refused})" if seen.refused else ""
        calls = {True: ", and calls come in", False: "; calls do not come in", None: untried}
        return Finding("udp", State.OK, f"gets out{calls[seen.gets_in]}", "", figures)
    dial = seen.helper.rpartition("/p2p/")[0]
    return Finding(
        "udp",
        State.WARNING,
        f"nothing comes back from {dial}",
        f"let UDP out of {survey.outward or 'this machine'} (it did not reach {dial}): without it "
        "holes can't be punched through routers, and a lossy line is slower",
        figures,
    )


@asked_others
def ipv6(survey: Survey) -> Finding:
    """Whether IPv6 gets out, if this machine has an address of it."""
    own = [host for host in survey.subject.hosts if ":" in host and is_public(host)]
    if not own:
        value = "none here, and none is needed"
        return Finding("ipv6", State.OK, value, "", {"addresses": own, "gets_out": None})
    dials = [dial for helper in survey.helpers for dial in helper.dials if "/tcp/" in dial]
    places = [(host_of(dial) or "", port_of(dial) or 0) for dial in dials]
    six = [(host, port) for host, port in places if ":" in host and is_public(host)]
    if not six:
        value = f"{own[0]}; nobody that answered has IPv6, so it was not tried"
        return Finding("ipv6", State.UNKNOWN, value, "", {"addresses": own, "gets_out": None})
    gets_out = any(reply_of(*there, size=len(GREETING)) == GREETING for there in six[:MAX_TRIED])
    figures = {"addresses": own, "gets_out": gets_out}
    if gets_out:
        return Finding("ipv6", State.OK, "works", "", figures)
    value = f"{own[0]} does not get through to {place(*six[0])}"
    remedy = f"let {own[0]} out in your router's firewall; without it peers use IPv4"
    return Finding("ipv6", State.WARNING, value, remedy, figures)


@asked_others
def bandwidth(survey: Survey) -> Finding:
    """How fast the line is."""
    speed = survey.speed
    if speed is None:
        why = f"not measured: {survey.no_speed}" if survey.no_speed else ""
        return unknown("bandwidth", survey, why)
    figures = {"up": speed.up, "down": speed.down, "round_trip": speed.round_trip}
    value = (
        f"up {rate(speed.up)}, down {rate(speed.down)}, "
        f"round trip {1000 * speed.round_trip:.1f} ms, with {survey.helpers[0].host}"
    )
    slowest = min(speed.up, speed.down)
    if slowest >= SLOW:
        return Finding("bandwidth", State.OK, value, "", figures)
    few = f"{rate(slowest)} lets few exchanges finish in time"
    remedy = f"{few}: end what else uses the line, or raise --exchange-deadline"
    return Finding("bandwidth", State.WARNING, value, remedy, figures)


def packets(seen: Observations) -> Finding | None:
    """Whether large packets get through over TCP; None if nobody was there to tell."""
    survey = seen.survey
    if survey is not None and survey.packets:
        return _large_packets(survey)
    greetings = (one for one in replies(seen) if one.is_peers and one.data.startswith(GREETING))
    heard = [place(reply.host, reply.port) for reply in greetings]
    if not heard:
        return None
    few = f"{heard[0]} answers a few bytes, but no connection comes about"
    value = f"{few}: larger packets may be lost on the way"
    return Finding("packets", State.WARNING, value, _lower_mtu("", True), {"heard": heard})


def _large_packets(survey: Survey) -> Finding:
    asked = len(survey.packets)
    out = sum(one.out for one in survey.packets)
    into = sum(one.into for one in survey.packets)
    figures = {"asked": asked, "out": out, "in": into}
    lost = " and ".join(
        f"{way} ({f'{count} of {asked}' if count else 'nobody'} {verb})"
        for way, count, verb in (("out", out, "got one"), ("in", into, "got one through"))
        if count < asked
    )
    if not lost:
        return Finding("packets", State.OK, "large ones get through, out and in", "", figures)
    value = f"large ones over TCP do not get {lost}, while a few bytes do: "
    if out and into:
        value += "a line on the way to these peers loses them"
        remedy = "nothing, if others do well; else lower the MTU of this machine"
        return Finding("packets", State.WARNING, value, remedy, figures)
    value += "the line of this machine loses them (an MTU black hole)"
    return Finding("packets", State.FAULT, value, _lower_mtu(survey.outward, not out), figures)


def _lower_mtu(outward: str, out: bool) -> str:
    """What makes packets fit."""
    which = f"that has {outward}" if outward else "to the internet"
    probing = ", or have TCP find out: sysctl -w net.ipv4.tcp_mtu_probing=1" if out else ""
    return (
        f"lower the MTU of the interface {which}: ip link set dev NAME mtu 1280{probing}; the "
        "cause is mostly a router or VPN that drops ICMP (fragmentation needed)"
    )
