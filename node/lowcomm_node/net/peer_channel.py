"""Opens and closes the routes to one peer.

Direct is preferred. Unknown routes are tried: direct at once, the tunnel after a head start, or as
soon as direct has failed. A failed route is tried again with growing pauses, or soon if no other is
open.

A gRPC channel is used only while it is connected. A disconnected one is closed once its calls have
ended, and the next call opens another, so that no call waits for a dead address.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from time import monotonic

import grpc
from grpc import aio

from lowcomm_node.errors import LinkLost
from lowcomm_node.net.addresses import CIRCUIT
from lowcomm_node.net.pipe import Outgoing, Pipes, name_tunnel
from lowcomm_node.net.routes import DEADLINES, HEAD_START, PeerRoute, Route, RouteHistory
from lowcomm_node.net.server import MAX_MESSAGE, PING_PATIENCE_MS, Options
from lowcomm_node.net.targets import Targets
from lowcomm_node.net.tls import SERVER_NAME, Gatekeeper, pinned
from lowcomm_node.system.logs import log
from lowcomm_node.system.tasks import Tasks, in_time, start
from lowcomm_protocol.errors import LowcommError, Reason, Refusals, What
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.messages.exchange_pb2_grpc import ExchangeStub
from lowcomm_protocol.peers.records import PeerInfo

PATIENCE = 10.0
"""Seconds that a call waits for a route. Attempts go on after that."""
RETIRE_GRACE = 300.0
"""Seconds for the calls on a channel that is replaced."""
LOOK_EVERY = 10.0
"""Seconds between two checks whether a better tunnel can replace a relayed one."""
MEASURE_EVERY = 30.0
"""Seconds between two measurements of the round-trip time of a route in use."""
MEASURE_DEADLINE = 10.0
OTHER_CERTIFICATE = "CERTIFICATE_VERIFY_FAILED"
"""gRPC's error text when a peer presents another certificate than the pinned one."""
_State = grpc.ChannelConnectivity
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


@dataclass(eq=False)
class Connected:
    """An open route."""

    channel: aio.Channel
    address: str = ""
    """HOST:PORT of a direct connection."""
    pipe: Outgoing | None = None
    """What carries the connection, if that is not direct."""
    round_trip: float | None = None
    """Seconds; rises slowly."""
    measured: float = float("-inf")
    """When that was measured last, or begun to be."""
    watching: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """The name of the route, as ``peers`` prints it."""
        if self.pipe is None:
            return f"direct {self.address}"
        return name_tunnel(self.pipe.address)

    async def is_ready(self) -> bool:
        """Wait until the channel is connected, or can't be."""
        failed = (_State.TRANSIENT_FAILURE, _State.SHUTDOWN)
        while (state := self.channel.get_state(try_to_connect=True)) is not _State.READY:
            if state in failed:
                return False
            await self.channel.wait_for_state_change(state)
        return True

    async def end(self, grace: float | None = None) -> None:
        """Close the channel; its calls have ``grace`` seconds to end."""
        if self.watching is not None and self.watching is not asyncio.current_task():
            self.watching.cancel()
        try:
            await self.channel.close(grace)
        except asyncio.CancelledError:
            await self.channel.close()
            raise
        finally:
            if self.pipe is not None:
                await self.pipe.close()


@dataclass(eq=False)
class Dialer:
    """Opens channels to peers, and tests them."""

    gatekeeper: Gatekeeper
    pipes: Pipes | None
    """None: there is one route."""
    targets: Targets
    """Addresses that may be dialed."""
    refusals: Refusals
    flow: Options
    """gRPC options for incoming bytes."""
    on_answer: Callable[[str], None] = lambda peer: None
    """Called with each peer that has answered a ping of ours: a sign of life."""

    @property
    def routes(self) -> tuple[Route, ...]:
        """The routes that may be tried, the best first."""
        return tuple(Route) if self.pipes is not None else (Route.DIRECT,)

    def direct(self, address: str, public_key: bytes) -> Connected:
        """A channel to HOST:PORT, for the holder of a TLS key. Raises LowcommError."""
        if not public_key:
            raise LinkLost("tells no TLS key: it can't be called directly")
        scheme = "ipv6:" if address.startswith("[") else "ipv4:"
        options = (*_TLS_OPTIONS, *self.flow)
        channel = aio.secure_channel(scheme + address, pinned(public_key), options=options)
        return Connected(channel, address)

    async def through_pipe(self, info: PeerInfo) -> Connected:
        """A channel through libp2p. Raises LinkLost."""
        assert self.pipes is not None
        pipe = await self.pipes.dial(info.peer_id, info.entry_points)
        channel = aio.insecure_channel(pipe.target, options=(*_LOCAL_OPTIONS, *self.flow))
        return Connected(channel, pipe=pipe)

    async def ping(self, channel: aio.Channel, peer_id: str) -> None:
        """Make one call. Raises grpc.RpcError."""
        metadata = self.gatekeeper.credential_for(peer_id)
        describe = ExchangeStub(channel).Describe
        await describe(pb.Introduction(), metadata=metadata, timeout=MEASURE_DEADLINE)
        self.on_answer(peer_id)

    async def why(self, channel: aio.Channel, peer_id: str) -> str:
        """Why a channel could not be connected, in words for the owner."""
        try:
            await self.ping(channel, peer_id)
        except aio.AioRpcError as error:
            if OTHER_CERTIFICATE not in (error.details() or ""):
                return "can't be reached"
            self.refusals.count(What.CONNECTION, Reason.OTHER_CERTIFICATE)
            return (
                "somebody else answers there, with another certificate than the one in its record"
            )
        return "was lost as soon as it was reached"


class PeerChannel:
    """All routes to one peer."""

    def __init__(
        self, info: PeerInfo, dialer: Dialer, clock: Callable[[], float] = monotonic
    ) -> None:
        self._info = info
        self._dialer = dialer
        self._clock = clock
        self._histories = {route: RouteHistory() for route in dialer.routes}
        self._open: dict[Route, Connected] = {}
        self._attempts: dict[Route, asyncio.Task[None]] = {}
        """Also to renew a route that is open."""
        self._tasks = Tasks()
        self._changed = asyncio.Event()
        self._looked = float("-inf")
        self._answered = ""
        """The address at which the peer answered last."""
        self._closed = False
        self.calls = 0
        """Calls under way."""

    async def channel(self, info: PeerInfo) -> aio.Channel:
        """A channel over the best route. Raises LinkLost with the reason if there is none."""
        self._follow(info)
        async with in_time(PATIENCE, f"can't be reached within {PATIENCE:.0f} s"):
            while not self._closed:
                self._begin_due()
                if (connected := self._best) is not None:
                    self._improve(connected)
                    return connected.channel
                if not self._attempts:
                    reasons = self._reasons()
                    raise LinkLost("can't be reached" + (f" ({reasons})" if reasons else ""))
                self._changed.clear()
                await self._changed.wait()
        raise LinkLost("was closed: the node leaves, or made room for another peer")

    @asynccontextmanager
    async def apart(self, route: Route) -> AsyncIterator[tuple[aio.Channel, str]]:
        """A connection of its own over one route, and its name, for measurements. Raises
        LowcommError with the reason if the route can't be opened."""
        async with in_time(DEADLINES[route]):
            connected = await self._connect(route)
        try:
            yield connected.channel, connected.name
        finally:
            await connected.end()

    @property
    def is_open(self) -> bool:
        """Whether any route is open."""
        return bool(self._open)

    def renew(self, *routes: Route) -> None:
        """Open these routes anew with the next call, or all. Calls under way may end on the
        existing ones."""
        for route in routes or self._dialer.routes:
            if (attempt := self._attempts.pop(route, None)) is not None:
                attempt.cancel()
            self._retire(route)
            self._histories[route] = RouteHistory()
        self._changed.set()

    def describe(self) -> PeerRoute:
        """What ``peers`` shows of the route in use, or why there is none."""
        if (used := self._best) is None:
            return PeerRoute(route_reason=self._reasons() or None)
        reason = self._histories[Route.DIRECT].reason or None
        return PeerRoute(route=used.name, route_reason=reason, round_trip=used.round_trip)

    async def close(self) -> None:
        """End all calls and attempts."""
        self._closed = True
        self._changed.set()
        await self._tasks.cancel()
        channels, self._open = list(self._open.values()), {}
        for connected in channels:
            await connected.end()

    def _follow(self, info: PeerInfo) -> None:
        """Follow the peer's newest record."""
        before, self._info = self._info, info
        if (before.addresses, before.certificate) != (info.addresses, info.certificate):
            self.renew(Route.DIRECT)
        if set(info.entry_points) - set(before.entry_points) and Route.TUNNEL not in self._open:
            self.renew(Route.TUNNEL)

    @property
    def _best(self) -> Connected | None:
        """The best open route."""
        return next((self._open[route] for route in self._histories if route in self._open), None)

    def _reasons(self) -> str:
        """Why each route failed last, in words."""
        histories = self._histories.items()
        return "; ".join(f"{route}: {one.reason}" for route, one in histories if one.reason)

    # opening

    def _begin_due(self) -> None:
        """Begin to open the routes that may be tried now and are better than what is open."""
        for route, history in self._histories.items():
            if route in self._open:
                return
            if route not in self._attempts and history.is_due(self._clock(), not self._open):
                self._begin(route)

    def _begin(self, route: Route) -> None:
        self._attempts[route] = self._tasks.start(self._attempt(route))

    async def _attempt(self, route: Route) -> None:
        peer_id = self._info.peer_id
        try:
            direct = self._attempts.get(Route.DIRECT)
            if route is Route.TUNNEL and direct is not None:
                await asyncio.wait([direct], timeout=HEAD_START)
            began = self._clock()
            async with asyncio.timeout(DEADLINES[route]):
                connected = await self._connect(route)
            self._opened(route, connected)
            seconds = round(self._clock() - began, 3)
            log.info("route.opened", peer=peer_id, route=connected.name, seconds=seconds)
        except TimeoutError:
            self._fail(route, f"did not answer within {DEADLINES[route]:.0f} s")
        except LowcommError as error:
            self._fail(route, str(error))
        except Exception as error:  # else calls would wait for this attempt
            log.error("route.defect", peer=peer_id, route=route, error=repr(error), exc_info=error)
            self._fail(route, f"a defect: {error!r}; please report it with the log")
        finally:
            if self._attempts.get(route) is asyncio.current_task():
                del self._attempts[route]
            self._changed.set()

    async def _connect(self, route: Route) -> Connected:
        """A connected channel: at one address after the other, or through a pipe. Raises LinkLost
        with the reason if there is none."""
        if route is Route.TUNNEL:
            return await self._ready(await self._dialer.through_pipe(self._info))
        *others, last = self._addresses()
        key = self._info.certificate
        for number, address in enumerate(others):
            seconds = DEADLINES[route] / (len(others) + 1 - number) / 2
            with suppress(LinkLost, TimeoutError):
                async with asyncio.timeout(seconds):
                    return await self._ready(self._dialer.direct(address, key))
        return await self._ready(self._dialer.direct(last, key))

    def _addresses(self) -> list[str]:
        """Addresses to dial now, the one that answered last first. Raises LinkLost if there are
        none."""
        known = sorted(self._info.addresses, key=lambda address: address != self._answered)
        if not known:
            raise LinkLost("tells no address that can be called")
        if not (admitted := self._dialer.targets.admit(known)):
            raise LinkLost(self._dialer.targets.refusal(known))
        return admitted

    async def _ready(self, connected: Connected) -> Connected:
        """Wait until a channel is connected, and close it if it fails. Raises LinkLost."""
        try:
            if not await connected.is_ready():
                raise LinkLost(await self._dialer.why(connected.channel, self._info.peer_id))
        except BaseException:
            await connected.end()
            raise
        if connected.pipe is None:
            self._answered = connected.address
            self._dialer.targets.reached(connected.address)
        return connected

    def _fail(self, route: Route, reason: str) -> None:
        if route not in self._open:  # else it was a renewal
            self._histories[route].fail(self._clock(), reason)
        log.debug("route.failed", peer=self._info.peer_id, route=route, reason=reason)

    def _opened(self, route: Route, connected: Connected) -> None:
        self._retire(route)
        self._open[route] = connected
        self._histories[route].open(self._clock())
        connected.watching = start(self._watch(route, connected))
        # A direct connection makes an attempt to open a tunnel needless. An open tunnel that is
        # being renewed stays as it is.
        if route is Route.DIRECT and (other := self._attempts.pop(Route.TUNNEL, None)) is not None:
            other.cancel()

    # what is open

    async def _watch(self, route: Route, connected: Connected) -> None:
        """Retire a route when its connection breaks."""
        while connected.channel.get_state() is _State.READY:
            await connected.channel.wait_for_state_change(_State.READY)
        if self._open.get(route) is connected:
            self._histories[route].lose(self._clock())
            log.debug("route.lost", peer=self._info.peer_id, route=connected.name)
            self._retire(route)

    def _improve(self, connected: Connected) -> None:
        """Measure the route now and then while it is used, and look for a direct connection of
        libp2p while its pipe uses a relay."""
        now = self._clock()
        if now >= connected.measured + MEASURE_EVERY:
            connected.measured = now
            self._tasks.start(self._measure(connected))
        is_relayed = connected.pipe is not None and CIRCUIT in connected.pipe.address
        if is_relayed and now >= self._looked + LOOK_EVERY:
            self._looked = now
            self._tasks.start(self._look())

    async def _measure(self, connected: Connected) -> None:
        """Measure the round trip."""
        began = self._clock()
        try:
            async with asyncio.timeout(MEASURE_DEADLINE):
                await self._dialer.ping(connected.channel, self._info.peer_id)
        except (grpc.RpcError, TimeoutError, LowcommError, asyncio.CancelledError):
            return  # gRPC cancels the call of a channel that is closed
        seconds, known = self._clock() - began, connected.round_trip
        # A busy callee answers late, so the minimum is the link's own round trip. It rises slowly,
        # to follow a link that has become slower.
        rising = seconds if known is None else known + 0.2 * (seconds - known)
        connected.round_trip = min(seconds, rising)

    async def _look(self) -> None:
        assert self._dialer.pipes is not None
        addresses = await self._dialer.pipes.streams.connected_at(self._info.peer_id)
        is_direct = any(address and not address.endswith(CIRCUIT) for address in addresses)
        if is_direct and Route.TUNNEL not in self._attempts:
            self._begin(Route.TUNNEL)

    def _retire(self, route: Route) -> None:
        """Make no new calls on a channel, and close it when its calls have ended."""
        connected = self._open.pop(route, None)
        if connected is not None:
            self._tasks.start(connected.end(RETIRE_GRACE))
            self._changed.set()
