"""A checkpoint is whole or not there: every damage is found and named, and no crash, full disk or
stranger gets past that."""

import errno
import itertools
import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowcomm_node.storage.checkpoint as checkpoint_module
from helpers.disk import PowerLoss, is_killed_at, on_small_disk
from lowcomm_node.errors import CheckpointError, DiskFull
from lowcomm_node.storage.checkpoint import (
    DIVERGED,
    MANIFEST,
    CheckpointStore,
    read_manifest,
)
from lowcomm_node.storage.files import (
    disk_full_error,
    read_sealed_json,
    require_space,
    write_sealed_json,
)
from lowcomm_node.storage.state_file import read_state

pytestmark = pytest.mark.slow

META: dict[str, Any] = {
    "run_id": "ab" * 32,
    "steps": 7,
    "nested": {"a": [1, 2.5, None, True, "é"]},
    "big": 10**30,
}
NOW = 1_800_000_000.25
Parts = dict[str, dict[str, Tensor]]


def make_parts(step: int = 0) -> Parts:
    generator = torch.Generator().manual_seed(step)
    return {
        "weights": {
            "a.weight": torch.randn(5, 3, generator=generator),
            "b": torch.randn((), generator=generator),
        },
        "outer": {
            "phi.0": torch.randn(18, generator=generator),
            "delta.0": torch.full((18,), float(step)),
        },
    }


def make_store(folder: Path, *steps: int, keep: int = 3) -> CheckpointStore:
    store = CheckpointStore(folder / "checkpoints", keep)
    for step in steps:
        store.save(step, make_parts(step), META, NOW)
    return store


def folder_of(store: CheckpointStore, step: int) -> Path:
    return store.folder / f"step-{step:010d}"


def equal(one: Parts, other: Parts) -> bool:
    """Equal to the bit: -0 is not 0."""

    def image(parts: Parts) -> dict[tuple[str, str], Any]:
        return {
            (part, name): (
                tensor.dtype,
                tuple(tensor.shape),
                tensor.contiguous().reshape(-1).view(torch.uint8).tolist(),
            )
            for part, tensors in parts.items()
            for name, tensor in tensors.items()
        }

    return image(one) == image(other)


def check_usable(store: CheckpointStore, newest: int, *skipped: int) -> None:
    recovery = store.load_newest_usable()
    assert recovery.checkpoint is not None
    assert recovery.checkpoint.info.step == newest
    assert equal(recovery.checkpoint.tensors, make_parts(newest))
    assert tuple(recovery.skipped) == skipped
    assert all(recovery.skipped.values())


def check_tidy(store: CheckpointStore) -> None:
    """Nothing is there but whole checkpoints."""
    assert {path.name for path in store.folder.iterdir()} == {".lock"} | {
        folder_of(store, step).name for step in store.steps()
    }
    assert all(store.verify(step) == [] for step in store.steps())


def flip(path: Path, at: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


# What is written comes back


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    special = torch.tensor([3e4, -0.0, 1e-45, -1.5])
    parts: Parts = {
        "weights": {
            "fp32": special,
            "fp16": special.half(),
            "bf16": special.bfloat16(),
            "fp64": special.double(),
            "int64": torch.tensor([2**62, -1]),
            "bool": torch.tensor([True, False]),
            "scalar": torch.tensor(3.0),
            "empty": torch.zeros(0, 4),
            "turned": torch.arange(6.0).reshape(2, 3).T,
            "every second": torch.arange(10.0)[::2],
            "grad": torch.ones(3, requires_grad=True),
        },
        "inner-2_x": {},
    }
    store = make_store(tmp_path)
    info = store.save(400, parts, META, NOW)
    checkpoint = CheckpointStore(store.folder).load(400)
    assert equal(
        checkpoint.tensors,
        {part: {n: t.detach() for n, t in named.items()} for part, named in parts.items()},
    )
    assert checkpoint.meta == META
    assert checkpoint.info == info == store.info(400) == store.latest()
    assert (info.step, info.created_at, info.path) == (400, NOW, folder_of(store, 400))
    assert store.verify(400) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", ["weights", "outer"])
def test_a_checkpoint_that_is_not_finite_is_passed_over_and_not_exported(
    tmp_path: Path, part: str, bad: float
) -> None:
    store = make_store(tmp_path, 1)
    parts = make_parts(2)
    next(iter(parts[part].values())).view(-1)[3] = bad
    store.save(2, parts, META, NOW)
    check_usable(store, 1, 2)
    with pytest.raises(CheckpointError, match="holds NaN or infinity in"):
        store.load(2)
    if part == "weights":
        with pytest.raises(CheckpointError, match=r"NaN or infinity in a\.weight"):
            store.export(2, tmp_path / "exported")
        assert not (tmp_path / "exported").exists()


def test_after_a_divergence_a_start_goes_back_one_checkpoint_each_time(tmp_path: Path) -> None:
    store = make_store(tmp_path, 1, 2, 3)
    assert store.note_divergence({"reason": "NaN.", "stream": {"batches": 7}}) == 3
    check_usable(store, 2, 3)
    recovery = CheckpointStore(store.folder).load_newest_usable()
    assert recovery.diverged == {"reason": "NaN.", "stream": {"batches": 7}}
    assert recovery.skipped[3] == "training went on from it and diverged: NaN."
    assert store.note_divergence({"reason": "again"}) == 2
    check_usable(store, 1, 3, 2)
    assert store.note_divergence({"reason": "and again"}) == 1
    check_usable(store, 3)
    assert store.note_divergence({"reason": "nothing is left"}) is None
    assert store.verify(3) == [], "what was saved is as it was"


def test_a_damaged_note_of_a_divergence_still_counts(tmp_path: Path) -> None:
    store = make_store(tmp_path, 1, 2)
    store.note_divergence({"reason": "NaN"})
    flip(folder_of(store, 2) / DIVERGED, 30)
    check_usable(store, 1, 2)


def test_a_store_without_checkpoints_says_so(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    assert (store.steps(), store.entries(), store.latest()) == ([], [], None)
    recovery = store.load_newest_usable()
    assert (recovery.checkpoint, recovery.skipped) == (None, {})
    for step in (0, 5):
        assert "no sound manifest" in store.verify(step)[0]
        for act in (store.load, store.info, lambda step: store.export(step, tmp_path / "out")):
            with pytest.raises(CheckpointError, match=f"step-{step:010d}"):
                act(step)
    assert not (tmp_path / "out").exists()


# Damage is found and named


def test_every_flipped_byte_is_found_and_the_file_named(tmp_path: Path) -> None:
    store = make_store(tmp_path, 1, 2)
    for path in sorted(folder_of(store, 2).iterdir()):
        whole = path.read_bytes()
        for at in range(len(whole)):
            flip(path, at, 1 << at % 8)
            problems = store.verify(2)
            assert len(problems) == 1, (path.name, at)
            assert path.name in problems[0]
            path.write_bytes(whole)
    assert store.verify(2) == []


@pytest.mark.parametrize("name", [MANIFEST, "weights.safetensors", "outer.safetensors"])
def test_a_damaged_file_is_passed_over_for_the_checkpoint_before(tmp_path: Path, name: str) -> None:
    store = make_store(tmp_path, 1, 2)
    path = folder_of(store, 2) / name
    whole = path.read_bytes()
    damages: list[Callable[[], object]] = [
        lambda: flip(path, len(whole) // 2),
        lambda: path.write_bytes(whole[:-1]),
        lambda: path.write_bytes(whole + b"\n"),
        lambda: path.write_bytes(b""),
        lambda: path.write_bytes(bytes(len(whole))),
        path.unlink,
        path.mkdir,
    ]
    for number, damage in enumerate(damages):
        damage()
        problems = store.verify(2)
        assert len(problems) == 1, number
        assert str(path) in problems[0]
        with pytest.raises(CheckpointError, match=name):
            store.load(2)
        check_usable(store, 1, 2)
        assert name in store.load_newest_usable().skipped[2]
        if number < len(damages) - 2:
            path.write_bytes(whole)
            check_usable(store, 2)


def test_what_is_not_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    store = make_store(tmp_path, 1)
    foreign = ["notes.txt", "step-1", "step-00000000010", "step-000000000x", "xstep-0000000001"]
    for name in foreign:
        (store.folder / name).write_text("mine")
    (store.folder / "step-0000000007").write_text("a file, not a folder")
    assert store.steps() == [1, 7]
    check_usable(store, 1, 7)
    store.save(8, make_parts(8), META, NOW)
    check_usable(store, 8)
    assert {path.name for path in store.folder.iterdir()} >= set(foreign)


# Strangers' manifests: their digest says only that they are whole


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    store = make_store(tmp_path_factory.mktemp("stranger"), 5)
    return folder_of(store, 5), read_sealed_json(folder_of(store, 5) / MANIFEST)


FILE = {"part": "weights", "size": 300, "sha256": "ab" * 32}


@pytest.mark.parametrize(
    "change",
    [
        {"step": 5.0},
        {"step": True},
        {"step": -5},
        {"step": 10**400},
        {"created_at": None},
        {"created_at": -1},
        {"created_at": 1e300},
        {"meta": None},
        {"meta": "x"},
        {"format": 2},
        {"format": "x" * 10_000},
        {"files": None},
        {"files": "weights"},
        {"files": {"weights": FILE}},
        {"files": [None]},
        {"files": [FILE, FILE]},
        {"files": [{"part": "weights", "size": 300}]},
        {"files": [FILE | {"mode": 0o777}]},
        {"files": [FILE | {"sha256": "AB" * 32}]},
        {"files": [FILE | {"sha256": "ab" * 32 + "\n"}]},
        {"files": [FILE | {"sha256": None}]},
        *(
            {"files": [FILE | {"size": size}]}
            for size in (-1, 1.0, "300", None, True, 1 << 63, 10**400, [1])
        ),
        *(
            {"files": [FILE | {"part": part}]}
            for part in (
                "",
                ".",
                "..",
                "/etc/passwd",
                "../../x",
                "a/b",
                "a\\b",
                "weights\0",
                "weights\n",
                "W",
                ".lock",
                "x" * 65,
                "x" * 100_000,
                5,
                None,
                ["weights"],
                {"a": 1},
            )
        ),
    ],
    ids=lambda change: str(change)[:60],
)
def test_a_malformed_manifest_is_refused_whoever_sealed_it(
    stranger: tuple[Path, dict[str, Any]], tmp_path: Path, change: dict[str, Any]
) -> None:
    _, content = stranger
    write_sealed_json(tmp_path / MANIFEST, content | change)
    with pytest.raises(CheckpointError) as caught:
        read_manifest(tmp_path, 5)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert len(message) < 400, "a stranger does not fill our logs"


def test_a_seal_covers_everything_and_cannot_be_written_another_way(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for no_object in ([], "text", 5, None):
        write_sealed_json(path, no_object)
        with pytest.raises(ValueError, match="own digest"):
            read_sealed_json(path)
    content = {"b": [1, 2], "a": {"é": None}}
    write_sealed_json(path, content)
    assert read_sealed_json(path) == content
    sealed = path.read_bytes()
    whole = json.loads(sealed)
    for other in (
        json.dumps(whole).encode(),
        sealed + b" ",
        sealed.rstrip(),
        json.dumps(whole | {"more": 1}, sort_keys=True, indent=1).encode() + b"\n",
        json.dumps(
            whole | {"content": {"b": [1, 3], "a": {"é": None}}}, sort_keys=True, indent=1
        ).encode()
        + b"\n",
        sealed.replace(whole["sha256"].encode(), whole["sha256"].upper().encode()),
    ):
        path.write_bytes(other)
        with pytest.raises(ValueError, match="own digest"):
            read_sealed_json(path)


# How many are kept


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    for keep in (1, 2, 3):
        store = make_store(tmp_path / str(keep), 10, 20, 30, 40, keep=keep)
        assert store.steps() == [10, 20, 30, 40][-keep:]
        assert [info.step for info in store.entries()] == store.steps()
        check_tidy(store)


def test_a_damaged_checkpoint_never_displaces_a_sound_one(tmp_path: Path) -> None:
    store = make_store(tmp_path, 1, 2, 3)
    (folder_of(store, 2) / "weights.safetensors").unlink()
    flip(folder_of(store, 3) / MANIFEST, 40)
    store.save(4, make_parts(4), META, NOW)
    assert store.steps() == [1, 3, 4]
    store.save(5, make_parts(5), META, NOW)
    assert store.steps() == [1, 4, 5]
    (folder_of(store, 5) / "outer.safetensors").write_bytes(b"short")
    store.save(6, make_parts(6), META, NOW)
    assert store.steps() == [1, 4, 6]


def test_steps_that_were_abandoned_go_first(tmp_path: Path) -> None:
    """A node that resumed from step 10 saves 15 next: 20 and 30 are of a past that no longer is."""
    store = make_store(tmp_path, 10, 20, 30)
    store.save(15, make_parts(15), META, NOW)
    assert store.steps() == [10, 15, 30]
    store.save(16, make_parts(16), META, NOW)
    assert store.steps() == [10, 15, 16]


# Readers and writers at once


def test_a_reader_whose_checkpoints_are_all_replaced_takes_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path, 1)
    make_store(tmp_path).save(1, make_parts(1), META, NOW)
    listed = CheckpointStore.steps

    def list_late(store: CheckpointStore) -> list[int]:
        monkeypatch.setattr(CheckpointStore, "steps", listed)
        before = listed(store)
        CheckpointStore(store.folder, keep=1).save(2, make_parts(2), META, NOW)
        assert listed(store) == [2], "the writer has removed what was listed"
        return before

    monkeypatch.setattr(CheckpointStore, "steps", list_late)
    found = store.load_newest_usable()
    assert found.checkpoint is not None and found.checkpoint.info.step == 2
    assert found.skipped == {}


# Crashes and full disks


def _save_again(folder: Path, step: int) -> None:
    store = CheckpointStore(folder, keep=2)
    store.save(step, {"weights": {"new": torch.full((4,), 9.0)}, "outer": {}}, {"new": True}, NOW)


@pytest.mark.slow
def test_a_kill_at_any_point_leaves_the_old_checkpoints_or_the_new_one(tmp_path: Path) -> None:
    """The newest is saved again: one more rename than for a new step."""
    step = 2
    outcomes: list[bool] = []
    for point in itertools.count():
        store = make_store(tmp_path / str(point), 1, 2, keep=2)
        killed = is_killed_at(point, _save_again, store.folder, step)
        survivors = CheckpointStore(store.folder, keep=2)
        check_tidy(survivors)
        recovery = survivors.load_newest_usable()
        assert recovery.checkpoint is not None
        assert recovery.skipped == {}
        is_new = recovery.checkpoint.info.step == step and recovery.checkpoint.meta == {"new": True}
        assert is_new or (
            recovery.checkpoint.info.step == 2 and equal(recovery.checkpoint.tensors, make_parts(2))
        )
        assert len(survivors.steps()) >= 2
        survivors.save(4, make_parts(4), META, NOW)
        check_tidy(survivors)
        check_usable(survivors, 4)
        outcomes.append(is_new)
        if not killed:
            break
    assert outcomes == sorted(outcomes), "from one point on it is the new one"
    assert outcomes[0] is False
    assert outcomes[-1] is True
    assert len(outcomes) > 12


def test_a_power_cut_finds_all_files_of_a_checkpoint_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path, 1, 2)
    power = PowerLoss(monkeypatch)
    store.save(3, make_parts(3), META, NOW)
    power.check()
    store.save(3, make_parts(4), META, NOW)
    power.check()
    assert power.named == [folder_of(store, 3), folder_of(store, 3)]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_a_call_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    """Whichever of its calls it is; a full disk is our error, a broken one is the system's."""
    call = getattr(os, name)
    for failing in itertools.count():
        store = make_store(tmp_path / str(failing), 1, 2, keep=2)
        calls = itertools.count()

        def fail(
            *arguments: Any, calls: Iterator[int] = calls, failing: int = failing, **keywords: Any
        ) -> Any:
            if next(calls) == failing:
                raise OSError(code, os.strerror(code))
            return call(*arguments, **keywords)

        monkeypatch.setattr(os, name, fail)
        try:
            store.save(2, {"weights": {"new": torch.ones(2)}}, {}, NOW)
        except (DiskFull, OSError) as error:
            assert isinstance(error, DiskFull) == (code != errno.EIO)
            if isinstance(error, DiskFull):
                assert error.exit_code == 75
                assert str(store.folder) in str(error)
                assert "what was saved before is untouched" in str(error)
            failed = True
        else:
            failed = False
        monkeypatch.undo()
        check_tidy(store)
        newest = store.load(2)
        assert equal(newest.tensors, make_parts(2)) or (list(newest.tensors["weights"]) == ["new"])
        assert equal(store.load(1).tensors, make_parts(1))
        if not failed and next(calls) <= failing:
            break
    assert failing >= 1


def test_a_full_disk_is_known_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path, 1)
    huge = torch.empty(1, dtype=torch.float64).expand(
        1 << 50
    )  # takes no memory: 8 PiB of the same number
    with pytest.raises(DiskFull, match=r"9,007,199,255,\d\d\d,\d\d\d bytes needed, [\d,]+ free"):
        store.save(2, {"weights": {"huge": huge}}, {}, NOW)
    check_tidy(store)
    check_usable(store, 1)
    require_space(tmp_path, shutil.disk_usage(tmp_path).free // 2)
    with pytest.raises(DiskFull, match="--home"):
        require_space(tmp_path, 1 << 62)


def _no_check(folder: Path, needed: int) -> None:
    """As if a quota, which the check can't see, were smaller than the disk."""


def _fill_disk(folder: Path) -> list[str]:
    """Save until a file system of 2 MiB is full, with and without a look at it before."""
    store = make_store(folder, 1, 2, keep=2)
    parts = {"weights": {"a": torch.zeros(1 << 17)}, "outer": {"b": torch.zeros(1 << 19)}}
    messages: list[str] = []
    for check in (checkpoint_module.require_space, _no_check):
        checkpoint_module.require_space = check
        with pytest.raises(DiskFull) as caught:
            store.save(3, parts, META, NOW)
        messages.append(str(caught.value))
        check_tidy(store)
        check_usable(store, 2)
        assert store.steps() == [1, 2]
    checkpoint_module.require_space = _no_check
    big = {"weights": {"a": torch.zeros(300_000)}}
    store.save(3, big, META, NOW)
    with pytest.raises(DiskFull) as caught:
        store.export(3, folder / "out")
    messages.append(str(caught.value))
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints"]
    with pytest.raises(DiskFull) as caught, disk_full_error(folder):
        write_sealed_json(folder / "x.json", {"a": "x" * (2 << 20)})
    messages.append(str(caught.value))
    return messages


def test_a_disk_that_gets_full_while_it_is_written_to_is_our_error(tmp_path: Path) -> None:
    messages = on_small_disk(tmp_path, 2 << 20, _fill_disk, tmp_path)
    assert len(messages) == 4
    for message in messages:
        assert message.startswith(f"No room in {tmp_path}")
        assert "bytes needed" in message


# Export


def test_an_export_is_the_weights_and_what_is_known_of_them(tmp_path: Path) -> None:
    store = make_store(tmp_path, 1)
    out = tmp_path / "deep" / "out"
    assert store.export(1, out) == out
    assert {path.name for path in out.iterdir()} == {"weights.safetensors", "config.json"}
    assert equal(
        {"weights": read_state(out / "weights.safetensors")}, {"weights": make_parts(1)["weights"]}
    )
    assert json.loads((out / "config.json").read_text()) == {"step": 1, "created_at": NOW, **META}
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_an_export_never_writes_over_anything(tmp_path: Path) -> None:
    store = make_store(tmp_path, 1)
    for name, make in (
        ("file", lambda path: path.write_text("mine")),
        ("folder", lambda path: path.mkdir()),
    ):
        path = tmp_path / name
        make(path)
        before = stat.S_IFMT(path.stat().st_mode), path.stat().st_mtime_ns
        with pytest.raises(CheckpointError, match="exists: name a folder that does not"):
            store.export(1, path)
        assert (stat.S_IFMT(path.stat().st_mode), path.stat().st_mtime_ns) == before


def test_damaged_weights_are_not_exported(tmp_path: Path) -> None:
    store = make_store(tmp_path, 1)
    flip(folder_of(store, 1) / "outer.safetensors", 30)
    store.export(1, tmp_path / "fine")
    flip(folder_of(store, 1) / "weights.safetensors", 30)
    with pytest.raises(CheckpointError, match="SHA-256"):
        store.export(1, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "fine"]
