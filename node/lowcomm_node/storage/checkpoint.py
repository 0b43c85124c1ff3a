"""Checkpoints on disk: atomic, verifiable, the newest few kept.

checkpoints/
  .lock                      one writer at a time
  step-0000000400/
    manifest.json            sealed: step, time, meta, and size and SHA-256 of every other file
    weights.safetensors      one file per part, e.g. weights, outer, inner
    diverged.json            sealed; only if training diverged from here: why, and where in the data
  .writing-*, .removing-*    left behind by a crash; swept by the next writer
  .replaced-step-*           the former checkpoint of a step that is being saved again
"""

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lowcomm_node.errors import CheckpointError, ConfigError
from lowcomm_node.storage.files import (
    WRITING,
    DiskQuota,
    disk_full_error,
    folder_lock,
    new_folder,
    read_sealed_json,
    require_space,
    sha256_file,
    sync,
    write_sealed_json,
)

if TYPE_CHECKING:  # reading a manifest needs no torch, which takes seconds to load
    from torch import Tensor

    Tensors = Mapping[str, Mapping[str, Tensor]]
    """Tensors by part and name."""

FORMAT = 1
MANIFEST, DIVERGED = "manifest.json", "diverged.json"
_STEP = re.compile(r"step-(\d{10})")
_PART = r"^[a-z][a-z0-9_-]{0,63}$"  # a part's name becomes a file name: it can't leave the folder
_REMOVING, _REPLACED = ".removing-", ".replaced-"
_END_OF_TIME = 253_402_300_800.0  # the year 10,000, in seconds since the epoch
_OVERHEAD = 1 << 20  # bytes of headers, manifest and the file system's own records


class CheckpointFile(BaseModel):
    """File of a checkpoint."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    part: Annotated[str, Field(pattern=_PART)]
    size: Annotated[int, Field(ge=0, lt=1 << 63)]  # bytes
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

    @property
    def name(self) -> str:
        """Its name in the checkpoint's folder."""
        return f"{self.part}.safetensors"


class CheckpointInfo(BaseModel):
    """The contents of a checkpoint's manifest. Its digest says nothing about its author."""

    model_config = ConfigDict(frozen=True, strict=True)

    path: Path
    step: int
    created_at: Annotated[float, Field(ge=0, lt=_END_OF_TIME)]  # seconds since the epoch
    parts: Annotated[list[CheckpointFile], Field(alias="files")]
    meta: dict[str, Any]

    @model_validator(mode="after")
    def _has_each_once(self) -> Self:
        if len({file.part for file in self.parts}) < len(self.parts):
            raise ValueError("it has a part twice")
        return self

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(file.size for file in self.parts)

    def problems(self, parts: Sequence[str] | None = None, reads: bool = True) -> list[str]:
        """One line for each of some parts (None: all) that is not as written. ``reads``: every
        byte, rather than only its size."""
        files = {file.part: file for file in self.parts}
        problems: list[str] = []
        for part in files if parts is None else parts:
            if (file := files.get(part)) is None:
                problems.append(f"{self.path} has no part {part!r}, only {', '.join(files)}")
                continue
            path = self.path / file.name
            try:
                if (size := path.stat().st_size) != file.size:
                    problems.append(f"{path} has {size} bytes instead of {file.size}")
                elif reads and sha256_file(path) != file.sha256:
                    problems.append(f"{path} does not match its SHA-256 in {MANIFEST}")
            except OSError as error:
                problems.append(f"{path} can't be read ({error.strerror})")
        return problems


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory: tensors by part and name."""

    info: CheckpointInfo
    tensors: "dict[str, dict[str, Tensor]]"

    @property
    def meta(self) -> dict[str, Any]:
        """The metadata saved with the tensors."""
        return self.info.meta


@dataclass(frozen=True)
class Recovery:
    """The newest sound checkpoint, if there is one, and why newer ones were skipped, by step."""

    checkpoint: Checkpoint | None
    skipped: dict[int, str] = field(default_factory=dict)
    diverged: dict[str, Any] | None = None
    """The note on the newest checkpoint from which training diverged, if there is one."""


def write_checkpoint(
    folder: Path,
    step: int,
    tensors_by_part: "Tensors",
    meta: dict[str, Any],
    created_at: float,
    taken: Callable[[], None] = lambda: None,
) -> None:
    """Write all files of a checkpoint into ``folder`` and sync them. Raises CheckpointError."""
    from lowcomm_node.storage.state_file import write_state

    paths = {part: folder / f"{part}.safetensors" for part in tensors_by_part}
    for part, tensors in tensors_by_part.items():
        write_state(paths[part], tensors)
    taken()
    files: list[dict[str, Any]] = []
    for part, path in paths.items():
        sync(path)
        # In chunks: to hash the tensors would need their bytes in memory a second time.
        files.append({"part": part, "size": path.stat().st_size, "sha256": sha256_file(path)})
    content = {"format": FORMAT, "step": step, "created_at": created_at, "files": files}
    try:
        write_sealed_json(folder / MANIFEST, {**content, "meta": meta})
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"meta of step {step} is not plain JSON ({error}): keep such values out of it."
        ) from error
    sync(folder)


def read_manifest(path: Path, step: int) -> CheckpointInfo:
    """Read the manifest of the checkpoint in ``path``, which may be untrusted. Raises
    CheckpointError."""
    try:
        content = read_sealed_json(path / MANIFEST)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} has no sound manifest ({error}): use another checkpoint."
        ) from error
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {content.get('format')!r:.20}, this release reads {FORMAT}: use "
            "the release that wrote it."
        )
    try:
        info = CheckpointInfo.model_validate({**content, "path": path})
    except ValidationError:
        raise CheckpointError(f"{path} has a malformed manifest: use another checkpoint.") from None
    if info.step != step:
        raise CheckpointError(
            f"{path} says that it is of step {info.step!r:.20}: give the folder its old name."
        )
    return info


class CheckpointStore:
    """The checkpoints of one node. Several processes may open it: one writes, others read.

    Raises ConfigError if ``keep`` is less than 1.
    """

    def __init__(self, folder: Path, keep: int = 3, disk_quota: DiskQuota | None = None) -> None:
        """``disk_quota``: of the home. It may keep fewer, but always the newest sound one."""
        if keep < 1:
            raise ConfigError(f"keep = {keep} would remove every checkpoint: set it to 1 or more.")
        self.folder = folder
        self.keep = keep
        self._disk_quota = disk_quota or DiskQuota(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(folder, wait=False) as free:
            # If another process writes, its temporary folder is in use, and it has swept itself.
            if free:
                self._sweep()

    def save(
        self,
        step: int,
        tensors_by_part: "Tensors",
        meta: dict[str, Any],
        created_at: float,
        taken: Callable[[], None] = lambda: None,
    ) -> CheckpointInfo:
        """Write a durable checkpoint, in place of one of this step, and remove the oldest ones.

        ``taken`` is called once the tensors are not read any more; what it raises ends the save.
        Raises DiskFull, CheckpointError if ``meta`` is not plain JSON. After any of them, and after
        a crash at any point, the earlier checkpoints are unchanged.
        """
        tensors = [tensor for part in tensors_by_part.values() for tensor in part.values()]
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors) + _OVERHEAD
        with folder_lock(self.folder):
            self._sweep()
            try:
                self._make_room(step, needed)
                require_space(self.folder, needed)
                with disk_full_error(self.folder, needed):
                    temporary = Path(tempfile.mkdtemp(prefix=WRITING, dir=self.folder))
                    write_checkpoint(temporary, step, tensors_by_part, meta, created_at, taken)
                    if (final := self._path(step)).exists():
                        final.rename(self.folder / f"{_REPLACED}{final.name}")
                    temporary.rename(final)
                    sync(self.folder)
            except BaseException:
                with suppress(OSError):
                    self._sweep()
                raise
            self._prune(step)
            return self.info(step)

    def steps(self) -> list[int]:
        """Steps of all checkpoints, oldest first, sound or not."""
        matches = (_STEP.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def entries(self) -> list[CheckpointInfo]:
        """The checkpoints with a readable manifest, oldest first."""
        infos: list[CheckpointInfo] = []
        for step in self.steps():
            with suppress(CheckpointError):
                infos.append(self.info(step))
        return infos

    def latest(self) -> CheckpointInfo | None:
        """The newest checkpoint with a readable manifest."""
        return next(reversed(self.entries()), None)

    def info(self, step: int) -> CheckpointInfo:
        """Read the manifest of one checkpoint. Raises CheckpointError if it is none, or damaged."""
        return read_manifest(self._path(step), step)

    def verify(self, step: int) -> list[str]:
        """Read every byte of a checkpoint. Returns its problems."""
        try:
            return self.info(step).problems()
        except CheckpointError as error:
            return [str(error)]

    def load(self, step: int, parts: Sequence[str] | None = None) -> Checkpoint:
        """Read parts (None: all). Raises CheckpointError if one is not sound, or not finite."""
        info = self._sound(step, parts)
        names = [file.part for file in info.parts] if parts is None else parts
        return Checkpoint(
            info, {part: _read_finite(info.path / f"{part}.safetensors") for part in names}
        )

    def load_newest_usable(self, parts: Sequence[str] | None = None) -> Recovery:
        """Read the newest sound checkpoint, one from which training diverged only if there is no
        other."""
        steps = self.steps()
        notes = {step: self._diverged(step) for step in reversed(steps)}
        diverged = {step: note for step, note in notes.items() if note is not None}
        newest = next(iter(diverged.values()), None)
        unusable: dict[int, str] = {}
        # The sort is stable, so the newest comes first among equals.
        for step in sorted(notes, key=lambda step: step in diverged):
            try:
                checkpoint = self.load(step, parts)
            except (CheckpointError, OSError) as error:
                unusable[step] = str(error)
                continue
            passed = {
                newer: "training went on from it and diverged: "
                f"{note.get('reason', 'the reason is lost')}"
                for newer, note in diverged.items()
                if newer > step
            }
            return Recovery(checkpoint, passed | unusable, newest)
        # Writers may have replaced all of them by newer ones since they were listed.
        if not set(self.steps()) <= set(steps):
            return self.load_newest_usable(parts)
        return Recovery(None, unusable, newest)

    def note_divergence(self, note: dict[str, Any]) -> int | None:
        """Note that training diverged from the newest checkpoint without a note, so that the next
        start reads the one before. Returns its step. Raises OSError, ValueError if ``note`` is not
        plain JSON."""
        step = next((step for step in reversed(self.steps()) if self._diverged(step) is None), None)
        if step is not None:
            write_sealed_json(self._path(step) / DIVERGED, note)
        return step

    def _diverged(self, step: int) -> dict[str, Any] | None:
        """The note on a checkpoint from which training diverged; None for others."""
        path = self._path(step) / DIVERGED
        try:
            return read_sealed_json(path) if path.exists() else None
        except (OSError, ValueError):
            return {}  # there is a note, and it is damaged

    def export(self, step: int, path: Path) -> Path:
        """Write weights.safetensors, config.json (step, time and meta) and a tokenizer.json to a
        new folder. Raises CheckpointError if it exists or the weights are not sound, DiskFull."""
        with new_folder(path, self.info(step).size) as folder:
            info = self._sound(step, ["weights"])
            weights = info.path / "weights.safetensors"
            _read_finite(weights)
            shutil.copyfile(weights, folder / weights.name)
            config = {"step": info.step, "created_at": info.created_at, **info.meta}
            text = json.dumps(config, indent=2) + "\n"
            (folder / "config.json").write_text(text, encoding="utf-8")
            tokenizer = info.path.parent.parent / "tokenizer.json"  # as data.tokenizer keeps it
            if tokenizer.is_file():
                shutil.copyfile(tokenizer, folder / tokenizer.name)
        return path

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:010d}"

    def _sound(self, step: int, parts: Sequence[str] | None) -> CheckpointInfo:
        info = self.info(step)
        if problems := info.problems(parts):
            raise CheckpointError(f"{'; '.join(problems)}: use another checkpoint.")
        return info

    def _sound_steps(self) -> set[int]:
        """Steps of the whole checkpoints from which training did not diverge."""
        infos = (info for info in self.entries() if not info.problems(reads=False))
        return {info.step for info in infos if self._diverged(info.step) is None}

    # For the holder of the folder's lock

    def _make_room(self, step: int, needed: int) -> None:
        """Remove the oldest checkpoints while the quota is short; never the newest sound one.
        Raises DiskFull."""
        if self._disk_quota.most is None:
            return
        spared = max(self._sound_steps(), default=step)
        for old in self.steps():
            if self._disk_quota.room() >= needed:
                return
            if old != spared:
                self._remove(old)
                self._sweep()
        self._disk_quota.require(needed, "A checkpoint")

    def _prune(self, newest: int) -> None:
        """Keep the new one and the newest sound ones before it. Steps beyond it were abandoned when
        the node resumed from an earlier one, and go first, as do those that are not sound."""
        sound = self._sound_steps()
        ranked = sorted(
            self.steps(), key=lambda step: (step in sound and step <= newest, step in sound, step)
        )
        for step in [step for step in ranked if step != newest][: max(0, len(ranked) - self.keep)]:
            # The new checkpoint is safe by now. A removal that fails is repeated at the next save.
            with suppress(OSError):
                self._remove(step)
        with suppress(OSError):
            self._sweep()

    def _remove(self, step: int) -> None:
        """Rename a checkpoint away, so that no crash leaves a part of it; a sweep removes it."""
        path = self._path(step)
        path.rename(self.folder / f"{_REMOVING}{path.name}")

    def _sweep(self) -> None:
        """Clean up after crashes and removals."""
        for path in list(self.folder.iterdir()):
            former = path.name.removeprefix(_REPLACED)
            if path.name.startswith(_REPLACED) and not (self.folder / former).exists():
                path.rename(self.folder / former)
            elif path.name.startswith((WRITING, _REMOVING, _REPLACED)):
                shutil.rmtree(path, ignore_errors=True)


def _read_finite(path: Path) -> "dict[str, Tensor]":
    from lowcomm_node.storage.state_file import not_finite, read_state

    tensors = read_state(path)
    if (name := not_finite(tensors)) is not None:
        raise CheckpointError(f"{path} holds NaN or infinity in {name}: use an older checkpoint.")
    return tensors
