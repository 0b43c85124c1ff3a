"""Both ends of the calls between peers: the server that they call, and the channels to them.

callers ── TLS ──► server ◄── unix socket ── tunnels ◄── streams of libp2p
channels ── TLS, or a tunnel ──► callees
"""

import asyncio
import datetime
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lowcomm_node.dht.interface import Discovery
from lowcomm_node.net.bandwidth import Bandwidth, flow_options
from lowcomm_node.net.channels import Channels
from lowcomm_node.net.congestion import CongestionChanged, CongestionWatch
from lowcomm_node.net.limits import PeerLimit
from lowcomm_node.net.ping import Echo
from lowcomm_node.net.server import ExchangeServer
from lowcomm_node.net.service import ExchangeService, Handlers
from lowcomm_node.net.tls import Gatekeeper, make_certificate
from lowcomm_node.net.traffic import Traffic
from lowcomm_node.net.tunnels import Tunnels
from lowcomm_node.system.tasks import Warn, endure
from lowcomm_protocol.errors import Refusals


class Endpoint:
    """The transport of one node in one run."""

    def __init__(
        self,
        gatekeeper: Gatekeeper,
        handlers: Handlers,
        discovery: Discovery,
        bandwidth: Bandwidth,
        peer_limit: PeerLimit,
        refusals: Refusals,
    ) -> None:
        """``handlers``: answer authenticated calls; ``discovery``: carries tunnels."""
        self.certificate = make_certificate(datetime.datetime.now(datetime.UTC))
        self.port: int | None = None
        """Where we listen; None while we do not."""
        self._bandwidth = bandwidth
        self._tunnels = Tunnels(discovery, gatekeeper.run_id)
        traffic, flow = Traffic(), flow_options(bandwidth.down.rate)
        self.channels = Channels(
            gatekeeper,
            self._tunnels,
            traffic,
            refusals,
            peer_limit,
            flow,
            discovery.targets,
        )
        self._service = ExchangeService(
            gatekeeper,
            handlers,
            self._tunnels,
            traffic,
            Echo(bandwidth),
            peer_limit,
            refusals,
        )
        self._server = ExchangeServer(self.certificate, self._service, flow)

    async def listen(self, folder: Path, host: str, port: int) -> int:
        """Listen on the network and, in ``folder``, for tunnels; returns the port.

        Raises PortInUse, LinkLost. ``close`` it in any case.
        """
        self._server.listen_locally(folder)
        self.port = await self._server.start(host, port)
        await self._tunnels.serve(self._server.local)
        return self.port

    async def watch(self, tell: Callable[[CongestionChanged], None], warn: Warn) -> None:
        """Watch over its connections, until cancelled. ``tell`` hears of lossy ones."""
        assert self.port is not None, "it does not listen yet"
        guard = partial(self._service.unauthenticated.run, self.port)
        await asyncio.gather(
            endure("lossy connections stay as they are", CongestionWatch(tell).run, warn),
            endure("connections without a call are not ended", guard, warn),
        )

    def on_sign_of_life(self, hear: Callable[[str], None]) -> None:
        """``hear`` is told each peer that has called us, or answered, and has authenticated."""
        self._service.on_caller = self.channels.on_answer = hear

    async def renew(self) -> None:
        """Follow the owner's changed limits; calls under way may end as they began.

        Raises PortInUse.
        """
        flow = flow_options(self._bandwidth.down.rate)
        self.channels.renew(flow)
        if self.port is not None:
            await self._server.renew(flow)
        await self.channels.trim()

    async def close(self) -> None:
        """Answer and make no more calls."""
        self.port = None
        try:
            await self._server.close()
            await self.channels.close()
        finally:
            await self._tunnels.close()
