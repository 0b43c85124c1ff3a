"""Opens and closes the routes to one peer, as ``routes.Choice`` decides, and reports the outcome to
it.

A gRPC channel is used only while it is connected. A disconnected one is closed once its calls have
ended, and the next call opens another, so that no call waits for a dead address.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from time import monotonic

import grpc
from grpc import aio

from lowcomm_node.errors import LinkLost
from lowcomm_node.net.certificates import ELSEWHERE
from lowcomm_node.net.connected import (
    Connected,
    Dialers,
    describe_route,
    end,
    has_direct,
    is_ready,
)
from lowcomm_node.net.routes import Attempt, Choice, Learned, PeerRoute, Route
from lowcomm_node.net.targets import MAX_ADDRESSES
from lowcomm_node.net.tunnels import Tunnels
from lowcomm_node.system.logs import log
from lowcomm_node.system.tasks import start
from lowcomm_protocol.errors import LowcommError
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


class PeerChannel:
    """All routes to one peer."""

    def __init__(
        self,
        info: PeerInfo,
        dialers: Dialers,
        tunnels: Tunnels,
        learned: Learned,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._info = info
        self._dialers = dialers
        self._tunnels = tunnels
        self._clock = clock
        self._choice = Choice(learned)
        self._open: dict[Route, Connected] = {}
        self._attempts: dict[Route, asyncio.Task[None]] = {}
        self._retiring: dict[Connected, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._direct_failed = asyncio.Event()
        self._changed = asyncio.Event()
        self._looked = 0.0
        self._answered = ""
        """The address at which the peer answered last."""
        self._closed = False
        self.calls = 0
        """Calls under way."""

    async def channel(self, info: PeerInfo) -> aio.Channel:
        """A channel over the best route. Raises LinkLost with the reason if there is none."""
        self._hear(info)
        try:
            async with asyncio.timeout(PATIENCE):
                return (await self._best()).channel
        except TimeoutError:
            cut = f" (the tunnel {cut}; it is being resumed)" if (cut := self._cut()) else ""
            raise LinkLost(f"can't be reached within {PATIENCE:.0f} s{cut}") from None

    def measured(self, channel: aio.Channel, size: int, seconds: float) -> None:
        """Record the rate of contents that came over a channel; the choice of route depends on
        it."""
        for route, connected in self._open.items():
            if connected.channel is channel:
                self._choice.measured(route, self._clock(), size, seconds)

    @asynccontextmanager
    async def apart(self, route: Route) -> AsyncIterator[tuple[aio.Channel, str]]:
        """A connection of its own over one route, and its name, for measurements.

        Raises LinkLost with the reason if the route can't be opened.
        """
        connected: Connected | None = None
        try:
            try:
                async with asyncio.timeout(deadline := self._choice.renewal(route).deadline):
                    connected = await self._connect(route, deadline)
            except TimeoutError:
                raise LinkLost("did not answer in time") from None
            except LowcommError as error:
                raise LinkLost(str(error)) from None
            yield connected.channel, describe_route(connected)
        finally:
            if connected is not None:
                await end(connected)

    @property
    def is_open(self) -> bool:
        """Whether any route is open."""
        return bool(self._open)

    def on_call(self, more: int) -> None:
        """Count a call that has begun (1) or ended (-1)."""
        self.calls += more

    def renew(self) -> None:
        """Open the routes anew with the next call. Calls under way may end on the existing ones."""
        for route in Route:
            self._drop(route)
            self._choice.moved(route)

    def describe(self) -> PeerRoute:
        """What ``peers`` shows of the route in use, or why there is none."""
        route = self._choice.route
        if route is None:
            reasons = [
                f"{each}: {reason}" for each in Route if (reason := self._choice.reason(each))
            ]
            return PeerRoute(route_reason="; ".join(reasons) or None)
        connected = self._open[route]
        reasons = [self._why_tunnel()] if route is Route.TUNNEL else []
        if cut := self._cut():
            reasons.append(f"the tunnel {cut}; it is being resumed")
        told = "; ".join(filter(None, reasons)) or None
        return PeerRoute(
            route=describe_route(connected), route_reason=told, round_trip=connected.round_trip
        )

    def _why_tunnel(self) -> str:
        return (
            "faster than direct"
            if Route.DIRECT in self._open
            else self._choice.reason(Route.DIRECT)
        )

    def _cut(self) -> str:
        """Why the tunnel carries nothing at the moment; empty if it carries, or there is none."""
        connected = self._open.get(Route.TUNNEL)
        return connected.cut if connected is not None else ""

    async def close(self) -> None:
        """End all calls and attempts."""
        self._closed = True
        self._changed.set()
        channels = [*self._open.values(), *self._retiring]
        tasks = [
            *self._attempts.values(),
            *self._retiring.values(),
            *([self._looking] if self._looking else []),
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connected in channels:
            await end(connected)
        self._open.clear()

    async def _best(self) -> Connected:
        while not self._closed:
            plan = self._choice.plan(self._clock())
            for attempt in plan.attempts:
                # Else what was begun to renew it opens it now
                if attempt.route not in self._attempts:
                    self._begin(attempt)
            if plan.use is not None:
                self._improve(plan.use)
                if (connected := self._carrying(plan.use)) is not None:
                    connected.is_used = True
                    return connected
            elif not self._attempts:
                raise LinkLost(plan.reason)
            await self._wait_changed()
        raise LinkLost("was closed: the node leaves, or made room for another peer")

    def _carrying(self, best: Route) -> Connected | None:
        """The best open route that is not interrupted; None if all are."""
        ranked = (self._open[best], *self._open.values())
        return next((connected for connected in ranked if not connected.cut), None)

    async def _wait_changed(self) -> None:
        """Wait until a route opens or closes, or an interrupted tunnel carries again."""
        self._changed.clear()
        cut = [
            connected.dialer
            for connected in self._open.values()
            if connected.dialer is not None and connected.cut
        ]
        waiting = {
            asyncio.create_task(work)
            for work in (self._changed.wait(), *(dialer.wait_carried() for dialer in cut))
        }
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    def _hear(self, info: PeerInfo) -> None:
        """Follow the peer's newest record."""
        before = self._info
        self._info = info
        tunnel = self._open.get(Route.TUNNEL)
        if tunnel is not None and tunnel.dialer is not None:
            tunnel.dialer.entry_points = info.entry_points
        if (before.addresses, before.certificate) != (info.addresses, info.certificate):
            self._drop(Route.DIRECT)
            self._choice.moved(Route.DIRECT)
        if set(info.entry_points) - set(before.entry_points) and Route.TUNNEL not in self._open:
            self._drop(Route.TUNNEL)
            self._choice.moved(Route.TUNNEL)

    # opening

    def _begin(self, attempt: Attempt) -> None:
        if attempt.route is Route.DIRECT:
            self._direct_failed.clear()
        task = asyncio.create_task(self._attempt(attempt))
        self._attempts[attempt.route] = task
        task.add_done_callback(lambda done: self._attempted(attempt.route, done))

    def _attempted(self, route: Route, task: asyncio.Task[None]) -> None:
        if self._attempts.get(route) is task:
            del self._attempts[route]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error(
                "route.defect",
                peer=self._info.peer_id,
                route=route,
                error=repr(error),
                exc_info=error,
            )
            self._choice.failed(
                route, self._clock(), f"a defect: {error!r}; please report it with the log"
            )
        self._changed.set()

    async def _attempt(self, attempt: Attempt) -> None:
        if attempt.after:
            await self._give_head_start(attempt.after)
        route, began = attempt.route, self._clock()
        try:
            async with asyncio.timeout(attempt.deadline):
                connected = await self._connect(route, attempt.deadline)
        except TimeoutError:
            self._fail(route, f"did not answer within {attempt.deadline:.0f} s")
        except LowcommError as error:
            self._fail(route, str(error))
        else:
            self._opened(route, connected, self._clock() - began)

    async def _give_head_start(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._direct_failed.wait()
        except TimeoutError:
            return

    async def _connect(self, route: Route, seconds: float) -> Connected:
        """A connected channel: at one address after the other, or through a tunnel.

        Raises LinkLost with the reason if there is none.
        """
        if route is Route.TUNNEL:
            dialer = self._tunnels.dialer(self._info.peer_id)
            dialer.entry_points = self._info.entry_points
            return await self._ready(route, Connected(self._dialers.local(dialer.target), dialer))
        *others, last = self._addresses()
        for number, address in enumerate(others):
            with suppress(LinkLost, TimeoutError):
                async with asyncio.timeout(seconds / (len(others) + 1 - number) / 2):
                    return await self._ready(route, await self._dial(address))
        return await self._ready(route, await self._dial(last))

    def _addresses(self) -> list[str]:
        """Addresses to dial now, the one that answered last first. Raises LinkLost if there are
        none."""
        told = sorted(self._info.addresses, key=lambda address: address != self._answered)
        if not told:
            raise LinkLost("tells no address that can be called")
        targets = self._dialers.targets
        if targets is None:
            return told[:MAX_ADDRESSES]
        if not (admitted := targets.admit(self._info.peer_id, told)):
            raise LinkLost(targets.refusal(told))
        return admitted

    async def _dial(self, address: str) -> Connected:
        return Connected(
            await self._dialers.direct(replace(self._info, addresses=(address,))), address=address
        )

    async def _ready(self, route: Route, connected: Connected) -> Connected:
        """Wait until a channel is connected, and close it if it fails. Raises LinkLost."""
        try:
            if not await is_ready(connected):
                raise LinkLost(await self._why(route, connected))
        except BaseException:
            await end(connected)
            raise
        if route is Route.DIRECT:
            self._answered = connected.address
            if self._dialers.targets is not None:
                self._dialers.targets.reached(connected.address)
        return connected

    async def _why(self, route: Route, connected: Connected) -> str:
        """Why a channel could not be connected, in words for the owner."""
        if connected.dialer is not None:
            return connected.dialer.reason or "can't be reached"
        try:
            await self._dialers.ping(connected.channel, self._info.peer_id)
        except aio.AioRpcError as error:
            if OTHER_CERTIFICATE not in (error.details() or ""):
                return "can't be reached"
            self._dialers.doubt()
            return ELSEWHERE
        except LowcommError as error:
            return str(error)
        return "was lost as soon as it was reached"

    def _fail(self, route: Route, reason: str) -> None:
        if route not in self._open:  # else it was a renewal
            self._choice.failed(route, self._clock(), reason)
        if route is Route.DIRECT:
            self._direct_failed.set()
        log.debug("route.failed", peer=self._info.peer_id, route=route, reason=reason)

    def _opened(self, route: Route, connected: Connected, seconds: float) -> None:
        self._retire(route)
        self._open[route] = connected
        self._choice.opened(route, self._clock(), seconds)
        connected.tasks = (
            start(self._watch(route, connected)),
            start(self._measure(connected)),
        )
        log.info(
            "route.opened",
            peer=self._info.peer_id,
            route=describe_route(connected),
            seconds=round(seconds, 3),
        )
        # A direct connection makes an attempt to open a tunnel needless. An open tunnel that is
        # being renewed stays as it is.
        if route is Route.DIRECT and (other := self._attempts.get(Route.TUNNEL)) is not None:
            other.cancel()
            if Route.TUNNEL not in self._open:
                self._choice.dropped(Route.TUNNEL)

    # what is open

    async def _watch(self, route: Route, connected: Connected) -> None:
        """Retire a route when its connection breaks."""
        ready = grpc.ChannelConnectivity.READY
        while connected.channel.get_state() is ready:
            await connected.channel.wait_for_state_change(ready)
        if self._open.get(route) is connected:
            self._choice.lost(
                route, self._clock(), "the connection broke off soon after it was made"
            )
            log.debug("route.lost", peer=self._info.peer_id, route=describe_route(connected))
            self._retire(route)

    async def _measure(self, connected: Connected) -> None:
        """Measure the round trip, repeatedly while there are calls."""
        while True:
            if connected.is_used:
                connected.is_used = False
                await self._ping(connected)
            await asyncio.sleep(MEASURE_EVERY)

    async def _ping(self, connected: Connected) -> None:
        began = self._clock()
        try:
            async with asyncio.timeout(MEASURE_DEADLINE):
                await self._dialers.ping(connected.channel, self._info.peer_id)
        except (grpc.RpcError, TimeoutError, LowcommError):
            return
        seconds = self._clock() - began
        # A busy callee answers late, so the minimum is the link's own round trip. It rises slowly,
        # to follow a link that has become slower.
        known = connected.round_trip
        connected.round_trip = (
            seconds if known is None else min(seconds, known + 0.2 * (seconds - known))
        )

    def _improve(self, route: Route) -> None:
        """Check now and then whether libp2p has a direct connection while the tunnel uses a
        relay."""
        dialer = self._open[route].dialer
        now = self._clock()
        if dialer is None or dialer.relay is None or now < self._looked + LOOK_EVERY:
            return
        if self._looking is None or self._looking.done():
            self._looked = now
            self._looking = start(self._look())

    async def _look(self) -> None:
        addresses = await self._tunnels.connected_at(self._info.peer_id)
        if self._closed or Route.TUNNEL in self._attempts or not has_direct(addresses):
            return
        self._begin(self._choice.renewal(Route.TUNNEL))

    def _drop(self, route: Route) -> None:
        """Retire a route to an old address, and cancel an attempt to open one."""
        attempt = self._attempts.pop(route, None)
        if attempt is not None:
            attempt.cancel()
        self._retire(route)

    def _retire(self, route: Route) -> None:
        """Make no new calls on a channel, and close it when its calls have ended."""
        connected = self._open.pop(route, None)
        if connected is not None:
            task = self._retiring[connected] = asyncio.create_task(end(connected, RETIRE_GRACE))
            task.add_done_callback(lambda _: self._retiring.pop(connected, None))
            self._changed.set()
