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
SYNCED = """learning_rate = 0.02
warmup = 3
optimizer = "{optimizer}"
[sync]
method = "{method}"
interval = 8
min_steps = 1
overlap = 0
fragments = 3
group = 2
"""
"""The rest of a run file whose exchanges a test carries out itself."""
METHODS = ("lowcomm", "noloco", "streaming-diloco", "diloco", "local")
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
