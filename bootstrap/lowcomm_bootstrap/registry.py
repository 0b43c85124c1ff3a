"""The runs that this server keeps published: one signed file a run, in a folder."""

from pathlib import Path

from lowcomm_node.errors import ConfigError
from lowcomm_node.files import write_atomic
from lowcomm_protocol.errors import LowcommError, VersionError
from lowcomm_protocol.run import MAX_SPEC_BYTES, SignedRun, read_signed_run

MAX_FILE_BYTES = 2 * MAX_SPEC_BYTES
MAX_BYTES = 2 * 1024**2
"""Of all runs together; the DHT takes no more under one key."""


class Registry:
    """Signed runs on disk, at most ``max_runs`` and MAX_BYTES; each is verified when it is read, once."""

    def __init__(self, folder: Path, max_runs: int = 64) -> None:
        """Reads the folder. A file that is no sound run is set aside, under its name and ``.damaged``.

        One of another version is left for the release that reads it: an upgrade may be taken back.
        """
        self._folder, self._max_runs = folder, max_runs
        self._runs: dict[str, SignedRun] = {}
        self._bytes = 0
        self.damaged: list[Path] = []
        """Files that were set aside just now."""
        self.other_versions: list[Path] = []
        """Files that this release does not read."""
        for path in sorted(folder.glob("*.json")):
            self._take(path)

    def runs(self) -> list[SignedRun]:
        """All runs, by name."""
        return sorted(self._runs.values(), key=lambda run: (run.spec.run.name, run.run_id))

    def add(self, run: SignedRun) -> bool:
        """Keep a run; whether it is new. Raises ConfigError if there is no room, DiskFull."""
        if run.run_id in self._runs:
            return False
        data = run.to_bytes()
        if len(self._runs) >= self._max_runs or self._bytes + len(data) > MAX_BYTES:
            raise ConfigError(
                f"{self._folder} holds {len(self._runs)} runs, {self._bytes} bytes: remove one, or raise --max-runs "
                f"(all runs together may have {MAX_BYTES} bytes)."
            )
        try:
            write_atomic(self._folder / f"{run.run_id}.json", data)
        except OSError as error:
            raise ConfigError(
                f"{self._folder}: {error.strerror}: make it writable, or choose another --home."
            ) from None
        self._runs[run.run_id] = run
        self._bytes += len(data)
        return True

    def _take(self, path: Path) -> None:
        try:
            run = _read(path)
        except VersionError:
            self.other_versions.append(path)
            return
        except LowcommError:
            aside = path.with_name(f"{path.name}.damaged")
            try:
                path.replace(aside)
            except OSError:
                aside = path  # a folder that we can only read: it is left where it is
            self.damaged.append(aside)
            return
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}: make it readable, or choose another --home.") from None
        if len(self._runs) < self._max_runs and self._bytes + path.stat().st_size <= MAX_BYTES:
            self._runs[run.run_id] = run
            self._bytes += path.stat().st_size


def _read(path: Path) -> SignedRun:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    run = read_signed_run(data, str(path))
    if path.stem != run.run_id:
        raise ConfigError(f"{path} holds the run {run.run_id}: give it that name.")
    return run
