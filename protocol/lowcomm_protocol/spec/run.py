"""The run specification: what a swarm agrees on.

A creator writes it as TOML (sections.py); a preset fills in what it leaves out; the document (JSON,
see document.py) is signed, and its SHA-256 is the run id. A document always holds a number of
fragments, so every release reads it: ``sync.fragments = "auto"`` of a run.toml is resolved before.
"""

import hashlib
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Self, cast, get_args

from pydantic import Field, SerializeAsAny, ValidationError, field_validator, model_validator

from lowcomm_protocol.errors import CodecError, SignatureError, SpecError, VersionError
from lowcomm_protocol.identity import Identity, verify
from lowcomm_protocol.spec.document import (
    MAX_OPTIONAL,
    Content,
    expected_in_words,
    fill,
    is_encoding,
    read_content,
    write_document,
)
from lowcomm_protocol.spec.models import TransformerSettings
from lowcomm_protocol.spec.names import RETIRED_CODECS
from lowcomm_protocol.spec.presets import PRESETS
from lowcomm_protocol.spec.sections import (
    BUILTIN_TOKENS,
    GENERATION_TOKENS,
    SORTED,
    AdapterSettings,
    DataSettings,
    ExportSettings,
    ModelSettings,
    PackedText,
    RunSettings,
    Settings,
    StartSettings,
    SyncSettings,
    TrainSettings,
    read_model,
    settings_of_kind,
    shown,
)

SPEC_VERSION = 2
MAX_SPEC_BYTES = 24 * 1024
"""A signed specification must fit into one DHT record (32 KiB) with room to spare."""
MAX_SIGNED_BYTES = 29 * 1024
"""Bytes of the same with its signature, as text within a text."""
MAX_STEP_TOKENS = 1024 * 1024
"""Most tokens of one inner step in a new run: a peer holds all of them in memory."""
SHARES = "data.shares"
"""Name of the shares of all ``data.parts`` in an amendment."""
PLAN = "plan"
"""Section of a run.toml that is its creator's alone: the line that the run was planned for."""
AUTO = "auto"
VALUES, MOST_VALUES = 16_000_000, 64_000_000
"""Values of a fragment with "auto": the usual number (64 MB in fp32), and the largest."""
_PURPOSE = "run specification"


class RunSpec(Settings):
    """Everything that the peers of one run agree on, with every setting explicit."""

    version: int = SPEC_VERSION
    optional: Annotated[
        tuple[Annotated[str, Field(max_length=80)], ...],
        SORTED,
        Field(strict=False, max_length=MAX_OPTIONAL),
    ] = ()
    """Settings (``sync.codec``) that a peer may ignore whose release does not know them, sorted."""
    run: RunSettings
    model: SerializeAsAny[ModelSettings] = TransformerSettings()
    data: DataSettings = DataSettings()
    start: StartSettings = StartSettings()
    adapter: AdapterSettings | None = None
    export: ExportSettings = ExportSettings()
    train: TrainSettings = TrainSettings.model_validate({})
    sync: SyncSettings

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        spec = cast("Content", data)
        sync, train = spec.get("sync", {}), spec.get("train", {})
        if not isinstance(sync, dict):
            return spec
        settings = cast("Content", sync)
        method = settings.get("method", "lowcomm")
        preset = PRESETS.get(method) if isinstance(method, str) else None
        if preset:
            if "momentum" in settings:
                # Files of 0.1 write every setting, and know no memory.
                settings = {"memory": 0.0} | settings
            settings = preset.settings(_layers_of(spec.get("model")), settings)
            if isinstance(train, dict):
                train = {"optimizer": preset.optimizer} | cast("Content", train)
        interval = settings.get("interval")
        if "min_steps" not in settings and isinstance(interval, int):
            settings = settings | {"min_steps": max(1, interval // 4)}
        return spec | {"sync": settings, "train": train}

    @field_validator("model", mode="before")
    @classmethod
    def _model_is_of_its_kind(cls, model: Any) -> Any:
        return read_model(cast("dict[str, Any]", model)) if isinstance(model, dict) else model

    @model_validator(mode="after")
    def _tokens_are_of_the_model(self) -> Self:
        data, export = self.data, self.export
        tokens = [*data.begin_tokens, data.end_token, *export.eos_token_id]
        tokens += [export.bos_token_id, export.pad_token_id]
        for name in GENERATION_TOKENS:
            value = export.generation.get(name)
            tokens += value if isinstance(value, list) else [value]
        largest = max((token for token in tokens if token is not None), default=0)
        if largest >= self.model.vocab:
            raise ValueError(
                f"token {largest} of [data] or [export] is not below model.vocab = "
                f"{self.model.vocab}: correct it"
            )
        return self

    @model_validator(mode="after")
    def _adapter_has_a_base(self) -> Self:
        if self.adapter and not self.start.files:
            raise ValueError(
                "[adapter] needs the weights that it adapts in [start]: write the run with "
                "`lowcomm-node init --from DIR --adapter RANK`"
            )
        return self

    @property
    def retired(self) -> str:
        """Setting that only earlier releases can train with; empty: none."""
        if self.sync.codec in RETIRED_CODECS:
            return f"sync.codec = {self.sync.codec!r}"
        if self.sync.error_feedback and self.sync.group == 2:
            return "sync.error_feedback = true in pairs"
        return ""

    def canonical(self) -> bytes:
        """The document that this release signs for these settings; a signed run has its own."""
        return write_document(self.model_dump())

    @property
    def run_id(self) -> str:
        """The id of a run that this release signs with these settings; a signed run has its own."""
        return run_id_of(self.canonical())

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one peer trains on in one inner step."""
        return self.train.batch * self.model.context

    @property
    def steps_of_tokens(self) -> int:
        """Steps in which ``start_peers`` train on ``run.tokens``, rounded up."""
        return -(-self.run.tokens // (self.tokens_per_step * self.run.start_peers))


@dataclass(frozen=True)
class SignedRun:
    """A run specification with its creator's signature."""

    spec: RunSpec
    creator: str
    """Peer id of the creator."""
    signature: bytes
    document: bytes
    """Signed bytes: this release may read less of them, or would write them otherwise."""

    @property
    def run_id(self) -> str:
        """The id of the run: digest of its document."""
        return run_id_of(self.document)

    @property
    def fingerprint(self) -> str:
        """The first 12 digits of the run id, enough to pin a run by hand: ``NAME@FINGERPRINT``."""
        return self.run_id[:12]

    def to_bytes(self) -> bytes:
        """The form that is published and kept in files; nobody can pad it."""
        content = {"creator": self.creator, "signature": self.signature.hex()}
        return json.dumps(content | {"spec": self.document.decode()}).encode()


def _layers_of(model: object) -> int | None:
    """Layers of a model that is still to be checked; None where it names none."""
    if model is None or isinstance(model, dict):
        try:
            model = read_model(cast("Content", model or {}))
        except ValidationError:
            return None  # reported when the section is checked
    return getattr(model, "layers", None)


def run_id_of(document: bytes) -> str:
    """The id of the run that has this document: SHA-256, 64 hexadecimal digits."""
    return hashlib.sha256(document).hexdigest()


def parse_toml(
    text: str,
    source: str = "run specification",
    parameters: Callable[[RunSpec], int] | None = None,
) -> RunSpec:
    """Read a specification that a person wrote. Raises SpecError or VersionError.

    ``parameters`` counts those that are trained, where ``fragments = "auto"`` may be resolved.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{source}: not valid TOML: {error}. Correct that line.") from None
    except (ValueError, RecursionError):
        raise SpecError(
            f"{source}: a number is too long or a list too deep: nothing in a run needs that."
        ) from None
    data.pop(PLAN, None)
    _check_version(data, source)
    data = _with_fragments(data, source, parameters)
    spec = _validate(data, source)
    if spec.run.tokens and "steps" not in spec.run.model_fields_set:
        run = cast("Content", data["run"]) | {"steps": spec.steps_of_tokens}
        spec = _validate(data | {"run": run}, source)
    check_new_run(spec, source)
    return spec


def _with_fragments(
    data: dict[str, Any], source: str, parameters: Callable[[RunSpec], int] | None
) -> dict[str, Any]:
    """The same with a number in place of ``fragments = "auto"``."""
    sync = data.get("sync")
    if not isinstance(sync, dict) or cast("Content", sync).get("fragments") != AUTO:
        return data
    if parameters is None:
        raise SpecError(
            f'{source}: sync.fragments = "auto" needs a program that builds the model: publish the '
            "run with one, or set a number."
        )
    rest = {name: value for name, value in cast("Content", sync).items() if name != "fragments"}
    spec = _validate(data | {"sync": rest}, source)
    try:
        count = fragment_count(parameters(spec), spec.sync.interval, spec.sync.fragments)
    except SpecError as error:
        raise SpecError(f"{source}: sync: {error}.") from None
    return data | {"sync": rest | {"fragments": count}}


def fragment_count(parameters: int, interval: int, least: int) -> int:
    """Number of fragments with "auto": ``least`` or more, at most one for each step.

    Raises SpecError where that leaves them too large.
    """
    count = min(interval, max(least, -(-parameters // VALUES)))
    if parameters > count * MOST_VALUES:
        raise SpecError(
            f'fragments = "auto": {parameters:,} parameters in interval = {interval} fragments are '
            f"more than {MOST_VALUES:,} values each: set interval = "
            f"{-(-parameters // MOST_VALUES)} or more"
        )
    return count


def check_new_run(spec: RunSpec, source: str = "run specification") -> None:
    """Raise SpecError for what only new runs must keep to, beside the bounds of their settings."""
    if spec.retired:
        raise SpecError(
            f"{source}: {spec.retired}, which only earlier releases can train with: set codec = "
            '"q2", and error_feedback = true only with group = 3 or more.'
        )
    if spec.run.tokens and spec.run.steps != spec.steps_of_tokens:
        raise SpecError(
            f"{source}: run.tokens = {spec.run.tokens:,} are {spec.steps_of_tokens:,} steps of "
            f"start_peers = {spec.run.start_peers} with {spec.tokens_per_step:,} tokens each, but "
            f"run.steps = {spec.run.steps:,}: set steps = {spec.steps_of_tokens}, or remove one of "
            "the two."
        )
    known = _known(type(spec.model))
    for name in spec.optional:
        if name not in known and not any(path.startswith(f"{name}.") for path in known):
            raise SpecError(
                f"{source}: optional names {shown(name)}, which is no setting: correct or remove "
                "it."
            )
    needed = BUILTIN_TOKENS.get(spec.data.tokenizer, 0)
    if spec.model.vocab < needed:
        raise SpecError(
            f"{source}: model.vocab = {spec.model.vocab} is too small for tokenizer = "
            f'"{spec.data.tokenizer}": set vocab = {needed}.'
        )
    for part in spec.data.parts:
        if part.piece_tokens < spec.model.context:
            raise SpecError(
                f"{source}: model.context = {spec.model.context} is more than the "
                f"{part.piece_tokens:,} tokens in a piece of {part.name}: lower it, or pack the "
                "text with larger pieces."
            )
    if spec.tokens_per_step > MAX_STEP_TOKENS:
        raise SpecError(
            f"{source}: train.batch = {spec.train.batch} times model.context = "
            f"{spec.model.context} are {spec.tokens_per_step:,} tokens in an inner step, more than "
            f"{MAX_STEP_TOKENS:,}: lower one of the two."
        )


def check_trainable(spec: RunSpec) -> None:
    """Raise VersionError if only earlier releases can train in a run."""
    if spec.retired:
        raise VersionError(
            f"The run has {spec.retired}, which only earlier releases can train with: join with "
            "the release that its creator names, or ask for a new run."
        )


def parse_canonical(text: str, source: str = "run specification") -> RunSpec:
    """Read the document of a run, of any release. Raises SpecError or VersionError."""
    content = read_content(text, source)
    _check_version(content, source)
    kind = settings_of_kind(content.get("model", {}))
    if kind is ModelSettings:
        _validate(content, source)  # raises, and names the kinds that there are
    spec = _validate(fill(content, _known(kind), source), source)
    if not is_encoding(text, content, spec.model_dump()):
        raise SpecError(
            f"{source}: the document is not in its canonical form; its creator must sign it anew."
        )
    return spec


def amended(spec: RunSpec, settings: Mapping[str, Any], source: str) -> RunSpec:
    """A specification with other values of some ``SECTION.SETTING``. Raises SpecError."""
    data = spec.model_dump()
    for name, value in settings.items():
        section, _, setting = name.partition(".")
        if name == SHARES:
            setting, value = "parts", _with_shares(spec.data.parts, value, source)
        data[section][setting] = value
    if "run.steps" in settings:
        data["run"]["tokens"] = 0  # steps were chosen
    return _validate(data, source)


def _with_shares(parts: Sequence[PackedText], shares: object, source: str) -> list[dict[str, Any]]:
    given = cast("list[object]", shares) if isinstance(shares, list) else []
    if len(given) != len(parts) or not parts:
        raise SpecError(
            f"{source}: {SHARES} = {shown(cast('object', shares))}: expected a share for each of "
            f"the run's {len(parts)} packed texts, in their order."
        )
    return [part.model_dump() | {"share": share} for part, share in zip(parts, given, strict=True)]


def sign_run(spec: RunSpec, creator: Identity) -> SignedRun:
    """Sign a specification, and name its creator in it. Raises SpecError."""
    if spec.run.creator not in ("", creator.peer_id):
        raise SpecError(
            f"run.creator = {spec.run.creator!r}, but {creator.peer_id} signs: remove that line, "
            "or sign with its key."
        )
    check_new_run(spec)
    spec = spec.model_copy(update={"run": spec.run.model_copy(update={"creator": creator.peer_id})})
    document = spec.canonical()
    signed = SignedRun(spec, creator.peer_id, creator.sign(_PURPOSE, document), document)
    if len(document) > MAX_SPEC_BYTES or len(signed.to_bytes()) > MAX_SIGNED_BYTES:
        raise SpecError(
            f"The specification has {len(document)} bytes, more than {MAX_SPEC_BYTES}, or too many "
            "with its signature: shorten description, members or export.chat_template."
        )
    return signed


def read_signed_run(data: bytes, source: str = "run specification") -> SignedRun:
    """Read a published specification and check its signature.

    Raises SpecError, VersionError if this release can't read it, or SignatureError.
    """
    creator, document, signature = _read_envelope(data, source)
    spec = parse_canonical(document.decode(), source)
    if spec.run.creator != creator:
        # Or anybody could sign a copy of a run, and invite and remove in its name.
        raise SignatureError(
            f"{source}: signed by {creator}, but its creator is {spec.run.creator or 'not named'}."
        )
    return SignedRun(spec, creator, signature, document)


def name_signed_run(data: bytes, source: str = "run specification") -> tuple[str, str]:
    """Run id and creator of a run that storers keep, even if they can't read all of it.

    Raises SpecError, SignatureError.
    """
    creator, document, _ = _read_envelope(data, source)
    run = read_content(document.decode(), source).get("run")
    if not isinstance(run, dict) or cast("dict[str, Any]", run).get("creator") != creator:
        raise SignatureError(
            f"{source}: signed by {creator}, which the specification does not name as its creator."
        )
    return run_id_of(document), creator


def _read_envelope(data: bytes, source: str) -> tuple[str, bytes, bytes]:
    """Creator, document and signature, which is checked. Raises SpecError, SignatureError."""
    if len(data) > 2 * MAX_SPEC_BYTES:
        raise SpecError(
            f"{source}: {len(data)} bytes are too many for a signed run; it is refused."
        )
    try:
        envelope = json.loads(data)
        creator, document = str(envelope["creator"]), str(envelope["spec"]).encode()
        signature = bytes.fromhex(envelope["signature"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SpecError(f"{source}: not a signed run: sign a run.toml to create one.") from None
    verify(creator, _PURPOSE, document, signature)
    return creator, document, signature


def _check_version(data: dict[str, Any], source: str) -> None:
    version = data.get("version", SPEC_VERSION)
    if version != SPEC_VERSION:
        raise VersionError(
            f"{source}: version {shown(version)} is not {SPEC_VERSION}, which this release speaks: "
            "install the release that the run's creator names."
        )


def _validate(data: dict[str, Any], source: str) -> RunSpec:
    try:
        return RunSpec.model_validate(data)
    except ValidationError as error:
        raise SpecError(
            f"{source}: {_explain(error, settings_of_kind(data.get('model', {})))}"
        ) from None
    except (SpecError, CodecError) as error:
        raise SpecError(f"{source}: sync: {error}") from None


def _explain(error: ValidationError, model: type[ModelSettings]) -> str:
    first = error.errors(include_url=False)[0]
    *path, key = map(str, first["loc"] or ("",))
    where = ".".join((*path, key))[:80]
    if first["type"] == "extra_forbidden":
        keys = _keys_at(path, model)
        near = get_close_matches(key, keys, 1)
        remedy = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(keys)}."
        return f"unknown key {where!r}; {remedy}"
    if first["type"] == "missing":
        return f"{where!r} is missing: add it."
    message = expected_in_words(first)
    if isinstance(first["input"], dict):  # settings that do not work together
        return f"{where}: {message}." if where else f"{message}."
    return f"{where} = {shown(first['input'])}: {message}." if where else f"{message}."


@cache
def _known(model: type[ModelSettings]) -> frozenset[str]:
    """All settings by ``SECTION.SETTING``, with this class of ``[model]``."""
    return frozenset(
        f"{section}.{name}" if name else section
        for section in RunSpec.model_fields
        for name in _keys_at([section], model) or [""]
    )


def _keys_at(path: list[str], model: type[ModelSettings]) -> list[str]:
    """The keys of a section, or of an item of a list in one; none of a value."""
    kind: Any = RunSpec
    for part in path:
        if part.isdigit():  # the number of an item in a list
            continue
        kind = model if part == "model" else kind.model_fields[part].annotation
        kind = next(iter(get_args(kind)), kind)
    return list(getattr(kind, "model_fields", ()))
