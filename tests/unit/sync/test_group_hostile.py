"""What must hold where a member of a group sends what no honest one does: it is lost, and nobody
else."""

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from blake3 import blake3

from helpers import group_frames
from helpers.exchanging import (
    INTERVAL,
    NUMEL,
    Node,
    Puppet,
    agreed,
    announced,
    chunks,
    eventually,
    hear,
    hear_content,
    hear_end,
    say,
    swarm,
)
from helpers.scripted_trainer import contribution, mean_of, shard_sizes
from helpers.wire import soon
from lowcomm_node.errors import LinkLost
from lowcomm_node.net.stream import CalleeStream, Stream
from lowcomm_node.sync import frames
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.spec.names import MAX_GROUP

pytestmark = pytest.mark.slow


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
        self.told: list[pb.Frame] = []
        """What others told it, but contents."""

    async def join(self) -> None:
        """Be called by all, and accept."""
        for node in self.nodes:
            node.step(INTERVAL)
        for _ in self.nodes:
            peer, stream = await soon(self.puppet.calls.get())
            assert (await hear(stream)).WhichOneof("kind") == "hello"
            await say(stream, pb.Frame(accept=frames.to_message(self.puppet.offer())))
            self.streams[peer] = stream

    async def play(self, until: str) -> None:
        """Do what is right in all stages before this one, and hear in it what the others tell
        before they wait for us."""
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
                both = [await hear(stream) for _ in range(2)]
                assert [frame.WhichOneof("kind") for frame in both] == ["roll", "members"]
                self.told += both
            case "share":
                self.shares[peer] = await hear_content(stream)
            case "mean":
                self.means[peer] = await hear_content(stream)
            case "held" | "commit":
                self.told.append(await hear(stream))
                assert self.told[-1].WhichOneof("kind") == stage

    def frames(self, stage: str, peer: str) -> list[pb.Frame]:
        """What is right to tell a member."""
        match stage:
            case "roll":
                return [group_frames.roll(self.members)]
            case "members":
                return [group_frames.members(self.members)]
            case "share":
                return whole(self.share(peer), pb.SHARE)
            case "mean":
                return whole(self.mean, pb.MEAN)
            case "held":
                return [group_frames.held(self.held)]
            case _:
                return [group_frames.commit([True] * 3, [True] * 3)]

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
        return [blake3(means[owner]).digest() for owner in self.members]


def half(data: bytes, part: pb.Part) -> list[pb.Frame]:
    """The beginning of a content: its announcement, and half of its bytes."""
    return [
        whole(data, part)[0],
        pb.Frame(chunk=pb.Chunk(offset=0, data=data[: len(data) // 2])),
    ]


def whole(data: bytes, part: pb.Part, **changes: Any) -> list[pb.Frame]:
    """A share or a mean as it travels."""
    return [announced(data, part=part, **changes), *chunks(data)]


async def test_an_impostor_that_does_all_right_is_a_member_like_all():
    async with swarm(2, 3) as one:
        impostor = Impostor(await one.puppet(), one.nodes)
        await impostor.join()
        await impostor.play("")
        assert [(await node.ended()).reason for node in one.nodes] == ["", ""]
        assert agreed(one.nodes) == set(impostor.members)
        assert one.nodes[0].trainer.merges[0].contributions[impostor.me] == impostor.mean
        for stream in impostor.streams.values():
            stream.cancel()


Bad = Callable[[Impostor, str], list[pb.Frame]]
MANY = [f"{number:02}" for number in range(MAX_GROUP + 1)]
HOSTILE: dict[str, tuple[str, Bad, str]] = {
    "too many peers": ("roll", lambda i, p: [group_frames.roll(MANY)],
        "sent 33 entries, where a group has 32"),
    "no peers": ("roll", lambda i, p: [group_frames.roll([])], "malformed"),
    "peers unsorted": ("roll", lambda i, p: [group_frames.roll(i.members[::-1])], "malformed"),
    "a peer twice": ("roll", lambda i, p: [group_frames.roll(sorted(i.members * 2))],
        "malformed"),
    "an empty id": ("roll", lambda i, p: [group_frames.roll(["", *i.members])],
        "malformed"),
    "a long id": ("roll", lambda i, p: [group_frames.roll([*i.members, "x" * 65])],
        "an entry of more than 64 characters"),
    "a roll without us": ("roll", lambda i, p: [group_frames.roll([i.me])], "lacks one of us"),
    "a share at once": ("roll", lambda i, p: [announced(b"x", part=pb.SHARE)],
        "sent 'share' after 'hello', where it is not"),
    "a chunk at once": ("roll", lambda i, p: chunks(b"x"), "before its contribution was announced"),
    "no roll": ("roll", lambda i, p: [group_frames.members(i.members)],
        "sent 'members' after 'hello'"),
    "nothing": ("roll", lambda i, p: [pb.Frame()], "sent 'nothing' after 'hello'"),
    "two rolls": ("members", lambda i, p: [group_frames.roll(i.members)],
        "sent 'roll' after 'roll'"),
    "no members": ("members", lambda i, p: [group_frames.members([])], "malformed"),
    "a member beyond the roll": ("members",
        lambda i, p: [group_frames.members(sorted([*i.members, "~"]))], "malformed"),
    "members without us": ("members", lambda i, p: [group_frames.members([i.me])],
        "lacks one of us"),
    "a large share": ("share", lambda i, p: whole(i.share(p) + b"x", pb.SHARE),
        "announced .* are due"),
    "a small share": ("share", lambda i, p: whole(i.share(p)[1:], pb.SHARE),
        "announced .* are due"),
    "an endless share": ("share", lambda i, p: [announced(b"", part=pb.SHARE, size=2**63)],
        "announced .* are due"),
    "a whole contribution": ("share", lambda i, p: [announced(i.share(p))],
        "'contribution' after 'members'"),
    "a part unknown": ("share", lambda i, p: [announced(i.share(p), part=7)],
        "'content' after"),
    "a mean first": ("share", lambda i, p: whole(i.share(p), pb.MEAN),
        "sent 'mean' after 'members'"),
    "steps that nobody lacks": ("share", lambda i, p: whole(b"step", pb.MISSED),
        "hands over outer steps that we do not lack"),
    "steps after a share": ("mean", lambda i, p: whole(b"step", pb.MISSED),
        "sent 'missed' after 'share'"),
    "a share of other bytes": ("share", lambda i, p: whole(i.share(p), pb.SHARE, digest=bytes(32)),
        "not match its checksum"),
    "half a share": ("share", lambda i, p: [*half(i.share(p), pb.SHARE),
            group_frames.held([b""] * 3)], "sent 'held' after"),
    "held before a share": ("share", lambda i, p: [group_frames.held([b""] * 3)],
        "sent 'held' after 'members'"),
    "a confirmation": ("share", lambda i, p: [i.puppet.confirm()],
        "sent 'confirm' after 'members'"),
    "a share twice": ("mean", lambda i, p: whole(i.share(p), pb.SHARE),
        "sent 'share' after 'share'"),
    "a large mean": ("mean", lambda i, p: whole(i.mean + b"x", pb.MEAN), "announced .* are due"),
    "a small mean": ("mean", lambda i, p: whole(i.mean[4:], pb.MEAN), "announced .* are due"),
    "a mean of other bytes": ("mean", lambda i, p: whole(i.mean, pb.MEAN, digest=bytes(32)),
        "not match its checksum"),
    "more after a share": ("mean", lambda i, p: chunks(b"x"), "out of place"),
    "committed unheld": ("mean", lambda i, p: [group_frames.commit([True] * 3, [True] * 3)],
        "sent 'commit' after 'share'"),
    "a mean twice": ("held", lambda i, p: whole(i.mean, pb.MEAN), "sent 'mean' after 'mean'"),
    "too many digests": ("held", lambda i, p: [group_frames.held([bytes(32)] * 33)],
        "sent 33 entries"),
    "two digests": ("held", lambda i, p: [group_frames.held(i.held[:2])],
        "in another form than of 3 digests"),
    "half a digest": ("held", lambda i, p: [group_frames.held([*i.held[:2], bytes(16)])],
        "in another form than of 3 digests"),
    "a digest too long": ("held", lambda i, p: [group_frames.held([*i.held[:2], bytes(33)])],
        "an entry of more than 32"),
    "digests of another mean": ("held",
        lambda i, p: [group_frames.held([*i.held[:2], bytes(32)])],
        "another digest of its own mean"),
    "a digest of our mean changed": ("held",
        lambda i, p: [group_frames.held([bytes(32), bytes(32), i.held[2]])],
        "a digest of our mean that"),
    "held twice": ("commit", lambda i, p: [group_frames.held(i.held)], "sent 'held' after 'held'"),
    "too many shards": ("commit", lambda i, p: [group_frames.commit([True] * 33, [True] * 3)],
        "sent 33 entries"),
    "shards beyond the members": ("commit",
        lambda i, p: [group_frames.commit([True] * 4, [True] * 3)],
        "another number of shards than 3"),
    "two shards": ("commit", lambda i, p: [group_frames.commit([True] * 2, [True] * 2)],
        "another number of shards than 3"),
    "deaf": ("commit", lambda i, p: [group_frames.commit([True] * 3, [False] * 3)],
        "without hearing of both of us"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_member_is_lost_and_nobody_else(name: str):
    stage, bad, reason = HOSTILE[name]
    async with swarm(2, 3) as one:
        impostor = Impostor(await one.puppet(), one.nodes)
        await impostor.join()
        await impostor.play(stage)
        for node in one.nodes:
            # Whoever loses it at once names a list without it; who hears of that first would give
            # it up for just that.
            node.silent["members"].clear()
        for peer, stream in impostor.streams.items():
            with suppress(LinkLost):  # the first frame can cost the stream
                await say(stream, *bad(impostor, peer))
        for node in one.nodes:
            await eventually(
                lambda node=node: node.exchanger.history.of(impostor.me).failed,
                "the impostor is lost",
            )
        for node in one.nodes:
            node.silent["members"].set()
        entries = [await node.ended() for node in one.nodes]
        for node, entry in zip(one.nodes, entries, strict=True):
            assert re.search(reason, entry.left_out.pop(impostor.me))
            assert (entry.outcome, entry.left_out) == ("applied", {})
            assert node.exchanger.history.of(impostor.me).failed == 1
        mean_has_come = stage in ("held", "commit")
        assert agreed(one.nodes) == set(impostor.members if mean_has_come else impostor.members[:2])
        in_list = stage != "roll"
        assert [e.reason for e in entries] == [
            "2 of 3 shards" if in_list and not mean_has_come else ""
        ] * 2
        for stream in impostor.streams.values():
            await hear_end(stream)
            stream.cancel()
