"""What an exchange gets of an emulated link of 200 Mbit/s and 50 ms: 64 MB in each direction at
once. Needs root.

    python benchmarks/links.py [--megabytes 64] [--runs 3] [--only clean-direct ...]

Two hosts in network namespaces, joined by a link with 25 ms each way (50 ms there and back), and
each with a node's real channels, server, tunnels and p2pd. A call of the Exchange service carries
contents both ways at once, in chunks as exchanges send them. Beside it, in the same run over the
same link: one TCP connection that does the same with plain sockets, and one stream of libp2p, of
which tunnels are made.

    clean    no loss; TCP with reno, close to what most machines have, and with bbr, where the
             kernel has it
    lossy    1 % of packets lost in each direction
    chosen   the node chooses route and congestion control by what it measures: the last calls
             count

Medians; all runs into benchmarks/results/links.json, a table to the terminal.
"""

import asyncio
import json
import os
import platform
import socket
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from threading import Thread
from time import perf_counter
from typing import Any

import kit
from ends import End, Ends, add_roles, ask, cpu_of, forever, record_of, say, set_up

RATE, DELAY, LOSS = 200e6, 0.025, 0.01
CHUNK = 256 * 1024
DEADLINE = 570.0
OUT = kit.RESULTS / "links.json"
WARM = 4
"""Calls before those that count where the node chooses: one by each route, and one to see what came
of that."""


@dataclass(frozen=True)
class Way:
    """One thing to measure."""

    way: str
    """"raw", "stream" (of libp2p alone), "direct", "tunnel" or "chosen"."""
    loss: float = 0.0
    congestion: str = "reno"
    """Of both hosts, as their systems are set; a node may choose another for a connection."""
    megabytes: float = 1.0
    """Of what is asked for: a slow line is not given hours."""
    over: str = ""
    """What libp2p is to use: "/tcp/" or "/quic-v1"; empty: whatever it prefers."""
    goal: str = ""


WAYS = {
    "clean-raw": Way("raw"),
    "clean-direct": Way("direct", goal="75 % of the link"),
    "clean-tunnel": Way("tunnel", goal="55 % of the link"),
    "clean-stream": Way("stream"),
    "clean-tunnel-tcp": Way("tunnel", over="/tcp/", goal="55 % of the link"),
    "clean-stream-tcp": Way("stream", over="/tcp/"),
    "clean-chosen": Way("chosen", goal="75 % of the link"),
    "clean-raw-bbr": Way("raw", congestion="bbr"),
    "clean-direct-bbr": Way("direct", congestion="bbr", goal="75 % of the link"),
    "lossy-raw": Way("raw", loss=LOSS, megabytes=1 / 8),
    "lossy-direct": Way("direct", loss=LOSS, megabytes=1 / 8),
    "lossy-tunnel": Way("tunnel", loss=LOSS, megabytes=1 / 8),
    "lossy-chosen": Way("chosen", loss=LOSS, goal="30 Mbit/s, by the route that it chose"),
    "lossy-raw-bbr": Way("raw", loss=LOSS, congestion="bbr", megabytes=1 / 2),
    "lossy-chosen-bbr": Way(
        "chosen",
        loss=LOSS,
        congestion="bbr",
        megabytes=1 / 4,
        goal="30 Mbit/s, by the route that it chose",
    ),
}


def main() -> None:
    """Measure and print; with --role, be one end of a measurement."""
    parser = kit.parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=64, help="in each direction")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=list(WAYS), default=list(WAYS))
    add_roles(parser, "callee", "caller")
    arguments = parser.parse_args()
    if arguments.role:
        play(arguments.role, arguments.told)
        return
    from namespaces import missing

    if reason := missing():
        sys.exit(f"no laboratory on this machine: {reason}")
    size = arguments.megabytes * 2**20
    figures = kit.read(OUT).get("ways", {}) if len(arguments.only) < len(WAYS) else {}
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release().split('-')[0]}"
    )
    about = {"machine": machine, "link": {"rate": RATE, "delay": DELAY, "loss": LOSS}}
    for name in filter(is_possible, arguments.only):
        figures[name] = measure(WAYS[name], size, arguments.runs)
        ways = {each: figures[each] for each in WAYS if each in figures}
        kit.write(OUT, about | {"ways": ways})
    print(
        f"{machine}; load {os.getloadavg()[0]:.1f}; {RATE / 1e6:.0f} Mbit/s, {2e3 * DELAY:.0f} ms, "
        "both ways at once"
    )
    print(
        f"{'way':18} {'Mbit/s':>8} {'of link':>8} {'s':>6} {'CPU: link':>10} {'ends':>6}   route   "
        " goal"
    )
    for name, figure in figures.items():
        share, goal = figure["rate"] * 8 / RATE, WAYS[name].goal
        seconds, (emulator, ends) = median(figure["seconds"]), figure["cpu"].values()
        print(
            f"{name:18} {figure['rate'] * 8 / 1e6:8.1f} {share:8.0%} {seconds:6.1f} "
            f"{emulator:10.1f} {ends:6.1f}   {figure['route'] or '-':8} {goal}"
        )


def is_possible(name: str) -> bool:
    """Whether this kernel has the congestion control."""
    return (
        WAYS[name].congestion
        in Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    )


def measure(way: Way, size: int, runs: int) -> dict[str, Any]:
    """Median rate of each direction, bytes a second, and all runs; the route of the last one."""
    from laboratory import Lab
    from shaping import Link

    size = max(CHUNK, int(size * way.megabytes) // CHUNK * CHUNK)
    # A queue of twice what is under way: a home router's.
    link = Link(rate=RATE, delay=DELAY, loss=way.loss, queue=int(RATE / 8 * 0.1), seed=1)
    with tempfile.TemporaryDirectory(prefix="lc-", dir="/tmp") as folder, Lab() as lab:
        hosts = {"callee": lab.public("callee"), "caller": lab.public("caller", link=link)}
        for host in hosts.values():
            host.sysctl({"ipv4/tcp_congestion_control": way.congestion})

        ends = Ends(__file__, folder)  # the laboratory ends them
        told: dict[str, Any] = {
            "way": way.way, "over": way.over, "folder": folder, "host": hosts["callee"].address
        }  # fmt: skip
        _, reached = ends.start("callee", told, hosts["callee"].popen)
        caller, _ = ends.start("caller", told | reached, hosts["caller"].popen)
        warm = WARM if way.way == "chosen" else 1
        for _ in range(warm):
            ask(caller, {"bytes": min(size, size if way.way == "chosen" else 4 * 2**20)})
        link_pid = hosts["caller"].link.process.pid
        before = [cpu_of([link_pid]), cpu_of(ends.pids)]
        done = [ask(caller, {"bytes": size}) for _ in range(runs)]
        cpu = [
            after - one
            for after, one in zip((cpu_of([link_pid]), cpu_of(ends.pids)), before, strict=True)
        ]
        carried = hosts["caller"].link.traffic()
        packets = carried.up.offered + carried.down.offered
    return {
        "way": asdict(way),
        "bytes": size,
        "rate": median(size / one["seconds"] for one in done),
        "route": done[-1]["route"],
        "load": os.getloadavg()[0],
        # The emulator is a process of this machine, too: a second of it for a second of the clock
        # is its limit.
        "cpu": {"emulator": cpu[0] / runs, "both ends": cpu[1] / runs},
        "bytes a packet": (carried.up.offered_bytes + carried.down.offered_bytes) / packets,
        "seconds": [one["seconds"] for one in done],
    }


def play(role: str, told: dict[str, Any]) -> None:
    """Be one end."""
    if told["way"] == "raw":
        (raw_callee if role == "callee" else raw_caller)(told)
        return
    import uvloop

    uvloop.run(our_callee(told) if role == "callee" else our_caller(told))


# One TCP connection with plain sockets: 8 bytes of length from the caller, then contents both ways
# at once


def trade_raw(connection: socket.socket, size: int) -> None:
    """Send and receive so many bytes at once."""
    data = os.urandom(CHUNK)
    sending = Thread(target=lambda: [connection.sendall(data) for _ in range(size // CHUNK)])
    sending.start()
    buffer, missing = memoryview(bytearray(CHUNK)), size
    while missing:
        got = connection.recv_into(buffer, min(CHUNK, missing))
        if not got:
            raise ConnectionError("the other end has gone")
        missing -= got
    sending.join()


def raw_callee(told: dict[str, Any]) -> None:
    """Answers until the caller has gone."""
    with socket.create_server((told["host"], 0)) as listener:
        say({"port": listener.getsockname()[1]})
        answer_raw(listener.accept()[0])


def answer_raw(connection: socket.socket) -> None:
    """The callee's part in what a caller asks."""
    while head := connection.recv(8, socket.MSG_WAITALL):
        trade_raw(connection, int.from_bytes(head))
        connection.sendall(b"!")


def raw_caller(told: dict[str, Any]) -> None:
    """Carries out what is asked on stdin."""
    ask_raw(socket.create_connection((told["host"], told["port"])), None)


def ask_raw(connection: socket.socket, route: str | None) -> None:
    """The caller's part: whatever is asked on stdin."""
    say({"ready": True})
    for line in sys.stdin:
        size, began = json.loads(line)["bytes"], perf_counter()
        connection.sendall(size.to_bytes(8))
        trade_raw(connection, size)
        connection.recv(1)
        say({"seconds": perf_counter() - began, "route": route})


# The same with a stream of libp2p: p2pd hands it over as a unix socket

STREAM = "/lowcomm/measurement"


async def stream_callee(node: "Node") -> None:
    """Serve streams, each on a thread of its own."""

    def take(stream: Any) -> None:
        stream.socket.setblocking(True)
        Thread(target=answer_raw, args=(stream.socket,), daemon=True).start()

    await node.discovery.serve_streams(STREAM, take)


async def stream_caller(node: "Node", told: dict[str, Any]) -> None:
    """Open one, and carry out what is asked."""
    await node.discovery.connect(told["peer"], told["entries"], DEADLINE)
    stream = await node.discovery.open_stream(told["peer"], STREAM, DEADLINE)
    stream.socket.setblocking(True)
    await asyncio.to_thread(
        ask_raw, stream.socket, "quic" if "/quic-v1" in stream.address else "tcp"
    )


# Our service


async def trade(stream: Any, size: int) -> None:
    """Send and receive so many bytes at once, as exchanges do; done when the other end has got
    all."""
    from lowcomm_node.sync.link import Link
    from lowcomm_protocol.messages import exchange_pb2 as pb

    link = Link("", stream)
    sending = asyncio.create_task(link.send_content(memoryview(os.urandom(size)), b""))
    missing = (await stream.receive()).content.size
    while missing:
        missing -= len((await stream.receive()).chunk.data)
    await sending
    await link.send(pb.Frame(confirm=pb.Confirm()))
    assert (await stream.receive()).WhichOneof("kind") == "confirm"


class Node(End):
    """An end at a host of its own."""

    def __init__(self, role: str, told: dict[str, Any]) -> None:
        from lowcomm_node.net.p2pd import listeners

        listen = listeners("0.0.0.0", 0)
        super().__init__(
            role, Path(told["folder"]), listen, "0.0.0.0", initial_peers=told.get("entries", ())
        )

    async def swap(self, peer: str, stream: Any) -> None:
        """See End; the caller tells how much in its first frame."""
        hello = await stream.receive()
        await trade(stream, hello.hello.tokens)
        while await stream.receive() is not None:
            pass


async def our_callee(told: dict[str, Any]) -> None:
    """A node that is called."""
    set_up()
    node = Node("callee", told)
    try:
        await node.start()
        await stream_callee(node)
        entries = [
            entry
            for entry in node.discovery.addresses()
            if told["host"] in entry and told["over"] in entry
        ]
        certificate = node.certificate.public_key.hex()
        say(
            {
                "peer": node.identity.peer_id,
                "port": node.port,
                "certificate": certificate,
                "entries": entries,
            }
        )
        await forever()
    finally:
        await node.close()


async def our_caller(told: dict[str, Any]) -> None:
    """A node that calls, by the route that is measured, or by the one that it chooses."""
    from lowcomm_node.net.stream import CallerStream
    from lowcomm_protocol.messages import exchange_pb2 as pb

    set_up()
    node, way = Node("caller", told), told["way"]
    address = f"{told['host']}:{1 if way == 'tunnel' else told['port']}"
    info = record_of(told, [address], [] if way == "direct" else told["entries"])
    if way == "direct":
        forget_tunnels()
    try:
        await node.start()
        if way == "stream":
            await stream_caller(node, told)
            return
        say({"ready": True})
        while line := await asyncio.to_thread(sys.stdin.readline):
            size, began = json.loads(line)["bytes"], perf_counter()
            async with asyncio.timeout(DEADLINE):
                stub = await node.channels.stub(info)
                stream = CallerStream(stub.Swap(metadata=node.channels.metadata(info.peer_id)))
                await stream.send(pb.Frame(hello=pb.Offer(tokens=size)))
                await trade(stream, size)
                seconds = perf_counter() - began
                route = node.channels.describe(info.peer_id).route
                await stream.close()
            assert way == "chosen" or (route or "").startswith(
                {"tunnel": "punched"}.get(way, "direct")
            ), route
            say({"seconds": seconds, "route": (route or "").split()[0]})
    finally:
        with suppress(asyncio.CancelledError):
            await node.close()


def forget_tunnels() -> None:
    """Let nothing but the direct route be tried."""
    from lowcomm_node.net import routes

    routes.SLOW = float("inf")


if __name__ == "__main__":
    main()
