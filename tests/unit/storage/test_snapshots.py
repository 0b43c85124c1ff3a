"""What must hold for the snapshots of a donor: few, shared, fresh enough, never taken from under a
joiner."""

import asyncio
import shutil
from pathlib import Path
from threading import Thread, current_thread, main_thread

import pytest

from lowcomm_node.errors import DiskFull, RetryLater, TrainerError
from lowcomm_node.storage import snapshots as module
from lowcomm_node.storage.snapshots import MAX_SNAPSHOTS, Snapshots, write_snapshot

STALE = 10


class Maker:
    """A trainer whose state is its step."""

    def __init__(self, folder: Path) -> None:
        self.step, self.made, self.error = 0, 0, None
        self.folder = folder
        (folder / "left-over").mkdir(parents=True)
        self.snapshots = Snapshots(folder, self.make, lambda: self.step, STALE)

    async def make(self) -> tuple[str, int]:
        self.made += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        state = b"%d" % self.step
        return write_snapshot(
            self.folder, len(state), iter([state]), lambda digests: b"".join(digests)
        ), self.step

    def there(self) -> list[int]:
        """The steps of what is on disk."""
        return sorted(int((path / "state").read_bytes()) for path in self.folder.iterdir())


@pytest.fixture
def maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Maker:
    monkeypatch.setattr(module, "SHORTEST_LIFE", 0.0)
    monkeypatch.setattr(module, "COST_SHARE", 0.0)
    return Maker(tmp_path / "snapshots")


async def test_all_who_come_share_one_until_it_is_old(maker: Maker):
    assert not maker.folder.exists(), "what a crash left is cleared away"

    async def use() -> bytes:
        async with maker.snapshots.use() as snapshot:
            return (snapshot.path / "state").read_bytes()

    assert await asyncio.gather(*(use() for _ in range(5))) == [b"0"] * 5
    maker.step = STALE
    assert await use() == b"0"
    assert maker.made == 1
    maker.step += 1
    assert await use() == b"11"
    assert maker.made == 2


@pytest.mark.parametrize(
    ("step", "after"), [(STALE + 200, "a merge with a peer far ahead"), (-200, "going back")]
)
async def test_one_that_nobody_could_train_on_from_is_not_handed_out_again(
    maker: Maker, monkeypatch, step, after
):
    monkeypatch.setattr(module, "SHORTEST_LIFE", 1000.0)
    maker.snapshots = Snapshots(maker.folder, maker.make, lambda: maker.step, STALE, useless=100)
    for now in (0, STALE + 90, step):
        maker.step = now
        async with maker.snapshots.use() as snapshot:
            assert snapshot.swarm_step == (step if now == step else 0), after


async def test_there_are_never_more_than_two_and_none_is_taken_from_under_a_joiner(maker: Maker):
    async with maker.snapshots.use() as first:
        for step in (100, 200, 300):
            maker.step = step
            async with maker.snapshots.use() as another:
                assert len(maker.there()) <= MAX_SNAPSHOTS
                assert (another.path / "state").exists()
        assert (first.path / "state").read_bytes() == b"0"
        assert maker.there() == [0, 300]
        maker.step = 400
        async with maker.snapshots.use() as second:
            maker.step = 500
            async with maker.snapshots.use() as same:
                assert same is second, "where there is no room, the newest serves"
        # By its name it can be had again, however old, while it is there.
        async with maker.snapshots.use(first.name) as again:
            assert again is first
    maker.step = 600
    async with maker.snapshots.use():
        assert 0 not in maker.there() and len(maker.there()) <= MAX_SNAPSHOTS
    await maker.snapshots.close()
    assert not maker.folder.exists()


async def test_making_room_for_one_holds_up_nothing_else(maker: Maker, monkeypatch):
    threads, rmtree = dict[str, Thread](), shutil.rmtree

    def remove(path: Path, ignore_errors: bool = False) -> None:
        threads[path.name] = current_thread()
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(module.shutil, "rmtree", remove)
    async with maker.snapshots.use() as first:
        pass
    for maker.step in (100, 200):
        async with maker.snapshots.use():
            pass
    assert maker.there() == [100, 200]
    assert threads[first.path.name] is not main_thread()


@pytest.mark.parametrize(
    "error", [DiskFull("no room in /home/me"), TrainerError("The trainer is not running.")]
)
async def test_where_none_can_be_made_joiners_are_told_later_or_get_the_last_one(
    maker: Maker, monkeypatch, error
):
    maker.error = error
    for _ in range(3):
        with pytest.raises(RetryLater, match="no snapshot can be made here now") as caught:
            async with maker.snapshots.use():
                pass
        assert "/" not in str(caught.value)
    assert maker.made == 1, "it is not tried again and again"
    monkeypatch.setattr(module, "FAILED_PAUSE", 0.0)
    maker.error = None
    async with maker.snapshots.use() as good:
        maker.error, maker.step = error, 500
        async with maker.snapshots.use() as same:
            assert same is good
