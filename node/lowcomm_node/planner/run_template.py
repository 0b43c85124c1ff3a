"""The run.toml that ``init`` writes: every setting with a comment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import tomlkit
from tomlkit.items import AoT, Table

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


TEXTS: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "stories": {
        "data": {"source": "builtin:stories", "tokenizer": "builtin:stories"},
        "model": {"vocab": STORY_TOKENS, "context": 128},
    },
    "python": {},
}
"""Texts that come with every node, by the name that `demo --text` takes: the settings that suit
them, by section."""
NOT_TOLD = {
    "data": {"begin_tokens", "end_token"},
    "model": {"rope_factor", "rope_low", "rope_high", "rope_original"},
}
"""Settings that say nothing as long as another has its default."""
CODECS_IN_WORDS = (
    f"{', '.join(codecs_for_groups())}; in pairs also "
    f"{', '.join(sorted({*CODECS} - {*codecs_for_groups()}))}"
)
Sections = Mapping[str, Mapping[str, Any]]


def write_template(
    name: str,
    method: str,
    steps: int,
    seed: int,
    start_peers: int = 1,
    interval: int | None = None,
    optimizer: str | None = None,
    more: Sections | None = None,
    tokenizer: TokenizerFile | None = None,
    weights: OpenWeights | None = None,
) -> str:
    """A complete, commented run.toml. The method chooses the inner optimizer unless one is named.

    ``more``: other settings, by section. ``tokenizer``: the file that all peers use in place of
    bytes; the model's vocabulary is as large, unless ``weights`` say which model it is.

    Raises ConfigError for an unknown method, SpecError for settings out of range.
    """
    if method not in PRESETS:
        raise ConfigError(f"--method {method} is {PRESETS.unknown(method)}.")
    more = more or {}
    run = {"name": name, "admission": "open", **more.get("run", {})}
    sync = {"method": method, **more.get("sync", {})} | ({"interval": interval} if interval else {})
    train = {"optimizer": optimizer} if optimizer else {}
    if weights and optimizer in (None, FINE_TUNING["optimizer"]):
        train = dict(FINE_TUNING)
    model = weights.model.model_dump() if weights else more.get("model", {})
    whole = {"run": run, "train": train, "sync": sync} | ({"model": model} if model else {})
    spec = parse_toml(tomlkit.dumps(whole), "init")
    sections: dict[str, Mapping[str, Any]] = {
        "run": {"name": name, "seed": seed, "steps": steps, "start_peers": start_peers} | run,
        "model": _model(spec.model)
        | ({"vocab": tokenizer.vocab} if tokenizer and not weights else {}),
        "data": {
            **DataSettings().model_dump(exclude=NOT_TOLD["data"]),
            **_file_of(tokenizer),
            **more.get("data", {}),
        },
        "train": spec.train.model_dump(),
        "sync": spec.sync.model_dump(),
        "start": weights.start.model_dump() if weights else {},
        "export": tokenizer.export.model_dump(exclude_defaults=True) if tokenizer else {},
        "plan": more.get("plan", {}),
    }
    comments = {name: dict(keys) for name, keys in _comments().items()}
    if weights:
        longest = f"tokens a sequence; the model reads at most {weights.longest}"
        comments["model"]["context"] = longest
    document = tomlkit.document()
    document.add(
        tomlkit.comment(
            "A run specification. Publish it with: lowcomm-node create run.toml --peers ADDR"
        )
    )
    for title, values in sections.items():
        if values:
            document.add(title, _table(values, comments.get(title, {})))
    return tomlkit.dumps(document)


@cache
def _comments() -> Mapping[str, Mapping[str, str]]:
    """What run.toml says of each setting, by section."""
    text = resources.files("lowcomm_node.planner").joinpath("run.toml").read_text(encoding="utf-8")
    found = {
        title: {
            key.key: item.trivia.comment.removeprefix("# ")
            for key, item in table.value.body
            if key is not None
        }
        for title, table in tomlkit.parse(text).items()
    }
    return found | {"sync": found["sync"] | {"codec": CODECS_IN_WORDS}}


def _model(settings: ModelSettings) -> dict[str, object]:
    told = settings.model_dump()
    left_out = NOT_TOLD["model"] if told.get("rope_scaling") == "none" else set[str]()
    return {key: value for key, value in told.items() if key not in left_out}


def _file_of(tokenizer: TokenizerFile | None) -> dict[str, object]:
    if tokenizer is None or not tokenizer.sha256:
        return {}
    return {
        "tokenizer": "local",
        "tokenizer_sha256": tokenizer.sha256,
        "tokenizer_size": tokenizer.size,
        "tokenizer_pieces": tokenizer.pieces,
        "tokenizer_check": tokenizer.check,
        "begin_tokens": tokenizer.begin_tokens,
        "end_token": tokenizer.end_token,
    }


def _table(values: Mapping[str, object], comments: Mapping[str, str]) -> Table:
    table = tomlkit.table()
    for key, value in values.items():
        if value is None:  # which TOML has not
            continue
        item = _files(value) if key == "files" else tomlkit.item(value)
        if comments.get(key):
            item.comment(comments[key])
        table.add(key, item)
    return table


def _files(files: Any) -> AoT:
    """The files, one table each: nobody needs to edit them."""
    tables = tomlkit.aot()
    for file in files:
        one = tomlkit.table()
        one.update(file)
        tables.append(one)
    return tables
