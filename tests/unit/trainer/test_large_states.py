"""What must hold for states that are too large to be copied: they are written from where they are,
what is written is the state of one moment, and training waits for no disk for ever."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from lowcomm_node.data import Dataset, open_data
from lowcomm_node.errors import CheckpointError
from lowcomm_node.node.messages import Save, WriteSnapshot
from lowcomm_node.storage.checkpoint import CheckpointStore
from lowcomm_node.storage.state_file import mapped_vector
from lowcomm_node.trainer import memory, saving, state, transfer
from lowcomm_node.trainer.replica import Replica
from lowcomm_node.trainer.saving import Saving, StateWriter
from lowcomm_node.trainer.state import Parts
from lowcomm_protocol.spec.run import RunSpec

SPEC = RunSpec.model_validate(
    {
        "run": {"name": "large", "steps": 1000},
        "model": {"layers": 1, "width": 64, "heads": 2, "feed_forward": 96, "context": 16},
        "train": {"batch": 2, "warmup": 2},
        "sync": {"method": "noloco", "codec": "mod8", "consensus": 1.0},
    }
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("A short text, and again a short text. " * 300)
    (folder / "b.txt").write_text("Another text that is held out. " * 300)
    return open_data(f"text:{folder}", "bytes", folder / "cache")


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "COPIED", 0)


class Writing:
    """A writer whose disk is busy until ``free`` is set."""

    def __init__(self, replica: Replica, folder: Path) -> None:
        self.free = threading.Event()
        self.store = CheckpointStore(folder / "checkpoints")
        self.thread = ThreadPoolExecutor(1)
        self.thread.submit(self.free.wait, 60)
        self.writer = StateWriter(
            replica, self.store, Saving(100), self.thread, lambda event: None, lambda work: None
        )

    def ask(self, request: Any) -> Future[Any]:
        """Begin what a request asks for."""
        return self.writer.handlers[type(request)](request)


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Callable[[Replica], Writing]]:
    made: list[Writing] = []

    def begin(replica: Replica) -> Writing:
        made.append(Writing(replica, tmp_path))
        return made[-1]

    yield begin
    for one in made:
        one.free.set()
        one.thread.shutdown()


def trained(dataset: Dataset, spec: RunSpec = SPEC) -> Replica:
    one = Replica(spec, "peer", dataset, torch.device("cpu"))
    for _ in range(3):
        one.inner_step()
    return one


def same(one: Parts, other: Parts) -> bool:
    return all(
        torch.equal(tensor, other[part][name])
        for part, tensors in one.items()
        for name, tensor in tensors.items()
    )


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("changed_by", ["a step", "a merge", "another state"])
def test_what_is_written_is_the_state_as_it_was_and_changes_wait_until_it_is_read(
    busy, dataset: Dataset, monkeypatch: pytest.MonkeyPatch, changed_by: str
):
    replica, donor = trained(dataset), trained(dataset)
    if changed_by == "a merge":
        replica.capture(0)
        replica.captures[0].ranges, replica.captures[0].outcome = (), (replica.fast(0) + 1, None)
        monkeypatch.setattr(replica.captures[0], "commit", lambda: None)
    before, _ = state.snapshot(replica)
    disk = busy(replica)
    saved = disk.ask(Save())
    wait, asked = replica.readings.wait, []

    def waits() -> None:
        asked.append(saved.done())
        disk.free.set()
        wait()

    monkeypatch.setattr(replica.readings, "wait", waits)
    taken = transfer.StateSnapshot(donor)
    {
        "a step": replica.inner_step,
        "a merge": lambda: replica.merge(0, 0),
        "another state": lambda: transfer.adopt(replica, taken.manifest([]), taken.piece),
    }[changed_by]()
    assert asked[0] is False, "it was asked before anything was written"
    found = disk.store.load(saved.result(60).swarm_step).tensors
    assert same(before, found)
    if changed_by == "a step":
        assert not same(state.snapshot(replica)[0], found), "it has trained on since"


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("request_", [Save(), WriteSnapshot(folder="")])
def test_a_disk_that_takes_too_long_holds_training_no_longer_and_nothing_of_it_counts(
    busy, dataset: Dataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request_: Any
):
    monkeypatch.setattr(saving, "PATIENCE", 0.0)
    monkeypatch.setattr(saving, "SLOWEST_DISK", float("inf"))
    replica = trained(dataset)
    disk = busy(replica)
    if isinstance(request_, WriteSnapshot):
        request_ = WriteSnapshot(folder=str(tmp_path / "snapshots"))
    asked = disk.ask(request_)
    replica.inner_step()
    disk.free.set()
    with pytest.raises(CheckpointError, match="training has gone on: the disk is too slow, or"):
        asked.result(60)
    assert disk.store.steps() == [] and not list(tmp_path.glob("snapshots/*"))


@pytest.mark.parametrize("allocates", [True, False])
def test_a_vector_in_a_file_has_its_room_on_the_disk(
    allocates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if not allocates:  # as on macOS
        monkeypatch.delattr(os, "posix_fallocate")
    vector = mapped_vector(tmp_path, 300_001)
    (file,) = tmp_path.iterdir()
    assert len(vector) == 300_001 and not vector.any()
    assert file.stat().st_blocks * 512 >= 1_200_004 == file.stat().st_size


def test_slow_weights_in_files_are_those_in_memory_and_leave_no_file_behind(
    dataset: Dataset, tmp_path: Path
):
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / ".mapped-left-by-a-killed-one").write_bytes(b"x")
    mapped, plain = trained(dataset), trained(dataset)
    mapped.keep_in_files(folder)
    for _ in range(3):
        for replica in (mapped, plain):
            replica.inner_step()
            alone(replica)
        assert all(map(torch.equal, mapped.phi, plain.phi))
        assert all(map(torch.equal, mapped.delta, plain.delta))
    numel = mapped.plan.fragments[0].numel
    assert {one.stat().st_size for one in folder.iterdir()} == {4 * numel}
    assert len(list(folder.iterdir())) == 2 * 2, "slow weights and momentum, old and new"
    again = trained(dataset)
    again.keep_in_files(folder)
    state.restore(again, *state.snapshot(plain))
    assert all(map(torch.equal, again.phi, plain.phi))
    del mapped, again, replica
    gc.collect()
    assert list(folder.iterdir()) == []


def alone(replica: Replica) -> None:
    """An exchange with a partner that brings just what we do."""
    replica.capture(0)
    capture = replica.capture_of(0)
    data = memoryview(bytearray(8 * capture.numel + 4096))
    capture.receive("other", data[: sum(capture.encode(data))])
    capture.pool({"peer": 1, "other": 1})
    replica.outer(0)
    replica.merge(0, replica.clock.step)
