"""The sealed manifest of a checkpoint, and whether its files match it."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowcomm_node.errors import CheckpointError
from lowcomm_node.storage.durable import (
    read_sealed_json,
    sha256_file,
    sync_file,
    sync_folder,
    write_sealed_json,
)

if TYPE_CHECKING:  # reading a manifest needs no torch, which takes seconds to load
    from torch import Tensor

FORMAT = 1
MANIFEST = "manifest.json"
PART = re.compile(r"[a-z][a-z0-9_-]{0,63}")
"""A part's name, which becomes a file name: it can't leave the folder."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_END_OF_TIME = 253_402_300_800.0
"""The year 10,000, in seconds since the epoch."""


@dataclass(frozen=True)
class PartFile:
    """One file of a checkpoint."""

    part: str
    size: int
    """Bytes."""
    sha256: str

    @property
    def name(self) -> str:
        """Its name in the checkpoint's folder."""
        return f"{self.part}.safetensors"


@dataclass(frozen=True)
class CheckpointInfo:
    """The contents of a checkpoint's manifest."""

    step: int
    path: Path
    created_at: float
    """Seconds since the epoch."""
    parts: tuple[PartFile, ...]
    meta: dict[str, Any]

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(file.size for file in self.parts)


def write_checkpoint(
    folder: Path,
    step: int,
    tensors_by_part: "Mapping[str, Mapping[str, Tensor]]",
    meta: dict[str, Any],
    created_at: float,
    taken: Callable[[], None] = lambda: None,
) -> None:
    """Write all files of a checkpoint into ``folder`` and sync them.

    ``taken`` is called once the tensors are not read any more. Raises CheckpointError if meta is
    not JSON.
    """
    for part, tensors in tensors_by_part.items():
        _write_part(folder, part, tensors)
    taken()
    files = [asdict(_sync_part(folder, part)) for part in tensors_by_part]
    content = {
        "format": FORMAT,
        "step": step,
        "created_at": created_at,
        "files": files,
        "meta": meta,
    }
    try:
        write_sealed_json(folder / MANIFEST, content)
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"meta of step {step} is not plain JSON ({error}): keep such values out of it."
        ) from error
    sync_folder(folder)


def read_manifest(path: Path, step: int) -> CheckpointInfo:
    """Read the manifest of the checkpoint in ``path``, which may be untrusted.

    Raises CheckpointError if it is missing, damaged or malformed.
    """
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
        files = tuple(PartFile(**file) for file in content["files"])
        info = CheckpointInfo(content["step"], path, content["created_at"], files, content["meta"])
    except (KeyError, TypeError):
        info = None
    if info is None or not _is_well_formed(info):
        raise CheckpointError(f"{path} has a malformed manifest: use another checkpoint.")
    if info.step != step:
        raise CheckpointError(
            f"{path} says that it is of step {info.step!r:.20}: give the folder its old name."
        )
    return info


def problems_of(info: CheckpointInfo, parts: Sequence[str] | None = None) -> list[str]:
    """Read every byte of some parts (None: all); one line for each that is not as it was
    written."""
    files = {file.part: file for file in info.parts}
    found = (_problem(info, files.get(part), part) for part in (files if parts is None else parts))
    return [problem for problem in found if problem]


def is_complete(info: CheckpointInfo) -> bool:
    """Whether all files exist with their sizes. A cheap check; ``problems_of`` reads them."""
    paths = ((info.path / file.name, file.size) for file in info.parts)
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def _is_well_formed(info: CheckpointInfo) -> bool:
    """Whether all values have valid types and ranges: a manifest's digest says nothing about its
    author."""
    parts = [file.part for file in info.parts]
    return (
        type(info.step) is int
        and type(info.created_at) in (int, float)
        and 0 <= info.created_at < _END_OF_TIME
        and isinstance(info.meta, dict)
        and all(isinstance(part, str) and PART.fullmatch(part) for part in parts)
        and len(set(parts)) == len(parts)
        and all(type(file.size) is int and 0 <= file.size < 1 << 63 for file in info.parts)
        and all(
            isinstance(file.sha256, str) and _SHA256.fullmatch(file.sha256) for file in info.parts
        )
    )


def _write_part(folder: Path, part: str, tensors: "Mapping[str, Tensor]") -> None:
    from lowcomm_node.storage.state_file import write_state

    write_state(folder / PartFile(part, 0, "").name, tensors)


def _sync_part(folder: Path, part: str) -> PartFile:
    path = folder / PartFile(part, 0, "").name
    sync_file(path)
    # Hash the file in chunks: hashing the tensors would need their bytes in memory a second time.
    return PartFile(part, path.stat().st_size, sha256_file(path))


def _problem(info: CheckpointInfo, file: PartFile | None, part: str) -> str | None:
    if file is None:
        return (
            f"{info.path} has no part {part!r}, only "
            f"{', '.join(other.part for other in info.parts)}"
        )
    path = info.path / file.name
    try:
        size = path.stat().st_size
        if size != file.size:
            return f"{path} has {size} bytes instead of {file.size}"
        return (
            None
            if sha256_file(path) == file.sha256
            else f"{path} does not match its SHA-256 in {MANIFEST}"
        )
    except OSError as error:
        return f"{path} can't be read ({error.strerror})"
