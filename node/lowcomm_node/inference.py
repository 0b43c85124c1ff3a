"""A model from a checkpoint, and text from it."""

import re
from pathlib import Path

from lowcomm_node.checkpoint import Checkpoint, CheckpointStore
from lowcomm_node.data import open_tokenizer
from lowcomm_node.errors import CheckpointError
from lowcomm_node.model import Transformer, build_model
from lowcomm_node.sampling import generate
from lowcomm_protocol.run import ModelSettings

_STEP = re.compile(r"step-(\d{10})")


def load_checkpoint(path: Path) -> Checkpoint:
    """The weights of one checkpoint folder, or of the newest sound one in a folder of checkpoints.

    Raises CheckpointError if there is none, or it is damaged.
    """
    match = _STEP.fullmatch(path.name)
    if match:
        return CheckpointStore(path.parent).load(int(match[1]), ["weights"])
    found = CheckpointStore(path).load_newest_usable(["weights"]).checkpoint if path.is_dir() else None
    if found is None:
        raise CheckpointError(f"There is no sound checkpoint in {path}: name the folder of one.")
    return found


def load_model(checkpoint: Checkpoint) -> Transformer:
    """The model of a checkpoint, ready to evaluate. Raises CheckpointError if it does not say what model it is."""
    try:
        model = build_model(ModelSettings.model_validate(checkpoint.meta["model"]), seed=0)
        model.load_state_dict(checkpoint.tensors["weights"], strict=False)
    except (KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{checkpoint.info.path} does not hold a model of this release: {error}.") from None
    return model.eval()


def generate_from(path: Path, prompt: str, tokens: int, temperature: float, seed: int, tokenizer: str = "bytes") -> str:
    """Continue a prompt with the model of a checkpoint. Raises CheckpointError, ConfigError."""
    encoder = open_tokenizer(tokenizer)
    model = load_model(load_checkpoint(path))
    start = [int(token) for token in encoder.encode((prompt or "\n").encode())]
    return encoder.decode(list(generate(model, start, tokens, temperature, 40, seed)))
