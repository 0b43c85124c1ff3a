"""The result of a demo, for people and for programs, and the files that stay."""

import os
import shlex
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowcomm_node.status.model import Status
from lowcomm_node.system.command import program
from lowcomm_node.system.units import clean, loss, short_peer, size

LINE_WIDTH = 74
"""Characters of a line of the sample; the rest goes on in the next."""
PROMPTS = {"stories": "Once upon a time", "python": "def "}
"""Prompts to try a model with, by the text that it was trained on."""
PASSING = ("data", "runs/*/snapshots", "runs/*/incoming")
"""Folders of a node that let it start faster, or serve others: useless after a demo."""


def node_result(status: Status) -> dict[str, Any]:
    """Figures of one node, from its last status."""
    training = ("steps", "swarm_step", "tokens", "val_loss_first", "val_loss_last")
    counts = ("completed", "refused", "no_partner", "failed")
    return {
        "peer_id": status.peer_id,
        **{name: getattr(status.trainer, name) for name in training},
        **{f"exchanges_{name}": getattr(status.exchanges, name) for name in counts},
        "bytes_sent": status.bytes_sent,
        "bytes_received": status.bytes_received,
    }


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """Result of a demo; the fields are those of ``--json``."""

    method: str
    optimizer: str
    text: str
    """A key of `TEXTS`."""
    seed: int
    steps: int
    seconds: float
    parameters: int | None
    val_loss_average_weights: float
    weight_spread_rms: float
    nodes: tuple[Mapping[str, Any], ...]
    sample: str
    checkpoint: str
    home: str
    report: str
    """Path of the HTML report of the run."""
    bytes: int
    """Bytes that stay on the disk."""


def render(result: DemoResult) -> str:
    """The result for people, in 80 columns: a table, a sample, and where the checkpoint is."""
    home, checkpoint = Path(result.home), Path(result.checkpoint)
    node = checkpoint.parents[3]
    averaged = f"averaged weights: held-out loss {result.val_loss_average_weights:.3f}"
    return "\n".join(
        [
            f"{result.method}: {result.parameters:,} parameters, {result.seconds:.0f} s",
            "",
            *_table(result.nodes),
            "",
            f"{averaged}; spread of the nodes' weights {result.weight_spread_rms:.1e}",
            "",
            f"what the averaged model writes{_about(result.text)}:",
            *(f"  | {line}" for line in _sample_lines(result.sample)),
            "",
            f"folder:     {_in_a_shell(home)}   ({size(result.bytes)})",
            f"checkpoint: {checkpoint.relative_to(home)}, in it",
            f"report:     {Path(result.report).relative_to(home)}, in it: open it in a browser",
            f'try it:     {program()} generate "{PROMPTS[result.text]}" \\',
            f"            --home {_in_a_shell(node)}",
            f"remove it:  rm -r {_in_a_shell(home)}",
        ]
    )


def _about(text: str) -> str:
    """Note on the text that it was trained on."""
    if text != "stories":
        return ""
    from lowcomm_node.data.stories import count_rules  # loads numpy

    return f" (tiny stories from a grammar of {count_rules()} rules)"


_COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "node": lambda node: short_peer(node["peer_id"]),
    "steps": lambda node: str(node["steps"]),
    "held-out loss": lambda node: (
        f"{loss(node['val_loss_first'], 3)} -> {loss(node['val_loss_last'], 3)}"
    ),
    "applied": lambda node: str(node["exchanges_completed"]),
    "no partner": lambda node: str(node["exchanges_no_partner"]),
    "failed": lambda node: str(node["exchanges_failed"]),
    "sent": lambda node: size(node["bytes_sent"]),
    "received": lambda node: size(node["bytes_received"]),
}


def _table(nodes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    columns = [[head, *(cell(node) for node in nodes)] for head, cell in _COLUMNS.items()]
    padded = ([cell.ljust(max(map(len, cells))) for cell in cells] for cells in columns)
    yield from ("  ".join(row).rstrip() for row in zip(*padded, strict=True))


def _in_a_shell(path: Path) -> str:
    """A path as it is typed; relative to the user's own folder if it lies there, to be short."""
    own = Path(os.environ.get("HOME", ""))
    if path.is_relative_to(own) and path != own:
        return f"~/{shlex.quote(str(path.relative_to(own)))}"
    return shlex.quote(str(path))


def _sample_lines(sample: str) -> Iterator[str]:
    """The text of a model, with any characters, as lines for a terminal."""
    lines = textwrap.TextWrapper(LINE_WIDTH, drop_whitespace=False, break_on_hyphens=False)
    for line in sample.splitlines():
        first, *rest = lines.wrap(clean(line).rstrip()) or [""]
        yield first.rstrip()
        yield from (part.strip() for part in rest)


def tidy(homes: Sequence[Path], checkpoints: Sequence[Path]) -> None:
    """Remove what is useless once a demo is over: tokens, snapshots, and older checkpoints."""
    for home in homes:
        useless = [folder for pattern in PASSING for folder in home.glob(pattern)]
        useless += set(home.glob("runs/*/checkpoints/step-*")) - set(checkpoints)
        for folder in useless:
            shutil.rmtree(folder, ignore_errors=True)
