"""The run specification: what a swarm agrees on.

A creator writes it as TOML; presets fill in what it leaves out; the document (JSON, see document.py) is signed, and its SHA-256
is the run id. A specification comes from strangers, so nothing in it can name a file, a module or an address: it can only
choose from what is listed here, within bounds.

A new setting needs a line in ``document.ADDED``: what a run means that was signed before the setting existed.
"""

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lowcomm_protocol.errors import CodecError, SignatureError, SpecError, VersionError
from lowcomm_protocol.identity import Identity, public_key_of, verify
from lowcomm_protocol.spec.document import MAX_OPTIONAL, fill, is_encoding, read_content, write_document
from lowcomm_protocol.spec.names import CODECS, Mean, Pairing
from lowcomm_protocol.spec.outer_settings import OuterSettings, validate_outer
from lowcomm_protocol.work import MAX_BITS

SPEC_VERSION = 2
MAX_SPEC_BYTES = 24 * 1024
"""A signed specification must fit into one DHT record (32 KiB) with room to spare."""
MAX_GROUP = 8
BYTES = 256
"""Tokens of ``tokenizer = "bytes"``."""
MAX_MEMBERS = 256
MAX_STEP_TOKENS = 1024 * 1024
"""Tokens of one inner step (``batch * context``) in a new run: all of them lie in a peer's memory at once."""
_PURPOSE = "run specification"

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]


def _check_peer_id(text: str) -> str:
    try:
        public_key_of(text)
    except SignatureError:
        raise ValueError("expected a peer id such as 12D3KooW..., as `lowcomm-node id` shows it") from None
    return text


PeerId = Annotated[str, AfterValidator(_check_peer_id)]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RunSettings(_Settings):
    """``[run]``: the name that people use, the seed that all randomness derives from, the length, and who may join."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    description: Annotated[str, Field(max_length=500)] = ""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    steps: Annotated[int, Field(ge=1, le=100_000_000)] = 400
    """Length of the run in swarm steps."""
    start_peers: Annotated[int, Field(ge=1, le=1024)] = 1
    """How many peers must be there before the first step; after it nobody waits for anybody."""
    creator: str = ""
    """Who signs the run, and with it invites and removals; signing fills it in, so that the run id names it as well."""
    admission: Literal["open", "invite", "list"] = "open"
    """Who may join: anybody, whom the creator invites, or the members; the creator always may."""
    members: Annotated[tuple[PeerId, ...], Field(strict=False, max_length=MAX_MEMBERS)] = ()
    """Peer ids of those who may join with ``admission = "list"``, sorted."""

    work: Annotated[int, Field(ge=0, le=MAX_BITS)] = 0
    """Bits of the proof of work that each peer of an open run finds once a week; 0: none."""

    @field_validator("creator")
    @classmethod
    def _creator_is_a_peer(cls, creator: str) -> str:
        return _check_peer_id(creator) if creator else creator

    @field_validator("members", mode="before")
    @classmethod
    def _members_have_one_order(cls, members: Any) -> Any:
        given = cast("list[object]", members)
        if isinstance(members, list | tuple) and all(isinstance(member, str) for member in given):
            return tuple(sorted(set(cast("list[str]", given))))
        return given

    @model_validator(mode="after")
    def _members_are_for_lists(self) -> Self:
        if self.members and self.admission != "list":
            raise ValueError(
                f'members are given, but admission = "{self.admission}": set admission = "list", or remove them'
            )
        if self.admission == "list" and not self.members:
            raise ValueError('admission = "list" needs members: the peer ids that `lowcomm-node id` shows')
        return self

    @model_validator(mode="after")
    def _work_is_for_open_runs(self) -> Self:
        if self.work and self.admission != "open":
            raise ValueError(
                f'work = {self.work}, but admission = "{self.admission}": set admission = "open", or work = 0'
            )
        return self

    @model_validator(mode="after")
    def _description_is_plain(self) -> Self:
        # It is shown on the terminals of strangers, who must not get escape sequences.
        if not self.description.isprintable():
            raise ValueError("description must be one line of printable text")
        return self


class ModelSettings(_Settings):
    """``[model]``: a decoder-only transformer; the defaults are the demo model of about 230,000 parameters."""

    kind: Literal["transformer"] = "transformer"
    vocab: Annotated[int, Field(ge=2, le=1_000_000)] = 256
    layers: Annotated[int, Field(ge=1, le=512)] = 4
    width: Annotated[int, Field(ge=8, le=65_536)] = 64
    heads: Annotated[int, Field(ge=1, le=1024)] = 4
    feed_forward: Annotated[int, Field(ge=8, le=262_144)] = 176
    context: Annotated[int, Field(ge=8, le=1_048_576)] = 64
    tied: bool = False
    rope_base: Annotated[float, Field(gt=1.0, le=1e9, allow_inf_nan=False)] = 10_000.0

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width = {self.width} must be a multiple of 2 * heads = {2 * self.heads}, "
                "because rotary embedding turns pairs of channels in every head"
            )
        return self


class DataSettings(_Settings):
    """``[data]``: which text. ``local`` means that every owner names their own with ``--data``."""

    source: Literal["builtin:python", "local"] = "builtin:python"
    tokenizer: Literal["bytes", "local"] = "bytes"
    tokenizer_sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """SHA-256 of the one tokenizer.json that all peers use with ``tokenizer = "local"``; empty: nobody checks it."""

    @model_validator(mode="after")
    def _sha256_is_of_a_file(self) -> Self:
        if self.tokenizer_sha256 and self.tokenizer != "local":
            raise ValueError(
                f'tokenizer_sha256 is given, but tokenizer = "{self.tokenizer}": set "local", or remove it'
            )
        return self


class TrainSettings(_Settings):
    """``[train]``: the inner optimizer and its schedule over swarm steps."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """Muon takes the matrices of the blocks; AdamW the rest."""
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]
    """Peak; 0.003 for AdamW and 0.02 for Muon unless given."""
    adamw_share: Fraction = 0.3
    """AdamW's share of ``learning_rate`` where Muon takes the matrices."""
    muon_momentum: Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)] = 0.9
    warmup: Annotated[int, Field(ge=0, le=10_000_000)] = 40
    final_learning_rate: Fraction = 0.1
    """Fraction of ``learning_rate`` at the end of the cosine."""
    batch: Annotated[int, Field(ge=1, le=65_536)] = 8
    """Sequences an inner step."""
    weight_decay: Fraction
    """0.1 for AdamW and 0.01 for Muon unless given."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)] = 0.9
    beta2: Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)] = 0.95
    clip: Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)] = 1.0
    """Largest norm of the gradient."""
    evaluate_every: Positive = 100
    """Inner steps between two evaluations on held-out text."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = cast("dict[str, Any]", data)
        muon = given.get("optimizer") == "muon"
        return {"learning_rate": 0.02 if muon else 3e-3, "weight_decay": 0.01 if muon else 0.1} | given


class SyncSettings(_Settings):
    """``[sync]``: when, with how many, and how fragments are exchanged; a method is a preset of these."""

    method: Literal["local", "gossip", "diloco", "streaming-diloco", "noloco", "lowcomm"] = "lowcomm"
    interval: Annotated[int, Field(ge=1, le=1_000_000)]
    """H: swarm steps between two syncs of one fragment."""
    fragments: Annotated[int, Field(ge=1, le=4096)]
    """P: pieces that the model is cut into."""
    pattern: Literal["strided", "sequential"]
    overlap: Annotated[int, Field(ge=0, le=1_000_000)]
    """tau: inner steps between capture and merge, at least; an exchange that takes longer merges when it is done."""
    codec: str
    error_feedback: bool = False
    """What coding loses of one exchange is added to the next."""
    mean: Mean = "clip"
    """How a group of three or more averages: see robust.py."""
    group: Annotated[int, Field(ge=1, le=MAX_GROUP)]
    """How many peers meet in one exchange, at most: 1 never communicates, 2 are pairs."""
    pairing: Pairing = "hypercube"
    """Whom a peer meets where ``group = 2``: across a hypercube, or in pairs drawn anew each time."""
    min_steps: Annotated[int, Field(ge=1, le=1_000_000)]
    """Inner steps since a fragment's last contribution before a peer accepts another exchange of it."""
    outer: Literal["nesterov", "noloco"]
    outer_lr: Annotated[float, Field(gt=0.0, le=10.0, allow_inf_nan=False)]
    momentum: Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)]
    consensus: Annotated[float, Field(ge=0.0, le=10.0, allow_inf_nan=False)]
    """Pull of the slow weights towards those of the group (NoLoCo's gamma); 0 where all peers always meet."""
    merge: Literal["shift", "mix"]
    mix: Fraction
    """Share of the fast weights that ``merge = "mix"`` keeps."""

    def realigns_among(self, peers: int) -> bool:
        """Whether a swarm of so many peers would mostly realign: its groups change, and nothing pulls their weights together."""
        return self.group > 1 and self.consensus == 0 and peers > self.group

    @property
    def outer_settings(self) -> OuterSettings:
        """The settings of the outer optimizer alone."""
        return OuterSettings(self.outer, self.outer_lr, self.momentum, self.consensus, self.merge, self.mix)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.codec not in CODECS:
            raise ValueError(f"codec = {self.codec!r} {CODECS.unknown(self.codec)}")
        codec = CODECS[self.codec]
        if codec.only_in_pairs and self.group > 2:
            raise ValueError(
                f"codec = {self.codec!r} {codec.only_in_pairs}, which works in pairs: set group = 2, or "
                f'codec = "e3m0"; group is {self.group}'
            )
        if self.fragments > self.interval:
            raise ValueError(
                f"fragments = {self.fragments} exceeds interval = {self.interval}: two fragments would be due at once"
            )
        if self.min_steps > self.interval:
            raise ValueError(f"min_steps = {self.min_steps} exceeds interval = {self.interval}: nobody would accept")
        if self.consensus > 0 and codec.coarse:
            raise ValueError(
                f"codec = {self.codec!r} is too coarse for absolute weights, which consensus = {self.consensus} needs: "
                'set consensus = 0 with groups of the whole swarm, or codec = "fp32" or "bf16"'
            )
        if self.group > 1:
            validate_outer(self.outer_settings, self.group)
        return self


PRESETS: dict[str, dict[str, Any]] = {
    "noloco": {
        "interval": 20,
        "fragments": 1,
        "pattern": "strided",
        "overlap": 0,
        "codec": "fp32",
        "group": 2,
        "outer": "noloco",
        # The gain lr / (1 - momentum) is 1: above it, short runs from scratch lose silently (benchmarks/methods.py).
        "outer_lr": 0.7,
        "momentum": 0.3,
        "consensus": 1.0,
        "merge": "shift",
        "mix": 0.0,
        "pairing": "random",
    },
    "diloco": {
        "interval": 20,
        "fragments": 1,
        "pattern": "strided",
        "overlap": 0,
        "codec": "fp32",
        "group": MAX_GROUP,
        "outer": "nesterov",
        # 0.7 and 0.9 of the paper suit runs of 100,000 steps; here a gain lr / (1 - momentum) of 7 loses silently.
        "outer_lr": 0.5,
        "momentum": 0.5,
        # With equal slow weights this term vanishes and the rule is DiLoCo's; after a missed exchange it heals.
        "consensus": 1.0,
        "merge": "shift",
        "mix": 0.0,
    },
    # Every parameter often, in few bits: that leaves more of all-reduce's gain than more bits more rarely (docs/results.md).
    "streaming-diloco": {
        "interval": 4,
        "fragments": 4,
        "pattern": "strided",
        "overlap": 1,
        "codec": "q2",
        "error_feedback": True,
        "group": MAX_GROUP,
        "outer": "nesterov",
        "outer_lr": 1.0,
        "momentum": 0.5,
        "consensus": 0.0,
        "merge": "mix",
        "mix": 0.25,
    },
}
# Fragments and overlap of Streaming DiLoCo, pairs and rule of NoLoCo, in 3 bits.
PRESETS["lowcomm"] = PRESETS["noloco"] | {
    "pairing": "hypercube",
    "interval": 4,
    "fragments": 4,
    "overlap": 1,
    "codec": "mod3",
    "outer_lr": 1.25,
    "momentum": 0.0,
}
# Gossip is NoLoCo without momentum: the slow weights become the mean of both peers' fast weights.
PRESETS["gossip"] = PRESETS["noloco"] | {"outer_lr": 1.0, "momentum": 0.0, "pairing": "hypercube"}
PRESETS["local"] = PRESETS["noloco"] | {"group": 1, "pairing": "hypercube"}

MUON_METHODS = frozenset({"lowcomm", "streaming-diloco"})
"""Their inner optimizer is Muon unless the creator says otherwise; that of the others AdamW."""

METHODS: dict[str, str] = {
    "lowcomm": "pairs, a quarter of the model at a time, in 3 bits, while it trains on: for a swarm of any size",
    "noloco": "pairs drawn anew each time average what they learned; nobody waits for more than one peer",
    "gossip": "pairs average their weights; the simplest thing that works, without outer momentum",
    "diloco": "the whole group (at most 8) averages the whole model every interval, in full precision",
    "streaming-diloco": "swarms of at most 8 average a quarter of the model at a time, in 2 bits: nearest to a cluster",
    "local": "no communication at all: the baseline that every method must beat",
}
"""What each method is for, in one line."""


class RunSpec(_Settings):
    """Everything that the peers of one run agree on, with every setting explicit."""

    version: int = SPEC_VERSION
    optional: Annotated[tuple[str, ...], Field(strict=False, max_length=MAX_OPTIONAL)] = ()
    """Settings (``sync.codec``) that a peer may ignore whose release does not know them, sorted."""
    run: RunSettings
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings.model_validate({})
    sync: SyncSettings

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        spec = cast("dict[str, Any]", data)
        sync = spec.get("sync", {})
        if not isinstance(sync, dict):
            return spec
        settings = cast("dict[str, Any]", sync)
        method = settings.get("method", "lowcomm")
        settings = PRESETS.get(method if isinstance(method, str) else "", {}) | settings
        interval = settings.get("interval")
        if "min_steps" not in settings and isinstance(interval, int):
            settings["min_steps"] = max(1, interval // 4)
        train = spec.get("train", {})
        if isinstance(method, str) and method in MUON_METHODS and isinstance(train, dict):
            train = {"optimizer": "muon"} | cast("dict[str, Any]", train)
        return spec | {"sync": settings, "train": train}

    @field_validator("optional", mode="before")
    @classmethod
    def _optional_has_one_order(cls, optional: Any) -> Any:
        given = cast("list[object]", optional)
        if isinstance(optional, list | tuple) and all(isinstance(name, str) for name in given):
            return tuple(sorted(set(cast("list[str]", given))))
        return given

    def canonical(self) -> bytes:
        """The document that this release signs for these settings. A run that is signed already has its own."""
        return write_document(self.model_dump())

    @property
    def run_id(self) -> str:
        """The id of a run that this release signs with just these settings. A run that is signed already has its own."""
        return run_id_of(self.canonical())

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one peer trains on in one inner step."""
        return self.train.batch * self.model.context


@dataclass(frozen=True)
class SignedRun:
    """A run specification with its creator's signature."""

    spec: RunSpec
    creator: str
    """Peer id of the creator."""
    signature: bytes
    document: bytes
    """What was signed, to the byte: this release may read less of it, or would write it in another way."""

    @property
    def run_id(self) -> str:
        """The id of the run: digest of its document."""
        return run_id_of(self.document)

    @property
    def fingerprint(self) -> str:
        """The first 12 digits of the run id, enough to pin a run by hand: ``NAME@FINGERPRINT``."""
        return self.run_id[:12]

    def to_bytes(self) -> bytes:
        """The form that is published and kept in files. Only the envelope is made anew, so nobody can pad it."""
        return json.dumps(
            {"creator": self.creator, "signature": self.signature.hex(), "spec": self.document.decode()}
        ).encode()


def run_id_of(document: bytes) -> str:
    """The id of the run that has this document: SHA-256, 64 hexadecimal digits."""
    return hashlib.sha256(document).hexdigest()


def parse_toml(text: str, source: str = "run specification") -> RunSpec:
    """Read a specification that a person wrote. Raises SpecError or VersionError with the remedy."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{source}: not valid TOML: {error}. Correct that line.") from None
    except (ValueError, RecursionError):
        raise SpecError(f"{source}: a number is too long or a list too deep: nothing in a run needs that.") from None
    _check_version(data, source)
    spec = _validate(data, source)
    check_new_run(spec, source)
    return spec


def check_new_run(spec: RunSpec, source: str = "run specification") -> None:
    """What a new run must keep to, beside the bounds of its settings. Raises SpecError.

    A run that is signed already is read all the same, for it may train since an earlier release.
    """
    known = _known()
    for name in spec.optional:
        section, _, setting = name.partition(".")
        if section not in known or (setting and setting not in known[section]):
            raise SpecError(f"{source}: optional names {_show(name)}, which is no setting: correct or remove it.")
    if spec.data.tokenizer == "bytes" and spec.model.vocab < BYTES:
        raise SpecError(
            f'{source}: model.vocab = {spec.model.vocab} is too small for tokenizer = "bytes": set vocab = {BYTES}.'
        )
    if spec.tokens_per_step > MAX_STEP_TOKENS:
        raise SpecError(
            f"{source}: train.batch = {spec.train.batch} times model.context = {spec.model.context} are "
            f"{spec.tokens_per_step:,} tokens in an inner step, more than {MAX_STEP_TOKENS:,}: lower one of the two."
        )


def parse_canonical(text: str, source: str = "run specification") -> RunSpec:
    """Read the document of a run, of any release. Raises SpecError or VersionError."""
    content, known = read_content(text, source), _known()
    _check_version(content, source)
    spec = _validate(fill(content, known, source), source)
    if not is_encoding(text, content, spec.model_dump(), known):
        raise SpecError(f"{source}: the document is not in its canonical form; its creator must sign it anew.")
    return spec


def amended(spec: RunSpec, settings: Mapping[str, Any], source: str) -> RunSpec:
    """A specification with other values of some settings (``SECTION.SETTING``). Raises SpecError."""
    data = spec.model_dump()
    for name, value in settings.items():
        section, _, setting = name.partition(".")
        data[section][setting] = value
    if data["run"]["admission"] != "open":
        data["run"]["work"] = 0  # which is for open runs
    return _validate(data, source)


def sign_run(spec: RunSpec, creator: Identity) -> SignedRun:
    """Sign a specification, and name its creator in it.

    Raises SpecError if it names another creator, or is too large to publish.
    """
    if spec.run.creator not in ("", creator.peer_id):
        raise SpecError(
            f"run.creator = {spec.run.creator!r}, but {creator.peer_id} signs: remove that line, or sign with its key."
        )
    check_new_run(spec)
    spec = spec.model_copy(update={"run": spec.run.model_copy(update={"creator": creator.peer_id})})
    document = spec.canonical()
    if len(document) > MAX_SPEC_BYTES:
        raise SpecError(
            f"The specification has {len(document)} bytes, more than {MAX_SPEC_BYTES}: shorten description or members."
        )
    return SignedRun(spec, creator.peer_id, creator.sign(_PURPOSE, document), document)


def read_signed_run(data: bytes, source: str = "run specification") -> SignedRun:
    """Read a published specification and check its signature.

    Raises SpecError if it is malformed, VersionError if this release can't read it, SignatureError if the signature is
    not the creator's.
    """
    creator, document, signature = _read_envelope(data, source)
    spec = parse_canonical(document.decode(), source)
    if spec.run.creator != creator:
        # Or anybody could sign a copy of a run, and invite and remove in its name.
        raise SignatureError(f"{source}: signed by {creator}, but its creator is {spec.run.creator or 'not named'}.")
    return SignedRun(spec, creator, signature, document)


def name_signed_run(data: bytes, source: str = "run specification") -> tuple[str, str]:
    """Run id and creator of a run that this release need not be able to read: storers keep it for those that are.

    Raises SpecError, SignatureError.
    """
    creator, document, _ = _read_envelope(data, source)
    run = read_content(document.decode(), source).get("run")
    if not isinstance(run, dict) or cast("dict[str, Any]", run).get("creator") != creator:
        raise SignatureError(f"{source}: signed by {creator}, which the specification does not name as its creator.")
    return run_id_of(document), creator


def _read_envelope(data: bytes, source: str) -> tuple[str, bytes, bytes]:
    """Creator, document and signature, which is checked. Raises SpecError, SignatureError."""
    if len(data) > 2 * MAX_SPEC_BYTES:
        raise SpecError(f"{source}: {len(data)} bytes are too many for a signed run; it is refused.")
    try:
        envelope = json.loads(data)
        creator, document = str(envelope["creator"]), str(envelope["spec"]).encode()
        signature = bytes.fromhex(envelope["signature"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SpecError(f"{source}: not a signed run; create one with `lowcomm-node create run.toml`.") from None
    verify(creator, _PURPOSE, document, signature)
    return creator, document, signature


def _check_version(data: dict[str, Any], source: str) -> None:
    version = data.get("version", SPEC_VERSION)
    if version != SPEC_VERSION:
        raise VersionError(
            f"{source}: version {_show(version)} is not {SPEC_VERSION}, which this release speaks: "
            "install the release that the run's creator names."
        )


def _validate(data: dict[str, Any], source: str) -> RunSpec:
    try:
        return RunSpec.model_validate(data)
    except ValidationError as error:
        raise SpecError(f"{source}: {_explain(error)}") from None
    except (SpecError, CodecError) as error:
        raise SpecError(f"{source}: sync: {error}") from None


def _explain(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:80]
    if first["type"] == "extra_forbidden":
        *path, key = (str(part) for part in first["loc"])
        near = get_close_matches(key, _keys_at(path), 1)
        remedy = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(_keys_at(path))}."
        return f"unknown key {where!r}; {remedy}"
    if first["type"] == "missing":
        return f"{where!r} is missing: add it."
    message = first["msg"].removeprefix("Value error, ")
    if isinstance(first["input"], dict):  # settings that do not work together
        return f"{where}: {message}."
    return f"{where} = {_show(first['input'])}: {message}." if where else f"{message}."


def _show(value: object) -> str:
    """A value of a stranger, short, whatever it is: a huge number or a deep list has no ``repr``."""
    plain = isinstance(value, str | float) or (isinstance(value, int) and value.bit_length() < 256)
    return repr(value)[:80] if plain else f"({type(value).__name__})"


@cache
def _known() -> dict[str, frozenset[str]]:
    """All settings, by section; a setting at the top has none below it."""
    return {
        section: frozenset(kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else ())
        for section, kind in ((name, field.annotation) for name, field in RunSpec.model_fields.items())
    }


def _keys_at(path: list[str]) -> list[str]:
    model: type[BaseModel] = RunSpec
    for part in path:
        model = cast("type[BaseModel]", model.model_fields[part].annotation)
    return list(model.model_fields)
