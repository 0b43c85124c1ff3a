"""Homes with a journal, for what reads one: as a node leaves them, without a node."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers.statuses import make_exchange
from lowcomm_node.status.events import Notice
from lowcomm_node.status.figures import Sample
from lowcomm_node.status.journal import JournalFile
from lowcomm_node.storage.paths import Paths
from lowcomm_node.sync.history import ExchangeEnded
from lowcomm_node.system.logs import Event
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.spec.run import SignedRun, parse_toml, sign_run

NOW = 1_800_000_000.0
OWNER = Identity(b"1" * 32)
RUN = sign_run(
    parse_toml(
        f'[run]\nname = "tea"\nadmission = "list"\nmembers = ["{Identity(b"2" * 32).peer_id}"]\n'
    ),
    OWNER,
)


def sample(place: int, **told: Any) -> Sample:
    """The ``place``-th sample of a node that trains."""
    made = Sample(
        time=NOW + 10 * place,
        phase="training",
        waiting=None,
        swarm_step=10 * place,
        steps=10 * place,
        tokens=5120 * place,
        loss=5.0 / (1 + place),
        val_loss=None,
        tokens_per_second=500.0,
        peers=3,
        completed=place,
        failed=0,
        bytes_sent=1000 * place,
        bytes_received=900 * place,
        memory=10**9,
        refused=0,
        no_partner=0,
        computing=9.0 * place,
        waited=1.0 * place,
        learning_rate=0.01,
    )
    return replace(made, **told)


def exchanged(second: float, **told: Any) -> tuple[float, ExchangeEnded]:
    """An exchange that ended at this second, of which this is told."""
    return NOW + second, make_exchange(time=NOW + second, **told)


def write_down(
    home: Path,
    notices: Sequence[tuple[float, Event]],
    samples: Sequence[Sample] = (),
    run: SignedRun = RUN,
) -> Path:
    """Add to the journal of a home, which has a key and the run's specification; its path."""
    paths = Paths(home)
    path = paths.journal(run.fingerprint)
    file = JournalFile(path)
    file.add([Notice(time, event) for time, event in notices], samples)
    file.close()
    paths.signed_run(run.fingerprint).write_bytes(run.to_bytes())
    if not paths.identity.exists():
        paths.identity.write_bytes(OWNER.to_libp2p())
    return path
