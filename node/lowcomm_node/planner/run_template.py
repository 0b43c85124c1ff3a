"""The run.toml that ``init`` writes: run.toml of this folder, with the settings of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import tomlkit

from lowcomm_node.errors import ConfigError
from lowcomm_protocol.spec import sections
from lowcomm_protocol.spec.names import CODECS, codecs_for_groups
from lowcomm_protocol.spec.presets import PRESETS
from lowcomm_protocol.spec.run import parse_toml

Sections = Mapping[str, Mapping[str, Any]]
FINE_TUNING: Mapping[str, object] = {
    "optimizer": "adamw",
    "learning_rate": 5e-5,
    "weight_decay": 0.01,
}
"""``[train]`` of a run that begins with open weights: rates for random ones would spoil them."""
TEXTS: Mapping[str, Sections] = {
    "stories": {
        "data": {"source": "builtin:stories", "tokenizer": "builtin:stories"},
        "model": {"vocab": sections.STORY_TOKENS, "context": 128},
    },
    "python": {},
}
"""Settings for each text that comes with every node, by the name that `demo --text` takes."""
ROPE_SCALING = {"rope_factor", "rope_low", "rope_high", "rope_original"}
"""Settings of ``[model]`` without a meaning where ``rope_scaling = "none"``."""


@dataclass(frozen=True)
class TokenizerFile:
    """Settings of a run for the tokenizer.json that all its peers use."""

    vocab: int
    """Exclusive upper bound of the tokens."""
    data: Mapping[str, Any]
    """Its settings of ``[data]``."""
    export: sections.ExportSettings = field(default_factory=sections.ExportSettings)
    warnings: tuple[str, ...] = ()
    """Properties of the tokenizer that the run can't keep."""


@dataclass(frozen=True)
class OpenWeights:
    """Settings of a run that begins with open weights."""

    model: sections.ModelSettings
    longest: int
    """Largest ``context`` that the model reads."""
    start: sections.StartSettings
    warnings: tuple[str, ...] = ()
    """Properties of the weights that the run can't keep."""


def write_template(
    name: str,
    method: str,
    steps: int | None,
    seed: int,
    start_peers: int = 1,
    interval: int | None = None,
    optimizer: str | None = None,
    more: Sections | None = None,
    tokenizer: TokenizerFile | None = None,
    weights: OpenWeights | None = None,
) -> str:
    """Write a complete, commented run.toml. ``method`` chooses the optimizer unless it is given.

    ``steps`` None: they follow from ``run.tokens``. ``more``: other settings, by section. Without
    ``weights``, the model's vocabulary is that of ``tokenizer``.

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
    model = spec.model.model_dump()
    if model.get("rope_scaling") == "none":
        model = {key: value for key, value in model.items() if key not in ROPE_SCALING}
    if tokenizer and not weights:
        model["vocab"] = tokenizer.vocab
    data = sections.DataSettings().model_dump(exclude={"begin_tokens", "end_token", "parts"})
    settings: Sections = {
        "run": {"name": name, "seed": seed, "steps": steps, "start_peers": start_peers, **run},
        "model": model,
        "data": {**data, **(tokenizer.data if tokenizer else {}), **more.get("data", {})},
        "train": spec.train.model_dump(),
        "sync": spec.sync.model_dump(),
        "start": weights.start.model_dump() if weights else {},
        "export": tokenizer.export.model_dump(exclude_defaults=True) if tokenizer else {},
        "plan": more.get("plan", {}),
    }
    template = resources.files("lowcomm_node.planner").joinpath("run.toml")
    document: Any = tomlkit.parse(template.read_text(encoding="utf-8"))
    for title, values in settings.items():
        if not values:
            del document[title]
            continue
        table = document[title]
        known = {key: value for key, value in values.items() if value is not None}
        for key in [key for key in table if key not in known]:
            del table[key]
        table.update(known)
    groups = codecs_for_groups()
    codecs = f"{', '.join(groups)}; in pairs also {', '.join(sorted({*CODECS} - {*groups}))}"
    document["sync"]["codec"].comment(codecs)
    if parts := document["data"].get("parts"):
        parts[0]["share"].comment("of the windows, over the sum of all shares; `amend` changes it")
        parts[-1].add(tomlkit.nl())
    if weights:
        longest = f"tokens a sequence; the model reads at most {weights.longest}"
        document["model"]["context"].comment(longest)
    return tomlkit.dumps(document).rstrip("\n") + "\n"
