"""What a node answers to the calls of other peers (transport.service.Handlers)."""

from lowcomm_node.errors import RetryLater
from lowcomm_node.fetch.giving import PieceServer
from lowcomm_node.net.stream import CalleeStream
from lowcomm_node.swarm.membership import Membership
from lowcomm_node.sync.exchanger import Exchanger
from lowcomm_protocol.messages import exchange_pb2 as pb


class PeerCalls:
    """Hands each call to what answers it, as soon as that is there."""

    def __init__(self) -> None:
        self.exchanger: Exchanger | None = None
        self.membership: Membership | None = None
        self.pieces: PieceServer | None = None

    async def swap(self, peer: str, stream: CalleeStream) -> None:
        """Answer one Swap."""
        assert self.exchanger, "it is there before we listen"
        await self.exchanger.serve(peer, stream)

    async def fetch(self, peer: str, stream: CalleeStream) -> None:
        """Give pieces of files, and of our state, to a peer that may take part.

        Raises RetryLater.
        """
        assert self.pieces, "it is there before we listen"
        await self.pieces.serve(peer, stream)

    def describe(self, peer: str, introduction: pb.Introduction) -> pb.Introduction:
        """Take in a peer's record, and tell our own. Raises RetryLater."""
        if self.membership is None:
            raise RetryLater("has only just begun to listen: call again in a moment.")
        return self.membership.meet(peer, introduction)
