"""A trainer that is built within a second: the smallest model, on a CPU."""

from pathlib import Path
from typing import Any

from lowcomm_node.node.messages import TrainerSettings
from lowcomm_protocol.spec.run import parse_toml

MODEL = """
layers = 1
width = 32
heads = 2
feed_forward = 32
context = 16
"""
TINY = """
[run]
name = "test"
[model]
{model}
[train]
batch = 2
"""


def tiny_settings(
    folder: Path, peer_id: str, more: str = "", model: str = MODEL, **settings: Any
) -> TrainerSettings:
    """How such a trainer is built; ``more``: further tables of the run file."""
    return TrainerSettings(
        spec=parse_toml(TINY.format(model=model) + more).canonical().decode(),
        peer_id=peer_id,
        checkpoints=str(folder / peer_id),
        data_cache=str(folder / "data"),
        **{"device": "cpu", "threads": 1, **settings},
    )
