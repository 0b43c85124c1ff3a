"""A home's router in a container: it hides the home behind one address, and its line has a rate, a
delay and losses.

    home ── lan ──► near ═══ emulated line ═══► line ── masquerade ──► wan ── bootstrap, other
    routers home ◄── lan ── near ◄══ emulated line ════ line ◄── masquerade ── wan

``near`` and ``line`` are TUN devices in this one network namespace: what comes from the home is
routed into ``near``, the emulator (tests/net) carries it over as the line would, and it comes out
of ``line`` as if from elsewhere; back the same way. Nothing is asked of the kernel but TUN and
iptables. Only what was sent from inside is let in, and nothing goes to other homes past their
routers.

RATE in bits a second, DELAY in seconds each way, LOSS as a probability each way.
"""

import json
import os
import signal
import socket
import subprocess
import sys

sys.path.insert(0, "/opt/net")

from emulator import Emulator, make_tun
from services import find, only_in_a_container
from shaping import Link

HOME_TABLE, LINE_TABLE = "100", "101"


def run(*command: str, text: str | None = None) -> str:
    """Output of a command; ends this program where it fails."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def interfaces(wan_host: str) -> tuple[str, str, str]:
    """Names of the interfaces to the wan and to the home, and the wan's network."""
    routes = json.loads(run("ip", "-j", "route", "get", wan_host))
    wan = routes[0]["dev"]
    links = json.loads(run("ip", "-j", "-4", "addr"))
    others = [link["ifname"] for link in links if link["ifname"] not in ("lo", wan)]
    if len(others) != 1:
        sys.exit(f"error: a router has one wan and one home, this one has {wan} and {others}")
    networks = json.loads(run("ip", "-j", "route", "show", "dev", wan, "scope", "link"))
    return wan, others[0], networks[0]["dst"]


def rules(wan: str, lan: str, network: str) -> str:
    """Rules for iptables-restore.

    A packet that passes the namespace twice is tracked only the second time, when it is translated.
    """
    return f"""*raw
:PREROUTING ACCEPT
-A PREROUTING -i {lan} -j CT --notrack
-A PREROUTING -i near -j CT --notrack
COMMIT
*nat
:POSTROUTING ACCEPT
-A POSTROUTING -o {wan} -j MASQUERADE
COMMIT
*filter
:FORWARD DROP
:INPUT ACCEPT
-A INPUT -i {wan} -m conntrack --ctstate NEW -j DROP
-A FORWARD -i {lan} -o near -j ACCEPT
-A FORWARD -i near -o {lan} -j ACCEPT
-A FORWARD -i line -o {wan} -d {network} -j ACCEPT
-A FORWARD -i line -j REJECT --reject-with icmp-net-unreachable
-A FORWARD -i {wan} -o line -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT
COMMIT
"""


def set_up(wan_host: str) -> tuple[int, int]:
    """Descriptors of the two ends of the line: the home's, and that outside."""
    wan, lan, network = interfaces(wan_host)
    ends = tuple(make_tun(name) for name in ("near", "line"))
    for name in ("near", "line"):
        run("ip", "link", "set", "dev", name, "up")
    home = json.loads(run("ip", "-j", "route", "show", "dev", lan, "scope", "link"))[0]["dst"]
    run("iptables-restore", text=rules(wan, lan, network))
    # From the home all goes onto the line; what comes back for the home, too.
    run("ip", "route", "add", "default", "dev", "near", "table", HOME_TABLE)
    run("ip", "rule", "add", "iif", lan, "lookup", HOME_TABLE, "priority", HOME_TABLE)
    run("ip", "route", "add", home, "dev", "line", "table", LINE_TABLE)
    run("ip", "rule", "add", "iif", wan, "lookup", LINE_TABLE, "priority", LINE_TABLE)
    return ends


def main() -> None:
    """``router.py HOST``: a host on the wan, by which that is known."""
    only_in_a_container()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ends = set_up(find(sys.argv[1]))
    take = os.environ.get
    link = Link(
        rate=float(take("RATE", "20e6")),
        delay=float(take("DELAY", "0.03")),
        loss=float(take("LOSS", "0.01")),
    )
    ours, theirs = socket.socketpair()
    emulator = Emulator(theirs, ends, (link, link))
    print(
        f"a line of {link.rate / 1e6:g} Mbit/s, {1000 * link.delay:g} ms each way, "
        f"{100 * link.loss:g} % lost",
        flush=True,
    )
    try:
        emulator.run()
    finally:
        for way, counted in zip(
            ("out", "in"), (one.counters for one in emulator.directions), strict=True
        ):
            print(
                f"{way}: {counted.offered} packets, {counted.lost} lost, {counted.dropped} too "
                "many for the line",
                flush=True,
            )
        ours.close()


if __name__ == "__main__":
    main()
