"""Bytes of one exchange at one member: contents as coders size them, and the frames that agree on
it as the node writes them. Pure."""

import torch

from lowcomm_node.models.base import family_of, tensor_specs
from lowcomm_node.net.stream import ChunkFrame
from lowcomm_node.sync import frames, offers
from lowcomm_node.sync.link import CHUNK_BYTES
from lowcomm_protocol import PROTOCOL_VERSION
from lowcomm_protocol.codecs import codec, coder
from lowcomm_protocol.codecs.shards import shard_bounds
from lowcomm_protocol.exchange.group.tally import SALT_BYTES
from lowcomm_protocol.matching import SLICE_DIGEST_BYTES, Offer
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.plan import plan_fragments
from lowcomm_protocol.spec.names import codec_in_offer
from lowcomm_protocol.spec.run import RunSpec
from lowcomm_protocol.spec.sections import SyncSettings

PEER_ID = "12D3KooW" + 44 * "x"
DIGEST = bytes(32)
SALT = bytes(SALT_BYTES)
FAR = 2**20
"""A step, version or number of tokens in the middle of a run."""


def fragment_sizes(spec: RunSpec) -> tuple[int, ...]:
    """Values of each fragment, by the plan that peers make."""
    with torch.device("meta"):
        model = family_of(spec.model).blank(spec.model)
    plan = plan_fragments(tensor_specs(model), spec.sync.fragments, spec.sync.pattern)
    return tuple(fragment.numel for fragment in plan.fragments)


def members_of(sync: SyncSettings, peers: int) -> int:
    """How many take part in an exchange of a swarm of so many."""
    return min(sync.group, peers)


def contents(sync: SyncSettings, numel: int, members: int) -> int:
    """Bytes of coded values that a member sends for a fragment, and receives as many.

    Of a modulo codec those without blocks that wrap, which are sent again. Of a group the most that
    one of its members sends.
    """
    if members < 2:
        return 0
    if sync.group == 2:
        return coder(sync.codec, numel).min_size
    coded = codec(sync.codec).coded_size
    sizes = [coded(stop - start) for start, stop in shard_bounds(numel, members)]
    # To each owner its shard, and to each member the mean of ours.
    return max(sum(sizes) - mine + (members - 1) * mine for mine in sizes)


def control(sync: SyncSettings, numel: int, members: int) -> int:
    """Bytes of frames beside them that a member sends: offers, lists, chunks' heads, confirmations.

    gRPC, HTTP/2 and TLS come on top, as they do for contents.
    """
    if members < 2:
        return 0
    others, hello = members - 1, pb.Frame(hello=offers.to_message(_offer(sync))).ByteSize()
    if sync.group == 2:
        sent = [hello, pb.Frame(confirm=pb.Confirm(members=DIGEST)).ByteSize()]
        return sum(sent) + _heads(contents(sync, numel, members), 1)
    roll = [f"{PEER_ID}{number:02}" for number in range(members)]
    flags = [True] * members
    told = [frames.roll(roll, roll), frames.members(roll, roll)]  # in brief, as in a calm swarm
    told += [frames.held([DIGEST] * members, SALT), frames.commit(flags, flags, brief=True)]
    each = [hello, *(frame.ByteSize() for frame in told)]
    return others * sum(each) + _heads(contents(sync, numel, members), 2 * others)


def _heads(size: int, count: int) -> int:
    """Of so many contents, which have ``size`` bytes together: announcements, heads of chunks."""
    told = pb.Content(size=max(1, size // count), digest=DIGEST, part=pb.MEAN, blake3=True)
    empty: memoryview = memoryview(b"")
    head = ChunkFrame(max(1, size // count), empty).ByteSize() + 4  # and the length of its data
    chunks = -(-size // count // CHUNK_BYTES)
    return count * (pb.Frame(content=told).ByteSize() + chunks * head)


def _offer(sync: SyncSettings) -> Offer:
    digests = DIGEST if sync.consensus == 0 else b""
    return Offer(
        protocol=PROTOCOL_VERSION,
        run_id=DIGEST.hex(),
        plan=DIGEST.hex(),
        codec=codec_in_offer(sync.codec),
        fragment=sync.fragments - 1,
        stage=0,
        round=FAR,
        swarm_step=FAR,
        steps=sync.interval,
        tokens=FAR,
        version=FAR,
        slow_digest=digests,
        momentum_digest=digests,
        seconds=10,
        blake3=True,
        slice_digest=bytes(SLICE_DIGEST_BYTES) if sync.group > 2 else b"",
    )
