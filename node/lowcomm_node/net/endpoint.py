"""Both ends of the calls between peers: the server that they call, and the channels to them.

callers ── TLS ──► server ◄── unix socket ── pipes ◄── streams of libp2p
channels ── TLS, or a pipe ──► callees
"""

from collections.abc import Callable

from lowcomm_node.net.bandwidth import Bandwidth, flow_options
from lowcomm_node.net.channels import Channels
from lowcomm_node.net.congestion import CongestionChanged, CongestionWatch
from lowcomm_node.net.control import Streams
from lowcomm_node.net.limits import PeerLimit
from lowcomm_node.net.ping import Echo
from lowcomm_node.net.pipe import Pipes
from lowcomm_node.net.server import ExchangeServer, ExchangeService, Handlers
from lowcomm_node.net.targets import Targets
from lowcomm_node.net.tls import Gatekeeper, make_certificate
from lowcomm_node.net.traffic import Traffic
from lowcomm_node.system.tasks import Warn, endure
from lowcomm_protocol.errors import Refusals


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

    async def watch(self, tell: Callable[[CongestionChanged], None], warn: Warn) -> None:
        """Watch over its connections, until cancelled. ``tell`` hears of lossy ones."""
        await endure("lossy connections stay as they are", CongestionWatch(tell).run, warn)

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
