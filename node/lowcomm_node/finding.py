"""Enter the DHT and find the run that the owner means."""

import asyncio
from time import monotonic

from lowcomm_node.discovery.interface import Discovery
from lowcomm_node.discovery.keys import RUNS_KEY
from lowcomm_node.errors import ConfigError, NoPeers
from lowcomm_node.files import write_atomic
from lowcomm_node.membership import listening
from lowcomm_node.settings import NodeSettings
from lowcomm_protocol.errors import LowcommError
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.run import SignedRun, read_signed_run

FIND_DEADLINE = 60.0


def open_discovery(settings: NodeSettings, identity: Identity, require_peers: bool = True) -> Discovery:
    """The DHT as these settings have it; not started yet. Raises ConfigError on a malformed address."""
    from lowcomm_node.discovery.hivemind import HivemindDiscovery  # takes seconds to import

    if not settings.peers:
        raise ConfigError(
            "No address of the swarm is known: give one with --peers, as `lowcomm-bootstrap serve` prints it."
        )
    host, _ = listening(settings)
    host = host.strip("[]")
    family = "ip6" if ":" in host else "ip4"
    return HivemindDiscovery(
        identity=identity,
        key_file=settings.paths.identity,
        listen=(f"/{family}/{host}/tcp/{settings.dht_port}",),
        initial_peers=settings.peers,
        require_peers=require_peers,
    )


async def find_run(discovery: Discovery, settings: NodeSettings) -> SignedRun:
    """The run that ``--run`` names, or the only one that there is; it is kept in the home.

    Raises NoPeers if none is found within the deadline, ConfigError if several are and none was named.
    """
    deadline = monotonic() + FIND_DEADLINE
    while monotonic() < deadline:
        found = await _published(discovery)
        chosen = choose(found, settings.run)
        if chosen is not None:
            path = settings.paths.signed_run(chosen.fingerprint)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, chosen.to_bytes(), 0o600)
            return chosen
        await asyncio.sleep(1.0)
    wanted = f"the run {settings.run!r}" if settings.run else "any run"
    raise NoPeers(
        f"The swarm answers, but {wanted} was not published within {FIND_DEADLINE:.0f} s: "
        "publish one with `lowcomm-node create run.toml --peers ADDR`, or correct --run."
    )


def choose(runs: list[SignedRun], wanted: str | None) -> SignedRun | None:
    """The run that is meant; None if it is not among ``runs``. Raises ConfigError if it is not clear which."""
    if wanted is not None:
        name, _, fingerprint = wanted.partition("@")
        runs = [run for run in runs if run.spec.run.name == name and run.run_id.startswith(fingerprint)]
    if len(runs) > 1:
        names = ", ".join(sorted(f"{run.spec.run.name}@{run.fingerprint}" for run in runs)[:8])
        raise ConfigError(f"The swarm knows several runs: choose one with --run: {names}.")
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
