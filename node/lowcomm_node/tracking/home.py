"""What of a home is followed: its run, its node, its journal."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lowcomm_node.storage.files import read_small
from lowcomm_node.storage.paths import Paths
from lowcomm_node.system.units import clean, short_peer
from lowcomm_node.tracking.sink import Setting, Tracked
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.identity import identity_from_libp2p
from lowcomm_protocol.spec.run import MAX_SPEC_BYTES, SignedRun, read_signed_run

LEFT_OUT = ("run.members", "run.creator", "version", "optional")
"""Settings that are no hyperparameters; the members of a list are other people's."""
LONGEST = 200
"""Characters of a setting that is a text or a list; the rest is cut."""


def tracked_of(home: Path, fingerprint: str, name: str = "") -> Tracked:
    """The node and a run of a home; ``name``: what the owner calls the node."""
    paths = Paths(home)
    signed = _run(paths.signed_run(fingerprint))
    peer_id = _peer_id(paths.identity)
    return Tracked(
        run=signed.spec.run.name if signed else fingerprint,
        run_id=signed.run_id if signed else fingerprint,
        fingerprint=fingerprint,
        peer_id=peer_id or home.name,
        node=clean(name) or short_peer(peer_id) or home.name,
        settings=dict(settings_of(signed.spec.model_dump(mode="json"))) if signed else {},
        step_tokens=signed.spec.tokens_per_step if signed else None,
    )


def settings_of(told: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Setting]]:
    """Every setting by its full name, lists as texts."""
    for key, value in told.items():
        name = f"{section}{key}"
        if name in LEFT_OUT or value is None:
            continue
        if isinstance(value, Mapping):
            yield from settings_of(value, f"{name}.")
        elif isinstance(value, bool | int | float):
            yield name, value
        else:
            yield name, clean(value)[:LONGEST]


def _run(path: Path) -> SignedRun | None:
    data = read_small(path, 2 * MAX_SPEC_BYTES)
    try:
        return read_signed_run(data, str(path)) if data else None
    except LowcommError:
        return None


def _peer_id(path: Path) -> str:
    """Of the home's key, which stays where it is; empty where there is none."""
    data = read_small(path, 4096)
    try:
        return identity_from_libp2p(data).peer_id if data else ""
    except LowcommError:
        return ""
