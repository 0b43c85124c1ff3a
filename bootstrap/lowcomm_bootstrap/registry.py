"""The runs that this server keeps published: one signed file a run, in a folder."""

from pathlib import Path

from lowcomm_node.errors import ConfigError
from lowcomm_node.files import write_atomic
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.run import MAX_SPEC_BYTES, SignedRun, read_signed_run


class Registry:
    """Signed runs on disk, at most ``max_runs``; each is verified whenever it is read."""

    def __init__(self, folder: Path, max_runs: int = 64) -> None:
        self._folder, self._max_runs = folder, max_runs
        folder.mkdir(parents=True, exist_ok=True)

    def runs(self) -> list[SignedRun]:
        """All runs whose file is sound, by name."""
        found = (self._read(path) for path in sorted(self._folder.glob("*.json")))
        return sorted((run for run in found if run), key=lambda run: (run.spec.run.name, run.run_id))

    def damaged(self) -> list[Path]:
        """Files that are not a sound run; they are left where they are."""
        return [path for path in sorted(self._folder.glob("*.json")) if self._read(path) is None]

    def add(self, run: SignedRun) -> bool:
        """Keep a run; whether it is new. Raises ConfigError if there is no room, DiskFull."""
        known = {kept.run_id for kept in self.runs()}
        if run.run_id in known:
            return False
        if len(known) >= self._max_runs:
            raise ConfigError(f"{self._folder} holds {len(known)} runs already: remove one, or raise --max-runs.")
        write_atomic(self._folder / f"{run.run_id}.json", run.to_bytes())
        return True

    def _read(self, path: Path) -> SignedRun | None:
        try:
            if path.stat().st_size > 3 * MAX_SPEC_BYTES:
                return None
            run = read_signed_run(path.read_bytes(), str(path))
        except (LowcommError, OSError):
            return None
        return run if path.stem == run.run_id else None
