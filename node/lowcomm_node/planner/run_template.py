"""The run.toml that ``init`` writes: run.toml of this folder, with the settings of a run."""

from collections.abc import Mapping
from importlib import resources
from typing import Any

import tomlkit

from lowcomm_protocol.spec.run import parse_toml

Sections = Mapping[str, Mapping[str, Any]]
COMPLETE = ("run", "model", "data", "adapter", "train", "sync")
"""Sections with all settings; the others have those that are given."""
RARE = {"description", "creator", "tokens", "members", "begin_tokens", "end_token", "parts"}
"""Settings of these that are left out unless they are given."""
ROPE_SCALING = {"rope_factor", "rope_low", "rope_high", "rope_original"}
"""Settings of ``[model]`` without a meaning where ``rope_scaling = "none"``."""


def write_template(given: Sections, longest: int = 0) -> str:
    """Write a complete, commented run.toml with the settings ``given``; None means not given.

    ``longest``: tokens that open weights read at most. Raises SpecError for settings out of range.
    """
    given = {
        title: {name: value for name, value in values.items() if value is not None}
        for title, values in given.items()
    }
    spec = parse_toml(tomlkit.dumps(given), "init").model_dump()
    template = resources.files("lowcomm_node.planner").joinpath("run.toml")
    document: Any = tomlkit.parse(template.read_text(encoding="utf-8"))
    for title in list(document):
        values = given.get(title, {})
        if title in COMPLETE and spec[title] is not None:
            values = {k: v for k, v in spec[title].items() if k not in RARE} | values
        if title == "run" and "tokens" in values:
            del values["steps"]  # they follow
        if title == "model" and values.get("rope_scaling") == "none":
            values = {k: v for k, v in values.items() if k not in ROPE_SCALING}
        if not values:
            del document[title]
            continue
        table = document[title]
        for key in [key for key in table if key not in values]:
            del table[key]
        table.update(values)
    if parts := document["data"].get("parts"):
        parts[0]["share"].comment("of the windows, over the sum of all shares; `amend` changes it")
        parts[-1].add(tomlkit.nl())
    if longest:
        words = f"tokens a sequence; the model reads at most {longest}"
        document["model"]["context"].comment(words)
    return tomlkit.dumps(document).rstrip("\n") + "\n"
