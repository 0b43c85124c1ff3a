"""Findings on what lies between this machine and everybody: names, login pages, large packets. No I/O."""

from collections.abc import Sequence
from urllib.parse import urlsplit

from lowcomm_node.doctor.findings import Finding, State
from lowcomm_node.doctor.sights import LIBP2P, Names, Silence, Survey
from lowcomm_node.system.formatting import clean, place

LOGIN = 511
"""Network Authentication Required, RFC 6585."""


def judge_names(names: Names | None) -> list[Finding]:
    """Whether names can be resolved; nothing where that was not looked at."""
    if names is None:
        return []
    figures = {"tried": dict(names.tried), "servers": list(names.servers)}
    failed = [f"{name}: {reason}" for name, reason in names.tried if reason]
    if not failed:
        value = f"{', '.join(name for name, _ in names.tried)} can be resolved"
        return [Finding(name="names", state=State.OK, value=value, figures=figures)]
    servers = f"asked {', '.join(names.servers)}" if names.servers else "/etc/resolv.conf names no name server"
    state = State.FAULT if names.used else State.WARNING
    remedy = "name a server that answers in /etc/resolv.conf, or give addresses as numbers: /ip4/..."
    if not names.used:
        remedy += "; the addresses of this node are numbers, so it trains, but can fetch nothing by name"
    value = f"{'; '.join(failed)} ({servers})"
    return [Finding(name="names", state=state, value=value, remedy=remedy, figures=figures)]


def judge_silence(silence: Sequence[Silence]) -> list[Finding]:
    """Whether a login page, or a line that loses packets, is why nobody answers; nothing where neither is seen."""
    for one in silence:
        if page := _login_page(one):
            remedy = f"open {page} in a browser and log in, or use another network"
            value = f"a web page answers in the place of {place(one.host, one.port)}: this network wants a login first"
            figures = {"page": page, "host": one.host, "port": one.port}
            return [Finding(name="portal", state=State.FAULT, value=value, remedy=remedy, figures=figures)]
    heard = [place(one.host, one.port) for one in silence if one.is_its_own and LIBP2P in one.reply[:32]]
    if not heard:
        return []
    value = f"{heard[0]} answers a few bytes, but no connection comes about: larger packets may be lost on the way"
    return [
        Finding(name="packets", state=State.WARNING, value=value, remedy=_lower_mtu("", True), figures={"heard": heard})
    ]


def _login_page(one: Silence) -> str:
    """Where a browser is sent by what answers in the place of another; empty if that is no login page."""
    head = one.reply.partition(b"\r\n\r\n")[0].decode("latin-1").splitlines()
    words = head[0].split() if head else []
    if len(words) < 2 or not words[0].startswith("HTTP/") or not words[1].isdecimal():
        return ""
    fields = (line.partition(":") for line in head[1:])
    location = next((clean(value.strip()) for name, _, value in fields if name.strip().lower() == "location"), "")
    here = f"http://{place(one.host, one.port)}/"
    host = urlsplit(location).hostname or ""
    elsewhere = bool(host) and host != one.host and words[1].startswith("3")
    # Where a peer listens there is no web page; at the port of the web a host may have one of its own.
    if elsewhere or one.is_its_own or int(words[1]) == LOGIN:
        return location[:200] if elsewhere else here
    return ""


def judge_packets(survey: Survey) -> list[Finding]:
    """Whether large packets get through over TCP; nothing where nobody was there to tell."""
    told = survey.packets
    if not told:
        return []
    out, into = sum(one.out for one in told), sum(one.into for one in told)
    figures = {"asked": len(told), "out": out, "in": into}
    lost = " and ".join(
        f"{way} ({'nobody' if not count else f'{count} of {len(told)}'} {verb})"
        for way, count, verb in (("out", out, "got one"), ("in", into, "got one through"))
        if count < len(told)
    )
    if not lost:
        return [Finding(name="packets", state=State.OK, value="large ones get through, out and in", figures=figures)]
    everywhere = not out or not into
    if not everywhere:
        value = (
            f"large ones over TCP do not get {lost}, while a few bytes do: a line on the way to these peers loses them"
        )
        remedy = "nothing, if others do well; else lower the MTU of this machine"
        return [Finding(name="packets", state=State.WARNING, value=value, remedy=remedy, figures=figures)]
    value = (
        f"large ones over TCP do not get {lost}, while a few bytes do: the line of this machine loses them "
        "(an MTU black hole)"
    )
    remedy = _lower_mtu(survey.outward or "", not out)
    return [Finding(name="packets", state=State.FAULT, value=value, remedy=remedy, figures=figures)]


def _lower_mtu(outward: str, out: bool) -> str:
    """What makes packets fit."""
    which = f"of the interface that has {outward}" if outward else "of the interface to the internet"
    probing = ", or have TCP find out: sysctl -w net.ipv4.tcp_mtu_probing=1" if out else ""
    return (
        f"lower the MTU {which}: ip link set dev NAME mtu 1280{probing}; the cause is mostly a router or VPN that drops ICMP "
        "(fragmentation needed)"
    )
