"""The calling side: channels to peers.

They run over TLS, pinned to the certificate in the signed record, or through a tunnel.
"""

import asyncio
import socket
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from grpc import aio

from lowcomm_node.errors import LinkLost
from lowcomm_node.net.bandwidth import FREE_FLOW, Bandwidth
from lowcomm_node.net.certificates import Certificates, OtherCertificate
from lowcomm_node.net.connected import Dialers, name_tunnel
from lowcomm_node.net.limits import PeerLimit
from lowcomm_node.net.peer_channel import MEASURE_DEADLINE, PeerChannel
from lowcomm_node.net.ping import measure_channel
from lowcomm_node.net.routes import Learned, PeerRoute, Route, RouteSpeed
from lowcomm_node.net.server import MAX_MESSAGE, PING_PATIENCE_MS, Options
from lowcomm_node.net.stream import SWAP, read_frame, write_frame
from lowcomm_node.net.targets import Targets
from lowcomm_node.net.tls import SERVER_NAME, Gatekeeper, pinned
from lowcomm_node.net.traffic import MeteredStub, Traffic
from lowcomm_node.net.tunnels import Tunnels
from lowcomm_protocol.errors import LowcommError, Reason, RecordError, Refusals, What
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.messages.exchange_pb2_grpc import ExchangeStub
from lowcomm_protocol.peers.records import PeerInfo

MAX_CHANNELS = 64
"""Without tunnels; otherwise ``PeerLimit`` bounds the number."""
_OPTIONS: Options = (
    # Or a callee could fill our memory before we see a byte.
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # gRPC asks a proxy of the environment even for a unix socket, and no proxy leads to a peer.
    ("grpc.enable_http_proxy", 0),
)

_TLS_OPTIONS: Options = (
    *_OPTIONS,
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.ssl_target_name_override", SERVER_NAME),
)
_LOCAL_OPTIONS: Options = (
    *_OPTIONS,
    ("grpc.keepalive_timeout_ms", PING_PATIENCE_MS),
    ("grpc.http2.ping_timeout_ms", PING_PATIENCE_MS),
    # Or a channel could be given the connection of one that was there before
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.client_idle_timeout_ms", 120_000),
)


class Channels:
    """Channels to the peers that we call. The least recently called one is closed to make room."""

    def __init__(
        self,
        gatekeeper: Gatekeeper,
        tunnels: Tunnels | None = None,
        traffic: Traffic | None = None,
        refusals: Refusals | None = None,
        peer_limit: PeerLimit | None = None,
        flow: Options = FREE_FLOW,
        targets: Targets | None = None,
    ) -> None:
        """Without ``tunnels`` there is one route: straight to the addresses of a record.

        ``flow``: gRPC options for incoming bytes (``bandwidth.flow_options``); ``targets``: which
        addresses may be dialed.
        """
        self.on_answer: Callable[[str], None] = lambda peer: None
        """Called with each peer that has answered a ping of ours: a sign of life."""
        # An empty one is false
        self._peer_limit = PeerLimit() if peer_limit is None else peer_limit
        self._flow = flow
        self._peer_limit.make_room = self._drop_idle
        self._refusals = refusals or Refusals()
        self._gatekeeper = gatekeeper
        self._tunnels = tunnels
        self._traffic = traffic or Traffic()
        self._open: OrderedDict[tuple[str, bytes], aio.Channel] = OrderedDict()
        self._peer_channels: OrderedDict[str, PeerChannel] = OrderedDict()
        self._certificates = Certificates()
        self._learned = Learned()
        self._dialers = Dialers(self._dial, self._dial_local, self._ping, self._doubt, targets)

    async def stub(self, peer: PeerInfo) -> MeteredStub:
        """The service of a peer, over the best route. Raises LinkLost with the reason if there is
        none."""
        meter = self._traffic.of(peer.peer_id)
        if self._tunnels is None:
            return MeteredStub(stub_of(await self._straight(peer)), meter)
        peer_channel = await self._peer_channel(peer, self._tunnels)
        peer_channel.on_call(1)  # or eviction could close it before its first call
        try:
            channel = await peer_channel.channel(peer)
        finally:
            peer_channel.on_call(-1)
        return MeteredStub(
            stub_of(channel),
            meter,
            partial(peer_channel.measured, channel),
            peer_channel.on_call,
        )

    def renew(self, flow: Options) -> None:
        """Open later channels with other options. Calls under way may end on the existing ones."""
        if flow == self._flow:
            return
        self._flow = flow
        for peer_channel in self._peer_channels.values():
            peer_channel.renew()

    async def trim(self) -> None:
        """Close idle channels until there are no more peers than the owner allows."""
        while self._peer_limit.is_over and await self._drop_idle():
            pass

    def metadata(self, peer_id: str) -> tuple[tuple[str, bytes], ...]:
        """The metadata of every call to ``peer_id``."""
        return self._gatekeeper.credential_for(peer_id)

    async def ping(self, peer: PeerInfo, bandwidth: Bandwidth) -> list[RouteSpeed]:
        """Latency and rate of each route to a peer, measured in turn beside the calls under way."""
        if self._tunnels is None:
            return []
        peer_channel = PeerChannel(peer, self._dialers, self._tunnels, Learned())
        try:
            return [
                await self._ping_over(peer_channel, route, peer.peer_id, bandwidth)
                for route in Route
            ]
        finally:
            await peer_channel.close()

    async def forget(self, peer_id: str) -> None:
        """Drop a channel with no open route and no call, so that it keeps no place in the limit."""
        peer_channel = self._peer_channels.get(peer_id)
        if peer_channel is not None and not peer_channel.calls and not peer_channel.is_open:
            del self._peer_channels[peer_id]
            self._peer_limit.leave(peer_id)
            await peer_channel.close()

    def describe(self, peer_id: str) -> PeerRoute:
        """What ``peers`` shows of a peer's route: name, why not the better one, seconds, bytes a
        second."""
        peer_channel, meter = self._peer_channels.get(peer_id), self._traffic.of(peer_id)
        told = peer_channel.describe() if peer_channel is not None else PeerRoute()
        if (
            told.route is None
            and self._tunnels is not None
            and (address := self._tunnels.callee.caller_at(peer_id))
        ):
            told = replace(told, route=name_tunnel(address))  # it calls us
        return replace(told, rate_up=meter.up.last, rate_down=meter.down.last)

    def tunnels(self) -> dict[str, int]:
        """What ``status`` shows of all tunnels: see ``tunnels.Statistics``."""
        return asdict(self._tunnels.statistics()) if self._tunnels is not None else {}

    async def close(self) -> None:
        """Close all channels."""
        while self._open:
            _, channel = self._open.popitem()
            await channel.close()
        for peer_id in self._peer_channels:
            self._peer_limit.leave(peer_id)
        lines = self._peer_channels
        self._peer_channels = OrderedDict()
        await asyncio.gather(*(peer_channel.close() for peer_channel in lines.values()))

    async def _straight(self, peer: PeerInfo) -> aio.Channel:
        if not peer.addresses:
            raise LinkLost("tells no address that can be called")
        key = (",".join(peer.addresses), peer.certificate)
        if key not in self._open:
            try:
                channel = await self._dial(peer)
            except RecordError as error:
                raise LinkLost(str(error)) from None
            if key in self._open:  # another call was quicker
                await channel.close()
            else:
                self._open[key] = channel
        self._open.move_to_end(key)
        while len(self._open) > MAX_CHANNELS:
            _, oldest = self._open.popitem(last=False)
            await oldest.close()
        return self._open[key]

    async def _peer_channel(self, peer: PeerInfo, tunnels: Tunnels) -> PeerChannel:
        if peer.peer_id not in self._peer_channels and not await self._peer_limit.has_room_for(
            peer.peer_id
        ):
            most = self._peer_limit.most
            raise LinkLost(
                f"was not called: this node talks with {most} peers already: raise --max-peers"
            )
        if peer.peer_id not in self._peer_channels:  # still: another call may have been quicker
            self._peer_channels[peer.peer_id] = PeerChannel(
                peer, self._dialers, tunnels, self._learned
            )
            self._peer_limit.join(peer.peer_id)
        self._peer_channels.move_to_end(peer.peer_id)
        return self._peer_channels[peer.peer_id]

    async def _drop_idle(self) -> bool:
        """Close the channel that has carried no call for longest; whether there was one."""
        quiet = [
            peer_id
            for peer_id, peer_channel in self._peer_channels.items()
            if not peer_channel.calls
        ]
        idle = next(
            (peer_id for peer_id in quiet if not self._peer_channels[peer_id].is_open),
            next(iter(quiet), None),
        )
        if idle is None:
            return False
        peer_channel = self._peer_channels.pop(idle)
        self._peer_limit.leave(idle)
        await peer_channel.close()
        return True

    async def _ping_over(
        self, peer_channel: PeerChannel, route: Route, peer_id: str, bandwidth: Bandwidth
    ) -> RouteSpeed:
        try:
            async with peer_channel.apart(route) as (channel, name):
                speed = await measure_channel(channel, self.metadata(peer_id), bandwidth)
        except LowcommError as error:
            return RouteSpeed(route=route.value, reason=str(error))
        return RouteSpeed(route=name, round_trip=speed.round_trip, up=speed.up, down=speed.down)

    async def _dial(self, peer: PeerInfo) -> aio.Channel:
        scheme, addresses = _callable(peer.addresses)
        try:
            der = await self._certificates.fetch(peer.certificate, addresses)
        except OtherCertificate:
            self._doubt()
            raise
        return aio.secure_channel(
            scheme + ",".join(addresses), pinned(der), options=(*_TLS_OPTIONS, *self._flow)
        )

    def _dial_local(self, target: str) -> aio.Channel:
        return aio.insecure_channel(target, options=(*_LOCAL_OPTIONS, *self._flow))

    def _doubt(self) -> None:
        self._refusals.count(What.CONNECTION, Reason.OTHER_CERTIFICATE)

    async def _ping(self, channel: aio.Channel, peer_id: str) -> None:
        stub = ExchangeStub(channel)
        await stub.Describe(
            pb.Introduction(), metadata=self.metadata(peer_id), timeout=MEASURE_DEADLINE
        )
        self.on_answer(peer_id)


def _callable(addresses: tuple[str, ...]) -> tuple[str, list[str]]:
    """gRPC's scheme, and the addresses of one family, since gRPC can't mix IPv4 and IPv6."""
    numbers = [
        address for address in addresses if address.rpartition(":")[0].replace(".", "").isdigit()
    ]
    longer = [address for address in addresses if address.startswith("[")]
    if numbers and (not longer or _has_route(numbers[0])):
        return "ipv4:", numbers
    return "ipv6:", longer


def _has_route(address: str) -> bool:
    """Whether this machine has a route to an IPv4 address. Nothing is sent."""
    host, _, port = address.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
    except OSError:
        return False
    return True


def stub_of(channel: Any) -> ExchangeStub:
    """The service behind a channel; the bytes of contents are not copied by protobuf."""
    stub = ExchangeStub(channel)
    stub.Swap = channel.stream_stream(
        SWAP, request_serializer=write_frame, response_deserializer=read_frame
    )
    return stub
