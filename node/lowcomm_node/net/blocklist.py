"""Addresses whose new connections the kernel drops at our listening sockets.

In a flood, refusing is what costs: each connection that gRPC accepts is a TLS handshake, each call
half a millisecond. A classic BPF program on a listening socket (Linux, socket(7): SO_ATTACH_FILTER)
needs no privileges and sees segments before TCP answers them. Established connections stay. On
other systems the list is kept, but not enforced.
"""

import ctypes
import socket
import struct
import sys
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv4Network, ip_network

from lowcomm_node.system.logs import log
from lowcomm_node.system.quota import network_of

BLOCKED = 60.0
"""Seconds. A flooder that goes on after that is soon blocked again."""
MOST = 32
"""Addresses at once, the newest. While one program replaces another, both count against the
socket's option memory (20 kB)."""
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # asm-generic/socket.h; Python has no names for them
# Linux/bpf_common.h
_LOAD_WORD, _LOAD_HALF, _JUMP, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x28, 0x05, 0x15, 0x06
# Linux/filter.h: the kernel's notes on a packet; its IP header
_PROTOCOL, _NETWORK_HEADER = -0x1000, -0x100000
_IPV4, _IPV6 = 0x0800, 0x86DD  # linux/if_ether.h
_IPV4_SOURCE, _IPV6_SOURCE = 12, 8
_DROP, _ACCEPT = 0, 0xFFFFFFFF


class Blocklist:
    """Blocked networks and until when. No clock: time is an argument."""

    def __init__(self, seconds: float = BLOCKED, most: int = MOST) -> None:
        self._seconds = seconds
        self._most = most
        self._until: OrderedDict[str, float] = OrderedDict()
        self._enforced: frozenset[str] = frozenset()
        self._told = False

    def block(self, host: str, now: float) -> None:
        """Refuse new connections from an IPv4 address, or its /64 of IPv6, for a while from now
        on."""
        network = network_of(host)
        if network not in self.networks(now):
            log.info("blocklist.blocked", network=network, seconds=self._seconds)
        self._until[network] = now + self._seconds
        self._until.move_to_end(network)
        if len(self._until) > self._most:
            self._until.popitem(last=False)

    def networks(self, now: float) -> frozenset[str]:
        """The networks that are blocked now."""
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        return frozenset(self._until)

    def enforce(self, listeners: Iterable[socket.socket], now: float) -> None:
        """Have the kernel drop packets to these sockets from the networks that are blocked now."""
        networks = self.networks(now)
        if sys.platform != "linux" or not (networks or self._enforced):
            return
        for listener in listeners:
            try:
                _attach(listener, networks)
            # A kernel that has no such filters, as in some sandboxes; or too little memory
            except OSError as error:
                self._tell(error)
        # Where that failed the program before is there still: it is replaced next time, or taken
        # back at the end.
        self._enforced = networks

    def _tell(self, error: OSError) -> None:
        if not self._told:
            log.warning("blocklist.not_enforced", reason=str(error))
        self._told = True


def program(networks: Iterable[str]) -> bytes:
    """BPF instructions, 8 bytes each, that drop packets from IPv4 addresses and IPv6 /64
    networks."""
    four, six = [_load(_IPV4_SOURCE)], list[bytes]()
    for one in map(ip_network, sorted(networks)):
        if isinstance(one, IPv4Network):
            four += [_go_on_if(int(one.network_address), 1), _return(_DROP)]
        else:
            high, low = divmod(int(one.network_address) >> 64, 1 << 32)
            six += [
                _load(_IPV6_SOURCE),
                _go_on_if(high, 3),
                _load(_IPV6_SOURCE + 4),
                _go_on_if(low, 1),
                _return(_DROP),
            ]
    # Conditional jumps reach no further than 255 instructions, so none leads over a whole list.
    lists = [(_IPV4, [*four, _return(_ACCEPT)]), (_IPV6, [*six, _return(_ACCEPT)])]
    checks = [
        step
        for kind, checks in lists
        for step in (_go_on_if(kind, 1), _skip(1), _skip(len(checks)), *checks)
    ]
    return b"".join([_instruction(_LOAD_HALF, _PROTOCOL), *checks, _return(_ACCEPT)])


def _load(offset: int) -> bytes:
    return _instruction(_LOAD_WORD, _NETWORK_HEADER + offset)


def _go_on_if(value: int, else_skip: int) -> bytes:
    return _instruction(_JUMP_IF_EQUAL, value, 0, else_skip)


def _skip(count: int) -> bytes:
    return _instruction(_JUMP, count)


def _return(verdict: int) -> bytes:
    return _instruction(_RETURN, verdict)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value & 0xFFFFFFFF)  # struct sock_filter


def _attach(listener: socket.socket, networks: frozenset[str]) -> None:
    """Replace the program of a socket. Raises OSError."""
    if not networks:
        with suppress(FileNotFoundError):  # it has none: it is newer than the last one
            listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        return
    code = program(networks)
    buffer = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))  # struct sock_fprog
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, head)
