"""Event files of TensorBoard.

A node has one file, which grows. A tracker that was killed in the midst of a batch has written more
than it noted down: the next one cuts that off, and writes the same again.
"""

import os
from pathlib import Path
from typing import Any, BinaryIO

from lowcomm_node.errors import ConfigError
from lowcomm_node.storage.files import disk_full_error
from lowcomm_node.storage.paths import absolute
from lowcomm_node.tracking.names import LOSSES
from lowcomm_node.tracking.sink import Batch, Kept, Library, Point, Tracked

DEFAULT = "tensorboard"
BY_TOKENS = "by_tokens"
"""TensorBoard draws against steps and time; these have tokens in place of steps."""


class TensorBoard:
    """See Sink. Steps are swarm steps."""

    takes = "points"

    def __init__(self, target: str | None) -> None:
        """``target``: the folder that `tensorboard --logdir` reads."""
        self._root = absolute(target or DEFAULT)
        self.target = str(self._root)
        library = Library("tensorboard", "tensorboard")
        records = "tensorboard.summary.writer.record_writer"
        self._record_writer: Any = library.module(records).RecordWriter
        self._event: Any = library.module("tensorboard.compat.proto.event_pb2").Event
        self._summary: Any = library.module("tensorboard.compat.proto.summary_pb2").Summary
        self._hparams: Any = library.module("tensorboard.plugins.hparams.summary_v2")
        self._tracked: Tracked | None = None
        self._path = Path()
        self._file: BinaryIO | None = None

    def open(self, tracked: Tracked, kept: Kept) -> None:
        """See Sink. The file itself begins with the first point."""
        self._tracked = tracked
        self._path = self._root / f"{tracked.run}-{tracked.fingerprint}" / _folder(tracked.node)
        if not kept:
            return
        path = self._path / str(kept["file"])
        if not path.exists() or path.stat().st_size < int(kept["bytes"]):
            raise ConfigError(
                f"{path} is missing or shorter than it was, so there is nothing to go on with: put "
                "it back, or name a new folder with --to."
            )
        os.truncate(path, int(kept["bytes"]))
        self._begin(path)

    def write(self, batch: Batch) -> Kept:
        """See Sink. Raises DiskFull."""
        with disk_full_error(self._root, 0):
            if self._file is None:
                self._create(batch.points[0])
            assert self._file is not None
            for point in batch.points:
                self._add(point)
            self._file.flush()
            os.fsync(self._file.fileno())
            return {"file": Path(self._file.name).name, "bytes": self._file.tell()}

    def close(self) -> None:
        """See Sink."""
        if self._file is not None:
            self._file.close()

    def _create(self, first: Point) -> None:
        assert self._tracked is not None
        self._path.mkdir(parents=True, exist_ok=True)
        path = self._path / f"events.out.tfevents.{int(first.time)}.{self._tracked.fingerprint}"
        path.unlink(missing_ok=True)  # of a tracker that was killed before it noted anything down
        self._begin(path)
        self._record(self._event(wall_time=first.time, file_version="brain.Event:2"))
        if self._tracked.settings:
            summary = self._hparams.hparams_pb(
                dict(self._tracked.settings), start_time_secs=first.time
            )
            self._record(self._event(wall_time=first.time, summary=summary))

    def _begin(self, path: Path) -> None:
        self._file = path.open("ab")
        self._writer = self._record_writer(self._file)

    def _add(self, point: Point) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=one) for name, one in point.values.items()
        ]
        summary = self._summary(value=values)
        self._record(self._event(wall_time=point.time, step=point.step, summary=summary))
        losses = [
            self._summary.Value(tag=f"{BY_TOKENS}/{name}", simple_value=point.values[name])
            for name in LOSSES
            if name in point.values
        ]
        if losses and point.tokens is not None:
            summary = self._summary(value=losses)
            self._record(self._event(wall_time=point.time, step=point.tokens, summary=summary))

    def _record(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())


def _folder(name: str) -> str:
    """A name of a node as that of a folder: an owner may choose any text."""
    kept = "".join(one if one.isalnum() or one in "-_" else "_" for one in name)
    return kept[:64] or "node"
