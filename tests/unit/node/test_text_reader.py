"""What must hold for the pieces that a node reads: what it resumes comes first, no other peer reads
the same, and what nobody gives is skipped and told."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.donors import identity
from helpers.memory_dht import MemoryDiscovery, MemoryNetwork
from helpers.packed_text import DATA, PART, PIECE, TRAINING, holding
from helpers.waiting import until_async
from lowcomm_node.dht.keys import read_key
from lowcomm_node.fetch.packs import PackStore
from lowcomm_node.node import reading
from lowcomm_node.node.messages import AddText, PieceRead, ReadAgain, TextAwaited
from lowcomm_node.node.reading import TextReader
from lowcomm_node.status.events import Board
from lowcomm_protocol.peers.records import PeerInfo, Phase
from lowcomm_protocol.reading import TextPiece, read_claims, write_statement
from lowcomm_protocol.spec.run import RunSpec, sign_run

DEADLINE = 20.0
SPEC = RunSpec.model_validate(
    {"run": {"name": "t", "steps": 10**6}, "model": {"context": 1024}, "train": {"batch": 4},
     "data": {"source": "packed", "parts": [PART.model_dump()], "shuffle_bytes": 8 * PIECE},
     "sync": {"method": "noloco"}}
)  # fmt: skip
RUN = sign_run(SPEC, identity(9))


class ReadingNode:
    """A reader, with a trainer that reads at once what it gets, while it may."""

    def __init__(
        self,
        number: int,
        home: Path,
        network: MemoryNetwork,
        store: PackStore,
        poll: float = 0.01,
    ) -> None:
        self.who, self.board = identity(number), Board()
        self.board.enter("training", None)
        self.added: list[TextPiece] = []
        self.again: list[ReadAgain] = []
        self.reads = True
        self.others: list[ReadingNode] = []
        paths = SimpleNamespace(read=lambda fingerprint: home / f"read-{number}")
        state: Any = SimpleNamespace(
            board=self.board,
            settings=SimpleNamespace(paths=paths, poll=poll, record_life=0.05),
            spec_now=lambda run: run.spec,
            supervisor=SimpleNamespace(runs=True, trainer=self),
        )
        text: Any = SimpleNamespace(stores=(store,))
        self.reader = TextReader(state, RUN, self.who, text)
        self.roster = SimpleNamespace(
            alive=lambda now: tuple(other.record() for other in self.others),
            admission=SimpleNamespace(barred=lambda peer, now: False),
        )
        self.discovery = MemoryDiscovery(self.who.peer_id, network)

    def record(self) -> PeerInfo:
        return PeerInfo(
            peer_id=self.who.peer_id, run_id=RUN.run_id, phase=Phase.TRAINING, issued=time(),
            expires=time() + 9, swarm_step=1000, reading=self.reader.claims(),
        )  # fmt: skip

    def count(self, *phases: Phase) -> int:
        return len(self.others)

    async def publish(self, renews: bool = False) -> None: ...

    async def ask(self, request: AddText | ReadAgain) -> None:
        if isinstance(request, ReadAgain):
            self.again.append(request)
            return
        self.added += request.pieces
        await asyncio.sleep(0.05)  # slower than news travels
        for one in request.pieces if self.reads else ():
            self.reader.hear(PieceRead(**vars(one), windows=8))

    def warnings(self) -> list[str]:
        return [one.code for one in self.board.warnings]

    def begin(self, *text: TextPiece) -> asyncio.Task[None]:
        ready: Any = SimpleNamespace(text=text)
        task = asyncio.create_task(self.reader.run(self))  # type: ignore[arg-type]
        self.reader.take_over(ready)
        return task


async def until(holds: Callable[[], bool]) -> None:
    await until_async(holds, DEADLINE, "what the test waits for")


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork(time)


@pytest.fixture
def ends() -> Iterator[list[asyncio.Task[None]]]:
    """Tasks that are ended with the test."""
    tasks: list[asyncio.Task[None]] = []
    yield tasks
    for task in tasks:
        task.cancel()


async def test_two_nodes_read_each_piece_once_and_say_so(
    tmp_path: Path, network: MemoryNetwork, ends: list[asyncio.Task[None]]
):
    stores = [holding(tmp_path / str(number), range(TRAINING + 1)) for number in range(3)]
    nodes = [ReadingNode(n + 1, tmp_path, network, store) for n, store in enumerate(stores)]
    one, other, late = nodes
    one.others, other.others, late.others = [other], [one], [one, other]
    ends += [one.begin(), other.begin()]
    await until(lambda: sum(piece.epoch == 0 for piece in one.added + other.added) >= TRAINING)
    first = [piece for piece in one.added + other.added if piece.epoch == 0]
    assert sorted(piece.piece for piece in first) == list(range(TRAINING))
    assert len(one.added) > 2 and len(other.added) > 2
    one.reads = other.reads = False
    both = one.reader, other.reader
    await until(lambda: all(stated for reader in both for stated in reader._ended.values()))
    ends.append(late.begin())
    await until(lambda: bool(late.added))
    assert late.added[0].epoch > 0, "who comes later knows what was read"
    assert (tmp_path / "read-1").exists()


async def test_the_queue_of_a_trainer_comes_first_and_in_its_order(
    tmp_path: Path, network: MemoryNetwork, ends: list[asyncio.Task[None]]
):
    node = ReadingNode(1, tmp_path, network, holding(tmp_path / "a", range(TRAINING + 1)))
    node.reads = False
    queue = TextPiece(0, 3, 7), TextPiece(0, 3, 2)
    ends.append(node.begin(*queue))
    await until(lambda: len(node.added) >= 2)
    assert tuple(node.added[:2]) == queue
    claims = read_claims(node.reader.claims())
    assert {claim.piece for claim in claims if claim.is_kept} == set(queue)


async def test_training_does_not_wait_until_others_know_of_each_claim(
    tmp_path: Path, network: MemoryNetwork, ends: list[asyncio.Task[None]]
):
    store = holding(tmp_path / "a", range(TRAINING + 1))
    node = ReadingNode(1, tmp_path, network, store, poll=600.0)
    node.others = [ReadingNode(2, tmp_path, network, store)]
    ends.append(node.begin(TextPiece(0, 0, 7)))
    await until(lambda: len(node.added) >= TRAINING)


async def test_what_a_peer_that_has_gone_has_read_is_stored_again(
    tmp_path: Path, network: MemoryNetwork, ends: list[asyncio.Task[None]]
):
    store = holding(tmp_path / "a", range(TRAINING + 1))
    one, gone = (ReadingNode(number, tmp_path, network, store) for number in (1, 2))
    one.others, gone.others = [gone], [one]
    gone.reads = one.reads = False
    key = read_key(RUN.run_id, 0, 0)
    read = np.arange(TRAINING) == 4
    told = write_statement(gone.who, RUN.run_id, (0, 0), read, 1)
    await gone.discovery.publish(key, gone.who.peer_id, told, 600)
    ends.append(one.begin())
    kept = tmp_path / "read-1"
    await until(lambda: kept.exists() and told in kept.read_bytes())
    one.others = []
    network.records.clear()
    await until(lambda: (key, gone.who.peer_id) in network.records)


async def test_what_nobody_gives_is_skipped_and_told_and_what_is_here_is_read_again(
    tmp_path: Path,
    network: MemoryNetwork,
    ends: list[asyncio.Task[None]],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(reading, "PATIENCE", 0.05)
    here = [*range(8), 11]  # one of three blocks, and a piece of another
    store = holding(tmp_path / "a", here)
    node = ReadingNode(1, tmp_path, network, store)
    events = node.board.subscribe()
    ends.append(node.begin(TextPiece(0, 0, 9)))
    node.reader.hear(TextAwaited(waits=True))
    await until(lambda: "text-missing" in node.warnings())
    assert node.again == [ReadAgain(part=0, pieces=tuple(here))]
    waiting = node.board.waiting
    assert waiting is not None and waiting.code == "text" and "--mirror" in waiting.text
    assert "piece-skipped" not in node.warnings() and not node.added
    monkeypatch.setattr(reading, "UNGIVEN", 0.05)
    await until(lambda: len(node.added) >= 8)
    assert {piece.piece for piece in node.added} == set(range(8))
    (warning,) = [one.text for one in node.board.warnings if one.code == "piece-skipped"]
    assert f"of {PART.name}, with 7 that are shuffled with it, did not come" in warning
    names = [events.get_nowait().event.name for _ in range(events.qsize())]
    assert "piece-skipped" in names


async def test_text_that_comes_slowly_is_read_again_once_there_is_some(
    tmp_path: Path,
    network: MemoryNetwork,
    ends: list[asyncio.Task[None]],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(reading, "PATIENCE", 0.05)
    monkeypatch.setattr(PackStore, "is_coming", lambda store, piece: True)
    store = holding(tmp_path / "a", [3])
    node = ReadingNode(1, tmp_path, network, store)
    looks, look = list[float](), node.reader._read_again

    async def counted(part: int) -> None:
        await look(part)
        looks.append(monotonic())

    monkeypatch.setattr(node.reader, "_read_again", counted)
    ends.append(node.begin(TextPiece(0, 0, 9)))
    node.reader.hear(TextAwaited(waits=True))
    waited = monotonic() + 2 * reading.PATIENCE
    await until(lambda: sum(at > waited for at in looks) >= 2)
    assert not node.again, "one piece of eight is too little"
    store.file.write(4, DATA[4 * PIECE : 5 * PIECE])
    await until(lambda: node.again == [ReadAgain(part=0, pieces=(3, 4))])
