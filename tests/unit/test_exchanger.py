"""What must hold for exchanges between nodes: real gRPC over TLS, real shared memory, a trainer that follows a script.

Deadlines are out of reach here: whatever ends, ends because somebody noticed. Every swarm must leave all slots free, no
task, no open call and no defect behind.
"""

import asyncio
import os
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from time import time
from typing import Any

import pytest
from structlog.testing import capture_logs
from wire import new_certificate, record, soon

from lowcomm_node.errors import LinkLost, TrainerError
from lowcomm_node.exchange import exchanger as exchanger_module
from lowcomm_node.exchange import frames, offers
from lowcomm_node.exchange import round as round_module
from lowcomm_node.exchange.channels import Channels
from lowcomm_node.exchange.exchanger import Exchanger
from lowcomm_node.exchange.group_round import GroupRound
from lowcomm_node.exchange.history import Outcome
from lowcomm_node.exchange.link import CHUNK_BYTES
from lowcomm_node.exchange.security import Gatekeeper
from lowcomm_node.exchange.service import ExchangeServer, ExchangeService
from lowcomm_node.exchange.stream import CalleeStream, CallerStream, Stream
from lowcomm_node.trainer.arena import Arena, create_file
from lowcomm_node.trainer.interface import Again, Captured, Merged, Ready, Shared, slots_each
from lowcomm_protocol import PROTOCOL_VERSION
from lowcomm_protocol import exchange as ex
from lowcomm_protocol import group as gr
from lowcomm_protocol.codecs import codec
from lowcomm_protocol.codecs.shards import shard_bounds
from lowcomm_protocol.exchange import members_digest
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.matching import REFUSAL_TEXT, Offer, Refusal
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.records import write_record
from lowcomm_protocol.roster import Roster
from lowcomm_protocol.run import RunSpec, parse_toml
from waiting import until_async

INTERVAL, MIN_STEPS = 20, 5
SIZE = 2 * CHUNK_BYTES + 77
"""Bytes of a contribution in a pair: three chunks."""
REALIGN_SIZE = SIZE + 5
NUMEL = 200_000
"""Values of a fragment in a group: in fp32 a third of it takes two chunks."""
PLAN = "22" * 32
NEVER = 1000.0
"""Seconds: a deadline that no test reaches."""
DEADLINE = 30.0
# In the order of their ids: of two calls that cross, the one of the first goes on.
IDENTITIES = sorted((Identity(bytes([number]) * 32) for number in range(1, 9)), key=lambda one: one.peer_id)


@pytest.fixture(autouse=True)
def _no_deadline_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (exchanger_module, round_module):
        monkeypatch.setattr(module, "HELLO_DEADLINE", NEVER)


def spec_of(group: int = 2, fragments: int = 1, codec: str = "fp32") -> RunSpec:
    """A run that exchanges every 20 steps."""
    method = "noloco" if codec == "fp32" else "streaming-diloco"
    sync = {"interval": INTERVAL, "min_steps": MIN_STEPS, "group": group, "fragments": fragments}
    numbers = "\n".join(f"{name} = {value}" for name, value in sync.items())
    return parse_toml(f'[run]\nname = "test"\n[sync]\nmethod = "{method}"\ncodec = "{codec}"\n{numbers}\n')


def contribution(peer: str, fragment: int, number: int, size: int) -> bytes:
    """The bytes of a peer's contribution, the ``number``-th of a fragment."""
    block = sha256(f"{peer}/{fragment}/{number}".encode()).digest()
    return (block * (size // len(block) + 1))[:size]


def mean_of(owner: str, contributions: dict[str, bytes]) -> bytes:
    """In place of the mean of a shard: bytes that another contribution, or none of a member, would change."""
    told = sha256()
    for peer in sorted(contributions):
        told.update(peer.encode() + contributions[peer])
    size = len(next(iter(contributions.values())))
    return contribution(f"{owner}/{told.hexdigest()}", 0, 0, size)


@dataclass(frozen=True)
class Merge:
    """What a trainer was asked to merge."""

    fragment: int
    contributions: dict[str, bytes]
    """In a pair what both brought; in a group the means of the shards that are applied, by owner."""
    tokens: dict[str, int]
    swarm_step: int


@dataclass
class SharedOut:
    """A fragment that a group shares out."""

    members: tuple[str, ...]
    sizes: tuple[int, ...]
    ours: bytes
    """Our contribution to our own shard."""
    received: dict[str, bytes]
    means: dict[str, bytes]


class ScriptedTrainer:
    """In place of ``Trainer``: bytes instead of tensors; a test holds it, and lets it fail, where it likes."""

    def __init__(self, peer_id: str, slots: int, size: int, codec_name: str, numel: int) -> None:
        self.peer_id, self.size, self.codec_name, self.numel = peer_id, size, codec_name, numel
        memory = create_file()
        self.arena: Arena | None = Arena(memory, slots, max(size, REALIGN_SIZE, 4 * numel + 8 * 4 * 256))
        os.close(memory)
        self.asked: list[str] = []
        self.holds: defaultdict[str, asyncio.Event] = defaultdict(_set_event)
        self.errors: dict[str, Exception] = {}
        """By the name of a request, or by that and a peer's id."""
        self.captures: Counter[int] = Counter()
        self.merges: list[Merge] = []
        self.again: Again | None = None
        """What the next contribution is asked for again."""
        self.bend: Callable[[Captured], Captured] = lambda captured: captured
        """What is told of a capture, when it is not the truth."""
        self.swarm_step = self.steps = self.tokens = 0
        self._contributions: dict[int, dict[str, bytes]] = {}
        self._shared_out: dict[int, SharedOut] = {}
        self._turn = asyncio.Lock()  # like the real one it answers in the order of asking

    async def capture(self, fragment: int, slot: int, realign: bool) -> Captured:
        """See Trainer."""
        await self._asked("capture")
        assert fragment not in self._contributions, "captured twice"
        self.captures[fragment] += 1
        size = REALIGN_SIZE if realign else self.size
        data = contribution(self.peer_id, fragment, self.captures[fragment], size)
        self._view(slot, size)[:] = data
        self._contributions[fragment] = {self.peer_id: data}
        return self.bend(Captured(size=size, digest=sha256(data).digest(), steps=self.steps))

    async def receive(self, fragment: int, peer: str, slot: int, size: int) -> Again | None:
        """See Trainer."""
        await self._asked("receive")
        self._contributions[fragment][peer] = bytes(self._view(slot, size))
        again, self.again = self.again, None
        return again

    async def resend(self, fragment: int, blocks: bytes, slot: int) -> tuple[int, bytes]:
        """See Trainer."""
        await self._asked("resend")
        data = b"again" + blocks
        self._view(slot, len(data))[:] = data
        return len(data), sha256(data).digest()

    async def patch(self, fragment: int, peer: str, slot: int, size: int) -> None:
        """See Trainer."""
        await self._asked("patch")
        self._contributions[fragment][peer] += bytes(self._view(slot, size))

    async def share(self, fragment: int, slot: int, realign: bool, members: tuple[str, ...]) -> Shared:
        """See Trainer."""
        await self._asked("share")
        assert fragment not in self._shared_out, "captured twice"
        self.captures[fragment] += 1
        sizes = shard_sizes("fp32" if realign else self.codec_name, self.numel, len(members))
        shares = [
            contribution(f"{self.peer_id}>{owner}", fragment, self.captures[fragment], size)
            for owner, size in zip(members, sizes, strict=True)
        ]
        mine = members.index(self.peer_id)
        self._shared_out[fragment] = SharedOut(members, sizes, shares[mine], {self.peer_id: shares[mine]}, {})
        shares[mine] = b""
        data = b"".join(shares)
        self._view(slot, len(data))[:] = data
        told = tuple(map(len, shares)), tuple(sha256(share).digest() for share in shares)
        return Shared(sizes=told[0], digests=told[1], steps=self.steps)

    async def receive_share(self, fragment: int, peer: str, slot: int, offset: int, size: int) -> None:
        """See Trainer."""
        await self._asked("receive_share", peer)
        self._shared(fragment).received[peer] = bytes(self._view(slot, offset + size)[offset:])

    async def reduce(self, fragment: int, tokens: dict[str, int], slot: int, offset: int) -> tuple[int, bytes]:
        """See Trainer."""
        await self._asked("reduce")
        one = self._shared(fragment)
        mean = mean_of(self.peer_id, {peer: one.received[peer] for peer in tokens})
        self._view(slot, offset + len(mean))[offset:] = mean
        one.means[self.peer_id] = mean
        return len(mean), sha256(mean).digest()

    async def receive_mean(self, fragment: int, owner: str, slot: int, offset: int, size: int) -> None:
        """See Trainer."""
        await self._asked("receive_mean", owner)
        self._shared(fragment).means[owner] = bytes(self._view(slot, offset + size)[offset:])

    async def merge(self, fragment: int, over: dict[str, int] | list[str], swarm_step: int) -> Merged:
        """See Trainer."""
        await self._asked("merge")
        if isinstance(over, dict):
            self.merges.append(Merge(fragment, self._contributions.pop(fragment), over, swarm_step))
        else:
            means = self._shared_out.pop(fragment).means
            self.merges.append(Merge(fragment, {owner: means[owner] for owner in over}, {}, swarm_step))
        self.swarm_step = max(self.swarm_step, swarm_step)
        return Merged(
            swarm_step=self.swarm_step, merged_steps=self.steps, merged_tokens=self.tokens, slow_digest="33" * 32
        )

    async def drop(self, fragment: int) -> None:
        """See Trainer."""
        await self._asked("drop")
        self._contributions.pop(fragment, None)
        self._shared_out.pop(fragment, None)

    async def _asked(self, name: str, peer: str = "") -> None:
        self.asked.append(name)
        async with self._turn:
            await self.holds[name].wait()
        for key in (name, name + peer):
            if key in self.errors:
                raise self.errors[key]

    def _shared(self, fragment: int) -> SharedOut:
        if fragment not in self._shared_out:
            raise TrainerError("it is not captured any more")
        return self._shared_out[fragment]

    def _view(self, slot: int, size: int) -> memoryview:
        assert self.arena is not None
        return self.arena.view(slot, size)


def shard_sizes(codec_name: str, numel: int, count: int) -> tuple[int, ...]:
    """Coded bytes of each shard."""
    return tuple(codec(codec_name).coded_size(stop - start) for start, stop in shard_bounds(numel, count))


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


class Peer:
    """A peer that listens on loopback; a subclass answers calls."""

    def __init__(self, identity: Identity, spec: RunSpec) -> None:
        self.identity, self.peer_id, self.spec = identity, identity.peer_id, spec
        self.certificate = new_certificate()
        gatekeeper = Gatekeeper(identity, spec.run_id, time)
        self.channels = Channels(gatekeeper)
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

    async def answer(self, peer: str, stream: CalleeStream) -> None:
        """Answer one call."""
        raise NotImplementedError

    async def start(self) -> None:
        """Listen."""
        self.port = await self.server.start("127.0.0.1", 0)

    async def stop(self) -> None:
        """Go, without a word."""
        await self.channels.close()
        await self.server._server.stop(None)

    def told(self, **changes: Any) -> bytes:
        """Its signed record."""
        info = record(self.identity, self.port, self.certificate.der, run_id=self.spec.run_id, **changes)
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
        self, identity: Identity, spec: RunSpec, slots: int, size: int, numel: int = NUMEL, **ready: Any
    ) -> None:
        super().__init__(identity, spec)
        self.roster = Roster(self.peer_id, spec.run_id)
        self.trainer = ScriptedTrainer(self.peer_id, slots, size, spec.sync.codec, numel)
        self.news: list[dict[str, Any]] = []
        self.told_bytes: Counter[str | None] = Counter()
        """Bytes of all frames that it has sent, by kind."""
        self.waiting_to_say: Counter[str | None] = Counter()
        self.silent: defaultdict[str | None, asyncio.Event] = defaultdict(_set_event)
        """Cleared: frames of this kind are not sent."""
        count = spec.sync.fragments
        fields: dict[str, Any] = {
            "device": "none", "parameters": 1, "plan": PLAN, "slots": slots, "slot_bytes": 4 * numel + 8192,
            "numels": (numel,) * count, "sizes": ((size, size),) * count, "realign_sizes": (REALIGN_SIZE,) * count,
            "swarm_step": 0, "steps": 0, "tokens": 0, "progress": ({},) * count,
            "slow_digests": ("44" * 32,) * count, "resumed": None,
        }  # fmt: skip
        self.exchanger = Exchanger(
            peer_id=self.peer_id,
            spec=spec,
            ready=Ready(**fields | ready),
            trainer=self.trainer,  # type: ignore[arg-type]
            roster=self.roster,
            channels=self.channels,
            deadline=NEVER,
            tell=self.news.append,
        )
        self.exchanger.open = True
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

    def step(self, swarm_step: int, steps: int | None = None) -> None:
        """The trainer has come to a step; each peer trains on another number of tokens."""
        self.trainer.swarm_step, self.trainer.steps = swarm_step, swarm_step if steps is None else steps
        self.trainer.tokens = self.trainer.steps * (100 + IDENTITIES.index(self.identity))
        self.exchanger.on_step(swarm_step, self.trainer.steps, self.trainer.tokens)

    def knows(self, *others: Peer, **changes: Any) -> None:
        """Hear the records of others."""
        for other in others:
            self.roster.hear(other.told(**changes), time())

    @property
    def free(self) -> int:
        """Slots that can be taken."""
        assert self.trainer.arena is not None
        return self.trainer.arena.free

    @property
    def outcomes(self) -> dict[Outcome, int]:
        """How often exchanges have ended in which way."""
        return dict(self.exchanger.history.outcomes)

    async def ended(self, count: int = 1) -> dict[str, Any]:
        """The entry of the ``count``-th exchange, once it is over."""
        rounds = self.exchanger.history.rounds
        await until_async(lambda: asyncio.sleep(0, len(rounds) >= count), DEADLINE, f"{count} exchanges have ended")
        return rounds[count - 1]


class Puppet(Peer):
    """A peer whose every frame is the test's."""

    def __init__(self, identity: Identity, spec: RunSpec) -> None:
        super().__init__(identity, spec)
        self.calls: asyncio.Queue[tuple[str, CalleeStream]] = asyncio.Queue()

    async def answer(self, peer: str, stream: CalleeStream) -> None:
        self.calls.put_nowait((peer, stream))
        await stream.wait_dropped()

    def offer(self, **changes: Any) -> Offer:
        """What it brings."""
        offer = Offer(
            protocol=PROTOCOL_VERSION, run_id=self.spec.run_id, plan=PLAN, codec=self.spec.sync.codec, fragment=0,
            stage=0, round=1, swarm_step=INTERVAL, steps=INTERVAL, tokens=77, version=0, slow_digest=b"",
        )  # fmt: skip
        return replace(offer, **changes)

    async def call(self, node: Node) -> CallerStream:
        """Call a node; nothing is said yet."""
        info = node.roster.hear(node.told(), time()) or record(
            node.identity, node.port, node.certificate.der, run_id=self.spec.run_id
        )
        stub = await self.channels.stub(info)
        return CallerStream(stub.Swap(metadata=self.channels.metadata(node.peer_id), timeout=NEVER))

    async def hello(self, node: Node, **changes: Any) -> tuple[CallerStream, pb.Frame]:
        """Call a node with an offer; its answer."""
        stream = await self.call(node)
        await stream.send(pb.Frame(hello=offers.to_message(self.offer(**changes))))
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
        await callee.send(pb.Frame(accept=offers.to_message(self.offer())))
        return callee

    @property
    def content(self) -> bytes:
        """What it contributes."""
        return contribution(self.peer_id, 0, 1, SIZE)

    def confirm(self, *others: Peer) -> pb.Frame:
        """Its confirmation of an exchange with others."""
        return pb.Frame(confirm=pb.Confirm(members=members_digest([peer.peer_id for peer in (self, *others)])))


def announced(data: bytes, **changes: Any) -> pb.Frame:
    """The frame before a contribution."""
    return pb.Frame(content=pb.Content(**{"size": len(data), "digest": sha256(data).digest(), **changes}))


def chunks(data: bytes) -> list[pb.Frame]:
    """A contribution as it travels."""
    pieces = range(0, len(data), CHUNK_BYTES)
    return [pb.Frame(chunk=pb.Chunk(offset=offset, data=data[offset : offset + CHUNK_BYTES])) for offset in pieces]


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
    assert sha256(data).digest() == content.digest
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

    def __init__(self, spec: RunSpec, slots: int | None, size: int, numel: int) -> None:
        self.spec, self.size, self.numel = spec, size, numel
        self.slots = slots_each(spec.sync.group) if slots is None else slots
        self.nodes: list[Node] = []
        self.peers: list[Peer] = []
        self.defects = 0
        """How many a test means to happen."""

    async def node(self, **ready: Any) -> Node:
        """One more node."""
        node = Node(IDENTITIES[len(self.peers)], self.spec, self.slots, self.size, self.numel, **ready)
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
            tasks = [task for task in asyncio.all_tasks() if _is_ours(task)]
            running = [round_ for node in self.nodes for round_ in node.exchanger.running.values()]
            return [*tasks, *running, *(peer.peer_id for peer in self.peers if peer.answering)]

        await until_async(lambda: asyncio.sleep(0, not left()), DEADLINE, "nothing is left behind")
        assert [node.free for node in self.nodes] == [self.slots] * len(self.nodes)
        assert not any(node.trainer._contributions or node.trainer._shared_out for node in self.nodes)
        assert not any(node.exchanger._closing for node in self.nodes)


def _is_ours(task: asyncio.Task[Any]) -> bool:
    return task.get_coro().__qualname__.startswith(("Exchanger.", "Round.", "PairRound.", "CalleeStream."))


@asynccontextmanager
async def swarm(
    nodes: int,
    group: int = 2,
    slots: int | None = None,
    size: int = SIZE,
    fragments: int = 1,
    codec: str = "fp32",
    numel: int = NUMEL,
) -> AsyncIterator[Swarm]:
    """Nodes that know each other; nothing may be left of them in the end."""
    one = Swarm(spec_of(group, fragments, codec), slots, size, numel)
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    with capture_logs() as logs:
        try:
            for _ in range(nodes):
                await one.node()
            one.meet()
            yield one
            await one.settle()
        finally:
            await asyncio.gather(*(peer.stop() for peer in one.peers))
    assert len([entry for entry in logs if entry["event"] == "exchange.defect"]) == one.defects
    assert unhandled == []


def merged_all(nodes: list[Node], number: int = 1) -> None:
    """Every node has merged the ``number``-th contributions of all, and nothing else."""
    contributions = {node.peer_id: contribution(node.peer_id, 0, number, SIZE) for node in nodes}
    for node in nodes:
        assert len(node.trainer.merges) == number
        assert node.trainer.merges[-1].contributions == contributions


async def test_a_pair_merges_once_with_both_contributions():
    async with swarm(2) as one:
        first, second = one.nodes
        second.step(INTERVAL)
        for node, other in ((first, second), (second, first)):
            entry = await node.ended()
            assert (entry["outcome"], entry["partners"]) == ("applied", [other.peer_id])
            assert (entry["bytes_sent"], entry["bytes_received"]) == (SIZE, SIZE)
            assert node.news == [{"event": "exchange.applied", **entry}]
            assert node.exchanger.history.of(other.peer_id).completed == 1
            assert node.trainer.merges[0].tokens == {peer.peer_id: peer.trainer.tokens for peer in one.nodes}
            assert node.trainer.merges[0].swarm_step == other.trainer.steps
            assert node.exchanger.swarm_step == INTERVAL
        merged_all(one.nodes)
        first.step(INTERVAL)
        second.step(INTERVAL + 1)
        assert not first.exchanger.running
        assert not second.exchanger.running, "this round is done at both ends"


async def test_peers_that_begin_at_once_make_one_exchange():
    async with swarm(2) as one:
        for number in (1, 2, 3):
            for node in one.nodes:
                node.step(number * INTERVAL)
            for node in one.nodes:
                await node.ended(number)
            merged_all(one.nodes, number)
        assert [node.outcomes for node in one.nodes] == [{Outcome.APPLIED: 3}] * 2


# Refusals


async def refused(one: Swarm, caller: Node, callee: Node, reason: Refusal) -> None:
    """The caller has been refused for a reason, which both have noted."""
    await until_async(
        lambda: asyncio.sleep(0, caller.exchanger.history.of(callee.peer_id).refused), DEADLINE, "it is refused"
    )
    assert caller.exchanger.history.of(callee.peer_id).refused == 1
    assert caller.exchanger.history.of(callee.peer_id).last_reason == REFUSAL_TEXT[reason]
    assert callee.exchanger.history.of(caller.peer_id).last_reason == f"we refused it: {reason.value}"
    assert (caller.exchanger.history.of(callee.peer_id).failed, callee.exchanger.history.of(caller.peer_id).failed) == (
        0,
        0,
    )


async def refused_for_good(one: Swarm, caller: Node, callee: Node, reason: Refusal) -> None:
    """As ``refused``, and there was nobody else to call."""
    entry = await caller.ended()
    assert entry["outcome"] == "no-partner"
    assert entry["left_out"] == {callee.peer_id: REFUSAL_TEXT[reason]}
    assert REFUSAL_TEXT[reason] in caller.exchanger.history.last_reason
    await refused(one, caller, callee, reason)
    assert caller.trainer.asked == []
    fragment = entry["fragment"]
    assert fragment not in caller.exchanger.schedule.due(caller.exchanger.swarm_step), "it waits for its next sync"


@pytest.mark.parametrize("callee", [0, 1])
async def test_who_does_not_train_refuses(callee: int):
    async with swarm(2) as one:
        one.nodes[callee].exchanger.open = False
        one.nodes[1 - callee].step(INTERVAL)
        await refused_for_good(one, one.nodes[1 - callee], one.nodes[callee], Refusal.NOT_TRAINING)
        assert one.nodes[callee].outcomes == {}


async def test_who_has_just_merged_refuses_until_it_has_made_enough_steps():
    async with swarm(2) as one:
        caller, callee = one.nodes
        callee.step(INTERVAL - 1, MIN_STEPS - 1)
        caller.step(INTERVAL)
        await refused_for_good(one, caller, callee, Refusal.TOO_SOON)
        callee.step(INTERVAL - 1, MIN_STEPS)
        caller.step(2 * INTERVAL)
        assert (await caller.ended(2))["outcome"] == "applied"


async def test_who_cuts_the_model_otherwise_is_refused():
    async with swarm(1) as one:
        await one.node(plan="99" * 32)
        one.meet()
        one.nodes[0].step(INTERVAL)
        await refused_for_good(one, one.nodes[0], one.nodes[1], Refusal.OTHER_PLAN)


async def test_an_unknown_fragment_is_refused():
    async with swarm(1) as one:
        await one.node(progress=({"synced": 9}, {}), sizes=((SIZE, SIZE),) * 2, slow_digests=("44" * 32,) * 2)
        one.meet()
        one.nodes[1].step(INTERVAL + INTERVAL // 2)
        await refused_for_good(one, one.nodes[1], one.nodes[0], Refusal.UNKNOWN_FRAGMENT)


@pytest.mark.parametrize(("step", "outcome"), [(11 * INTERVAL - 1, "applied"), (11 * INTERVAL, "no-partner")])
async def test_a_step_that_nobody_else_supports_is_refused(step: int, outcome: str):
    async with swarm(2) as one:
        caller, callee = one.nodes
        callee.knows(caller, swarm_step=step, issued=time() + 1)
        caller.step(step)
        assert (await caller.ended())["outcome"] == outcome
        if outcome == "no-partner":
            await refused(one, caller, callee, Refusal.IMPLAUSIBLE_STEP)
            assert callee.exchanger.swarm_step == INTERVAL - 1


async def test_a_step_that_a_third_peer_supports_is_accepted():
    async with swarm(2) as one:
        caller, callee = one.nodes
        third = await one.puppet()
        callee.knows(third, swarm_step=INTERVAL, issued=time() + 1)
        caller.roster = caller.exchanger.roster = Roster(caller.peer_id, one.spec.run_id)
        caller.knows(callee)
        caller.step(11 * INTERVAL)
        assert (await caller.ended())["outcome"] == "applied"


async def test_an_answer_with_a_step_that_nobody_else_supports_is_not_taken():
    async with swarm(2) as one:
        caller, callee = one.nodes
        callee.step(11 * INTERVAL + 1, MIN_STEPS)
        await callee.ended()  # refused for just that, too
        caller.knows(callee, swarm_step=11 * INTERVAL + 1, issued=time() + 1)
        caller.step(INTERVAL)
        assert "which nobody else supports" in (await caller.ended())["reason"]
        await callee.ended(2)
        assert caller.exchanger.history.of(callee.peer_id).failed == 1
        assert [node.trainer.merges for node in one.nodes] == [[], []]


async def test_a_stranger_is_refused():
    async with swarm(1) as one:
        await one.node()
        one.nodes[0].knows(one.nodes[1])
        one.nodes[0].step(INTERVAL)
        await refused_for_good(one, one.nodes[0], one.nodes[1], Refusal.NOT_ALLOWED)


async def test_who_is_busy_refuses_and_the_next_candidate_is_called():
    async with swarm(0) as one:
        first, second, third, fourth = [await one.node() for _ in range(4)]
        one.meet(first, second)
        first.trainer.holds["capture"].clear()
        first.step(INTERVAL)
        await until_async(lambda: asyncio.sleep(0, "capture" in second.trainer.asked), DEADLINE, "two are under way")
        one.meet(first, second, third)
        third.step(INTERVAL)
        entry = await third.ended()
        assert entry["outcome"] == "no-partner"
        assert entry["left_out"] == dict.fromkeys((first.peer_id, second.peer_id), REFUSAL_TEXT[Refusal.BUSY])
        for busy in (first, second):
            await refused(one, third, busy, Refusal.BUSY)
        one.meet()
        third.step(2 * INTERVAL)
        assert (await third.ended(2))["partners"] == [fourth.peer_id]
        first.trainer.holds["capture"].set()
        assert [(await node.ended())["outcome"] for node in (first, second)] == ["applied", "applied"]


@pytest.mark.parametrize("short", ["of exchanges", "of slots"])
async def test_who_is_full_refuses_and_does_not_begin(short: str):
    ahead = {"progress": ({}, {"synced": 9})}  # so that it is the other fragment that it calls for
    async with swarm(0, fragments=2) as one:
        first, second = await one.node(), await one.node()
        one.slots = 4
        third = await one.node(**ahead)
        one.meet(first, second)
        first.trainer.holds["capture"].clear()
        first.step(INTERVAL)
        await until_async(lambda: asyncio.sleep(0, "capture" in second.trainer.asked), DEADLINE, "two are under way")
        if short == "of slots":
            first.exchanger.ready = replace(first.exchanger.ready, slots=4)
        one.meet(first, third)
        third.step(INTERVAL + INTERVAL // 2)
        await refused_for_good(one, third, first, Refusal.FULL)
        first.step(INTERVAL + INTERVAL // 2)
        assert list(first.exchanger.running) == [1], "the other fragment waits"
        first.trainer.holds["capture"].set()
        assert (await first.ended())["outcome"] == "applied"
        third.exchanger.open = False
        await until_async(lambda: asyncio.sleep(0, first.free == 2), DEADLINE, "slots are free again")
        first.step(INTERVAL + INTERVAL // 2 + 1)
        assert (await first.ended(2))["fragment"] == 0
        one.slots = 2
        third.trainer.arena.take(2)  # of its larger arena, so that all are alike in the end


async def test_slots_are_kept_until_the_last_word_has_gone():
    async with swarm(2) as one:
        first, second = one.nodes
        first.silent["confirm"].clear()
        first.step(INTERVAL)
        assert (await first.ended())["outcome"] == "applied"
        assert (first.free, len(second.exchanger.running)) == (0, 1)
        first.step(2 * INTERVAL)
        assert not first.exchanger.running, "the next one waits for slots"
        first.silent["confirm"].set()
        assert (await second.ended())["outcome"] == "applied"
        await until_async(lambda: asyncio.sleep(0, first.free == one.slots), DEADLINE, "slots are free again")


# Deaths and hostile frames in a pair


@pytest.mark.parametrize("calls", [True, False])
async def test_a_partner_that_is_gone_in_the_midst_of_it_costs_one_exchange(calls: bool):
    async with swarm(1) as one:
        (node,) = one.nodes
        puppet = await one.puppet()
        stream = await puppet.agree(node, calls)
        await say(stream, announced(puppet.content), chunks(puppet.content)[0])
        stream.cancel()
        entry = await node.ended()
        assert (entry["outcome"], node.trainer.merges) == ("failed", [])
        assert node.exchanger.history.of(puppet.peer_id).failed == 1


@pytest.mark.parametrize(("group", "outcome"), [(2, "failed"), (3, "no-partner")])
async def test_a_caller_that_is_gone_before_it_is_accepted_is_noticed(group: int, outcome: str):
    async with swarm(1, group) as one:
        (node,) = one.nodes
        puppet = await one.puppet()
        node.exchanger.roster.in_phase = lambda *_: []  # nobody else is to be called
        node.silent["accept"].clear()
        stream = await puppet.call(node)
        await say(stream, pb.Frame(hello=offers.to_message(puppet.offer())))
        await until_async(lambda: asyncio.sleep(0, node.waiting_to_say["accept"]), DEADLINE, "it is to be accepted")
        stream.cancel()
        assert (await node.ended())["outcome"] == outcome
        assert node.exchanger.history.of(puppet.peer_id).failed == 1


@pytest.mark.parametrize("calls", [True, False])
async def test_a_frame_of_groups_in_a_pair_costs_one_exchange(calls: bool):
    async with swarm(1) as one:
        (node,) = one.nodes
        puppet = await one.puppet()
        stream = await puppet.agree(node, calls)
        await say(stream, frames.roll(sorted([puppet.peer_id, node.peer_id])))
        assert "sent 'roll' where a contribution was expected" in (await node.ended())["reason"]
        await hear_end(stream)
        stream.cancel()


@pytest.mark.parametrize("calls", [True, False])
async def test_a_puppet_that_does_all_right_is_merged_with(calls: bool):
    async with swarm(1) as one:
        (node,) = one.nodes
        puppet = await one.puppet()
        stream = await puppet.agree(node, calls)
        assert await hear_content(stream) == contribution(node.peer_id, 0, 1, SIZE)
        await say(stream, announced(puppet.content), *chunks(puppet.content), puppet.confirm(node))
        assert (await hear(stream)).confirm == puppet.confirm(node).confirm
        assert (await node.ended())["outcome"] == "applied"
        assert node.trainer.merges[0].contributions[puppet.peer_id] == puppet.content
        closing = asyncio.create_task(soon(stream.close()))
        if not calls:
            stream.cancel()
        await closing


# Groups


def agreed(nodes: list[Node], number: int = 1) -> set[str]:
    """The owners of the shards that all have applied, the same means at every node."""
    merges = [node.trainer.merges for node in nodes]
    assert [len(one) for one in merges] == [number] * len(nodes)
    last = [one[-1].contributions for one in merges]
    assert last == [last[0]] * len(nodes)
    return set(last[0])


def whole_means(nodes: list[Node], number: int = 1) -> dict[str, bytes]:
    """The means of all shards, if everybody has contributed to all of them."""
    members = sorted(node.peer_id for node in nodes)
    sizes = shard_sizes(nodes[0].spec.sync.codec, nodes[0].trainer.numel, len(members))
    return {
        owner: mean_of(owner, {peer: contribution(f"{peer}>{owner}", 0, number, size) for peer in members})
        for owner, size in zip(members, sizes, strict=True)
    }


@pytest.mark.parametrize("group", [3, 4])
async def test_a_group_that_begins_at_once_applies_all_shards_with_all_contributions(group: int):
    async with swarm(group, group) as one:
        for number in (1, 2, 3):
            for node in one.nodes:
                node.step(number * INTERVAL)
            for node in one.nodes:
                entry = await node.ended(number)
                assert (entry["outcome"], entry["reason"], len(entry["partners"])) == ("applied", "", group - 1)
                assert entry["bytes_sent"] == entry["bytes_received"]
            agreed(one.nodes, number)
            assert one.nodes[0].trainer.merges[-1].contributions == whole_means(one.nodes, number)
        assert [node.outcomes for node in one.nodes] == [{Outcome.APPLIED: 3}] * group
        assert [node.exchanger.history.in_doubt for node in one.nodes] == [0] * group


@pytest.mark.parametrize("group", [3, 4])
@pytest.mark.parametrize("first", [0, -1])
async def test_who_is_called_takes_part_with_all_of_its_group(group: int, first: int):
    async with swarm(group, group) as one:
        one.nodes[first].step(INTERVAL)
        for node in one.nodes:
            assert len((await node.ended())["partners"]) == group - 1
        assert agreed(one.nodes) == {node.peer_id for node in one.nodes}


async def test_a_group_goes_on_without_a_member_that_refuses():
    async with swarm(4, 4) as one:
        one.nodes[1].exchanger.open = False
        for node in one.nodes:
            node.step(INTERVAL)
        others = [node for node in one.nodes if node is not one.nodes[1]]
        for node in others:
            entry = await node.ended()
            assert (entry["reason"], entry["left_out"]) == (
                "",
                {one.nodes[1].peer_id: REFUSAL_TEXT[Refusal.NOT_TRAINING]},
            )
            assert node.exchanger.history.refusals >= 1
        assert agreed(others) == {node.peer_id for node in others}
        assert one.nodes[1].trainer.asked == []


async def test_slow_weights_that_differ_go_in_full_precision_for_all():
    async with swarm(2, 3, codec="e3m0") as one:
        await one.node(slow_digests=("55" * 32,))
        one.meet()
        for node in one.nodes:
            node.step(INTERVAL)
        for node in one.nodes:
            entry = await node.ended()
            assert (entry["outcome"], entry["reason"]) == ("applied", "realigned")
            assert entry["bytes_sent"] > 4 * NUMEL
        agreed(one.nodes)


DEATHS = {
    "before it tells its links": ("frame", "roll", "none"),
    "before it names the members": ("frame", "members", "none of a leader"),
    "before it is captured": ("trainer", "share", "its own"),
    "before its shares have gone": ("frame", "content", "its own"),
    "while it averages": ("trainer", "reduce", "its own"),
    "before it tells what it holds": ("frame", "held", "none, its mean has come"),
    "before it commits": ("frame", "commit", "none, its mean has come"),
}
"""What of it is held up meanwhile, and which shards that costs."""


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("when", DEATHS)
async def test_a_member_that_dies_costs_no_more_than_its_shard(when: str, place: int):
    what, name, costs = DEATHS[when]
    async with swarm(4, 4) as one:
        dying = one.nodes[place]
        others = [node for node in one.nodes if node is not dying]
        (dying.trainer.holds if what == "trainer" else dying.silent)[name].clear()

        def reached() -> bool:
            return name in dying.trainer.asked if what == "trainer" else dying.waiting_to_say[name] == 3

        for node in one.nodes:
            node.step(INTERVAL)
        await until_async(lambda: asyncio.sleep(0, reached()), DEADLINE, f"it comes to {name}")
        await dying.die()
        everybody, alive = {node.peer_id for node in one.nodes}, {node.peer_id for node in others}
        entries = [await node.ended() for node in others]
        assert [entry["outcome"] for entry in entries] == ["applied"] * 3
        assert agreed(others) == (everybody if "mean has come" in costs else alive)
        # Who dies after the leader has named it, and before it is agreed, is still in the list.
        in_list = costs == "its own" or (costs == "none of a leader" and place == 3)
        assert [entry["reason"] for entry in entries] == ["3 of 4 shards" if in_list else ""] * 3
        assert all(dying.peer_id in entry["left_out"] for entry in entries)
        ended = (await dying.ended())["outcome"]
        assert ended in ("failed", "no-partner") or (name == "commit" and agreed(one.nodes) == everybody)


@pytest.mark.parametrize("request_", ["receive_share", "receive_mean"])
@pytest.mark.parametrize(("at", "of"), [(0, 1), (2, 1), (1, 3)])
async def test_a_contribution_that_the_trainer_can_not_take_costs_that_peer_only(request_: str, at: int, of: int):
    async with swarm(4, 4) as one:
        critic, blamed = one.nodes[at], one.nodes[of]
        critic.trainer.errors[request_ + blamed.peer_id] = TrainerError(
            "brings progress of norm 9 where 3 is plausible"
        )
        for node in one.nodes:
            node.step(INTERVAL)
        entries = [await node.ended() for node in one.nodes]
        owners = agreed(one.nodes)
        others = {node.peer_id for node in one.nodes if node not in (critic, blamed)}
        assert others <= owners and blamed.peer_id not in owners
        assert entries[at]["left_out"] == {blamed.peer_id: "brings progress of norm 9 where 3 is plausible"}
        assert entries[at]["reason"] == f"{len(owners)} of 4 shards"


@pytest.mark.parametrize("request_", ["share", "reduce", "merge"])
async def test_a_trainer_that_fails_costs_its_own_node_the_exchange(request_: str):
    async with swarm(3, 3) as one:
        failing, others = one.nodes[1], [one.nodes[0], one.nodes[2]]
        failing.trainer.errors[request_] = TrainerError("out of memory")
        for node in one.nodes:
            node.step(INTERVAL)
        entry = await failing.ended()
        assert entry["outcome"] == "failed" and "out of memory" in entry["reason"]
        for node in others:
            assert (await node.ended())["outcome"] == "applied"
        assert (failing.peer_id in agreed(others)) == (request_ == "merge")


async def test_a_share_that_comes_too_late_is_not_averaged_but_its_sender_takes_part():
    async with swarm(3, 3) as one:
        slow = one.nodes[2]
        slow.trainer.holds["share"].clear()
        for node in one.nodes:
            node.step(INTERVAL)
        await until_async(lambda: asyncio.sleep(0, "share" in slow.trainer.asked), DEADLINE, "all have agreed")
        for node in one.nodes[:2]:
            await until_async(
                lambda node=node: asyncio.sleep(0, node.trainer.asked.count("receive_share") == 1), DEADLINE, "one came"
            )
            next(iter(node.exchanger.running.values())).handle(gr.ReduceClosed())
        slow.trainer.holds["share"].set()
        assert [(await node.ended())["reason"] for node in one.nodes] == [""] * 3
        assert agreed(one.nodes) == {node.peer_id for node in one.nodes}
        whole, applied = whole_means(one.nodes), slow.trainer.merges[0].contributions
        assert {peer for peer in whole if applied[peer] == whole[peer]} == {slow.peer_id}


async def test_a_node_that_leaves_ends_its_exchange_and_the_others_go_on():
    async with swarm(3, 3) as one:
        leaving, others = one.nodes[0], one.nodes[1:]
        leaving.trainer.holds["share"].clear()
        for node in one.nodes:
            node.step(INTERVAL)
        await until_async(lambda: asyncio.sleep(0, "share" in leaving.trainer.asked), DEADLINE, "all have agreed")
        leaving.exchanger._longest = 0.1
        closing = asyncio.create_task(leaving.exchanger.close("the node leaves"))
        for node in others:
            assert (await node.ended())["left_out"] == {leaving.peer_id: "gave up: the node leaves"}
        leaving.trainer.holds["share"].set()
        await closing
        assert agreed(others) == {node.peer_id for node in others}


@pytest.mark.parametrize("deadline", [1.0, 10.0, 12.5, 60.0, 3600.0])
async def test_the_hours_of_a_group_strike_in_their_order(deadline: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(round_module, "HELLO_DEADLINE", 10.0)
    async with swarm(1, 4) as one:
        node = one.nodes[0].exchanger
        hours = GroupRound(node, node._offer(0, 1), [], (), called=False).timetable(deadline)
        hours.sort(key=lambda hour: hour[0])
        kinds = [type(event) for _, event in hours]
        looks = kinds.index(gr.ReduceClosed) - 1
        assert kinds[0] is ex.GatheringClosed and looks >= 3, "who waits for the leader can give it up before"
        assert kinds[1 : looks + 1] == [gr.AgreeingClosed] * looks
        rest = [kind for kind in kinds[looks + 1 :] if kind is not gr.AgreeingClosed]
        assert rest == [gr.ReduceClosed, ex.DeadlinePassed, gr.ConfirmingClosed, ex.DeadlinePassed]
        assert hours[0][0] <= 10.0 and hours[-1][0] == deadline + 10.0
        assert len(hours) < 1300


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("frame", ["roll", "members", "content", "held", "commit"])
async def test_a_member_that_falls_silent_is_not_waited_for(frame: str, place: int, monkeypatch: pytest.MonkeyPatch):
    for module in (exchanger_module, round_module):
        monkeypatch.setattr(module, "HELLO_DEADLINE", 1.5)
    async with swarm(4, 4) as one:
        silent = one.nodes[place]
        others = [node for node in one.nodes if node is not silent]
        silent.silent[frame].clear()
        for node in one.nodes:
            node.exchanger._longest = 3.0
        for node in one.nodes:
            node.step(INTERVAL)
        entries = [await node.ended() for node in others]
        silent.silent[frame].set()
        owners = agreed(others)
        assert {node.peer_id for node in others} <= owners
        assert (silent.peer_id in owners) == (frame in ("held", "commit"))
        assert [entry["outcome"] for entry in entries] == ["applied"] * 3
        if frame == "commit":
            assert [node.exchanger.history.in_doubt for node in others] == [1] * 3, "it may have left something out"
        await silent.ended()


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_share_of_a_list_that_we_do_not_agree_to_is_not_taken_in(leaves: bool):
    async with swarm(0, 3) as one:
        leader, hasty = await one.puppet(), await one.puppet()
        node = await one.node()
        one.meet()
        stream, _ = await leader.hello(node)
        _, early = await soon(hasty.calls.get())
        await hear(early)
        await say(early, pb.Frame(accept=offers.to_message(hasty.offer())))
        pair = sorted([hasty.peer_id, node.peer_id])
        await say(early, frames.roll(pair), frames.members(pair), announced(bytes(9), part=pb.SHARE))
        (round_,) = node.exchanger.running.values()
        reads = round_.links  # it has come to the share when the list before it was heard
        await until_async(
            lambda: asyncio.sleep(0, hasty.peer_id in reads and hasty.peer_id in round_.exchange._lists),
            DEADLINE,
            "named",
        )
        if leaves:
            node.exchanger._longest = 0.1
            await node.exchanger.close("the node leaves")
        else:
            both = sorted([leader.peer_id, node.peer_id])
            await say(stream, frames.roll(both), frames.members(both))
            heard = await hear_end(early)
            assert heard[-1].abandon.reason == "is not in the list of members"
            assert list(round_.members) == both
        stream.cancel()
        entry = await node.ended()
        assert entry["outcome"] == ("no-partner" if leaves else "failed")
        early.cancel()


# Bytes


@pytest.mark.parametrize("group", [2, 3, 4, 8])
@pytest.mark.parametrize(("codec_name", "numel"), [("fp32", 60_000), ("fp32", 250_000), ("e3m0", 1_000_000)])
async def test_a_member_sends_its_part_and_hardly_more(group: int, codec_name: str, numel: int):
    """2 (n - 1) / n of a coded fragment; beside it what it tells each partner, however large the fragment is."""
    async with swarm(group, max(3, group), codec=codec_name, numel=numel) as one:
        for node in one.nodes:
            node.step(INTERVAL)
        entries = [await node.ended() for node in one.nodes]
        assert agreed(one.nodes) == {node.peer_id for node in one.nodes}
        part = 2 * (group - 1) / group * codec(codec_name).coded_size(numel)
        sent = [entry["bytes_sent"] for entry in entries]
        assert sum(sent) == pytest.approx(group * part, rel=1e-4), (
            "a shard that is larger than others makes those smaller"
        )
        for node, payload in zip(one.nodes, sent, strict=True):
            assert payload <= part + (group - 2) * codec(codec_name).coded_size(256), "shards are cut at blocks"
            told = sum(node.told_bytes.values())
            assert told - payload <= (group - 1) * (400 + 150 * group) + 1e-4 * part
            if numel == 250_000 or (group <= 4 and numel > 60_000):
                assert told <= 1.01 * part


# Hostile frames in a group


class Impostor:
    """A puppet in a group of nodes, the last of its members: does all right up to some stage."""

    def __init__(self, puppet: Puppet, nodes: list[Node]) -> None:
        self.puppet, self.nodes = puppet, nodes
        self.me, self.members = puppet.peer_id, [*(node.peer_id for node in nodes), puppet.peer_id]
        assert self.members == sorted(self.members)
        self.sizes = shard_sizes("fp32", NUMEL, len(self.members))
        self.streams: dict[str, CalleeStream] = {}
        self.shares = {self.me: contribution(f"{self.me}>{self.me}", 0, 1, self.sizes[-1])}
        self.means: dict[str, bytes] = {}

    async def join(self) -> None:
        """Be called by all, and accept."""
        for node in self.nodes:
            node.step(INTERVAL)
        for _ in self.nodes:
            peer, stream = await soon(self.puppet.calls.get())
            assert (await hear(stream)).WhichOneof("kind") == "hello"
            await say(stream, pb.Frame(accept=offers.to_message(self.puppet.offer())))
            self.streams[peer] = stream

    async def play(self, until: str) -> None:
        """Do what is right in all stages before this one, and hear in it what the others tell before they wait for us."""
        for stage in ("roll", "members", "share", "mean", "held", "commit", ""):
            for peer, stream in self.streams.items():
                await self._hear(stage, peer, stream)
            if stage == until:
                return
            for peer, stream in self.streams.items():
                await say(stream, *self.frames(stage, peer))

    async def _hear(self, stage: str, peer: str, stream: Stream) -> None:
        match stage:
            case "members":
                assert [(await hear(stream)).WhichOneof("kind") for _ in range(2)] == ["roll", "members"]
            case "share":
                self.shares[peer] = await hear_content(stream)
            case "mean":
                self.means[peer] = await hear_content(stream)
            case "held" | "commit":
                assert (await hear(stream)).WhichOneof("kind") == stage

    def frames(self, stage: str, peer: str) -> list[pb.Frame]:
        """What is right to tell a member."""
        match stage:
            case "roll":
                return [frames.roll(self.members)]
            case "members":
                return [frames.members(self.members)]
            case "share":
                return whole(self.share(peer), pb.SHARE)
            case "mean":
                return whole(self.mean, pb.MEAN)
            case "held":
                return [frames.held(self.held)]
            case _:
                return [frames.commit([True] * 3, [True] * 3)]

    def share(self, owner: str) -> bytes:
        """Its contribution to a shard."""
        return contribution(f"{self.me}>{owner}", 0, 1, self.sizes[self.members.index(owner)])

    @property
    def mean(self) -> bytes:
        """The mean of its shard."""
        return mean_of(self.me, self.shares)

    @property
    def held(self) -> list[bytes]:
        """Digests of the means that it holds."""
        means = {**self.means, self.me: self.mean}
        return [sha256(means[owner]).digest() for owner in self.members]


def whole(data: bytes, part: pb.Part, **changes: Any) -> list[pb.Frame]:
    """A share or a mean as it travels."""
    return [announced(data, part=part, **changes), *chunks(data)]


async def test_an_impostor_that_does_all_right_is_a_member_like_all():
    async with swarm(2, 3) as one:
        impostor = Impostor(await one.puppet(), one.nodes)
        await impostor.join()
        await impostor.play("")
        assert [(await node.ended())["reason"] for node in one.nodes] == ["", ""]
        assert agreed(one.nodes) == set(impostor.members)
        assert one.nodes[0].trainer.merges[0].contributions[impostor.me] == impostor.mean
        for stream in impostor.streams.values():
            stream.cancel()


Bad = Callable[[Impostor, str], list[pb.Frame]]
NINE = [str(number) for number in range(9)]
HOSTILE: dict[str, tuple[str, Bad, str]] = {
    "nine peers": ("roll", lambda i, p: [frames.roll(NINE)], "sent 9 peers, where a group has 1 to 8"),
    "no peers": ("roll", lambda i, p: [frames.roll([])], "sent 0 peers"),
    "peers unsorted": ("roll", lambda i, p: [frames.roll(i.members[::-1])], "not sorted"),
    "a peer twice": ("roll", lambda i, p: [frames.roll(sorted(i.members * 2))], "one of them twice"),
    "an empty id": ("roll", lambda i, p: [frames.roll(["", *i.members])], "does not have 1 to 64 characters"),
    "a long id": ("roll", lambda i, p: [frames.roll([*i.members, "x" * 65])], "does not have 1 to 64 characters"),
    "a roll without us": ("roll", lambda i, p: [frames.roll([i.me])], "lacks one of us"),
    "a share at once": ("roll", lambda i, p: [announced(b"x", part=pb.SHARE)], "sent 'share' after 'hello', where it is not"),
    "a chunk at once": ("roll", lambda i, p: chunks(b"x"), "before its contribution was announced"),
    "no roll": ("roll", lambda i, p: [frames.members(i.members)], "sent 'members' after 'hello'"),
    "nothing": ("roll", lambda i, p: [pb.Frame()], "sent None after 'hello'"),
    "two rolls": ("members", lambda i, p: [frames.roll(i.members)], "sent 'roll' after 'roll'"),
    "nine members": ("members", lambda i, p: [frames.members(NINE)], "sent 9 peers"),
    "members unsorted": ("members", lambda i, p: [frames.members(i.members[::-1])], "not sorted"),
    "a stranger": ("members", lambda i, p: [frames.members([*i.members, "x"])], "malformed, or lacks one of us"),
    "members without us": ("members", lambda i, p: [frames.members([i.me])], "lacks one of us"),
    "a large share": ("share", lambda i, p: whole(i.share(p) + b"x", pb.SHARE), "announced .* are due"),
    "a small share": ("share", lambda i, p: whole(i.share(p)[1:], pb.SHARE), "announced .* are due"),
    "an endless share": ("share", lambda i, p: [announced(b"", part=pb.SHARE, size=2**63)], "announced .* are due"),
    "a whole contribution": ("share", lambda i, p: [announced(i.share(p))], "'a whole contribution' after 'members'"),
    "a part unknown": ("share", lambda i, p: [announced(i.share(p), part=7)], "'a whole contribution' after"),
    "a mean first": ("share", lambda i, p: whole(i.share(p), pb.MEAN), "sent 'mean' after 'members'"),
    "a share of other bytes": ("share", lambda i, p: whole(i.share(p), pb.SHARE, digest=bytes(32)), "not match its checksum"),
    "half a share": ("share", lambda i, p: [*whole(i.share(p), pb.SHARE)[:2], frames.held([b""] * 3)], "sent 'held' after"),
    "held before a share": ("share", lambda i, p: [frames.held([b""] * 3)], "sent 'held' after 'members'"),
    "a confirmation": ("share", lambda i, p: [i.puppet.confirm()], "sent 'confirm' after 'members'"),
    "a share twice": ("mean", lambda i, p: whole(i.share(p), pb.SHARE), "sent 'share' after 'share'"),
    "a large mean": ("mean", lambda i, p: whole(i.mean + b"x", pb.MEAN), "announced .* are due"),
    "a small mean": ("mean", lambda i, p: whole(i.mean[4:], pb.MEAN), "announced .* are due"),
    "a mean of other bytes": ("mean", lambda i, p: whole(i.mean, pb.MEAN, digest=bytes(32)), "not match its checksum"),
    "more after a share": ("mean", lambda i, p: chunks(b"x"), "out of place"),
    "committed unheld": ("mean", lambda i, p: [frames.commit([True] * 3, [True] * 3)], "sent 'commit' after 'share'"),
    "a mean twice": ("held", lambda i, p: whole(i.mean, pb.MEAN), "sent 'mean' after 'mean'"),
    "nine digests": ("held", lambda i, p: [frames.held([bytes(32)] * 9)], "sent 9 digests"),
    "a short digest": ("held", lambda i, p: [frames.held([bytes(31)] * 3)], "neither 32 bytes nor none"),
    "two digests": ("held", lambda i, p: [frames.held(i.held[:2])], "in another form than of 3 digests"),
    "another mean": ("held", lambda i, p: [frames.held([*i.held[:2], bytes(32)])], "another digest of its own mean"),
    "our mean changed": ("held", lambda i, p: [frames.held([bytes(32), bytes(32), i.held[2]])], "a digest of our mean that"),
    "held twice": ("commit", lambda i, p: [frames.held(i.held)], "sent 'held' after 'held'"),
    "nine shards": ("commit", lambda i, p: [frames.commit([True] * 9, [True] * 9)], "sent 9 shards"),
    "shards of others": ("commit", lambda i, p: [frames.commit([True] * 3, [True] * 2)], "3 shards of 2 members"),
    "two shards": ("commit", lambda i, p: [frames.commit([True] * 2, [True] * 2)], "another number of shards than 3"),
    "deaf": ("commit", lambda i, p: [frames.commit([True] * 3, [False] * 3)], "without hearing of both of us"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_member_is_lost_and_nobody_else(name: str):
    stage, bad, reason = HOSTILE[name]
    async with swarm(2, 3) as one:
        impostor = Impostor(await one.puppet(), one.nodes)
        await impostor.join()
        await impostor.play(stage)
        for peer, stream in impostor.streams.items():
            with suppress(LinkLost):  # the first frame can cost the stream
                await say(stream, *bad(impostor, peer))
        entries = [await node.ended() for node in one.nodes]
        for node, entry in zip(one.nodes, entries, strict=True):
            assert re.search(reason, entry["left_out"].pop(impostor.me))
            assert (entry["outcome"], entry["left_out"]) == ("applied", {})
            assert node.exchanger.history.of(impostor.me).failed == 1
        mean_has_come = stage in ("held", "commit")
        assert agreed(one.nodes) == set(impostor.members if mean_has_come else impostor.members[:2])
        in_list = stage != "roll"
        assert [e["reason"] for e in entries] == ["2 of 3 shards" if in_list and not mean_has_come else ""] * 2
        for stream in impostor.streams.values():
            await hear_end(stream)
            stream.cancel()
