"""Channels to peers, and both ends of a node: the server that others call, and these channels.

callers ── TLS ──► server ◄── unix socket ── pipes ◄── streams of libp2p
channels ── TLS, or a pipe ──► callees
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lowcomm_node.errors import LinkLost
from lowcomm_node.net.bandwidth import FREE_FLOW, Bandwidth, flow_options
from lowcomm_node.net.control import Streams
from lowcomm_node.net.limits import PeerLimit
from lowcomm_node.net.peer_channel import Dialer, PeerChannel
from lowcomm_node.net.ping import Echo, measure
from lowcomm_node.net.pipe import Pipes, name_tunnel
from lowcomm_node.net.routes import PeerRoute, RouteSpeed
from lowcomm_node.net.server import ExchangeServer, ExchangeService, Handlers, Options
from lowcomm_node.net.stream import SWAP, read_frame, write_frame
from lowcomm_node.net.targets import Targets
from lowcomm_node.net.tls import Gatekeeper, make_certificate
from lowcomm_node.net.traffic import Traffic
from lowcomm_protocol.errors import LowcommError, Refusals
from lowcomm_protocol.messages.exchange_pb2_grpc import ExchangeStub
from lowcomm_protocol.peers.records import PeerInfo


class Channels:
    """Channels to the peers that we call. The least recently called one is closed to make room."""

    def __init__(
        self,
        gatekeeper: Gatekeeper,
        pipes: Pipes | None = None,
        traffic: Traffic | None = None,
        refusals: Refusals | None = None,
        peer_limit: PeerLimit | None = None,
        flow: Options = FREE_FLOW,
        targets: Targets | None = None,
    ) -> None:
        """Without ``pipes`` there is one route: straight to the addresses of a record.

        ``flow``: gRPC options for incoming bytes (``bandwidth.flow_options``); ``targets``: which
        addresses may be dialed; all of this machine without it.
        """
        # An empty one is false
        self._peer_limit = PeerLimit() if peer_limit is None else peer_limit
        self._peer_limit.make_room = self._drop_idle
        self.traffic = traffic or Traffic()
        self._peers: OrderedDict[str, PeerChannel] = OrderedDict()
        self.dialer = Dialer(
            gatekeeper, pipes, targets or Targets(local=True), refusals or Refusals(), flow
        )

    async def stub(self, peer: PeerInfo) -> Any:
        """The service of a peer, over the best route. Raises LinkLost with the reason if there is
        none."""
        peer_channel = await self._peer_channel(peer)
        peer_channel.calls += 1  # or eviction could close it before its first call
        try:
            channel = await peer_channel.channel(peer)
        finally:
            peer_channel.calls -= 1
        stub: Any = ExchangeStub(channel)
        # So protobuf does not copy the bytes of contents.
        stub.Swap = channel.stream_stream(
            SWAP, request_serializer=write_frame, response_deserializer=read_frame
        )

        def counted(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                begun = method(*arguments, **options)
                peer_channel.calls += 1
                begun.add_done_callback(ended)
                return begun

            return call

        def ended(_: Any) -> None:
            peer_channel.calls -= 1

        for name in ("Swap", "Fetch", "Describe"):
            setattr(stub, name, counted(getattr(stub, name)))
        return stub

    async def renew(self, flow: Options) -> None:
        """Open later channels with other options, and close idle ones until there are no more peers
        than the owner allows. Calls under way may end on the existing ones."""
        if flow != self.dialer.flow:
            self.dialer.flow = flow
            for peer_channel in self._peers.values():
                peer_channel.renew()
        while len(self._peer_limit) > self._peer_limit.most and await self._drop_idle():
            pass

    def metadata(self, peer_id: str) -> tuple[tuple[str, bytes], ...]:
        """The metadata of every call to ``peer_id``."""
        return self.dialer.gatekeeper.credential_for(peer_id)

    async def ping(self, peer: PeerInfo, bandwidth: Bandwidth) -> list[RouteSpeed]:
        """Latency and rate of each route to a peer, measured in turn beside the calls under way."""
        peer_channel, speeds = PeerChannel(peer, self.dialer), list[RouteSpeed]()
        for route in self.dialer.routes:
            metadata = self.metadata(peer.peer_id)
            try:
                async with peer_channel.apart(route) as (channel, name):
                    speeds.append(await measure(channel, metadata, bandwidth, name))
            except LowcommError as error:
                speeds.append(RouteSpeed(route=route.value, reason=str(error)))
        return speeds

    async def forget(self, peer_id: str) -> None:
        """Drop a channel with no open route and no call, so that it keeps no place in the limit."""
        peer_channel = self._peers.get(peer_id)
        if peer_channel is not None and not peer_channel.calls and not peer_channel.is_open:
            await self._drop(peer_id)

    def describe(self, peer_id: str) -> PeerRoute:
        """What ``peers`` shows of a peer's route."""
        peer_channel, meter = self._peers.get(peer_id), self.traffic.of(peer_id)
        shown = peer_channel.describe() if peer_channel is not None else PeerRoute()
        if shown.route is None and self.dialer.pipes is not None:
            address = self.dialer.pipes.called_from(peer_id)
            shown = replace(shown, route=name_tunnel(address) if address else None)
        return replace(shown, rate_up=meter.up.last, rate_down=meter.down.last)

    def tunnels(self) -> dict[str, int]:
        """What ``status`` shows of streams that others have opened to us."""
        return self.dialer.pipes.statistics() if self.dialer.pipes is not None else {}

    async def close(self) -> None:
        """Close all channels."""
        await asyncio.gather(*(self._drop(peer_id) for peer_id in list(self._peers)))

    async def _peer_channel(self, peer: PeerInfo) -> PeerChannel:
        peer_id, limit = peer.peer_id, self._peer_limit
        if peer_id not in self._peers and not await limit.has_room_for(peer_id):
            raise LinkLost(
                f"was not called: this node talks with {limit.most} peers already: raise "
                "--max-peers"
            )
        if peer_id not in self._peers:  # still: another call may have been quicker
            self._peers[peer_id] = PeerChannel(peer, self.dialer)
            limit.join(peer_id)
        self._peers.move_to_end(peer_id)
        return self._peers[peer_id]

    async def _drop_idle(self) -> bool:
        """Close the channel that has carried no call for longest; whether there was one."""
        quiet = [peer_id for peer_id, channel in self._peers.items() if not channel.calls]
        unconnected = (peer_id for peer_id in quiet if not self._peers[peer_id].is_open)
        idle = next(unconnected, next(iter(quiet), None))
        if idle is not None:
            await self._drop(idle)
        return idle is not None

    async def _drop(self, peer_id: str) -> None:
        peer_channel = self._peers.pop(peer_id)
        self._peer_limit.leave(peer_id)
        await peer_channel.close()


class Endpoint:
    """The transport of one node in one run."""

    def __init__(
        self,
        gatekeeper: Gatekeeper,
        handlers: Handlers,
        streams: Streams,
        targets: Targets,
        bandwidth: Bandwidth,
        peer_limit: PeerLimit,
        refusals: Refusals,
    ) -> None:
        """``handlers``: answer authenticated calls; ``streams``: of libp2p; ``targets``: addresses
        that may be dialed."""
        self.certificate = make_certificate()
        self.port: int | None = None
        """Where we listen; None while we do not."""
        self._bandwidth = bandwidth
        self._pipes = Pipes(streams, gatekeeper.run_id)
        traffic, flow = Traffic(), flow_options(bandwidth.down.rate)
        self.channels = Channels(
            gatekeeper, self._pipes, traffic, refusals, peer_limit, flow, targets
        )
        self._service = ExchangeService(
            gatekeeper, handlers, self._pipes, traffic, Echo(bandwidth), peer_limit, refusals
        )
        self._server = ExchangeServer(self.certificate, self._service, flow)

    async def listen(self, host: str, port: int) -> int:
        """Listen on the network and for pipes; returns the port. Raises PortInUse, LinkLost.
        ``close`` it in any case."""
        self.port = await self._server.start(host, port)
        await self._pipes.serve(lambda: self._server.local)
        return self.port

    def on_sign_of_life(self, hear: Callable[[str], None]) -> None:
        """Have ``hear`` called with each authenticated peer that has called us, or answered."""
        self._service.on_caller = self.channels.dialer.on_answer = hear

    async def renew(self) -> None:
        """Follow the owner's changed limits; calls under way may end as they began. Raises
        PortInUse."""
        flow = flow_options(self._bandwidth.down.rate)
        await self._server.renew(flow)
        await self.channels.renew(flow)

    async def close(self) -> None:
        """Answer and make no more calls."""
        self.port = None
        try:
            await self._server.close()
            await self.channels.close()
        finally:
            await self._pipes.close()
