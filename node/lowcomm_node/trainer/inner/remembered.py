"""The micro-batches that were found by trying, one a device, in a file beside the checkpoints of a
run: the next start need not try again."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from lowcomm_node.errors import DiskFull
from lowcomm_node.storage.files import read_small, write_atomic
from lowcomm_node.trainer.inner.micro_batch import Cut

MOST_DEVICES = 32
MOST_BYTES = 64_000


class Remembered:
    """What one file knows. A file that is damaged knows nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def cut(self, device: str, batch: int) -> Cut | None:
        """What was found for a device."""
        known = self._read().get(device)
        if not isinstance(known, dict):
            return None
        windows, recompute = known.get("micro_batch"), known.get("activation_checkpointing")
        if type(windows) is not int or not 1 <= windows <= batch or type(recompute) is not bool:
            return None
        return Cut(windows, recompute)

    def keep(self, device: str, cut: Cut) -> None:
        """Note what was found. A disk that is full costs another search, no more."""
        known = self._read()
        known.pop(device, None)
        kept = dict(list(known.items())[1 - MOST_DEVICES :])
        kept[device] = {"micro_batch": cut.windows, "activation_checkpointing": cut.recompute}
        with suppress(OSError, DiskFull):
            write_atomic(self._path, json.dumps(kept, indent=1).encode())

    def _read(self) -> dict[str, Any]:
        try:
            known = json.loads(read_small(self._path, MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        return known if isinstance(known, dict) else {}
