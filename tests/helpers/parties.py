"""Nodes without trainers, which find each other in a DHT in memory, and call each other by gRPC
over TLS."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import time

import grpc
from grpc import aio

from helpers.memory_dht import MemoryDiscovery, MemoryNetwork
from helpers.wire import new_certificate
from lowcomm_node.dht.keys import removals_key
from lowcomm_node.errors import NotAdmitted
from lowcomm_node.net.channels import Channels
from lowcomm_node.net.server import ExchangeServer, ExchangeService
from lowcomm_node.net.tls import Gatekeeper
from lowcomm_node.owner.sources import load_settings
from lowcomm_node.swarm.admission import RunAdmission
from lowcomm_node.swarm.membership import Membership
from lowcomm_node.swarm.own_record import OwnRecord
from lowcomm_protocol.errors import Refusals
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.invites import Token, write_removals
from lowcomm_protocol.peers.records import PeerInfo, Phase
from lowcomm_protocol.peers.roster import Roster
from lowcomm_protocol.spec.run import SignedRun, parse_toml, sign_run

CREATOR, ADA, BOB, CLEO = (Identity(bytes([number]) * 32) for number in (1, 2, 3, 4))


def run_of(admission: str) -> SignedRun:
    return sign_run(parse_toml(f'[run]\nname = "a"\nadmission = "{admission}"\n'), CREATOR)


@dataclass
class Party:
    """A node without a trainer."""

    identity: Identity
    run: SignedRun
    network: MemoryNetwork
    home: Path
    token: Token | None = None
    warnings: list[str] = field(default_factory=list)
    barred: list[NotAdmitted] = field(default_factory=list)
    removals_heard: int = 0
    swarm_step: int = 0

    async def start(self, stack: AsyncExitStack) -> "Party":
        settings = load_settings(
            {"home": self.home, "invite": self.token.text() if self.token else None}, {}
        ).settings
        self.refusals = Refusals()
        self.run_admission = RunAdmission(settings, self.run, self.peer_id, time())
        admission = self.run_admission.admission
        gatekeeper = Gatekeeper(
            self.identity,
            self.run.run_id,
            time,
            admission=admission,
            claim=self.run_admission.claim,
            refusals=self.refusals,
        )
        self.channels = Channels(gatekeeper, refusals=self.refusals)
        stack.push_async_callback(self.channels.close)
        self.certificate = new_certificate()
        service = ExchangeService(gatekeeper, self)  # pyright: ignore[reportArgumentType]
        server = self.server = ExchangeServer(self.certificate, service)
        stack.push_async_callback(server.close)
        self.port = await server.start("127.0.0.1", 0)
        self.discovery = MemoryDiscovery(self.peer_id, self.network)
        self.roster = Roster(self.peer_id, self.run.run_id, admission, self.refusals)
        own = OwnRecord(
            identity=self.identity, run_id=self.run.run_id, certificate=self.certificate.public_key,
            addresses=(f"127.0.0.1:{self.port}",), progress=lambda: (self.swarm_step, 0, 0.0),
        )  # fmt: skip
        self.membership = Membership(
            own=own, signed=self.run, roster=self.roster, discovery=self.discovery,
            channels=self.channels,
            settings=settings, run_admission=self.run_admission, refusals=self.refusals,
            warn=lambda code, text: self.warnings.append(text),
            withdraw=lambda code: self.warnings.clear(),
            on_removals=self._on_removals, on_barred=self.barred.append,
        )  # fmt: skip
        service.on_caller = self.membership.sign_of_life
        return self

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    def describe(self, peer: str, introduction: pb.Introduction) -> pb.Introduction:
        """Handlers of the service."""
        return self.membership.meet(peer, introduction)

    def knows(self) -> set[str]:
        return {info.peer_id for info in self.roster.alive(time())}

    async def look(self) -> None:
        """Look at the DHT, and wait until those who are new have been greeted."""
        await self.membership.look()
        await asyncio.gather(*self.membership._greetings)

    async def call(
        self, other: "Party", introduction: pb.Introduction
    ) -> tuple[grpc.StatusCode, str]:
        """How a call of Describe ends."""
        info = PeerInfo(
            peer_id=other.peer_id, run_id=self.run.run_id, phase=Phase.TRAINING, issued=time(),
            expires=time() + 30,
            addresses=(f"127.0.0.1:{other.port}",), certificate=other.certificate.public_key,
        )  # fmt: skip
        stub = await self.channels.stub(info)
        try:
            await stub.Describe(
                introduction, metadata=self.channels.metadata(other.peer_id), timeout=10
            )
        except aio.AioRpcError as error:
            return error.code(), error.details() or ""
        return grpc.StatusCode.OK, ""

    def _on_removals(self) -> None:
        self.removals_heard += 1


class Parties:
    """Starts parties of one run."""

    def __init__(self, run: SignedRun, folder: Path, stack: AsyncExitStack) -> None:
        self.run, self.folder, self.stack = run, folder, stack
        self.network = MemoryNetwork(time)

    async def __call__(self, identity: Identity, token: Token | None = None) -> Party:
        party = Party(identity, self.run, self.network, self.folder / identity.peer_id, token)
        return await party.start(self.stack)

    async def removing(self, *ids: str, version: int = 1, life: float = 100.0) -> bytes:
        """Publish a removal list."""
        data = write_removals(CREATOR, self.run.run_id, version, frozenset(ids)).data
        key = removals_key(self.run.run_id, CREATOR.peer_id)
        self.network.records.pop((key, CREATOR.peer_id), None)
        assert await MemoryDiscovery("x", self.network).publish(key, CREATOR.peer_id, data, life)
        return data
