"""A swarm of nodes in one event loop: real gRPC over TLS, real shared memory, trainers that follow
a script.

A node is an ``Exchanger`` with all that it needs; beside them are puppets, whose every frame is the
test's. Deadlines are out of reach here: whatever ends, ends because somebody noticed. Every swarm
must leave all slots free, no task, no open call and no defect behind.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from time import time
from typing import Any, TypeVar

import pytest
from blake3 import blake3
from structlog.testing import capture_logs

from helpers.scripted_trainer import (
    REALIGN_SIZE,
    SIZE,
    ScriptedTrainer,
    contribution,
    set_event,
)
from helpers.waiting import until_async
from helpers.wire import DEADLINE, new_certificate, record, soon
from lowcomm_node.errors import LinkLost
from lowcomm_node.net import stream as stream_module
from lowcomm_node.net.channels import Channels
from lowcomm_node.net.server import ExchangeServer, ExchangeService
from lowcomm_node.net.stream import CalleeStream, CallerStream, Stream
from lowcomm_node.net.tls import Gatekeeper
from lowcomm_node.node.messages import Ready
from lowcomm_node.sync import driver as driver_module
from lowcomm_node.sync import frames
from lowcomm_node.sync.exchanger import Exchanger
from lowcomm_node.sync.history import ExchangeEnded
from lowcomm_node.sync.link import CHUNK_BYTES
from lowcomm_protocol import PROTOCOL_VERSION
from lowcomm_protocol.exchange.budget import Deadlines
from lowcomm_protocol.exchange.events import Outcome
from lowcomm_protocol.exchange.kinds import kind_of
from lowcomm_protocol.exchange.pair import members_digest
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.matching import Offer
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import write_record
from lowcomm_protocol.peers.roster import Roster
from lowcomm_protocol.spec.names import codec_in_offer
from lowcomm_protocol.spec.run import RunSpec, parse_toml

INTERVAL, MIN_STEPS = 20, 5
NUMEL = 200_000
"""Values of a fragment in a group: in fp32 a third of it takes two chunks."""
PLAN = "22" * 32
NEVER = 1000.0
"""Seconds: a deadline that no test reaches."""
# In the order of their ids: of two calls that cross, the one of the first goes on.
IDENTITIES = sorted(
    (Identity(bytes([number]) * 32) for number in range(1, 9)), key=lambda one: one.peer_id
)

T = TypeVar("T")


async def eventually(condition: Callable[[], T], what: str) -> T:
    """Wait for a condition that other tasks of this event loop bring about; its value."""
    return await until_async(condition, DEADLINE, what)


def spec_of(group: int = 2, fragments: int = 1, codec: str = "fp32") -> RunSpec:
    """A run that exchanges every 20 steps."""
    method = "noloco" if codec == "fp32" else "streaming-diloco"
    sync = {"interval": INTERVAL, "min_steps": MIN_STEPS, "group": group, "fragments": fragments}
    numbers = "\n".join(f"{name} = {value}" for name, value in sync.items())
    return parse_toml(
        f'[run]\nname = "test"\n[sync]\nmethod = "{method}"\ncodec = "{codec}"\n{numbers}\n'
    )


async def no_ping(channel: Any, peer_id: str) -> None:
    """In place of the call that measures a round trip, since calls and bytes are counted here."""


class Peer(ABC):
    """A peer that listens on loopback; a subclass answers calls."""

    def __init__(self, identity: Identity, spec: RunSpec) -> None:
        self.identity, self.peer_id, self.spec = identity, identity.peer_id, spec
        self.certificate = new_certificate()
        gatekeeper = Gatekeeper(identity, spec.run_id, time)
        self.channels = Channels(gatekeeper)
        self.channels.dialer.ping = no_ping
        self.server = ExchangeServer(self.certificate, ExchangeService(gatekeeper, self))
        self.port = 0
        self.answering = 0
        """Calls of others that are open."""

    async def swap(self, peer: str, stream: CalleeStream) -> None:
        """See Handlers."""
        self.answering += 1
        try:
            await self.answer(peer, stream)
        finally:
            self.answering -= 1

    @abstractmethod
    async def answer(self, peer: str, stream: CalleeStream) -> None:
        """Answer one call."""

    async def start(self) -> None:
        """Listen."""
        self.port = await self.server.start("127.0.0.1", 0)

    async def stop(self) -> None:
        """Go, without a word."""
        await self.channels.close()
        await self.server._server.stop(None)

    def told(self, **changes: Any) -> bytes:
        """Its signed record."""
        info = record(
            self.identity,
            self.port,
            self.certificate.public_key,
            run_id=self.spec.run_id,
            **changes,
        )
        return write_record(info, self.identity)


class Tap:
    """A stream whose node is listened to: how many bytes it tells, and where it falls silent."""

    def __init__(self, stream: Any, node: "Node") -> None:
        self._stream, self._node = stream, node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def send(self, frame: pb.Frame) -> None:
        """See Stream."""
        kind = frame.WhichOneof("kind")
        self._node.waiting_to_say[kind] += 1
        await self._node.silent[kind].wait()
        self._node.told_bytes[kind] += frame.ByteSize()
        await self._stream.send(frame)


class Node(Peer):
    """An ``Exchanger`` with all that it needs; nothing begins before the test says so."""

    def __init__(
        self,
        identity: Identity,
        spec: RunSpec,
        slots: int,
        size: int,
        numel: int,
        deadlines: Deadlines,
        **ready: Any,
    ) -> None:
        super().__init__(identity, spec)
        self.roster = Roster(self.peer_id, spec.run_id)
        self.trainer = ScriptedTrainer(self.peer_id, slots, size, spec.sync.codec, numel)
        self.news: list[ExchangeEnded] = []
        self.told_bytes: Counter[str | None] = Counter()
        """Bytes of all frames that it has sent, by kind."""
        self.waiting_to_say: Counter[str | None] = Counter()
        self.silent: defaultdict[str | None, asyncio.Event] = defaultdict(set_event)
        """Cleared: frames of this kind are not sent."""
        count = spec.sync.fragments
        fields: dict[str, Any] = {
            "device": "none", "parameters": 1, "plan": PLAN, "slots": slots,
            "slot_bytes": 4 * numel + 8192,
            "numels": (numel,) * count, "sizes": ((size, size),) * count,
            "realign_sizes": (REALIGN_SIZE,) * count,
            "swarm_step": 0, "steps": 0, "tokens": 0, "progress": ({},) * count,
            "slow_digests": ("44" * 32,) * count, "resumed": None,
        }  # fmt: skip
        self.exchanger = Exchanger(
            peer_id=self.peer_id,
            spec=spec,
            roster=self.roster,
            channels=self.channels,
            deadlines=deadlines,
            tell=self.news.append,
        )
        self.exchanger.take_over(Ready(**fields | ready), self.trainer)  # type: ignore[arg-type]
        self.exchanger.exchanging = True
        self._call, self.exchanger.call = self.exchanger.call, self._tapped  # type: ignore[method-assign]
        self.step(INTERVAL - 1)

    async def answer(self, peer: str, stream: CalleeStream) -> None:
        await self.exchanger.serve(peer, Tap(stream, self))  # type: ignore[arg-type]

    async def _tapped(self, peer: str) -> Any:
        return Tap(await self._call(peer), self)

    async def die(self) -> None:
        """Be gone, in the midst of whatever it does."""
        await self.stop()
        for event in (*self.trainer.holds.values(), *self.silent.values()):
            event.set()

    def step(self, swarm_step: int, steps: int | None = None, seconds: float = 0.0) -> None:
        """The trainer has come to a step, which took so long; each peer trains on another number of
        tokens."""
        self.trainer.swarm_step, self.trainer.steps = (
            swarm_step,
            swarm_step if steps is None else steps,
        )
        self.trainer.tokens = self.trainer.steps * (100 + IDENTITIES.index(self.identity))
        self.exchanger.on_step(swarm_step, self.trainer.steps, self.trainer.tokens, seconds)

    def allow(self, **deadlines: Any) -> None:
        """Change the deadlines of this node."""
        budget = self.exchanger.peer.budget
        budget.deadlines = replace(budget.deadlines, **deadlines)

    def knows(self, *others: Peer, **changes: Any) -> None:
        """Hear the records of others."""
        for other in others:
            self.roster.hear(other.told(**changes), time())
            self.roster.heard(other.peer_id, time())

    @property
    def free(self) -> int:
        """Slots that can be taken."""
        assert self.trainer.arena is not None
        return self.trainer.arena.free

    @property
    def outcomes(self) -> dict[Outcome, int]:
        """How often exchanges have ended in which way."""
        return dict(self.exchanger.history.outcomes)

    async def ended(self, count: int = 1) -> ExchangeEnded:
        """The entry of the ``count``-th exchange, once it is over."""
        exchanges = self.exchanger.history.exchanges
        await eventually(lambda: len(exchanges) >= count, f"{count} exchanges have ended")
        return exchanges[count - 1]

    async def at_rest(self) -> None:
        """Until the next exchange can begin: one that has ended keeps its slots while last words
        are on their way."""
        await eventually(
            lambda: not self.exchanger.running and not self.exchanger._closing,
            "slots are given back",
        )


class Puppet(Peer):
    """A peer whose every frame is the test's."""

    def __init__(self, identity: Identity, spec: RunSpec) -> None:
        super().__init__(identity, spec)
        self.calls: asyncio.Queue[tuple[str, CalleeStream]] = asyncio.Queue()

    async def answer(self, peer: str, stream: CalleeStream) -> None:
        self.calls.put_nowait((peer, stream))
        await stream.dropped.wait()

    def offer(self, **changes: Any) -> Offer:
        """What it brings."""
        offer = Offer(
            protocol=PROTOCOL_VERSION, run_id=self.spec.run_id, plan=PLAN,
            codec=codec_in_offer(self.spec.sync.codec), fragment=0,
            round=1, swarm_step=INTERVAL, steps=INTERVAL, tokens=77, version=0,
            slow_digest=b"",
        )  # fmt: skip
        return replace(offer, **changes)

    async def call(self, node: Node, port: int = 0) -> CallerStream:
        """Call a node, where ``port`` leads to it if given; nothing is said yet."""
        info = node.roster.hear(node.told(), time()) or record(
            node.identity, port or node.port, node.certificate.public_key, run_id=self.spec.run_id
        )
        stub = await self.channels.stub(info)
        return CallerStream(stub.Swap(metadata=self.channels.metadata(node.peer_id), timeout=NEVER))

    async def hello(
        self, node: Node, port: int = 0, **changes: Any
    ) -> tuple[CallerStream, pb.Frame]:
        """Call a node with an offer; its answer."""
        stream = await self.call(node, port)
        await stream.send(pb.Frame(hello=frames.to_message(self.offer(**changes))))
        return stream, await hear(stream)

    async def agree(self, node: Node, calls: bool) -> Stream:
        """Come to an exchange with a node, by a call of either side."""
        if calls:
            stream, answer = await self.hello(node)
            assert answer.WhichOneof("kind") == "accept"
            return stream
        node.step(INTERVAL)
        _, callee = await soon(self.calls.get())
        assert (await hear(callee)).WhichOneof("kind") == "hello"
        await callee.send(pb.Frame(accept=frames.to_message(self.offer())))
        return callee

    @property
    def content(self) -> bytes:
        """What it contributes."""
        return contribution(self.peer_id, 0, 1, SIZE)

    def confirm(self, *others: Peer) -> pb.Frame:
        """Its confirmation of an exchange with others."""
        return pb.Frame(
            confirm=pb.Confirm(members=members_digest([peer.peer_id for peer in (self, *others)]))
        )


def announced(data: bytes, **changes: Any) -> pb.Frame:
    """The frame before a contribution."""
    return pb.Frame(
        content=pb.Content(**{"size": len(data), "digest": blake3(data).digest(), **changes})
    )


def chunks(data: bytes) -> list[pb.Frame]:
    """A contribution as it travels."""
    pieces = range(0, len(data), CHUNK_BYTES)
    return [
        pb.Frame(chunk=pb.Chunk(offset=offset, data=data[offset : offset + CHUNK_BYTES]))
        for offset in pieces
    ]


async def say(stream: Stream, *frames: pb.Frame) -> None:
    """Send frames."""
    for frame in frames:
        await soon(stream.send(frame))


async def hear(stream: Stream) -> pb.Frame:
    """The next frame."""
    frame = await soon(stream.receive())
    assert frame is not None, "the stream has ended"
    return frame


async def hear_content(stream: Stream) -> bytes:
    """A whole contribution."""
    content, data = (await hear(stream)).content, b""
    while len(data) < content.size:
        chunk = (await hear(stream)).chunk
        assert chunk.offset == len(data)
        data += chunk.data
    assert blake3(data).digest() == content.digest
    return data


async def hear_end(stream: Stream) -> list[pb.Frame]:
    """All that still comes until the other end ends the stream, in whatever way."""
    came: list[pb.Frame] = []
    with suppress(LinkLost):
        while (frame := await soon(stream.receive())) is not None:
            came.append(frame)
    return came


class Swarm:
    """Peers of one run in this event loop."""

    def __init__(
        self, spec: RunSpec, slots: int | None, size: int, numel: int, hello: float
    ) -> None:
        self.spec = spec
        self.size = size
        self.numel = numel
        self.deadlines = Deadlines(longest=NEVER, first=NEVER, hello=hello, alone_first=False)
        kind = kind_of(spec.sync)
        assert kind is not None
        self.slots = kind.slots if slots is None else slots
        self.nodes: list[Node] = []
        self.peers: list[Peer] = []

    async def node(self, **ready: Any) -> Node:
        """One more node."""
        node = Node(
            IDENTITIES[len(self.peers)],
            self.spec,
            self.slots,
            self.size,
            self.numel,
            self.deadlines,
            **ready,
        )
        self.nodes.append(node)
        self.peers.append(node)
        await node.start()
        return node

    async def puppet(self) -> Puppet:
        """One more peer, led by the test; all hear of it."""
        puppet = Puppet(IDENTITIES[len(self.peers)], self.spec)
        self.peers.append(puppet)
        await puppet.start()
        self.meet()
        return puppet

    def meet(self, *peers: Peer) -> None:
        """All hear of all."""
        for node in peers or self.peers:
            if isinstance(node, Node):
                node.knows(*(other for other in peers or self.peers if other is not node))

    async def settle(self) -> None:
        """Until nothing is under way, and everything has been given back."""

        def left() -> list[Any]:
            tasks = tasks_of(
                "Exchanger.", "ExchangeDriver.", "PairDriver.", "GroupDriver.", "CalleeStream."
            )
            running = [round_ for node in self.nodes for round_ in node.exchanger.running.values()]
            return [*tasks, *running, *(peer.peer_id for peer in self.peers if peer.answering)]

        await eventually(lambda: not left(), "nothing is left behind")
        assert [node.free for node in self.nodes] == [self.slots] * len(self.nodes)
        assert not any(
            node.trainer._contributions or node.trainer._shared_out for node in self.nodes
        )
        assert not any(node.exchanger._closing for node in self.nodes)


@contextmanager
def no_other_deadlines() -> Iterator[None]:
    """None of the deadlines that the owner of a node can't set is within reach."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver_module, "ABANDON_DEADLINE", NEVER)
        patch.setattr(stream_module, "CLOSE_DEADLINE", NEVER)
        yield


def tasks_of(*classes: str) -> list[asyncio.Task[Any]]:
    """Tasks that run methods of these classes."""
    return [
        task for task in asyncio.all_tasks() if task.get_coro().__qualname__.startswith(classes)
    ]


@asynccontextmanager
async def swarm(
    nodes: int,
    group: int = 2,
    slots: int | None = None,
    size: int = SIZE,
    fragments: int = 1,
    codec: str = "fp32",
    numel: int = NUMEL,
    hello_deadline: float = NEVER,
) -> AsyncIterator[Swarm]:
    """Nodes that know each other; nothing may be left of them in the end."""
    one = Swarm(spec_of(group, fragments, codec), slots, size, numel, hello_deadline)
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    with no_other_deadlines(), capture_logs() as logs:
        try:
            for _ in range(nodes):
                await one.node()
            one.meet()
            yield one
            await one.settle()
        finally:
            await asyncio.gather(*(peer.stop() for peer in one.peers))
            await eventually(
                lambda: not tasks_of("_AioCall."),
                "gRPC is done: the next test has another event loop",
            )
    # On a busy machine gRPC hands events to the event loop of the test before, which is closed.
    unhandled = [one for one in unhandled if "PollerCompletionQueue" not in one["message"]]
    left = [entry for entry in logs if entry["event"] == "exchange.defect"] + unhandled
    assert not left, left


def agreed(nodes: list[Node], number: int = 1) -> set[str]:
    """The owners of the shards that all have applied, the same means at every node."""
    merges = [node.trainer.merges for node in nodes]
    assert [len(one) for one in merges] == [number] * len(nodes)
    last = [one[-1].contributions for one in merges]
    assert last == [last[0]] * len(nodes)
    return set(last[0])


@asynccontextmanager
async def node_and_puppet(hello_deadline: float = NEVER) -> AsyncIterator[tuple[Node, Puppet]]:
    """A node, and a peer that says what a test has it say."""
    async with swarm(1, hello_deadline=hello_deadline) as one:
        yield one.nodes[0], await one.puppet()
