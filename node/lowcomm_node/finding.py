"""Enter the DHT and find the run that the owner means."""

import asyncio
from pathlib import Path
from time import monotonic

from lowcomm_node.discovery.interface import Discovery
from lowcomm_node.discovery.keys import RUNS_KEY
from lowcomm_node.errors import ConfigError, NoPeers
from lowcomm_node.files import write_atomic
from lowcomm_node.membership import listening
from lowcomm_node.settings import NodeSettings
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.refusals import Refusals
from lowcomm_protocol.run import SignedRun, read_signed_run

FIND_DEADLINE = 60.0


def open_discovery(
    settings: NodeSettings,
    identity: Identity,
    require_peers: bool = True,
    key_file: Path | None = None,
    refusals: Refusals | None = None,
) -> Discovery:
    """The DHT as these settings have it; not started yet. Raises ConfigError on a malformed address.

    ``key_file``: where the key of ``identity`` lies, if not in the home; ``refusals``: where refused records are counted.
    """
    from lowcomm_node.discovery.hivemind import HivemindDiscovery  # takes seconds to import
    from lowcomm_node.discovery.p2pd import listeners

    if not settings.peers:
        raise ConfigError(
            "No address of the swarm is known: give one with --peers, as `lowcomm-bootstrap serve` prints it."
        )
    host, _ = listening(settings)
    host = host.strip("[]")
    discovery = HivemindDiscovery(
        identity=identity,
        key_file=key_file or settings.paths.identity,
        listen=listeners(host, settings.dht_port),
        initial_peers=settings.peers,
        require_peers=require_peers,
        # Nobody can know from inside whether others get through a router; on loopback there is none.
        wants_places=host not in ("127.0.0.1", "::1"),
    )
    if refusals is not None:
        discovery._provenances.refusals = refusals
    return discovery


async def find_run(discovery: Discovery, settings: NodeSettings) -> SignedRun:
    """The run that ``--run`` names, or the invite is for, or the only one that there is; it is kept in the home.

    Raises NoPeers if none is found within the deadline, ConfigError if several are and none was named.
    """
    invited_to = settings.token.invite.run_id if settings.token is not None else None
    deadline = monotonic() + FIND_DEADLINE
    while monotonic() < deadline:
        found = await _published(discovery)
        chosen = choose(found, settings.run, invited_to)
        if chosen is not None:
            path = settings.paths.signed_run(chosen.fingerprint)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, chosen.to_bytes(), 0o600)
            return chosen
        await asyncio.sleep(1.0)
    invited = f"the run {invited_to[:12]} of the invite" if invited_to else "any run"
    wanted = f"the run {settings.run!r}" if settings.run else invited
    raise NoPeers(
        f"The swarm answers, but {wanted} was not published within {FIND_DEADLINE:.0f} s: "
        "publish one with `lowcomm-node create run.toml --peers ADDR`, or correct --run."
    )


def choose(runs: list[SignedRun], wanted: str | None, invited_to: str | None = None) -> SignedRun | None:
    """The run that is meant; None if it is not among ``runs``. Raises ConfigError if it is not clear which.

    ``wanted``: NAME or NAME@FINGERPRINT; ``invited_to``: the id of the run that an invite is for.
    """
    if wanted is not None:
        name, _, fingerprint = wanted.partition("@")
        runs = [run for run in runs if run.spec.run.name == name and run.run_id.startswith(fingerprint)]
    if invited_to is not None:
        named, runs = runs, [run for run in runs if run.run_id == invited_to]
        if wanted is not None and named and not runs:
            raise ConfigError(
                f"--invite is for another run ({invited_to[:12]}) than --run {wanted}: leave --run away, or use the "
                "invite that you were given for it."
            )
    if len(runs) > 1:
        names = ", ".join(sorted(f"{run.spec.run.name}@{run.fingerprint}" for run in runs)[:8])
        raise ConfigError(f"There are several runs: choose one with --run: {names}.")
    return runs[0] if runs else None


async def _published(discovery: Discovery) -> list[SignedRun]:
    runs: list[SignedRun] = []
    for run_id, data in (await discovery.lookup(RUNS_KEY)).items():
        try:
            run = read_signed_run(data, f"run {run_id[:12]}")
        except LowcommError:
            continue
        if run.run_id == run_id:
            runs.append(run)
    return runs
