"""Trackio: a folder of this machine, or the Space or server that its own variables name
(``TRACKIO_SPACE_ID``, ``TRACKIO_SERVER_URL``).

It writes in a thread of its own, which a kill would take with it. So each batch is a session of the
same run, which is over only once all is written.
"""

import io
from contextlib import redirect_stdout
from typing import Any

from lowcomm_node.tracking.sink import Batch, Kept, Library, Tracked

DEFAULT = "lowcomm"


class Trackio:
    """See Sink."""

    takes = "points"

    def __init__(self, target: str | None) -> None:
        """``target``: the project."""
        self.target = target or DEFAULT
        self._trackio: Any = Library("trackio", "trackio").module("trackio")
        self._tracked: Tracked | None = None

    def open(self, tracked: Tracked, kept: Kept) -> None:
        """See Sink."""
        self._tracked = tracked

    def write(self, batch: Batch) -> Kept:
        """See Sink. Its own step is the number of the point; none comes twice."""
        assert self._tracked is not None
        with redirect_stdout(io.StringIO()):  # it greets each time
            run = self._trackio.init(
                project=self.target,
                name=f"{self._tracked.node}-{self._tracked.fingerprint}",
                group=f"{self._tracked.run}-{self._tracked.fingerprint}",
                config=dict(self._tracked.settings),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
            try:
                self._log(batch, getattr(run, "_next_step", 0))
            finally:
                self._trackio.finish()
        return {}

    def close(self) -> None:
        """See Sink: nothing is open between two batches."""

    def _log(self, batch: Batch, behind: int) -> None:
        """Points from this step on: those before it were written by a tracker that was killed."""
        for point in batch.points:
            if point.number >= behind:
                self._trackio.log(dict(point.values), step=point.number)
