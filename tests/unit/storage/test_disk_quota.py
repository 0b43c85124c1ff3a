"""What must hold for a disk that is full or allotted: training goes on, the newest sound checkpoint
stays, it is told once."""

from pathlib import Path

import pytest
import torch

from lowcomm_node.data import open_data
from lowcomm_node.errors import DiskFull
from lowcomm_node.storage.checkpoint import CheckpointStore
from lowcomm_node.storage.files import GIB, DiskQuota

MIB = 1024**2


def allotted(home: Path, mebibytes: float) -> DiskQuota:
    return DiskQuota(home, mebibytes * MIB / GIB)


def save(store: CheckpointStore, step: int, mebibytes: float = 1.0) -> None:
    store.save(step, {"weights": {"w": torch.zeros(int(mebibytes * MIB / 4))}}, {}, 0.0)


def test_fewer_checkpoints_are_kept_where_the_allotment_is_short(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c", keep=5, disk_quota=allotted(tmp_path, 5.2))
    kept = []
    for step in range(1, 8):
        save(store, step)
        kept.append(store.steps())
        assert DiskQuota(tmp_path).used() <= 5.2 * MIB
    assert kept[0] == [1] and kept[1] == [1, 2]
    assert kept[-1] == [4, 5, 6, 7] and store.verify(7) == []


def test_the_newest_sound_checkpoint_stays_and_the_error_names_the_setting(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c", keep=5, disk_quota=allotted(tmp_path, 3.5))
    save(store, 1)
    save(store, 2)
    with pytest.raises(DiskFull, match=r"--max-disk .* raise that, or lower --keep") as caught:
        save(store, 3, 2.0)
    assert caught.value.exit_code == 75
    assert store.steps() == [2] and store.verify(2) == [], "what was older made room in vain"
    (tmp_path / "c" / "step-0000000002" / "weights.safetensors").unlink()
    save(store, 4)
    assert store.verify(4) == []


def test_what_a_link_leads_to_is_not_counted(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "big").write_bytes(b"x" * MIB)
    (home / "link").symlink_to(tmp_path / "big")
    (home / "folder").mkdir()
    (home / "folder" / "file").write_bytes(b"x" * MIB)
    assert MIB <= DiskQuota(home).used() < 1.1 * MIB
    assert DiskQuota(home).room() == float("inf")
    with pytest.raises(DiskFull, match="The state of a peer needs"):
        allotted(home, 1.5).require(MIB, "The state of a peer")
    allotted(home, 2.5).require(MIB, "The state of a peer")


def test_a_text_that_does_not_fit_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"some words of a text \n" * 50_000)
    cache = tmp_path / "home" / "data"
    with pytest.raises(DiskFull, match=r"The text of .* needs"):
        open_data(str(text), "bytes", cache, disk_quota=allotted(tmp_path / "home", 1.0))
    assert [path.name for path in cache.iterdir()] == [".lock"]
    open_data(str(text), "bytes", cache, disk_quota=allotted(tmp_path / "home", 4.0))


def test_what_a_part_of_a_file_takes_already_is_not_needed_again(tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(b"x" * MIB)
    allotted(tmp_path, 2.1).require(2 * MIB, "A file", part=part)
    with pytest.raises(DiskFull, match="A file needs"):
        allotted(tmp_path, 1.9).require(2 * MIB, "A file", part=part)
    with pytest.raises(DiskFull, match="A file needs"):
        allotted(tmp_path, 2.1).require(2 * MIB, "A file", part=tmp_path / "other")
