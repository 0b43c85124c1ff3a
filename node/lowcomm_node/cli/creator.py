"""What the creator of a run checks, tells and publishes: the run, amendments, who was removed.

Commands import this when they run: it loads numpy and the DHT.
"""

import asyncio
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from time import monotonic, time
from typing import Any, TypeVar

from pydantic import ValidationError

from lowcomm_node.data.tokenizer import (
    FileTokenizer,
    check_of,
    check_tokenizer,
    open_tokenizer,
)
from lowcomm_node.dht.hivemind import Discovery
from lowcomm_node.dht.keys import RUNS_KEY, amendments_key, removals_key
from lowcomm_node.errors import ConfigError, LinkLost, NoPeers, NotRunning, Unhealthy
from lowcomm_node.net.addresses import by_peer
from lowcomm_node.owner.settings import NodeSettings
from lowcomm_node.storage.files import ephemeral_identity, read_small, write_atomic
from lowcomm_node.swarm.admission import AMENDMENTS_LIFE, REMOVALS_LIFE, newest_removals
from lowcomm_node.swarm.find_run import ask_server, open_discovery
from lowcomm_node.swarm.probes import CONNECT_DEADLINE
from lowcomm_node.swarm.remembered_peers import RememberedPeer, read_remembered, remember
from lowcomm_node.system.units import clean, write_size
from lowcomm_node.web.client import ControlClient
from lowcomm_protocol.identity import Identity
from lowcomm_protocol.peers.invites import Removals, write_removals
from lowcomm_protocol.peers.probes import Keeping
from lowcomm_protocol.spec.amendments import MAX_CHAIN_BYTES, Chain, newest, write_amendment
from lowcomm_protocol.spec.document import expected_in_words
from lowcomm_protocol.spec.models import TransformersSettings
from lowcomm_protocol.spec.names import MAX_GROUP
from lowcomm_protocol.spec.run import RunSpec, SignedRun
from lowcomm_protocol.spec.sections import (
    PIECE_BYTES,
    ExportSettings,
    ModelSettings,
    StartSettings,
    digest_of_pieces,
)

SPARE_VOCABULARY = 10
"""One in this number of tokens of a model may be spare, as vocabularies are rounded up."""
PUBLISH_DEADLINE = 30.0
ASK_EVERY = 1.0
ASKED = 3
"""Most questions to a server whether it keeps a run: it may just be receiving it."""
RUN_LIFE = 1800.0
MAX_CARD = 65_536
"""Characters of a README."""
FINE_TUNING: Mapping[str, object] = {
    "optimizer": "adamw",
    "learning_rate": 5e-5,
    "weight_decay": 0.01,
}
"""``[train]`` of a run that begins with open weights: rates for random ones would spoil them."""
ADAPTING: Mapping[str, object] = {**FINE_TUNING, "learning_rate": 1e-3, "weight_decay": 0.0}
"""The same where an adapter is trained beside them."""
ADAPTER_SYNC: Mapping[str, object] = {"interval": 2, "fragments": 2}
"""``[sync]`` of the same with ``lowcomm``: adapters are small (benchmarks/finetune.py)."""
Made = TypeVar("Made", Removals, Chain)


@dataclass(frozen=True)
class TokenizerFile:
    """Settings of a run for the tokenizer.json that all its peers use."""

    vocab: int
    """Exclusive upper bound of the tokens."""
    data: Mapping[str, Any]
    """Its settings of ``[data]``."""
    export: ExportSettings
    warnings: tuple[str, ...]
    """Properties of the tokenizer that the run can't keep."""


@dataclass(frozen=True)
class OpenWeights:
    """Settings of a run that begins with open weights."""

    model: ModelSettings
    longest: int
    """Largest ``context`` that the model reads."""
    start: StartSettings
    warnings: tuple[str, ...]
    """Properties of the weights that the run can't keep."""


# settings


def apply_plan(
    spec: RunSpec, options: Mapping[str, Any], method: str | None, optimizer: str | None
) -> tuple[dict[str, dict[str, Any]], str]:
    """Plan a run for the line of ``options``: sections of run.toml, and the reason.

    Takes the best method, or the best interval of ``method``. Raises ConfigError.
    """
    from lowcomm_node.planner.line import read_line
    from lowcomm_node.planner.plan import OPTIMIZER, plan  # loads torch

    line = read_line("--plan", options)
    train = spec.train.model_copy(update={"optimizer": optimizer or OPTIMIZER})
    planned = plan(spec.model_copy(update={"train": train}), line, from_file=True)
    best = next((choice for choice in planned.choices if method in (None, choice.method)), None)
    if best is None:
        raise ConfigError(
            f"--method {method} can't be planned for {line.peers} peers: it does not exchange, "
            "is for fewer, or has the settings of a paper; leave --method away to get the best."
        )
    reason = planned.reason
    if best is not planned.choices[0]:
        reason = (
            f"{best.method}: every {best.interval:.0f} steps is the shortest interval that this "
            "line carries"
        )
    sections = {
        "sync": {"method": best.method, **best.settings},
        "plan": line.section(),
    }
    if optimizer is None:
        sections["train"] = {"optimizer": OPTIMIZER}
    return sections, reason


def name_tokenizer(spec: RunSpec, path: str | None) -> RunSpec:
    """Put its creator's tokenizer into a specification: SHA-256, and a check of its tokens.

    Raises ConfigError.
    """
    data = spec.data
    if data.tokenizer != "local" or (path is None and data.tokenizer_size):
        return spec
    if path is None:
        raise ConfigError(
            'data.tokenizer = "local", but nobody knows which file, or how large it is: name '
            "yours with --tokenizer PATH, so that the run carries its SHA-256 and size, and "
            "refuses others."
        )
    from lowcomm_node.models.documents import check_documents  # loads torch

    tokenizer = open_tokenizer_file(path)
    check_tokenizer(tokenizer, data.tokenizer_sha256, spec.model.vocab, data.tokenizer_check)
    check_documents(spec, tokenizer)
    named = dict(tokenizer_file(path).data)
    if data.tokenizer_sha256 or {"begin_tokens", "end_token"} & data.model_fields_set:
        del named["begin_tokens"], named["end_token"]
    return spec.model_copy(update={"data": data.model_copy(update=named)})


def name_layout(spec: RunSpec) -> RunSpec:
    """Put the layout of a model of another library, and that library's release, into a
    specification. Raises ConfigError."""
    if not isinstance(spec.model, TransformersSettings):
        return spec
    from lowcomm_node.models.transformers import checked_model, layout_of, library

    layout = layout_of(checked_model(spec.model))
    named = {"layout": layout, "release": spec.model.release or library().__version__}
    return spec.model_copy(update={"model": spec.model.model_copy(update=named)})


def check_adapter(spec: RunSpec) -> None:
    """Raise ConfigError if an adapter names targets that its model does not have."""
    if spec.adapter is not None:
        from lowcomm_node.models.adapters import shell  # loads torch

        shell(spec.model, spec.adapter)


def open_tokenizer_file(path: str) -> FileTokenizer:
    """Open the tokenizer of a file that a run can name by its SHA-256. Raises ConfigError."""
    tokenizer = open_tokenizer(path)
    if not isinstance(tokenizer, FileTokenizer):
        raise ConfigError(
            "--tokenizer bytes needs no file: leave it away, runs use bytes unless they say "
            "otherwise."
        )
    return tokenizer


def tokenizer_file(
    path: str, weights: OpenWeights | None = None, folder: Path | None = None
) -> TokenizerFile:
    """Describe a tokenizer's file for a run, and the folder of weights that it belongs to.

    Raises ConfigError.
    """
    from lowcomm_node.models.conventions import conventions_of  # loads torch

    tokenizer = open_tokenizer_file(path)
    content = tokenizer.content
    pieces = (content[at : at + PIECE_BYTES] for at in range(0, len(content), PIECE_BYTES))
    vocab, positions = tokenizer.vocab, 0
    if weights:
        vocab, positions = weights.model.vocab, weights.longest
    read = conventions_of(folder or Path(tokenizer.file).parent, tokenizer, vocab, positions)
    data = {
        "tokenizer": "local",
        "tokenizer_sha256": tokenizer.sha256,
        "tokenizer_size": len(content),
        "tokenizer_pieces": digest_of_pieces([sha256(piece).digest() for piece in pieces]),
        "tokenizer_check": check_of(tokenizer),
        "begin_tokens": read.begin_tokens,
        "end_token": read.end_token,
    }
    return TokenizerFile(tokenizer.vocab, data, read.export, read.warnings)


def open_weights(folder: Path) -> OpenWeights:
    """Describe the weights in a folder of Hugging Face's for a run. Raises ConfigError."""
    from lowcomm_node.fetch.files import pin
    from lowcomm_node.models.open_weights import check_weights, files_of, settings_of

    read = settings_of(folder)
    files = files_of(folder)
    check_weights(read.settings, files)
    try:
        start = StartSettings(files=tuple(pin(file) for file in files))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(
            f"{folder}: {first['input']!r}: {expected_in_words(first)}: rename the file, and its "
            "entry in the index."
        ) from None
    warnings = [read.note] if read.note else []
    if read.left_out:
        left_out = ", ".join(read.left_out)
        warnings.append(f"{folder}: left out {left_out}, which transformers does not read")
    return OpenWeights(read.settings, read.longest, start, tuple(warnings))


def licences_of_weights(folder: Path) -> list[str]:
    """The licence in the README of a folder of Hugging Face's, for the card of a model."""
    with suppress(OSError, UnicodeDecodeError):
        text = (folder / "README.md").read_text(encoding="utf-8")[:MAX_CARD]
        if named := re.search(r"\A---\n(?:(?!---).*\n)*?license: *([!-~]{1,80})\n", text):
            return [f"{named[1]} ({clean(folder.absolute().name[:80])})"]
    return []


def parameters_of(spec: RunSpec) -> int:
    """Parameters that a run trains, for ``fragments = "auto"``."""
    from lowcomm_node.trainer.memory import count_trained  # loads torch

    return count_trained(spec)


# warnings


def check_size(spec: RunSpec) -> str | None:
    """Warn of too many peers for a run. Raises ConfigError if it begins with too many."""
    sync, peers = spec.sync, spec.run.start_peers
    group, most = sync.group, sync.group * sync.cells
    larger = f"group up to {MAX_GROUP}, " if group < MAX_GROUP else ""
    rest = f'{larger}codec = "bf16" and consensus = 1.0, or method = "lowcomm".'
    if sync.realigns_among(peers):
        cells = f"or cells = {sync.cells_for(peers)}, " if group > 2 else ""
        raise ConfigError(
            f"start_peers = {peers}, but group = {group} and consensus = 0: most exchanges of "
            f"more than {most} peers would be realignments in fp32. Set start_peers = {most} "
            f"or less, {cells}{rest}"
        )
    if sync.cells > 1 or not sync.realigns_among(most + 1):
        return None
    many = 4 * group
    cells = f"cells = {sync.cells_for(many)} for {many} peers, " if group > 2 else ""
    return (
        f"this run is for at most {most} peers: with more, most exchanges are realignments in "
        f"fp32, for consensus = 0. For a larger swarm set {cells}{rest}"
    )


def check_line(spec: RunSpec, text: str, source: str) -> str | None:
    """Warn where the line in a run.toml does not carry its interval. Raises ConfigError."""
    section = tomllib.loads(text).get("plan")
    if section is None or spec.sync.group == 1:
        return None
    from lowcomm_node.planner.line import read_line
    from lowcomm_node.planner.plan import choice_of  # loads torch
    from lowcomm_node.planner.words import interval_in_words

    why = interval_in_words(choice_of(spec, read_line(f"{source}: [plan]", {}, section)))
    remedy = "plan it again with `lowcomm-node plan`, or remove [plan] if the line is another"
    return f"{why}: {remedy}" if why else None


def check_used(spec: RunSpec, tokens: int | None) -> str | None:
    """Warn of weights for words that a tokenizer of this number of tokens does not have."""
    vocab = spec.model.vocab
    if tokens is None or spec.start.files or vocab - tokens <= vocab // SPARE_VOCABULARY:
        return None
    model = spec.model.model_copy(update={"vocab": tokens})
    used = parameters_of(spec.model_copy(update={"model": model}))
    return (
        f"model.vocab = {vocab}, but the tokenizer has {tokens} tokens: "
        f"{1 - used / parameters_of(spec):.0%} of the weights are of words that never occur. "
        f"Set vocab = {tokens}, or name a larger tokenizer."
    )


# messages


def epochs_in_words(spec: RunSpec) -> str | None:
    """Epochs of a built-in text that a peer trains on; None below two."""
    if spec.data.source in ("local", "packed") or spec.data.tokenizer == "local":
        return None
    from lowcomm_node.data.corpus import open_corpus

    corpus, tokenizer = open_corpus(spec.data.source), open_tokenizer(spec.data.tokenizer)
    sample = [document.text for _, document in islice(corpus.documents(), 100)]
    tokens_a_byte = sum(map(len, tokenizer.encode_all(sample))) / sum(map(len, sample))
    text, trained = tokens_a_byte * corpus.size, spec.run.steps * spec.tokens_per_step
    if trained < 2 * text:
        return None
    return (
        f"each peer trains on {trained / 1e6:,.0f} million tokens, {trained / text:,.0f} epochs of "
        f"the {text / 1e6:,.1f} million of {spec.data.source}: a smaller model, fewer steps, or "
        'more text with source = "local" learns more from that time'
    )


def how_to_join(spec: RunSpec, address: str) -> str:
    """The command by which others join a run, and what else they need."""
    command = f"lowcomm-node join --peers {address}"
    if spec.data.source == "local":
        command += " --data PATH"
    if spec.data.tokenizer == "local" and not spec.data.tokenizer_sha256:
        command += " --tokenizer PATH"
    if spec.run.admission == "invite":
        command += " --invite ...\nwhich you make with\n  lowcomm-node invite"
    elif spec.run.admission == "list":
        command += "\nas one of its members"
    if spec.data.parts:
        size = write_size(sum(part.size for part in spec.data.parts))
        command += (
            f"\nand the first node with\n  --data PACK\nwhich sends the others {size} of text"
        )
    if spec.start.files:
        size = write_size(spec.start.size)
        command += f"\nand the first node with\n  --weights DIR\nwhich sends the others {size} of "
        command += "weights"
    return command


def keeping_in_words(kept: Mapping[str, Keeping]) -> str:
    """Number of servers that keep a run, for how long, and the remedy if none does."""
    keepers = [keeping for keeping in kept.values() if keeping.kept]
    lines = [
        f"{peer[-6:]} does not store it: {keeping.reason}"
        for peer, keeping in kept.items()
        if not keeping.kept
    ]
    if not keepers:
        lines.append(
            "no server stores it: it stays in the DHT for up to half an hour, and for as long as a "
            "node trains it. Start one soon, name another server with --peers, or ask the operator "
            "of this one to serve it with --run"
        )
        return "\n".join(lines)
    lasts = "for good"
    if seconds := [keeping.seconds for keeping in keepers if keeping.seconds is not None]:
        hours = max(1, round(min(seconds) / 3600))
        lasts = f"expires {hours} h after the last peer leaves"
    servers = "server" if len(keepers) == 1 else "servers"
    return "\n".join([f"stored on {len(keepers)} {servers}; {lasts}", *lines])


# publishing


async def publish_run(
    settings: NodeSettings, identity: Identity, run: SignedRun
) -> dict[str, Keeping]:
    """Publish a run; returns whether each server that ``--peers`` names keeps it. Raises
    NoPeers."""
    discovery = open_discovery(settings, identity)
    try:
        await discovery.start()
        data = run.to_bytes()
        if not await _publish(discovery, RUNS_KEY, run.run_id, data, RUN_LIFE, exactly=False):
            raise NoPeers(
                f"The run could not be published within {PUBLISH_DEADLINE:.0f} s: is the bootstrap "
                "server closed to new runs?"
            )
        servers = by_peer(settings.peers)
        now, file = time(), settings.paths.remembered_peers(run.fingerprint)
        known = [
            RememberedPeer(peer_id=peer, addresses=addresses, answered=now, named=True)
            for peer, addresses in servers.items()
        ]
        remember(file, known, now)  # for amendments, and for this home's node
        asking = (_ask(discovery, peer, servers[peer], run.run_id) for peer in servers)
        return dict(zip(servers, await asyncio.gather(*asking), strict=True))
    finally:
        await discovery.close()


async def publish_removals(
    settings: NodeSettings, identity: Identity, run: SignedRun, names: frozenset[str], undo: bool
) -> Removals:
    """Publish the list of the removed with these names added, or taken away. Raises NoPeers."""
    path = settings.paths.removals(run.fingerprint)

    def write(heard: bytes) -> Removals:
        before = newest_removals(run, path, heard)
        ids = before.ids - names if undo else before.ids | names
        return write_removals(identity, run.run_id, before.version + 1, ids)

    key = removals_key(run.run_id, identity.peer_id)
    return await _publish_next(settings, key, identity.peer_id, path, REMOVALS_LIFE, write)


async def publish_amendment(
    settings: NodeSettings,
    identity: Identity,
    run: SignedRun,
    at: int | None,
    changes: Mapping[str, Any],
) -> Chain:
    """Publish one more amendment of a run; ``at`` None: in force at once. Raises NoPeers."""
    path = settings.paths.amendments(run.fingerprint)

    def write(heard: bytes) -> Chain:
        kept = read_small(path, MAX_CHAIN_BYTES)
        chain = newest(run.spec, run.run_id, [kept, heard]).chain
        last = chain.links[-1].at if chain.links else 0
        return write_amendment(identity, run, chain, last if at is None else at, changes)

    key = amendments_key(run.run_id, identity.peer_id)
    return await _publish_next(settings, key, identity.peer_id, path, AMENDMENTS_LIFE, write)


def with_entry_points(settings: NodeSettings, run: SignedRun) -> NodeSettings:
    """Settings with addresses of the swarm: their own, else those of our own node, else those at
    which the swarm of the run was entered before. Raises ConfigError, Unhealthy."""
    if settings.peers:
        return settings
    try:
        with ControlClient(settings.home) as client:
            known = client.status().entry_points
    except NotRunning:
        file = settings.paths.remembered_peers(run.fingerprint)
        known = tuple(peer.addresses[0] for peer in read_remembered(file, time()))
        if not known:
            raise ConfigError(
                "No address of the swarm is known, and no node runs in "
                f"{shlex.quote(str(settings.home))}: give one with --peers."
            ) from None
    except Unhealthy as error:
        raise Unhealthy(f"{error} Or give an address of the swarm with --peers.") from None
    return settings.model_copy(update={"peers": known})


async def _publish_next(
    settings: NodeSettings,
    key: str,
    creator: str,
    path: Path,
    life: float,
    write: Callable[[bytes], Made],
) -> Made:
    """Publish for ``life`` seconds what ``write`` makes of the record in the DHT; keep it in
    ``path``. Under a passing identity: our node may run under ours. Raises NoPeers.
    """
    settings = settings.model_copy(update={"dht_port": 0})
    with ephemeral_identity() as (passing, key_file):
        discovery = open_discovery(settings, passing, key_file=key_file)
        try:
            await discovery.start()
            made = write((await discovery.lookup(key)).get(creator, b""))
            write_atomic(path, made.data)
            if await _publish(discovery, key, creator, made.data, life):
                return made
        finally:
            await discovery.close()
    raise NoPeers(
        f"It could not be published within {PUBLISH_DEADLINE:.0f} s. It is kept in {path}, and the "
        "node of this home will publish it when it runs; or try again."
    )


async def _publish(
    discovery: Discovery, key: str, subkey: str, data: bytes, life: float, exactly: bool = True
) -> bool:
    """Publish a record until others hold it, or any of that name; whether they did in time."""
    deadline = monotonic() + PUBLISH_DEADLINE
    while monotonic() < deadline:
        await discovery.publish(key, subkey, data, life)
        # A store that says yes may not have arrived: read it back, from others than ourselves.
        held = await discovery.held_by_others(key, subkey)
        if held is not None and (held == data or not exactly):
            return True
        await asyncio.sleep(ASK_EVERY)
    return False


async def _ask(discovery: Discovery, peer: str, addresses: Sequence[str], run_id: str) -> Keeping:
    """Whether a server keeps a run, asked until it has received it."""
    keeping = Keeping(reason="it did not answer")
    for _ in range(ASKED):
        with suppress(LinkLost):
            await discovery.connect(peer, addresses, CONNECT_DEADLINE)
        keeping = await ask_server(discovery, peer, run_id, only_tell=False)
        if keeping.kept:
            break
        await asyncio.sleep(ASK_EVERY)
    return keeping
