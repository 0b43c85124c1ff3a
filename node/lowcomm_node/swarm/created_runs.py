"""Runs created in this home: its identity may invite to them, and remove peers."""

from lowcomm_node.errors import ConfigError
from lowcomm_node.storage.files import load_or_create_identity
from lowcomm_node.storage.paths import Paths
from lowcomm_node.swarm.find_run import matching, the_only
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.spec.run import MAX_SPEC_BYTES, SignedRun, read_signed_run


def created_run(paths: Paths, wanted: str | None) -> tuple[Identity, SignedRun]:
    """The home's identity, and its run ``wanted`` (NAME or NAME@FINGERPRINT; None: the only one).

    Raises ConfigError if there is none, or if it is ambiguous.
    """
    runs: list[SignedRun] = []
    if paths.identity.exists():
        identity = load_or_create_identity(paths.identity)
        # A node keeps runs in folders; a bootstrap server, which signs a given run.toml, in files.
        for path in sorted([*paths.runs.glob("*/run.json"), *paths.runs.glob("*.json")]):
            try:
                with path.open("rb") as file:
                    run = read_signed_run(file.read(2 * MAX_SPEC_BYTES + 1), str(path))
            except (LowcommError, OSError):
                continue
            if run.creator == identity.peer_id:
                runs.append(run)
        chosen = the_only(matching(runs, wanted))
        if chosen is not None:
            return identity, chosen
    known = ", ".join(sorted(f"{run.spec.run.name}@{run.fingerprint}" for run in runs))
    raise ConfigError(
        f"{paths.home} has created {'no run' if not runs else f'no run {wanted!r}, only {known}'}: "
        "name the home where `lowcomm-node create` was called with --home."
    )
