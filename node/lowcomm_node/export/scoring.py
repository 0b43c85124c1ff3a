"""Scores of an export on tasks of lm-eval.

Only the data of tasks may come from the Hub, never the model, and no code of either runs.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowcomm_node.errors import ConfigError, NodeError
from lowcomm_node.models.devices import choose_device
from lowcomm_node.system.command import load_optional

BATCH = 4
"""Texts that go through the model at once."""


@dataclass(frozen=True)
class Score:
    """A figure of a task, or of a group of tasks."""

    task: str
    metric: str
    value: float
    stderr: float | None
    """Standard error; None where lm-eval gives none."""


def score(
    folder: Path, tasks: Sequence[str], include: Path | None, limit: int | None
) -> list[Score]:
    """The scores of a model. ``include``: folder of further tasks; ``limit``: documents of each.

    Raises ConfigError, NodeError.
    """
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{folder} is no export for transformers: write one with `lowcomm-node checkpoint "
            f"export {folder}`."
        )
    for part in (".tasks", ".models.huggingface", ""):
        library = load_optional(f"lm_eval{part}", "`eval`", "eval")
    known = library.tasks.TaskManager(include_path=include and str(include))
    if unknown := [task for task in tasks if task not in known.all_tasks]:
        raise ConfigError(
            f"lm-eval knows no task {unknown[0][:80]!r}: `lm-eval ls tasks` lists all; --include "
            "names a folder with tasks of your own."
        )
    # It warns that a model was loaded before.
    logging.getLogger("lm_eval.models.huggingface").setLevel(logging.ERROR)
    try:
        model = library.models.huggingface.HFLM(batch_size=BATCH, **_opened(folder))
        results = library.simple_evaluate(
            model, tasks=[*tasks], task_manager=known, limit=limit, log_samples=False
        )
    except Exception as error:  # of the library, of a task, or of what it loads from the Hub
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
        raise NodeError(
            f"{', '.join(tasks)} could not be evaluated ({reason}): see whether the data of each "
            "task can be loaded here."
        ) from error
    return [
        found for task, figures in results["results"].items() for found in _scores(task, figures)
    ]


def _opened(folder: Path) -> dict[str, Any]:
    """Model and tokenizer of a folder, without the Hub."""
    library = load_optional("transformers", "`eval`", "eval")
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    model = library.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **local)
    tokenizer = library.AutoTokenizer.from_pretrained(folder, **local)
    ends = model.config.eos_token_id
    end = ends[0] if isinstance(ends, list) else ends
    if tokenizer.eos_token is None and end is not None:  # such as that of bytes
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    return {"pretrained": model.to(choose_device("auto")).eval(), "tokenizer": tokenizer}


def _scores(task: str, figures: dict[str, Any]) -> list[Score]:
    """What lm-eval says of a task, by keys such as ``acc,none`` and ``acc_stderr,none``."""
    found: list[Score] = []
    for key, value in figures.items():
        metric, _, filter_ = key.partition(",")
        if not filter_ or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = figures.get(f"{metric}_stderr,{filter_}")
        known = isinstance(error, float) and math.isfinite(error)
        name = metric if filter_ == "none" else key
        found.append(Score(task, name, float(value), error if known else None))
    return found
