"""What must hold for a copied state: a peer that trains on from it is where the others are, as far
as they can be believed."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.donors import INTERVAL, SMALL, STEP, Donor, giving, sync_of
from helpers.wire import calling, soon
from lowcomm_node.fetch import engine
from lowcomm_node.fetch.catch_up import CatchUp, Gatherer
from lowcomm_node.net.bandwidth import BandwidthLimit
from lowcomm_node.node.messages import Adopt
from lowcomm_node.storage import snapshots
from lowcomm_node.storage.files import GIB, DiskQuota
from lowcomm_protocol.peers.records import PeerInfo, Phase
from lowcomm_protocol.plan import largest_jump
from lowcomm_protocol.state import read_manifest, read_piece

JUMP = largest_jump(INTERVAL)


class Late:
    """A late peer: real donors, lines and files; its membership and its trainer are the test's."""

    def __init__(self, folder: Path, channels: Any, givers: list[Donor]) -> None:
        self.folder, self.givers = folder, givers
        self.claims: list[PeerInfo] = []
        """Records of peers that hand over nothing."""
        self.adopted: list[int] = []
        self.went_back: list[bool] = []
        self.warnings: list[str] = []
        self.asked = 0
        self.known = self.after_copy = lambda: None
        self.roster: Any = SimpleNamespace(
            get=lambda peer, now: self.info_of(peer), in_cell=lambda peer: True
        )
        self._infos: list[PeerInfo] = []
        run: Any = SimpleNamespace(spec=SimpleNamespace(sync=sync_of()))
        self.copier = CatchUp(
            run=run,
            trainer=SimpleNamespace(ask=self.adopt),
            channels=channels,
            membership=self,
            trusts=lambda peer: True,
            down=BandwidthLimit(),  # type: ignore[arg-type]
            disk_quota=DiskQuota(folder.parent),
            folder=folder,
            show=lambda text: None,
            warn=lambda code, text: self.warnings.append(text),
            tell=lambda event: None,
        )

    # as the membership

    async def acquaint(self) -> None:
        """Hear of peers."""

    async def greet_all(self) -> None:
        """Hear where they are."""
        self.asked += 1
        self._infos = [giver.info() for giver in self.givers] + self.claims

    def donors(self) -> list[PeerInfo]:
        """Who trains."""
        return self._infos

    def info_of(self, peer: str) -> PeerInfo | None:
        """Its record."""
        return next((info for info in self._infos if info.peer_id == peer), None)

    # as the trainer

    async def adopt(self, message: Adopt) -> Any:
        """Take over a state."""
        step = read_manifest((Path(message.folder) / "manifest").read_bytes(), SMALL).swarm_step
        self.adopted.append(step)
        self.went_back.append(message.back)
        self.after_copy()
        return SimpleNamespace(swarm_step=step)

    async def catch_up(self, own: int = 0, drifted: bool = False) -> Any:
        """Copy what must be copied."""
        return await soon(self.copier.run_from(own, SMALL, drifted))


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Late peers of so many donors."""
    monkeypatch.setattr(snapshots, "SHORTEST_LIFE", 0.0)
    monkeypatch.setattr(snapshots, "COST_SHARE", 0.0)
    monkeypatch.setattr(engine, "RETRY_PAUSE", 0.05)

    @asynccontextmanager
    async def beside(*steps: int) -> AsyncIterator[Late]:
        async with AsyncExitStack() as stack:
            givers = [
                await stack.enter_async_context(giving(tmp_path, 11 + number, step=step))
                for number, step in enumerate(steps)
            ]
            yield Late(tmp_path / "incoming", await stack.enter_async_context(calling()), givers)

    return beside


def moves(one: Late, *steps: int) -> Callable[[], None]:
    """After each copy all donors are at another step."""
    left = list(steps)

    def move() -> None:
        if left:
            step = left.pop(0)
            for giver in one.givers:
                giver.step = step

    return move


@pytest.mark.parametrize("donors", [1, 2])
async def test_a_state_that_grew_old_while_it_was_copied_is_copied_again_before_training(
    late, donors
):
    async with late(*[STEP] * donors) as one:
        one.after_copy = moves(one, 9_000)
        ready = await one.catch_up()
        assert one.adopted == [STEP, 9_000]
        assert ready.swarm_step == 9_000
        assert one.warnings == [
            f"the state that was copied is {9_000 - STEP} swarm steps old by now: copying it again"
        ]


async def test_a_swarm_that_trains_faster_than_it_can_be_copied_is_not_copied_again_and_again(late):
    async with late(STEP) as one:
        one.after_copy = moves(one, STEP + 2_000, STEP + 4_000, STEP + 6_000, STEP + 8_000)
        assert (await one.catch_up()).swarm_step == STEP + 2_000
        assert len(one.adopted) == 2, (
            "the second was as old as the first when it was whole: so would be the third"
        )


@pytest.mark.parametrize(
    ("own", "back"), [(STEP + JUMP, False), (STEP + JUMP + 1, True), (9_000, True)]
)
async def test_who_drifted_ahead_of_all_others_goes_back_to_their_step(late, own, back):
    async with late(STEP, STEP) as one:
        await one.catch_up(own, drifted=True)
        assert one.adopted == [STEP]
        assert one.went_back == [back]


async def test_a_donor_that_trained_on_since_its_record_is_asked_again_and_not_accused(late):
    async with late(STEP) as one:
        greet_all, moved = one.greet_all, False

        async def ask_once_before() -> None:
            nonlocal moved
            await greet_all()
            if not moved:
                one.givers[0].step, moved = STEP + 2 * JUMP, True

        one.greet_all = ask_once_before
        assert (await one.catch_up()).swarm_step == STEP + 2 * JUMP
        assert one.warnings == []


async def test_what_is_here_of_a_state_is_no_reason_to_refuse_the_rest(late):
    async with late(STEP) as one:
        one.folder.mkdir()
        (one.folder / "state").write_bytes(b"x" * SMALL.size)
        allotted = DiskQuota(one.folder, 1.5 * SMALL.size / GIB)
        one.copier = replace(one.copier, disk_quota=allotted)
        await one.catch_up()
        assert one.adopted == [STEP], one.warnings


async def test_what_is_here_of_a_state_goes_once_it_is_known_that_none_is_needed(late):
    async with late(STEP) as one:
        one.folder.mkdir()
        (one.folder / "state").write_bytes(b"x")
        givers, one.givers = one.givers, []
        assert await one.catch_up(STEP) is None
        assert one.folder.exists(), "nobody has been found yet"
        one.givers = givers
        assert await one.catch_up(STEP) is None
        assert not one.folder.exists()


# Whom it copies

NOTHING: Any = None
OWN = 100


def donors(
    *claims: int,
    distrusted: tuple[int, ...] = (),
    drifted: bool = False,
    own: int = OWN,
    phase: Phase = Phase.TRAINING,
    cell: tuple[int, ...] = (),
) -> list[int]:
    """The claims of those that are asked, of peers that claim these swarm steps."""
    infos = [
        SimpleNamespace(peer_id=f"peer{number}", swarm_step=claim, phase=phase)
        for number, claim in enumerate(claims)
    ]
    run: Any = SimpleNamespace(
        spec=SimpleNamespace(sync=SimpleNamespace(interval=20, consensus=1.0, fragments=1, group=2))
    )
    roster = SimpleNamespace(in_cell=lambda peer: int(peer.removeprefix("peer")) in cell)
    membership: Any = SimpleNamespace(donors=lambda: infos, roster=roster)
    catch_up = CatchUp(
        run=run, trainer=NOTHING, channels=NOTHING, membership=membership, down=NOTHING,
        disk_quota=NOTHING, folder=NOTHING,
        trusts=lambda peer: int(peer.removeprefix("peer")) not in distrusted, show=NOTHING,
        warn=NOTHING, tell=NOTHING,
    )  # fmt: skip
    return sorted((one.swarm_step for one in catch_up._donors(own, drifted)), reverse=True)


def test_of_peers_that_have_finished_a_newcomer_copies_what_no_merge_can_bring_it():
    assert donors(20, 20, own=0) == []
    assert donors(20, 20, own=0, phase=Phase.FINISHED) == [20, 20]
    assert donors(20, 20, own=10, phase=Phase.FINISHED) == [], "it has learned something itself"


def test_who_claims_what_nobody_comes_near_to_is_no_donor():
    assert donors(10**15, 5000, 4990) == [5000, 4990]


def test_one_alone_is_believed_for_every_late_peer_of_a_pair_is_in_that_place():
    assert donors(5000) == [5000]


def test_peers_of_our_cell_alone_are_donors_while_there_are_any():
    assert donors(5000, 4990, 4980, cell=(1, 2)) == [4990, 4980]
    assert donors(5000, 4990, 4980) == [5000, 4990, 4980]


def test_who_has_left_out_everybody_copies_from_them_all_the_same_if_it_has_drifted():
    assert donors(5000, 4990, distrusted=(0, 1)) == []
    assert donors(5000, 4990, distrusted=(0, 1), drifted=True) == [5000, 4990]
    assert donors(5000, 4990, distrusted=(0,), drifted=True) == [4990], "whom it trusts comes first"


# Weights for an average


def slow_of(giver: Donor) -> bytes:
    pieces = zip(SMALL.pieces, giver.pieces, strict=True)
    return np.concatenate([read_piece(piece, data).phi for piece, data in pieces]).tobytes()


async def gathered(folder: Path, givers: list[Donor], seconds: float = 60.0, quota=None):
    async with calling() as channels:
        gatherer = Gatherer(
            form=SMALL,
            sync=sync_of(),
            channels=channels,
            down=BandwidthLimit(),
            disk_quota=quota or DiskQuota(folder, None),
        )
        donors = [giver.info() for giver in givers]
        return await gatherer.gather(donors, STEP, folder / "gathered", seconds)


async def test_the_slow_weights_of_the_nearest_three_come_to_the_bit(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        givers = [
            await stack.enter_async_context(giving(tmp_path, number, step=STEP + 5 * number))
            for number in (4, 1, 2, 3)
        ]
        found = await gathered(tmp_path, givers)
        assert found.missing == ""
        assert set(found.peers) == {giver.peer_id for giver in givers[1:]}
        for giver in givers[1:]:
            assert (Path(found.folder) / giver.peer_id).read_bytes() == slow_of(giver)
    names = {path.name for path in Path(found.folder).iterdir()}
    assert names == set(found.peers), "and nothing else is left there"


async def test_who_gives_nothing_is_named_and_others_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "RETRY_PAUSE", 0.05)
    monkeypatch.setattr(engine, "STALL_DEADLINE", 0.5)
    async with giving(tmp_path, 1) as good, giving(tmp_path, 2) as bad:
        bad.port = 1
        found = await gathered(tmp_path, [good, bad])
    assert found.peers == (good.peer_id,)
    assert bad.peer_id[-6:] in found.missing and "can't be reached" in found.missing
