"""An internet of network namespaces on one machine: public hosts, homes behind NAT, links as slow
and lossy as asked for.

    with Lab() as lab:
        server = lab.public("server")
        alice = lab.home("alice", nat=Nat.SYMMETRIC, link=Link(rate=20e6, delay=0.02, loss=0.01,
        seed=1)) server.popen(["lowcomm-bootstrap", "serve", "--host", server.address])
        alice.run(["ping", "-c", "1", server.address])
        alice.link.outage(True)
        alice.router.block(Block("udp"))

What it is made of: the internet is a router that hosts and home routers hang on, each by a pair of
veth devices or, where a `Link` is given, by an emulated link. So hosts of different owners share no
network, no broadcast and no multicast. The machine's own network is not touched; what a laboratory
has made is gone when it is closed, or its process has died."""

import re
from contextlib import ExitStack
from ipaddress import IPv4Network, IPv6Network
from itertools import count
from typing import Self

from links import EmulatedLink
from namespaces import (
    LaboratoryError,
    Namespace,
    Warden,
    end_processes,
    prefix,
    remove,
    remove_leftovers,
    tool,
)
from nat import MAPPED, MAPPING_LIFE, REFUSE, Block, Nat, host_rules, router_rules
from shaping import Link

# Not the ranges for documentation: what is not global by ipaddress or by libp2p is not told to
# others, or not dialed.
_PUBLIC4 = IPv4Network("44.128.0.0/16")
_PUBLIC6 = IPv6Network("2a00:128::/32")
_OWN = {4: 24, 6: 48}
"""Prefix of the network that each public address has to itself, as those of volunteers are: a node
counts what comes from one network together."""
_HOMES6 = IPv6Network("2a00:128:1::/48")
_HOME4 = IPv4Network("192.168.1.0/24")
"""The same in all homes, as it is outside of laboratories."""
_GATEWAY4, _GATEWAY6, _NEIGHBOUR6 = str(_PUBLIC4[1]), "fe80::1", "fe80::2"
_FIRST = 10
"""Number of the first public address."""
_FIRST_AT_HOME = 2
_WAITING = 10_000
"""Packets that a device keeps for the emulator: what waits, and what is dropped, is the emulator's
to decide."""
_NO_WAIT = {4: "", 6: "nodad"}
"""Nobody else has our addresses of IPv6; to make sure takes seconds."""

_laboratories = count(1)


class Host(Namespace):
    """A machine with an address of IPv4, IPv6 or both."""

    def __init__(self, prefix: str, name: str) -> None:
        if not re.fullmatch("[a-z0-9-]+", name):
            raise ValueError(
                f"a host can't be called {name!r}: small letters, digits and hyphens only"
            )
        super().__init__(prefix, name)
        self.addresses: dict[int, str] = {}
        """By version of IP."""
        self.router: Router | None = None
        """The home router that it is behind."""
        self.hosts: list[Host] = []
        """Behind it, where it is a router."""
        self.uplink: EmulatedLink | None = None
        self.device, self.far = "", ""
        """Its device to the internet, and the other end of that."""
        self._blocks: tuple[Block, ...] = ()
        self._has_rules = False

    @property
    def address(self) -> str:
        """Its own address; of IPv4 if it has one."""
        return self.addresses[min(self.addresses)]

    @property
    def link(self) -> EmulatedLink:
        """The emulated link to the internet, of itself or of its router. Raises LaboratoryError
        where there is none."""
        link = self.uplink if self.router is None else self.router.uplink
        if link is None:
            raise LaboratoryError(f"{self.name} has no emulated link: make it with link=Link()")
        return link

    def block(self, *blocks: Block) -> None:
        """Drop this from now on, and nothing else; without arguments, nothing."""
        self._blocks = blocks
        self._apply_rules()

    def refused(self) -> int:
        """Packets that blocks have dropped, and of a router its filter, since the blocks were
        changed."""
        if not self._has_rules:
            return 0
        return sum(
            int(line.split()[0])
            for command in ("iptables", "ip6tables")
            for line in tool(*self.command([command, "-nvxL", REFUSE])).splitlines()
            if " DROP " in line
        )

    def _apply_rules(self) -> None:
        for version, command in ((4, "iptables-restore"), (6, "ip6tables-restore")):
            tool(*self.command([command]), text=self._rules(version))
        self._has_rules = True

    def _rules(self, version: int) -> str:
        return host_rules(self._blocks)


class Router(Host):
    """A home router, and the hosts behind it."""

    def __init__(self, prefix: str, name: str, nat: Nat, inside6: IPv6Network) -> None:
        super().__init__(prefix, name)
        self.nat = nat
        self._prefix, self._inside6 = prefix, inside6
        self.sysctl({"ipv4/ip_forward": 1, "ipv6/conf/all/forwarding": 1})
        self.ip(
            "link add lan type bridge mcast_snooping 0",
            "link set lan addrgenmode none up",
            f"address add {_HOME4[1]}/{_HOME4.prefixlen} dev lan",
            f"address add {inside6[1]}/{inside6.prefixlen} dev lan nodad",
        )
        if nat is Nat.FULL_CONE:
            tool(
                *self.command(
                    ["ipset", "create", MAPPED, "hash:ip,port", "timeout", str(MAPPING_LIFE)]
                )
            )
        self._apply_rules()

    def host(self, name: str) -> Host:
        """A host behind this router, with addresses of the versions that the router has. Raises
        ValueError."""
        if self.hosts and self.nat is Nat.FULL_CONE:
            raise ValueError(f"{self.name} is a full cone, and serves {self.hosts[0].name} alone")
        host = Host(self._prefix, name)
        number = len(self.hosts) + _FIRST_AT_HOME
        self.hosts.append(host)
        host.router = self
        self.ip(
            f"link add p{number} type veth peer name eth0 netns {host.namespace}",
            f"link set p{number} addrgenmode none master lan up",
        )
        host.ip("link set eth0 addrgenmode none up")
        for version, network in ((4, _HOME4), (6, self._inside6)):
            if version in self.addresses:
                host.addresses[version] = str(network[number])
                host.ip(
                    f"address add {network[number]}/{network.prefixlen} dev eth0 "
                    f"{_NO_WAIT[version]}",
                    f"route add default via {network[1]}",
                )
        return host

    def _rules(self, version: int) -> str:
        return router_rules(self.nat, version, self._blocks, only_host=str(_HOME4[_FIRST_AT_HOME]))


def _public(network: IPv4Network | IPv6Network, number: int) -> str:
    """The ``number``-th public address."""
    return str(network[(number << network.max_prefixlen - _OWN[network.version]) + 1])


class Lab:
    """A laboratory, as a context; several may exist at once, and know nothing of each other."""

    def __init__(self, grace: float = 10.0) -> None:
        """``grace`` is how many seconds processes have to end when they are asked to."""
        self.prefix = prefix(next(_laboratories))
        self.grace = grace
        self._machines: list[Host] = []
        self._numbers = count(_FIRST)
        self._end = ExitStack()

    def __enter__(self) -> Self:
        try:
            remove_leftovers()
            self.warden = Warden(self.prefix)
            self._end.callback(self.warden.close)
            self._end.callback(remove, self.prefix)
            self._internet = Namespace(self.prefix, "internet")
            self._internet.sysctl({"ipv4/ip_forward": 1, "ipv6/conf/all/forwarding": 1})
            self._internet.ip(f"address add {_GATEWAY4}/32 dev lo")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes of all hosts, and remove everything."""
        try:
            end_processes(
                [host for machine in self._machines for host in (machine, *machine.hosts)],
                self.grace,
            )
        finally:
            self._end.close()

    def public(
        self,
        name: str,
        ip: tuple[int, ...] = (4,),
        link: Link | None = None,
        down: Link | None = None,
    ) -> Host:
        """A host with public addresses of these versions of IP. Its link to the internet is
        emulated if ``link`` is given; ``down`` is the direction to the host, where it differs."""
        host = Host(self.prefix, name)
        self._attach(host, "eth0", ip, next(self._numbers), link, down)
        return host

    def home(
        self,
        name: str,
        nat: Nat | str = Nat.PORT_RESTRICTED,
        ip: tuple[int, ...] = (4,),
        link: Link | None = None,
        down: Link | None = None,
    ) -> Host:
        """A host at home, behind a router of its own, ``host.router``, with which further hosts can
        be made. ``link`` and ``down`` are those of the router."""
        number = next(self._numbers)
        inside6 = IPv6Network((int(_HOMES6.network_address) + (number << 64), 64))
        router = Router(self.prefix, f"{name}-router", Nat(nat), inside6)
        self._attach(router, "wan", ip, number, link, down)
        if 6 in router.addresses:
            self._internet.ip(f"route add {inside6} via {router.addresses[6]}")
        return router.host(name)

    def move(self, host: Host) -> str:
        """Give a public host another address of IPv4, as providers do: nothing reaches the old one
        any more."""
        old, new = host.addresses[4], _public(_PUBLIC4, next(self._numbers))
        self._internet.ip(
            f"route del {old}/32 dev {host.far}", f"route add {new}/32 dev {host.far}"
        )
        host.ip(
            f"address del {old}/32 dev {host.device}",
            f"address add {new}/32 dev {host.device}",
            f"route replace default via {_GATEWAY4} dev {host.device} onlink",
        )
        host.addresses[4] = new
        return new

    def _attach(
        self,
        machine: Host,
        device: str,
        ip: tuple[int, ...],
        number: int,
        link: Link | None,
        down: Link | None,
    ) -> None:
        self._machines.append(machine)
        far = f"h{number}"
        machine.device, machine.far = device, far
        if link is None:
            self._internet.ip(
                f"link add {far} type veth peer name {device} netns {machine.namespace}"
            )
        else:
            machine.uplink = EmulatedLink(
                (machine, device), (self._internet, far), link, down or link
            )
            self._end.callback(machine.uplink.close)
        for side, name in ((self._internet, far), (machine, device)):
            side.ip(f"link set {name} addrgenmode none txqueuelen {_WAITING} up")
        for version, network, gateway in ((4, _PUBLIC4, _GATEWAY4), (6, _PUBLIC6, _GATEWAY6)):
            if version not in ip:
                continue
            address = machine.addresses[version] = _public(network, number)
            whole = f"{address}/{network.max_prefixlen}"
            if version == 6:
                # Neighbours look for each other under addresses of the link.
                self._internet.ip(f"address add {gateway}/64 dev {far} nodad")
                machine.ip(f"address add {_NEIGHBOUR6}/64 dev {device} nodad")
            self._internet.ip(f"route add {whole} dev {far}")
            machine.ip(
                f"address add {whole} dev {device} {_NO_WAIT[version]}",
                f"route add default via {gateway} dev {device} onlink",
            )
