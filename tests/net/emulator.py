"""The process behind an emulated link: it carries packets between two TUN devices, each in a
namespace of its own.

Started by ``links.py`` with an open socket, on which commands come as lines of JSON, and each is
answered by one. It ends, and the devices with it, when the other end of the socket is closed, also
by the death of whoever held it."""

import ctypes
import fcntl
import gc
import json
import os
import select
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from struct import pack
from time import monotonic
from typing import Any

from segments import VNET, is_multicast
from shaping import Direction, Link

# linux/if_tun.h
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_CHECKSUMS_AND_TCP, _UDP = 0x01 | 0x02 | 0x04, 0x20 | 0x40
_CLONE_NEWNET = 0x40000000
AT_ONCE = 64
"""Pieces read from one device before the other is looked at."""
LARGEST = 65536 + VNET.size


def open_tun(namespace: str, name: str) -> int:
    """A TUN device in a namespace, as a descriptor that does not block; this process stays there.
    Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(namespace).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(
                ctypes.get_errno(), f"can't enter {namespace}: {os.strerror(ctypes.get_errno())}"
            )
    return make_tun(name)


def make_tun(name: str) -> int:
    """A TUN device where this process is, as a descriptor that does not block. Raises OSError."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(
        descriptor,
        _TUNSETIFF,
        pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR),
    )
    try:
        fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _CHECKSUMS_AND_TCP | _UDP)
    except OSError:  # before Linux 6.2: UDP comes in single packets
        fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _CHECKSUMS_AND_TCP)
    return descriptor


class Emulator:
    """Both directions of a link, and the socket of its commands."""

    def __init__(
        self, control: socket.socket, devices: tuple[int, int], links: tuple[Link, Link]
    ) -> None:
        self.control, self.devices = control, devices
        self.directions = tuple(
            Direction(link, name) for link, name in zip(links, ("up", "down"), strict=True)
        )
        self.commands = b""

    def run(self) -> None:
        """Until the control socket is closed."""
        ways = tuple(zip(self.devices, reversed(self.devices), self.directions, strict=True))
        readers = [self.control.fileno(), *self.devices]
        while True:
            times = [time for direction in self.directions if (time := direction.next) is not None]
            timeout = max(0.0, min(times) - monotonic()) if times else None
            # Not epoll: its timeout counts milliseconds.
            readable, _, _ = select.select(readers, (), (), timeout)
            if readers[0] in readable and not self.obey():
                return
            for source, target, direction in ways:
                if source in readable:
                    take(source, direction)
                deliver(direction, target)

    def obey(self) -> bool:
        """Carry out what has come; false at the end."""
        try:
            received = self.control.recv(65536)
        except ConnectionResetError:
            return False
        *lines, self.commands = (self.commands + received).split(b"\n")
        for line in lines:
            answer = self.carry_out(json.loads(line))
            self.control.sendall(json.dumps(answer).encode() + b"\n")
        return bool(received)

    def carry_out(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command."""
        for direction, settings in zip(self.directions, command.get("links", ()), strict=False):
            direction.link = Link(**settings)
        if "outage" in command:
            for direction in self.directions:
                direction.outage(command["outage"])
        return {"counters": [asdict(direction.counters) for direction in self.directions]}


def take(device: int, direction: Direction) -> None:
    """Read what a device sends."""
    now = monotonic()
    for _ in range(AT_ONCE):
        try:
            piece = os.read(device, LARGEST)
        except BlockingIOError:
            return
        # The kernel looks for routers and tells of groups of its own accord; that would change
        # which packets are lost.
        if not is_multicast(piece):
            direction.offer(piece, now)


def deliver(direction: Direction, device: int) -> None:
    """Hand over what has arrived."""
    now = monotonic()
    while (piece := direction.due(now)) is not None:
        try:
            os.write(device, piece)
        except OSError:
            direction.counters.refused += 1


def main() -> None:
    """``emulator.py SOCKET JSON``: the number of the control socket, and namespaces, names and
    links."""
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(sys.argv[2])
    devices = tuple(open_tun(namespace, name) for namespace, name in settings["devices"])
    emulator = Emulator(control, devices, tuple(Link(**link) for link in settings["links"]))
    control.sendall(b'{"ready": true}\n')
    gc.disable()  # nothing here makes cycles
    emulator.run()


if __name__ == "__main__":
    main()
