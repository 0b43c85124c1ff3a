"""Remedies, with this machine's own values in them. No I/O."""

from lowcomm_node.doctor.sights import Subject, Survey
from lowcomm_node.system.formatting import place


def let_calls_in(subject: Subject, survey: Survey, behind_router: bool) -> str:
    """How calls from outside can arrive."""
    return _forward(subject, survey) if behind_router else _open_firewall(subject)


def announce(subject: Subject, sees: str) -> str:
    """How others learn of an address that they can call."""
    return f"start the node with {_flags(subject)} --announce {place(sees, subject.direct)}, so that others know where to call"


def let_udp_out(survey: Survey) -> str:
    """How UDP can be used."""
    towards = survey.udp.helper.split("/")[2:5] if survey.udp is not None else []
    where = f"{towards[0]} port {towards[2]}" if len(towards) == 3 else "any address"
    return (
        f"let UDP out of {survey.outward or 'this machine'} (it did not reach {where}): without it holes can't be punched "
        "through routers, and a lossy line is slower"
    )


def set_clock(offset: float, peers: int) -> str:
    """How the clock is set right; ``offset``: seconds that the others are ahead."""
    where = "behind" if offset > 0 else "ahead of"
    whom = (
        "the peer that answered; if it is that one's clock that is wrong, tell its owner, else"
        if peers == 1
        else (f"{peers} peers:")
    )
    return f"this clock is {abs(offset):.1f} s {where} {whom} run `timedatectl set-ntp true`"


def use_bbr(congestion: str) -> str:
    """How TCP stops halving its rate at each lost packet."""
    return (
        f"run `sysctl -w net.ipv4.tcp_congestion_control=bbr net.core.default_qdisc=fq` as root (now it is {congestion}), "
        "and put both lines into /etc/sysctl.d/ to keep them"
    )


def _forward(subject: Subject, survey: Survey) -> str:
    host = survey.outward or "this machine"
    rules = [f"TCP port {subject.direct} to {host}"] if subject.direct is not None else []
    rules += [f"TCP and UDP port {dht} to {host}"] if (dht := subject.dht_port) is not None else []
    sees = next((helper.sees for helper in survey.helpers if helper.sees), None)
    told = f" --announce {place(sees, subject.direct)}" if sees and subject.direct is not None else ""
    return f"forward {' and '.join(rules)} in your router, and start the node with {_flags(subject)}{told}"


def _open_firewall(subject: Subject) -> str:
    direct, dht = subject.direct, subject.dht_port
    rules = [f"{direct}/tcp"] if direct is not None else []
    rules += [f"{dht}/tcp", f"{dht}/udp"] if dht is not None else []
    commands = " && ".join(f"ufw allow {rule}" for rule in rules)
    return (
        f"let these ports in, in the firewall of this machine and of its provider (such as `{commands}`), and start the "
        f"node with {_flags(subject)}"
    )


def _flags(subject: Subject) -> str:
    direct, dht = subject.direct, subject.dht_port
    flags = [f"--port {direct}"] if direct is not None else []
    flags += [f"--dht-port {dht}"] if dht is not None else []
    return " ".join(flags)
