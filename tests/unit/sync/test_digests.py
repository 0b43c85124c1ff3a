"""What must hold for the digest of a content, which is BLAKE3."""

from blake3 import blake3

from helpers.exchanging import announced, chunks, hear_content, hear_end, say, swarm
from lowcomm_protocol.messages import exchange_pb2 as pb


async def test_what_comes_again_has_a_digest_of_its_own():
    async with swarm(1) as one:
        (node,) = one.nodes
        puppet = await one.puppet()
        stream, _ = await puppet.hello(node)
        await hear_content(stream)
        await say(stream, pb.Frame(resend=pb.Resend(blocks=b"\1")))
        await hear_content(stream)
        stream.cancel()
        await node.ended()


async def test_bytes_that_do_not_match_the_digest_are_refused():
    async with swarm(1) as one:
        (node,) = one.nodes
        puppet = await one.puppet()
        stream, _ = await puppet.hello(node)
        other = announced(puppet.content, digest=blake3(b"other bytes").digest())
        await say(stream, other, *chunks(puppet.content))
        assert "does not match its checksum" in (await node.ended()).reason
        await hear_end(stream)
