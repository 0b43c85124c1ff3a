"""The run.toml that ``init`` writes: every setting with a comment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tomlkit
from tomlkit.items import Table

from lowcomm_node.errors import ConfigError
from lowcomm_protocol.spec.names import CODECS, codecs_for_groups
from lowcomm_protocol.spec.presets import PRESETS
from lowcomm_protocol.spec.run import parse_toml
from lowcomm_protocol.spec.sections import (
    STORY_TOKENS,
    DataSettings,
    ExportSettings,
    ModelSettings,
    StartSettings,
)

FINE_TUNING: Mapping[str, object] = {
    "optimizer": "adamw",
    "learning_rate": 5e-5,
    "weight_decay": 0.01,
}
"""``[train]`` of a run that begins with open weights: rates for random ones would spoil them."""


@dataclass(frozen=True)
class TokenizerFile:
    """What a run says of its tokenizer."""

    vocab: int
    """Exclusive upper bound of the tokens."""
    sha256: str
    """Of its file; empty if it has none."""
    size: int = 0
    """Bytes of its file."""
    pieces: str = ""
    """Digest of the list of its pieces' digests."""
    check: str = ""
    """Of its tokens of a fixed text."""
    begin_tokens: tuple[int, ...] = ()
    end_token: int | None = None
    export: ExportSettings = field(default_factory=ExportSettings)
    warnings: tuple[str, ...] = ()
    """What the run can't keep of it."""


@dataclass(frozen=True)
class OpenWeights:
    """What a run says of the weights that it begins with."""

    model: ModelSettings
    longest: int
    """Largest ``context`` that the model reads."""
    start: StartSettings
    warnings: tuple[str, ...] = ()
    """What the run can't keep of them."""


@dataclass(frozen=True)
class BuiltinText:
    """A text that comes with every node, and the settings that suit it, by section."""

    data: Mapping[str, object]
    model: Mapping[str, object]


TEXTS: Mapping[str, BuiltinText] = {
    "stories": BuiltinText(
        data={"source": "builtin:stories", "tokenizer": "builtin:stories"},
        model={"vocab": STORY_TOKENS, "context": 128},
    ),
    "python": BuiltinText(data={}, model={}),
}
"""By the name that `demo --text` takes."""

_COMMENTS = {
    "name": "what people type: join --run NAME",
    "seed": "all randomness of the run derives from it",
    "steps": "length in swarm steps; the learning rate follows them",
    "start_peers": "how many must be there before the first step; afterwards nobody waits",
    "admission": 'who may join: "open", "invite" (lowcomm-node invite), or "list" (members below)',
    "members": "their peer ids, as `lowcomm-node id` shows them",
    "vocab": "256 bytes, or the size of your tokenizer",
    "kv_heads": "heads of keys and values; 0: as many as heads",
    "head_width": "channels of a head; 0: width / heads",
    "qkv_bias": "biases of queries, keys and values, as Qwen 2 has",
    "qk_norm": "normed queries and keys, as Qwen 3 has",
    "rope_scaling": '"none", or "llama3": see docs/specification.md',
    "feed_forward": "width of the SwiGLU layer, about 8/3 of width",
    "context": "tokens a sequence",
    "tied": "one matrix for embedding and head",
    "source": '"builtin:python" is the standard library, "builtin:stories" tiny stories from a'
    ' grammar; "local": every owner names text with --data',
    "tokenizer": '"bytes"; "builtin:stories": words of these; or "local": every owner names a'
    " tokenizer.json with --tokenizer",
    "tokenizer_sha256": "of that file; others are refused. `create --tokenizer PATH` fills it in",
    "tokenizer_size": "its bytes; filled in likewise, as is what follows",
    "tokenizer_pieces": "of the list of its pieces",
    "tokenizer_check": "of its tokens of a fixed text",
    "begin_tokens": "before each document and each prompt, as the tokenizer's template has them",
    "end_token": "after each document",
    "positions": "tokens that the model reads at most; this section is for exports alone",
    "optimizer": '"adamw", or "muon" for the matrices of the blocks',
    "learning_rate": "peak",
    "adamw_share": "of learning_rate, for what Muon does not take",
    "warmup": "swarm steps",
    "schedule": '"cosine"; "wsd": falls in the last steps only; "constant"',
    "decay": "share of the steps in which wsd falls",
    "final_learning_rate": "fraction of the peak at the end",
    "batch": "sequences an inner step, at every peer",
    "clip": "largest norm of the gradient",
    "evaluate_every": "inner steps between two looks at held-out text",
    "method": "a preset of all below; these values override it",
    "interval": "H: swarm steps between two syncs of a fragment",
    "fragments": 'P: pieces that are exchanged one at a time; "auto": about 16 million values each',
    "pattern": 'layers in a fragment: "strided", "sequential"; "even": rows, all of one size',
    "overlap": "inner steps between capture and merge, at least",
    "codec": f"{', '.join(codecs_for_groups())}; in pairs also "
    f"{', '.join(sorted({*CODECS} - {*codecs_for_groups()}))}",
    "error_feedback": "what coding loses is added to the next exchange: for few bits",
    "mean": '"clip", "median", "trimmed": what a liar among three or more can move; "mean":'
    " everything",
    "group": "how many meet in one exchange, at most; 2 are pairs",
    "pairing": 'of pairs: "hypercube" spreads weights fastest, "random" draws them anew each time',
    "slice_rounds": "syncs for which the same peers meet, where a swarm is larger than a group",
    "min_steps": "inner steps before a peer accepts the same fragment again",
    "outer": '"nesterov" (DiLoCo) or "noloco"',
    "outer_lr": "step of the outer optimizer (NoLoCo's beta)",
    "momentum": "of the outer optimizer (NoLoCo's alpha)",
    "memory": "share of the momentum that a step keeps, of many steps a mean; 0: NoLoCo's rule",
    "consensus": "pull towards the group (NoLoCo's gamma); 0 where all always meet",
    "merge": '"shift" keeps the steps done meanwhile, "mix" averages',
    "mix": 'share of the fast weights that "mix" keeps',
    "up": "what the line of a peer sends; this section is for `create` alone and never signed",
    "down": "what it receives",
    "step_seconds": "of an inner step of a peer",
    "peers": "how many are expected",
    "latency": "milliseconds there and back between two peers",
}


def write_template(
    name: str,
    method: str,
    steps: int,
    seed: int,
    start_peers: int = 1,
    interval: int | None = None,
    optimizer: str | None = None,
    admission: str = "open",
    members: Sequence[str] = (),
    tokenizer: TokenizerFile | None = None,
    weights: OpenWeights | None = None,
    model: ModelSettings | None = None,
    changes: Mapping[str, object] | None = None,
    plan: Mapping[str, object] | None = None,
    builtin: BuiltinText | None = None,
) -> str:
    """A complete, commented run.toml. The method chooses the inner optimizer unless one is named.

    ``tokenizer``: the file that all peers use in place of bytes; the model's vocabulary is as
    large, unless ``weights`` say which model it is. ``model``: if not the demo's. ``changes``: of
    ``[sync]``, beside the preset. ``plan``: the line that the run is planned for. ``builtin``: in
    place of Python's library.

    Raises ConfigError for an unknown method, SpecError for settings out of range.
    """
    if method not in PRESETS:
        raise ConfigError(f"--method {method} is {PRESETS.unknown(method)}.")
    sync: dict[str, object] = {"method": method, **(changes or {})}
    sync |= {"interval": interval} if interval else {}
    train: dict[str, object] = {"optimizer": optimizer} if optimizer else {}
    if weights and optimizer in (None, FINE_TUNING["optimizer"]):
        train = dict(FINE_TUNING)
    joining = {"admission": admission} | ({"members": list(members)} if members else {})
    known = weights.model if weights else model
    of_model = {"model": known.model_dump()} if known else {}
    bare = {"run": {"name": name, **joining}, "train": train, "sync": sync} | of_model
    spec = parse_toml(tomlkit.dumps(bare), "init")
    run = {"name": name, "seed": seed, "steps": steps, "start_peers": start_peers, **joining}
    document = tomlkit.document()
    document.add(
        tomlkit.comment(
            "A run specification. Publish it with: lowcomm-node create run.toml --peers ADDR"
        )
    )
    sections = {
        "run": run,
        "model": _model(weights.model)
        if weights
        else {
            **_model(model or spec.model),
            **({"vocab": tokenizer.vocab} if tokenizer else {}),
            **(builtin.model if builtin else {}),
        },
        "data": {
            **DataSettings().model_dump(exclude={"begin_tokens", "end_token"}),
            **_file_of(tokenizer),
            **(builtin.data if builtin else {}),
        },
        "train": spec.train.model_dump(),
        "sync": spec.sync.model_dump(),
    }
    comments = _COMMENTS | (
        {"context": f"tokens a sequence; the model reads at most {weights.longest}"}
        if weights
        else {}
    )
    for title, values in sections.items():
        document.add(title, _table(values, comments))
    if weights:
        document.add("start", _start(weights.start))
    export = tokenizer.export.model_dump(exclude_defaults=True) if tokenizer else {}
    if export:
        document.add("export", _table(export, _COMMENTS))
    if plan:
        document.add("plan", _table(plan, _COMMENTS))
    return tomlkit.dumps(document)


def _start(start: StartSettings) -> Table:
    """The files, one table each: nobody needs to edit them."""
    files = tomlkit.aot()
    for file in start.files:
        one = tomlkit.table()
        one.update(file.model_dump())
        files.append(one)
    table = tomlkit.table(is_super_table=True)
    table.add("files", files)
    return table


def _model(settings: ModelSettings) -> dict[str, object]:
    """All settings but those that say nothing as long as another is as it is."""
    told = settings.model_dump()
    if told.get("rope_scaling") == "none":
        for name in ("rope_factor", "rope_low", "rope_high", "rope_original"):
            del told[name]
    return told


def _file_of(tokenizer: TokenizerFile | None) -> dict[str, object]:
    return (
        {
            "tokenizer": "local",
            "tokenizer_sha256": tokenizer.sha256,
            "tokenizer_size": tokenizer.size,
            "tokenizer_pieces": tokenizer.pieces,
            "tokenizer_check": tokenizer.check,
            "begin_tokens": tokenizer.begin_tokens,
            "end_token": tokenizer.end_token,
        }
        if tokenizer and tokenizer.sha256
        else {}
    )


def _table(values: Mapping[str, object], comments: Mapping[str, str]) -> Table:
    table = tomlkit.table()
    for key, value in values.items():
        if value is None:  # which TOML has not
            continue
        item = tomlkit.item(value)
        if key in comments:
            item.comment(comments[key])
        table.add(key, item)
    return table
