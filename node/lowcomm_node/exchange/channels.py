"""The calling side: one TLS channel a peer, pinned to the certificate in its signed record."""

from collections import OrderedDict
from typing import Any

from grpc import aio

from lowcomm_node.errors import LinkLost
from lowcomm_node.exchange.security import SERVER_NAME, Gatekeeper, pinned
from lowcomm_node.exchange.service import MAX_MESSAGE
from lowcomm_protocol.errors import RecordError
from lowcomm_protocol.messages.exchange_pb2_grpc import ExchangeStub
from lowcomm_protocol.records import PeerInfo

MAX_CHANNELS = 64
OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),  # or a callee could fill our memory before we see a byte
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)


class Channels:
    """Channels to the peers that we call, the least recently used closed beyond ``MAX_CHANNELS``."""

    def __init__(self, gatekeeper: Gatekeeper) -> None:
        self._gatekeeper = gatekeeper
        self._open: OrderedDict[tuple[str, bytes], aio.Channel] = OrderedDict()

    async def stub(self, peer: PeerInfo) -> ExchangeStub:
        """The service of a peer. Raises LinkLost if it tells no address, or no certificate that can be read."""
        if not peer.addresses:
            raise LinkLost("tells no address that can be called")
        key = (",".join(peer.addresses), peer.certificate)
        if key not in self._open:
            try:
                self._open[key] = self._dial(peer)
            except RecordError as error:
                raise LinkLost(str(error)) from None
        self._open.move_to_end(key)
        while len(self._open) > MAX_CHANNELS:
            _, oldest = self._open.popitem(last=False)
            await oldest.close()
        return ExchangeStub(self._open[key])

    def metadata(self, peer_id: str) -> tuple[tuple[str, bytes], ...]:
        """What every call to ``peer_id`` carries."""
        return self._gatekeeper.credential_for(peer_id)

    async def close(self) -> None:
        """Close all channels."""
        while self._open:
            _, channel = self._open.popitem()
            await channel.close()

    def _dial(self, peer: PeerInfo) -> aio.Channel:
        options = (*OPTIONS, ("grpc.ssl_target_name_override", SERVER_NAME))
        return aio.secure_channel(_target(peer.addresses), pinned(peer.certificate), options=options)


def _target(addresses: tuple[str, ...]) -> str:
    """All addresses at once where gRPC can try them in turn; it can't mix names and numbers."""
    numbers = [address for address in addresses if address.rpartition(":")[0].replace(".", "").isdigit()]
    # With its scheme, or a host named "unix" would be a path on this machine.
    return "ipv4:" + ",".join(numbers) if numbers else f"dns:///{addresses[0]}"
