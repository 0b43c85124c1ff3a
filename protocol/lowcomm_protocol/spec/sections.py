"""The sections of a run specification: what a creator chooses, and within which bounds.

A specification comes from strangers, so nothing in it can name a file, a module or an address: it
can only choose from what is listed here and in the tables of names.py. A new setting needs a line
in ``document.ADDED``: what a run means that was signed before the setting existed.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import ceil, log2
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from lowcomm_protocol.errors import SignatureError
from lowcomm_protocol.identity import public_key_of
from lowcomm_protocol.spec.names import (
    CODECS,
    MAX_GROUP,
    MODELS,
    OUTER_RULES,
    PAIRINGS,
    RETIRED_CODECS,
    Mean,
    Table,
)
from lowcomm_protocol.spec.outer import OuterSettings, validate_outer
from lowcomm_protocol.spec.presets import PRESETS

BYTES = 256
"""Tokens of ``tokenizer = "bytes"``."""
STORY_TOKENS = 672
"""Room for the tokens of ``tokenizer = "builtin:stories"``."""
BUILTIN_TOKENS = {"bytes": BYTES, "builtin:stories": STORY_TOKENS}
"""Tokens of the tokenizers that need no file."""
MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
"""Largest tokenizer.json; the largest published ones have half of it."""
MAX_MEMBERS = 256
MAX_CELLS = 1024
CELL_SHARE = 0.6
"""Share of a group that the members of a cell fill on average: chance makes some cells larger."""
MAX_RANK = 1024
ALL_LINEAR = "all-linear"
MAX_LICENCE = 200
"""Characters."""
MAX_CHAT_TEMPLATE = 16 * 1024
"""Characters."""

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Token = Annotated[int, Field(ge=0, lt=1_000_000)]
_Number = Annotated[int | float, Field(ge=-1000, le=10_000_000, allow_inf_nan=False)]
_Tokens = Token | Annotated[list[Token], Field(min_length=1, max_length=64)]
GENERATION_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "suppress_tokens")
_NUMBERS = (
    *("max_length", "max_new_tokens", "min_p", "no_repeat_ngram_size", "repetition_penalty"),
    *("temperature", "top_k", "top_p", "typical_p"),
)
_STRICT = ConfigDict(strict=True)
GENERATION: Mapping[str, TypeAdapter[Any]] = {
    "do_sample": TypeAdapter(bool, config=_STRICT),
    **dict.fromkeys(_NUMBERS, TypeAdapter[Any](_Number, config=_STRICT)),
    **dict.fromkeys(GENERATION_TOKENS, TypeAdapter[Any](_Tokens, config=_STRICT)),
}
"""Keys of ``generation_config.json`` that a run keeps, and their values."""


def _check_peer_id(text: str) -> str:
    try:
        public_key_of(text)
    except SignatureError:
        raise ValueError(
            "expected a peer id such as 12D3KooW..., as a node shows its own"
        ) from None
    return text


PeerId = Annotated[str, AfterValidator(_check_peer_id)]


def _in_order(values: Any) -> Any:
    given = cast("list[Any]", values)
    is_texts = isinstance(values, list | tuple) and all(isinstance(text, str) for text in given)
    return tuple(sorted(set(given))) if is_texts else given


SORTED = BeforeValidator(_in_order)
"""Puts texts into their one order, each once."""


def shown(value: object, most: int = 80) -> str:
    """A value of a stranger, short: a huge number or a deep list has no ``repr``."""
    plain = isinstance(value, str | float | None) or (
        isinstance(value, int) and value.bit_length() < 256
    )
    return repr(value)[:most] if plain else "(a list)" if isinstance(value, list) else "(a table)"


@dataclass(frozen=True)
class OneOf:
    """Marks a name that must be in a table."""

    table: Table[Any]
    retired: Container[str] = ()
    """Names that only earlier releases have."""

    def __call__(self, name: str) -> str:
        """Raises ValueError, which lists the entries."""
        if name not in self.table and name not in self.retired:
            raise ValueError(self.table.unknown(name))
        return name


class Settings(BaseModel):
    """A section: unknown keys are refused, and no value is converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RunSettings(Settings):
    """``[run]``: name, seed of all randomness, length, and who may join."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    description: Annotated[str, Field(max_length=500)] = ""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    steps: Annotated[int, Field(ge=1, le=100_000_000)] = 400
    """Length of the run in swarm steps."""
    tokens: Annotated[int, Field(ge=0, le=1 << 50)] = 0
    """Length in tokens of all peers, which ``steps`` follows from where ``start_peers`` train all
    the time; 0: ``steps`` was chosen."""
    start_peers: Annotated[int, Field(ge=1, le=1024)] = 1
    """How many peers must be there before the first step; after it nobody waits for anybody."""
    creator: Annotated[str, AfterValidator(lambda text: text and _check_peer_id(text))] = ""
    """Peer id of the signer, who alone signs invites and removals; filled in by signing."""
    admission: Literal["open", "invite", "list"] = "open"
    """Who may join: anybody, whom the creator invites, or the members; the creator always may."""
    members: Annotated[tuple[PeerId, ...], SORTED, Field(strict=False, max_length=MAX_MEMBERS)] = ()
    """Peer ids of those who may join with ``admission = "list"``, sorted."""

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        if self.members and self.admission != "list":
            raise ValueError(
                f'members are given, but admission = "{self.admission}": set admission = "list", '
                "or remove them"
            )
        if self.admission == "list" and not self.members:
            raise ValueError('admission = "list" needs members: the peer ids of those who may join')
        # It is shown on the terminals of strangers, who must not get escape sequences.
        if not self.description.isprintable():
            raise ValueError("description must be one line of printable text")
        return self


class ModelSettings(Settings):
    """``[model]``: settings of all kinds of model; the family of ``kind`` adds its own."""

    kind: Annotated[str, AfterValidator(OneOf(MODELS))] = "transformer"
    vocab: Annotated[int, Field(ge=2, le=1_000_000)] = 256
    context: Annotated[int, Field(ge=8, le=1_048_576)] = 64


def settings_of_kind(data: object) -> type[ModelSettings]:
    """The class of ``[model]`` that ``data`` names; `ModelSettings` if there is none."""
    kind = (
        cast("dict[str, Any]", data).get("kind", "transformer") if isinstance(data, dict) else None
    )
    return MODELS[kind] if isinstance(kind, str) and kind in MODELS else ModelSettings


def read_model(data: Mapping[str, Any]) -> ModelSettings:
    """The settings of a model of any kind. Raises ValidationError."""
    found = settings_of_kind(data)
    # Of an unknown kind the kind alone is wrong: nobody can tell which of the others are.
    return found.model_validate(data if found is not ModelSettings else {"kind": data["kind"]})


PIECE_BYTES = 16 * 1024 * 1024
"""Bytes of a piece of a file: what is hashed, asked for and given at once."""
SMALLEST_PIECE = 16 * 1024
MAX_PARTS = 8
MAX_PACK_BYTES = 1 << 43
MAX_PACK_PIECES = 1 << 20
"""A list of 32 MiB, and a bitmap of 128 KiB in each session."""
DIGEST_BYTES = 32

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, order=True)
class TextPiece:
    """A piece of packed text in one epoch, which deals windows to it (`reading.Deal`)."""

    part: int
    """Its place in ``data.parts``."""
    epoch: int
    """How often all of the part was read before."""
    piece: int


class PackedText(Settings):
    """``[[data.parts]]``: one packed text, pinned by the digest of its list of pieces.

    The file has whole pieces, the last of each kind padded with zeros: first those of training
    text, then those of held-out text. A token is a little-endian integer.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    """For people; never a path."""
    pieces: Digest
    """SHA-256 of the SHA-256s of its pieces, one after the other."""
    tokens: Annotated[int, Field(ge=1, le=1 << 50)]
    """Tokens of training text."""
    held_out_tokens: Annotated[int, Field(ge=1, le=1 << 40)]
    piece_bytes: Annotated[int, Field(ge=SMALLEST_PIECE, le=PIECE_BYTES)] = PIECE_BYTES
    """Bytes of a piece, a power of two."""
    token_bytes: Literal[2, 4] = 2
    masked: bool = False
    """Whether the highest bit of a token says that it is read, but not learned: a prompt."""
    share: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] = 1.0
    """Share of the windows that are of this text, over the sum of all shares."""
    mirrors: Annotated[
        tuple[Annotated[str, Field(max_length=200, pattern=r"^https://[!-~]+$")], ...],
        Field(strict=False, max_length=4),
    ] = ()
    """Addresses that serve the file, too. A node calls them only where its owner allows that."""

    @model_validator(mode="after")
    def _pieces_are_whole(self) -> Self:
        if self.piece_bytes & (self.piece_bytes - 1):
            raise ValueError(f"piece_bytes = {self.piece_bytes} is not a power of two")
        if self.size > MAX_PACK_BYTES:
            raise ValueError(
                f"{self.size:,} bytes are more than {MAX_PACK_BYTES:,}: make two packs"
            )
        if self.piece_count > MAX_PACK_PIECES:
            raise ValueError(
                f"{self.piece_count:,} pieces are more than {MAX_PACK_PIECES:,}: make larger pieces"
            )
        if self.masked and self.token_bytes == 2:
            raise ValueError("masked text needs token_bytes = 4")
        return self

    @property
    def piece_tokens(self) -> int:
        """Tokens of a piece."""
        return self.piece_bytes // self.token_bytes

    @property
    def training_pieces(self) -> int:
        """Pieces of training text; those of held-out text follow."""
        return -(-self.tokens // self.piece_tokens)

    @property
    def piece_count(self) -> int:
        """All pieces."""
        return self.training_pieces + -(-self.held_out_tokens // self.piece_tokens)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.piece_count * self.piece_bytes


class DataSettings(Settings):
    """``[data]``: which text. ``local``: every owner chooses their own."""

    source: Literal["builtin:python", "builtin:stories", "local", "packed"] = "builtin:python"
    parts: Annotated[tuple[PackedText, ...], Field(strict=False, max_length=MAX_PARTS)] = ()
    """With ``source = "packed"``: the texts, which peers send one another."""
    shuffle_bytes: Annotated[int, Field(ge=SMALLEST_PIECE, le=1 << 27)] = 32 << 20
    """Bytes of neighbouring pieces whose windows are shuffled together; at least one piece."""
    tokenizer: Literal["bytes", "builtin:stories", "local"] = "bytes"
    tokenizer_sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """SHA-256 of the one tokenizer.json that all peers use with ``tokenizer = "local"``; empty:
    nobody checks it."""
    tokenizer_size: Annotated[int, Field(ge=0, le=MAX_TOKENIZER_BYTES)] = 0
    """Bytes of that file; 0: nobody knows, as in runs that were signed before."""
    tokenizer_pieces: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """SHA-256 of the SHA-256s of its pieces, as of ``start.files``."""
    tokenizer_check: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """SHA-256 of the tokens of a fixed text, since releases of the library may differ; empty: not
    checked."""
    begin_tokens: Annotated[tuple[Token, ...], Field(strict=False, max_length=8)] = ()
    """Tokens before each document and each prompt of ``generate``."""
    end_token: Token | None = None
    """Token after each document; missing: one that the tokenizer names ``<|endoftext|>``,
    ``<|end_of_text|>``, ``</s>``, ``<eos>`` or ``[SEP]``."""

    @model_validator(mode="after")
    def _parts_are_of_packed_text(self) -> Self:
        if (self.source == "packed") != bool(self.parts):
            raise ValueError('source = "packed" and [[data.parts]] go together: give both or none')
        if self.parts and not sum(part.share for part in self.parts):
            raise ValueError("the shares of all parts are 0: raise one of them")
        if len({part.pieces for part in self.parts}) < len(self.parts):
            raise ValueError("two parts are the same text: list it once")
        if self.parts and self.tokenizer == "local" and not self.tokenizer_sha256:
            raise ValueError("packed text needs its tokenizer pinned: set tokenizer_sha256")
        return self

    @model_validator(mode="after")
    def _sha256_is_of_a_file(self) -> Self:
        names = ("tokenizer_sha256", "tokenizer_size", "tokenizer_pieces", "tokenizer_check")
        for name in (*names, "begin_tokens", "end_token"):
            given = getattr(self, name) != type(self).model_fields[name].default
            if given and self.tokenizer != "local":
                raise ValueError(
                    f'{name} is given, but tokenizer = "{self.tokenizer}": set "local", or remove '
                    "it"
                )
        pinned = [bool(self.tokenizer_size), bool(self.tokenizer_pieces)]
        if any(pinned) and not (all(pinned) and self.tokenizer_sha256):
            raise ValueError(
                "tokenizer_sha256, tokenizer_size and tokenizer_pieces go together: "
                "take all three from one tokenizer.json, or none"
            )
        return self


class ExportSettings(Settings):
    """``[export]``: what exports say beside the weights, for programs that let the model write."""

    bos_token_id: Token | None = None
    eos_token_id: Annotated[tuple[Token, ...], Field(strict=False, max_length=16)] = ()
    """Tokens that end a text; none: the one after each document."""
    pad_token_id: Token | None = None
    positions: Annotated[int, Field(ge=0, le=1 << 30)] = 0
    """Tokens that the model reads at most, where that is more than ``context``."""
    chat_template: Annotated[str, Field(max_length=MAX_CHAT_TEMPLATE)] = ""
    """In Jinja, for conversations; peers do not render it for one another."""
    base: Annotated[str, Field(max_length=100)] = ""
    """Name of the weights that the run began with."""
    licences: Annotated[
        tuple[Annotated[str, Field(max_length=MAX_LICENCE)], ...],
        Field(strict=False, max_length=16),
    ] = ()
    """Licences of these weights and of the texts."""
    generation: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Settings of ``generation_config.json``: numbers, true or false, and lists of tokens."""

    @field_validator("base", "licences")
    @classmethod
    def _card_is_plain(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not all(text.isprintable() for text in ([value] if isinstance(value, str) else value)):
            raise ValueError("must be one line of printable text")
        return value

    @field_validator("generation")
    @classmethod
    def _generation_is_listed(cls, told: dict[str, Any]) -> dict[str, Any]:
        for name, value in told.items():
            if name not in GENERATION:
                raise ValueError(f"unknown key {name[:80]!r}; there are {', '.join(GENERATION)}")
            try:
                GENERATION[name].validate_python(value)
            except ValidationError as error:
                reason = error.errors(include_url=False)[0]["msg"]
                raise ValueError(f"{name}: {reason}") from None
        return told


class TrainSettings(Settings):
    """``[train]``: the inner optimizer and its schedule over swarm steps."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """Muon takes the matrices of the blocks; AdamW the rest."""
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]
    """Peak; 0.003 for AdamW and 0.02 for Muon unless given."""
    adamw_share: Fraction = 0.3
    """AdamW's share of ``learning_rate`` where Muon takes the matrices."""
    muon_momentum: Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)] = 0.9
    warmup: Annotated[int, Field(ge=0, le=10_000_000)] = 40
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """How the rate falls after the warm-up: over all steps that are left, in the last of them
    (warm-up, stable, decay), or never."""
    decay: Fraction = 0.2
    """Share of the steps after the warm-up in which ``wsd`` lets the rate fall."""
    final_learning_rate: Fraction = 0.1
    """Fraction of ``learning_rate`` at the end; without meaning where it never falls."""
    batch: Annotated[int, Field(ge=1, le=65_536)] = 8
    """Sequences an inner step."""
    weight_decay: Fraction
    """0.1 for AdamW and 0.01 for Muon unless given."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)] = 0.9
    beta2: Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)] = 0.95
    clip: Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)] = 1.0
    """Largest norm of the gradient."""
    document_mask: bool = False
    """Whether attention, and positions, end with a document."""
    evaluate_every: Positive = 100
    """Inner steps between two evaluations on held-out text."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = cast("dict[str, Any]", data)
        muon = given.get("optimizer") == "muon"
        return {
            "learning_rate": 0.02 if muon else 3e-3,
            "weight_decay": 0.01 if muon else 0.1,
        } | given


class SyncSettings(Settings):
    """``[sync]``: when, with how many, and how fragments are exchanged; a method presets it."""

    method: Annotated[str, AfterValidator(OneOf(PRESETS))] = "lowcomm"
    interval: Annotated[int, Field(ge=1, le=1_000_000)]
    """H: swarm steps between two syncs of one fragment."""
    fragments: Annotated[int, Field(ge=1, le=4096)]
    """P: pieces that the model is cut into."""
    pattern: Literal["strided", "sequential", "even"]
    """Whole layers, in turn or in runs; or rows, so that all fragments are of one size."""
    overlap: Annotated[int, Field(ge=0, le=1_000_000)]
    """tau: inner steps between capture and merge, at least; an exchange that takes longer merges
    when it is done."""
    codec: Annotated[str, AfterValidator(OneOf(CODECS, RETIRED_CODECS))]
    error_feedback: bool = False
    """What coding loses of one exchange is added to the next."""
    mean: Mean = "clip"
    """How a group of three or more averages: see robust.py."""
    group: Annotated[int, Field(ge=1, le=MAX_GROUP)]
    """How many peers meet in one exchange, at most: 1 never communicates, 2 are pairs."""
    pairing: Annotated[str, AfterValidator(OneOf(PAIRINGS))] = "hypercube"
    """Whom a peer meets where ``group = 2``: across a hypercube, or in pairs drawn anew each
    time."""
    cells: Annotated[int, Field(ge=1, le=MAX_CELLS)] = 1
    """Parts of a swarm that is larger than a group, a power of two: groups form within one, and
    what each learns passes on to the others."""
    min_steps: Annotated[int, Field(ge=1, le=1_000_000)]
    """Own inner steps since a fragment's last contribution before another exchange of it."""
    outer: Annotated[str, AfterValidator(OneOf(OUTER_RULES))]
    outer_lr: Annotated[float, Field(gt=0.0, le=10.0, allow_inf_nan=False)]
    momentum: Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)]
    memory: Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)] = 0.0
    """Share of the outer momentum that an outer step of ``noloco`` keeps after an interval
    (quasi-global momentum); 0: the momentum is the last step. A file that has ``momentum`` and no
    ``memory`` means 0."""
    consensus: Annotated[float, Field(ge=0.0, le=10.0, allow_inf_nan=False)]
    """Pull of the slow weights towards those of the group (NoLoCo's gamma)."""
    merge: Literal["shift", "mix"]
    mix: Fraction
    """Share of the fast weights that ``merge = "mix"`` keeps."""

    def realigns_among(self, peers: int) -> bool:
        """Whether this number of peers would often realign: a cell has more than a group, and
        nothing pulls their weights together."""
        return self.group > 1 and self.consensus == 0 and peers > self.group * self.cells

    def cells_for(self, peers: int) -> int:
        """Choose the number of cells for this number of peers; 1 where a group holds them."""
        if peers <= self.group:
            return 1
        return min(MAX_CELLS, 1 << ceil(log2(peers / (CELL_SHARE * self.group))))

    @property
    def outer_settings(self) -> OuterSettings:
        """The settings of the outer optimizer alone."""
        values = self.outer_lr, self.momentum, self.consensus, self.merge, self.mix, self.memory
        return OuterSettings(self.outer, *values)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        codec = RETIRED_CODECS.get(self.codec) or CODECS[self.codec]
        if codec.only_in_pairs and self.group > 2:
            raise ValueError(
                f"codec = {self.codec!r} {codec.only_in_pairs}, which works in pairs: set group = "
                f'2, or codec = "e3m0"; group is {self.group}'
            )
        if self.fragments > self.interval:
            raise ValueError(
                f"fragments = {self.fragments} exceeds interval = {self.interval}: two fragments "
                "would be due at once"
            )
        if self.min_steps > self.interval:
            raise ValueError(
                f"min_steps = {self.min_steps} exceeds interval = {self.interval}: nobody would "
                "accept"
            )
        if self.consensus > 0 and codec.coarse:
            raise ValueError(
                f"codec = {self.codec!r} is too coarse for absolute weights, which consensus = "
                f"{self.consensus} needs: "
                'set consensus = 0 with groups of the whole swarm, or codec = "fp32" or "bf16"'
            )
        if self.cells > 1 and (self.group == 2 or self.consensus > 0):
            raise ValueError(
                f"cells = {self.cells} needs groups of three or more with consensus = 0: pairs and "
                "groups whose weights are pulled together meet anybody"
            )
        if self.cells & (self.cells - 1):
            above = 1 << self.cells.bit_length()
            raise ValueError(
                f"cells = {self.cells} is not a power of two: set {above // 2} or {above}"
            )
        if self.group > 1:
            validate_outer(self.outer_settings, self.group)
        return self


MAX_FILES = 64
"""With so many the specification still fits into its record."""
MAX_FILE_BYTES = 1 << 40


class StartFile(Settings):
    """One file of weights."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.safetensors$")]
    """Its name alone: it never is a path."""
    size: Annotated[int, Field(ge=1, le=MAX_FILE_BYTES)]
    """Bytes."""
    sha256: Digest
    pieces: Digest
    """SHA-256 of the SHA-256s of its pieces, one after the other."""


class StartSettings(Settings):
    """``[start]``: files of weights to begin with. None: random weights, drawn from the seed."""

    files: Annotated[tuple[StartFile, ...], Field(strict=False, max_length=MAX_FILES)] = ()
    """Files of weights in safetensors, under the names of transformers."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        if len({file.name for file in self.files}) < len(self.files):
            raise ValueError("two files have the same name: each is listed once")
        return self

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


class AdapterSettings(Settings):
    """``[adapter]``: train low-rank factors beside the frozen weights of ``[start]``.

    A matrix W becomes W + alpha / rank * B A (LoRA, 2106.09685). A is drawn from the run's seed and
    stays, so that the mean of B is that of B A (FFA-LoRA, 2403.12313); B begins at zero.
    """

    rank: Annotated[int, Field(ge=1, le=MAX_RANK)]
    """Rows of A and columns of B."""
    alpha: Annotated[float, Field(gt=0.0, le=65_536.0, allow_inf_nan=False)] = 32.0
    dropout: Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)] = 0.0
    """Share of the values that A does not see in a step."""
    targets: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,40}$")], ...],
        SORTED,
        Field(strict=False, min_length=1, max_length=16),
    ] = (ALL_LINEAR,)
    """Names of matrices in transformers, such as ``q_proj``; ``all-linear``: all of the blocks."""
    train_also: Annotated[
        tuple[Literal["embeddings", "norms"], ...], SORTED, Field(strict=False)
    ] = ()
    """Weights that are trained whole: embeddings and head, or norms."""
    base: Literal["bf16", "int8", "nf4"] = "bf16"
    """What all peers hold of the frozen matrices of the blocks; the rest is in bf16."""


def count_pieces(size: int) -> int:
    """How many pieces a file of so many bytes has."""
    return -(-size // PIECE_BYTES)


def digest_of_pieces(digests: Sequence[bytes]) -> str:
    """What ``StartFile.pieces`` says of a file whose pieces have these digests."""
    return sha256(b"".join(digests)).hexdigest()
