"""Finds the owner's run: in the swarm, or in the home from an earlier start."""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from time import monotonic, time

from lowcomm_node.dht.hivemind import DhtSettings, Discovery
from lowcomm_node.dht.keys import RUNS_KEY, peers_key
from lowcomm_node.errors import ConfigError, LinkLost, NoPeers
from lowcomm_node.net.addresses import by_peer, place_in
from lowcomm_node.net.p2pd import listeners
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.storage.files import kept_run, load_or_create_identity, write_atomic
from lowcomm_node.storage.paths import Paths
from lowcomm_node.swarm.admission import given_token
from lowcomm_node.swarm.hosts import listening
from lowcomm_node.swarm.probes import Asker
from lowcomm_node.swarm.remembered_peers import read_remembered
from lowcomm_node.system.quota import prefixes_of
from lowcomm_protocol.errors import LowcommError, ProtocolViolation, Refusals, VersionError
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers.probes import Keeping
from lowcomm_protocol.peers.records import Phase, read_record
from lowcomm_protocol.spec.run import SignedRun, read_signed_run

FIND_DEADLINE, OTHERS_DEADLINE = 60.0, 15.0
"""Seconds, and the same if other runs are published: the name is then probably misspelt."""
NAMED = 8
"""Runs listed in a message."""
KEPT_AFTER = 5.0
"""Seconds before a run kept in the home is used although no answering peer publishes it; we publish
it then."""
MAX_COMPARED, AT_ONCE = 64, 8
"""Published runs of which one is chosen by its peers, and those whose peers are called at once."""
MAX_KNOCKED = 8
"""Peers of one run that are called to see whether they answer."""
COMPARE_DEADLINE = 30.0


def open_discovery(
    settings: NodeSettings,
    identity: Identity,
    require_peers: bool = True,
    key_file: Path | None = None,
    refusals: Refusals | None = None,
    remembered: Sequence[str] = (),
) -> Discovery:
    """The DHT with these settings, not started yet. Raises ConfigError on a malformed address.

    ``key_file``: the key of ``identity``, if not in the home; ``refusals``: counts refused records;
    ``remembered``: addresses that have answered before, the best first.
    """
    if not settings.peers and not remembered:
        raise ConfigError(
            "No address of the swarm is known: give one with --peers, as `lowcomm-bootstrap serve` "
            "prints it."
        )
    host, _ = listening(settings, remembered)
    host = host.strip("[]")
    dht = DhtSettings(
        listen=listeners(host, settings.dht_port),
        initial_peers=settings.peers,
        require_peers=require_peers,
        # A node can't tell from inside whether others get through its router. Loopback has none.
        wants_places=host not in ("127.0.0.1", "::1"),
        learned=remembered[::-1],  # the last ones are kept if there are too many
        # p2pd does not count what it relays for others, so it relays nothing if traffic is limited.
        relays=settings.max_up is None and settings.max_down is None,
    )
    return Discovery(identity, key_file or settings.paths.identity, dht, refusals)


def remembered_run(settings: NodeSettings) -> SignedRun | None:
    """The run that this home knows and that is meant, if there is one.

    ``--run`` or the invite names it. Without them, it is the run found at the addresses in
    ``--peers``; without any address, the only one. Raises ConfigError if it is ambiguous, and there
    is no address whose peers could decide.
    """
    invited_to = _invited_to(settings)
    runs = matching(kept_runs(settings.paths), settings.run, invited_to)
    if settings.peers and (len(runs) > 1 or (settings.run is None and invited_to is None)):
        # Otherwise a mistyped address of another swarm would train an old run.
        given, now = by_peer(settings.peers), time()
        runs = [run for run in runs if not given.keys().isdisjoint(_entered_at(settings, run, now))]
        return runs[0] if len(runs) == 1 else None
    return the_only(runs)


def _invited_to(settings: NodeSettings) -> str | None:
    """The id of the run that the owner's invite is for."""
    return token.invite.run_id if (token := given_token(settings)) is not None else None


async def find_run(
    discovery: Discovery,
    settings: NodeSettings,
    kept: SignedRun | None = None,
    show: Callable[[str], None] = lambda reason: None,
    tell_choice: Callable[[str], None] = lambda text: None,
) -> SignedRun:
    """The run named by ``--run`` or the invite, or the only one; kept in the home.

    ``kept``, the home's run, is taken if it is among several, or if none is published. Among others
    the operator of the entry point decides, or the peers that answer: anybody may publish one more
    run, also under the same name. ``show`` receives what is missing; ``tell_choice``, which run was
    taken and why. Raises NoPeers if none is found within the deadline, which is short if others are
    published; ConfigError if nothing tells several apart.
    """
    invited_to = _invited_to(settings)
    began, deadline = monotonic(), FIND_DEADLINE
    missing, fitting = missing_run([], settings.run, invited_to), list[SignedRun]()
    while monotonic() < began + deadline:
        found, unread = await _published(discovery)
        is_kept = kept is not None and (
            any(run.run_id == kept.run_id for run in found)
            or (not found and monotonic() >= began + KEPT_AFTER)
        )
        fitting = matching(found, settings.run, invited_to)
        chosen = kept if is_kept else fitting[0] if len(fitting) == 1 else None
        why = "which this home joined before"
        if chosen is None and fitting:
            chosen, why = await _preferred(discovery, settings, fitting)
        if chosen is not None:
            if len(fitting) > 1:
                tell_choice(
                    f"{_names(fitting)} are published: taking {name_of(chosen)}, {why}; for "
                    "another, --run NAME@FINGERPRINT"
                )
            path = settings.paths.signed_run(chosen.fingerprint)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, chosen.to_bytes(), 0o600)
            return chosen
        missing = missing_run(found, settings.run, invited_to, unread)
        if fitting:
            missing = f"nothing tells {_names(fitting)} apart yet"
        deadline = OTHERS_DEADLINE if found else FIND_DEADLINE
        show(missing)
        await asyncio.sleep(1.0)
    the_only(fitting)
    remedy = "use the invite at its own swarm" if invited_to else "try again later"
    remedy = "correct --run" if settings.run else remedy
    raise NoPeers(
        f"The swarm answers, but {missing} (within {deadline:.0f} s): {remedy}, or publish the run "
        "with `lowcomm-node create run.toml --peers ADDR`."
    )


def missing_run(
    found: list[SignedRun],
    wanted: str | None,
    invited_to: str | None = None,
    unread: Sequence[str] = (),
) -> str:
    """Why no published run is the one that is meant, with suggestions. ``unread``: why this release
    can't read other published runs."""
    if unread:
        reason = unread[0].rstrip(".")
        others = missing_run(found, wanted, invited_to)
        return f"{others}; {len(unread)} cannot be read here: {reason}"
    if not found:
        return f"the run {wanted!r} is not published yet" if wanted else "no run is published yet"
    names, listed = sorted(map(name_of, found)), _names(found)
    if wanted is None:
        return (
            f"the run {(invited_to or '')[:12]} of the invite is not published; there are: {listed}"
        )
    name = wanted.partition("@")[0]
    near = get_close_matches(name, [run.spec.run.name for run in found], 1)
    meant = [run for run in names if near and run.startswith(f"{near[0]}@")][:1]
    hint = f"; did you mean {meant[0]}?" if meant else ""
    return f"no run {wanted!r} is published; there are: {listed}{hint}"


def matching(
    runs: list[SignedRun], wanted: str | None, invited_to: str | None = None
) -> list[SignedRun]:
    """Those of the runs that may be meant. Raises ConfigError if run and invite disagree.

    ``wanted``: NAME or NAME@FINGERPRINT; ``invited_to``: the id of the run that an invite is for.
    """
    if wanted is not None:
        name, _, fingerprint = wanted.partition("@")
        named = [run for run in runs if run.spec.run.name == name]
        runs = [run for run in named if run.run_id.startswith(fingerprint)]
    if invited_to is not None:
        fitting, runs = runs, [run for run in runs if run.run_id == invited_to]
        if wanted is not None and fitting and not runs:
            raise ConfigError(
                f"--invite is for another run ({invited_to[:12]}) than --run {wanted}: leave --run "
                "away, or use the invite that you were given for it."
            )
    return runs


def the_only(runs: list[SignedRun]) -> SignedRun | None:
    """The only one of these runs; None if there is none. Raises ConfigError if there are more."""
    if len(runs) > 1:
        raise ConfigError(f"There are several runs: choose one with --run: {_names(runs)}.")
    return runs[0] if runs else None


def name_of(run: SignedRun) -> str:
    """NAME@FINGERPRINT, as ``--run`` takes it."""
    return f"{run.spec.run.name}@{run.fingerprint}"


def _names(runs: list[SignedRun]) -> str:
    names = sorted(map(name_of, runs))
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


async def _preferred(
    discovery: Discovery, settings: NodeSettings, runs: list[SignedRun]
) -> tuple[SignedRun | None, str]:
    """The run that the operator of an entry point serves, or else the run whose peers answer, from
    most networks, and why; None if nothing tells the runs apart."""
    servers = by_peer(settings.peers)
    asking = (ask_server(discovery, server, runs[0].run_id) for server in servers)
    served = {run_id for answer in await asyncio.gather(*asking) for run_id in answer.own}
    own = [run for run in runs if run.run_id in served or run.creator in servers]
    if len(own) == 1:
        return own[0], "which the operator of the bootstrap server serves"
    # Of too many a random part is compared, so that a flood can't choose which.
    compared = random.sample(own or runs, min(MAX_COMPARED, len(own or runs)))
    counts, at_once = {run.run_id: (0, 0) for run in compared}, asyncio.Semaphore(AT_ONCE)

    async def count(run_id: str) -> None:
        async with at_once:
            counts[run_id] = await _count_answering(discovery, run_id)

    with suppress(TimeoutError):
        async with asyncio.timeout(COMPARE_DEADLINE):
            await asyncio.gather(*map(count, counts))
    best = max(compared, key=lambda run: counts[run.run_id])
    networks, peers = counts[best.run_id]
    if not peers:
        return None, ""
    answer = "1 peer of it answers" if peers == 1 else f"{peers} peers of it answer"
    return best, f"as {answer}, from {networks} network{'s' if networks != 1 else ''}"


async def _count_answering(discovery: Discovery, run_id: str) -> tuple[int, int]:
    """The number of networks, and of peers, of a run that answer. A record alone proves nothing,
    and one machine may have any number of identities."""
    entries: dict[str, Sequence[str]] = {}
    for peer, data in (await discovery.lookup(peers_key(run_id))).items():
        with suppress(LowcommError):
            info = read_record(data, time())
            if info.phase not in (Phase.LEFT, Phase.FINISHED):
                entries[peer] = info.entry_points
    there = await discovery.connected_peers() & set(entries)
    others = sorted(set(entries) - there)
    some = random.sample(others, min(MAX_KNOCKED, len(others)))
    knocks = await discovery.knock({peer: entries[peer] for peer in some})
    there |= {peer for peer, knock in knocks.items() if knock.reason is None}
    networks = {
        prefixes_of(place_in(address))[-1]
        for peer in sorted(there)[:MAX_COMPARED]
        for address in await discovery.connected_at(peer)
    }
    return len(networks), len(there)


async def ask_server(
    discovery: Discovery, server: str, run_id: str, only_tell: bool = True
) -> Keeping:
    """What a peer says of a run that it may keep. Only bootstrap servers keep any."""
    try:
        with await Asker.open(discovery, server) as asker:
            return await asker.keeps(run_id, only_tell)
    except (LinkLost, ProtocolViolation) as error:
        return Keeping(reason=str(error))


async def _published(discovery: Discovery) -> tuple[list[SignedRun], list[str]]:
    """The published runs, and why this release can't read others."""
    runs, unread = list[SignedRun](), list[str]()
    for run_id, data in (await discovery.lookup(RUNS_KEY)).items():
        try:
            runs.append(read_signed_run(data, f"run {run_id[:12]}"))
        except VersionError as error:
            unread.append(str(error))
        except LowcommError:
            continue
    return runs, unread


def _entered_at(settings: NodeSettings, run: SignedRun, now: float) -> set[str]:
    """The peers at which this home has entered the swarm of a run."""
    file = settings.paths.remembered_peers(run.fingerprint)
    return {peer.peer_id for peer in read_remembered(file, now)}


def kept_runs(paths: Paths) -> list[SignedRun]:
    """The signed runs that a node keeps in its home. Damaged ones count as missing."""
    found = {path: kept_run(path) for path in sorted(paths.runs.glob("*/run.json"))}
    return [run for path, run in found.items() if run and paths.signed_run(run.fingerprint) == path]


def created_run(paths: Paths, wanted: str | None) -> tuple[Identity, SignedRun]:
    """The home's identity, and its run ``wanted`` (NAME or NAME@FINGERPRINT; None: the only one).

    That identity may invite to the run, and remove peers. Raises ConfigError if there is none, or
    if it is ambiguous.
    """
    runs: list[SignedRun] = []
    if paths.identity.exists():
        identity = load_or_create_identity(paths.identity)
        # A node keeps runs in folders; a bootstrap server, which signs a given run.toml, in files.
        files = sorted([*paths.runs.glob("*/run.json"), *paths.runs.glob("*.json")])
        runs = [run for run in map(kept_run, files) if run and run.creator == identity.peer_id]
        chosen = the_only(matching(runs, wanted))
        if chosen is not None:
            return identity, chosen
    known = ", ".join(sorted(map(name_of, runs)))
    raise ConfigError(
        f"{paths.home} has created {'no run' if not runs else f'no run {wanted!r}, only {known}'}: "
        "name the home where `lowcomm-node create` was called with --home."
    )
