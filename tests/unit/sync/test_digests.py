"""What must hold for the digest of a content: BLAKE3 where all members know it, and SHA-256 for
those who do not say so."""

from hashlib import sha256

import pytest
from blake3 import blake3

from helpers.exchanging import announced, chunks, hear, hear_end, say, swarm
from helpers.wire import soon
from lowcomm_node.net.stream import Stream
from lowcomm_node.sync import offers
from lowcomm_protocol.messages import exchange_pb2 as pb

HASHES = {True: blake3, False: sha256}


async def hear_all(stream: Stream) -> tuple[pb.Content, bytes]:
    """What announces a content, and its bytes."""
    content, data = (await hear(stream)).content, b""
    while len(data) < content.size:
        data += (await hear(stream)).chunk.data
    return content, data


@pytest.mark.parametrize("knows", [True, False])
async def test_a_content_is_told_by_a_digest_that_both_know(knows: bool):
    async with swarm(1) as one:
        (node,) = one.nodes
        puppet = await one.puppet()
        stream, answer = await puppet.hello(node, blake3=knows)
        assert offers.from_message(answer.accept).blake3, "a node says what it knows"
        content, data = await hear_all(stream)
        assert content.blake3 is knows
        assert content.digest == HASHES[knows](data).digest()
        theirs = announced(
            puppet.content, blake3=knows, digest=HASHES[knows](puppet.content).digest()
        )
        await say(stream, theirs, *chunks(puppet.content), puppet.confirm(node))
        assert (await node.ended()).outcome == "applied"
        await soon(stream.close())


async def test_what_comes_again_has_the_same_digest():
    async with swarm(1) as one:
        (node,) = one.nodes
        puppet = await one.puppet()
        stream, _ = await puppet.hello(node, blake3=True)
        await hear_all(stream)
        await say(stream, pb.Frame(resend=pb.Resend(blocks=b"\1")))
        content, data = await hear_all(stream)
        assert content.blake3
        assert content.digest == blake3(data).digest()
        stream.cancel()
        await node.ended()


@pytest.mark.parametrize("claimed", [True, False])
async def test_bytes_that_do_not_match_the_digest_are_refused(claimed: bool):
    async with swarm(1) as one:
        (node,) = one.nodes
        puppet = await one.puppet()
        stream, _ = await puppet.hello(node, blake3=True)
        other = HASHES[not claimed](puppet.content).digest()
        told = announced(puppet.content, blake3=claimed, digest=other)
        await say(stream, told, *chunks(puppet.content))
        assert "does not match its checksum" in (await node.ended()).reason
        await hear_end(stream)
