"""Made-up states, donors that serve them from real servers, and joiners that fetch them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from random import Random

import numpy as np

from helpers.wire import Callee, listening
from lowcomm_node.fetch.engine import Fetch
from lowcomm_node.fetch.files import VerifiedFiles
from lowcomm_node.fetch.giving import PieceServer
from lowcomm_node.fetch.state import StateDownload
from lowcomm_node.net.bandwidth import BandwidthLimit
from lowcomm_node.net.channels import Channels
from lowcomm_node.storage.snapshots import Snapshots, write_snapshot
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.messages import exchange_pb2 as pb
from lowcomm_protocol.peers.records import PeerInfo
from lowcomm_protocol.spec.run import RunSpec
from lowcomm_protocol.spec.sections import SyncSettings
from lowcomm_protocol.state import Piece, StateForm, Values, write_manifest

STEP = 400
INTERVAL = 20


def form_of(values: int) -> StateForm:
    """Two fragments, one shared by AdamW and Muon, with ranges of a modulo codec."""
    third = values // 3
    runs = (((third, True),), ((third, False), (third, True)))
    return StateForm.of("ab" * 32, "cd" * 32, 10_000, runs, True)


SMALL = form_of(30_000)
LARGE = form_of(792_000)


def sync_of(method: str = "lowcomm") -> SyncSettings:
    """How a run of this method exchanges."""
    return RunSpec.model_validate(
        {"run": {"name": "t", "steps": 10_000}, "sync": {"method": method, "interval": INTERVAL}}
    ).sync


@cache
def drawn(form: StateForm, seed: int, noise: float = 0.02, common: int = 0) -> list[bytes]:
    """The pieces of one peer; peers with the same ``common`` differ by ``noise``."""

    def piece(one: Piece) -> bytes:
        shared, own = (
            np.random.default_rng([common, one.index]),
            np.random.default_rng([seed, one.index]),
        )
        vectors = [
            (shared.standard_normal(count) + noise * own.standard_normal(count)).astype(np.float32)
            for count in one.counts
        ]
        vectors[4] = np.abs(vectors[4])
        return Values(*vectors).to_bytes()

    return [piece(one) for one in form.pieces]


def manifest(
    form: StateForm,
    digests: Sequence[bytes],
    step: int = STEP,
    slow: Sequence[int] = (1, 1),
) -> pb.Manifest:
    """What goes with such pieces; ``slow``: equal numbers stand for equal slow weights."""
    return pb.Manifest(
        run_id=bytes.fromhex(form.run_id),
        plan=bytes.fromhex(form.plan),
        swarm_step=step,
        moments=step,
        versions=(7, 8),
        slow_digests=[bytes([number]) * 32 for number in slow],
        digests=digests,
    )


class Donor:
    """A donor that serves what it was given."""

    def __init__(
        self,
        callee: Callee,
        folder: Path,
        form: StateForm,
        pieces: list[bytes],
        step: int,
        slow: Sequence[int],
    ) -> None:
        self.callee = callee
        self.form = form
        self.pieces = pieces
        self.step = step
        self.slow = slow
        self.made = 0
        self.may_make = asyncio.Event()
        self.may_make.set()
        self.up = BandwidthLimit()
        self.snapshots = Snapshots(folder, self._make, lambda: self.step, stale=INTERVAL)
        self.folder = folder
        self.server = PieceServer(VerifiedFiles(), self.up)
        self.server.state = form, self.snapshots
        callee.fetching = self.server.serve
        self.port = callee.port

    @property
    def peer_id(self) -> str:
        return self.callee.identity.peer_id

    def info(self) -> PeerInfo:
        """Where joiners find it."""
        return self.callee.info(addresses=(f"127.0.0.1:{self.port}",), swarm_step=self.step)

    async def _make(self) -> tuple[str, int]:
        self.made += 1
        await self.may_make.wait()
        step, slow = self.step, self.slow

        def seal(digests: list[bytes]) -> bytes:
            return write_manifest(manifest(self.form, digests, step, slow))

        size = self.form.size
        return await asyncio.to_thread(write_snapshot, self.folder, size, self.pieces, seal), step


def identity(number: int) -> Identity:
    """Of a donor or joiner."""
    return Identity(bytes([number]) * 32)


@asynccontextmanager
async def giving(
    folder: Path,
    number: int,
    form: StateForm = SMALL,
    *,
    step: int = STEP,
    slow: Sequence[int] = (1, 1),
    noise: float = 0.02,
    common: int = 0,
) -> AsyncIterator[Donor]:
    """A donor that listens."""
    async with listening(identity(number)) as callee:
        pieces = await asyncio.to_thread(drawn, form, number, noise, common)
        yield Donor(callee, folder / f"donor-{number}", form, pieces, step, slow)


class Joiner(Fetch):
    """A joiner, and what came of it."""

    download: StateDownload

    def __init__(
        self,
        channels: Channels,
        folder: Path,
        donors: Callable[[], Sequence[PeerInfo]],
        form: StateForm = SMALL,
        method: str = "lowcomm",
        **more,
    ) -> None:
        self.warnings: list[str] = []
        warn = self.warnings.append
        self.heard: Callable[[int], None] = lambda size: None
        state = {name: more.pop(name) for name in ("plausible",) if name in more}
        download = StateDownload(folder, form, sync_of(method), Random(3), warn=warn, **state)
        download.load()
        super().__init__(channels, download, donors, warn=warn, **more)

    def received(self, size: int) -> None:
        super().received(size)
        self.heard(size)

    def pieces(self) -> list[bytes]:
        """What lies in the folder."""
        data, form = (self.download.folder / "state").read_bytes(), self.download.form
        return [data[at : at + one.size] for at, one in zip(form.offsets, form.pieces, strict=True)]

    def given_by(self, givers: Sequence[Donor]) -> list[int]:
        """How many pieces are, to the bit, those of each; all must be somebody's."""
        found = [
            [giver.pieces[index] for giver in givers].index(data)
            for index, data in enumerate(self.pieces())
        ]
        return [found.count(number) for number in range(len(givers))]
