"""What a node answers to the calls of other peers (transport.service.Handlers)."""

from lowcomm_node.errors import RetryLater
from lowcomm_node.fetch.giving import FileGiver
from lowcomm_node.net.stream import CalleeStream
from lowcomm_node.node.lifecycle import Training
from lowcomm_node.swarm.membership import Membership
from lowcomm_node.sync.exchanger import Exchanger
from lowcomm_protocol.messages import exchange_pb2 as pb


class PeerCalls:
    """Hands each call to what answers it, as soon as that is there."""

    def __init__(self) -> None:
        self.exchanger: Exchanger | None = None
        self.membership: Membership | None = None
        self.training: Training | None = None
        self.files: FileGiver | None = None

    async def swap(self, peer: str, stream: CalleeStream) -> None:
        """Answer one Swap."""
        assert self.exchanger, "it is there before we listen"
        await self.exchanger.serve(peer, stream)

    async def fetch(self, peer: str, stream: CalleeStream) -> None:
        """Serve a joiner, as long as it may take part. Raises RetryLater."""
        donor = self.training.donor if self.training is not None else None
        if donor is None:
            raise RetryLater("has no state to hand over yet: ask another peer, or later.")
        await donor.serve(peer, stream)

    async def file(self, peer: str, stream: CalleeStream) -> None:
        """Send a file of the run to a peer that may take part. Raises RetryLater."""
        assert self.files, "it is there before we listen"
        await self.files.serve(peer, stream)

    def describe(self, peer: str, introduction: pb.Introduction) -> pb.Introduction:
        """Take in a peer's record, and tell our own. Raises RetryLater."""
        if self.membership is None:
            raise RetryLater("has only just begun to listen: call again in a moment.")
        return self.membership.meet(peer, introduction)
