"""What must hold for weights of peers that an export averages: the slow ones of each to the bit, of
the nearest three, and no others' fault is ours."""

from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from helpers.donors import SMALL, STEP, Giver, giving, sync_of
from helpers.wire import calling
from lowcomm_node.errors import LinkLost
from lowcomm_node.fetch import gather
from lowcomm_node.fetch.gather import Gatherer
from lowcomm_node.net.bandwidth import BandwidthLimit
from lowcomm_node.storage.files import DiskQuota
from lowcomm_protocol.state import read_piece


def slow_of(giver: Giver) -> bytes:
    pieces = zip(SMALL.pieces, giver.pieces, strict=True)
    return np.concatenate([read_piece(piece, data).phi for piece, data in pieces]).tobytes()


async def gathered(folder: Path, givers: list[Giver], seconds: float = 60.0, quota=None):
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
    async with giving(tmp_path, 1) as good, giving(tmp_path, 2) as bad:
        fetch = gather.Fetcher.fetch

        async def failing(self: gather.Fetcher) -> None:
            if self._donors()[0].peer_id == bad.peer_id:
                raise LinkLost("it hung up")
            await fetch(self)

        monkeypatch.setattr(gather.Fetcher, "fetch", failing)
        found = await gathered(tmp_path, [good, bad])
    assert found.peers == (good.peer_id,)
    assert found.missing == f"{bad.peer_id[-6:]}: it hung up"


async def test_who_is_too_slow_is_left_out(tmp_path: Path) -> None:
    async with giving(tmp_path, 1) as slow:
        slow.may_make.clear()
        found = await gathered(tmp_path, [slow], seconds=0.05)
        slow.may_make.set()
    assert found.peers == () and found.missing.endswith("it was too slow")


async def test_without_room_on_the_disk_nothing_is_fetched(tmp_path: Path) -> None:
    async with giving(tmp_path, 1) as giver:
        found = await gathered(tmp_path, [giver], quota=DiskQuota(tmp_path, 1e-6))
    assert found.peers == () and "state of peers" in found.missing and giver.made == 0


async def test_without_peers_nothing_is_missing_but_them(tmp_path: Path) -> None:
    found = await gathered(tmp_path, [])
    assert found.peers == () and found.missing == "no peer trains beside this node now"
