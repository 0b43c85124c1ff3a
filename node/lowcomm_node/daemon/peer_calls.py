"""What a node answers to the calls of other peers (transport.service.Handlers)."""

from collections.abc import Callable

from lowcomm_node.daemon.report import View
from lowcomm_node.errors import RetryLater
from lowcomm_node.transport.stream import CalleeStream
from lowcomm_protocol.messages import exchange_pb2 as pb


class PeerCalls:
    """Hands each call to the room that answers it."""

    def __init__(self, view: Callable[[], View]) -> None:
        self._view = view

    async def swap(self, peer: str, stream: CalleeStream) -> None:
        """Answer one Swap."""
        exchanger = self._view().exchanger
        assert exchanger
        await exchanger.serve(peer, stream)

    async def fetch(self, peer: str, stream: CalleeStream) -> None:
        """Serve a joiner, as long as it may take part. Raises RetryLater."""
        donor = self._view().donor
        if donor is None:
            raise RetryLater("has no state to hand over yet: ask another peer, or later.")
        await donor.serve(peer, stream)

    def describe(self, peer: str, introduction: pb.Introduction) -> pb.Introduction:
        """Take in a peer's record, and tell our own. Raises RetryLater."""
        membership = self._view().membership
        if membership is None:
            raise RetryLater("has only just begun to listen: call again in a moment.")
        return membership.meet(peer, introduction)
