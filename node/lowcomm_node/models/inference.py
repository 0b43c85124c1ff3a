"""A model from a checkpoint, and text from it."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from lowcomm_node.data import Tokenizer, open_tokenizer
from lowcomm_node.data.stories.words import StoryTokenizer
from lowcomm_node.data.tokenizer import KEPT, check_vocabulary, prompt_of
from lowcomm_node.errors import CheckpointError, ConfigError
from lowcomm_node.models.base import Model, build_model
from lowcomm_node.models.sampling import TOP_K, generate
from lowcomm_node.storage.checkpoint import Checkpoint, CheckpointStore
from lowcomm_node.storage.files import sha256_file
from lowcomm_node.system.units import clean
from lowcomm_protocol.spec.sections import BYTES, DataSettings, read_model

_STEP = re.compile(r"step-(\d{10})")


def load_checkpoint(path: Path) -> Checkpoint:
    """The weights of one checkpoint folder, or of the newest sound one in a folder of checkpoints.

    Raises CheckpointError if there is none, or it is damaged.
    """
    match = _STEP.fullmatch(path.name)
    if match:
        return CheckpointStore(path.parent).load(int(match[1]), ["weights"])
    found = (
        CheckpointStore(path).load_newest_usable(["weights"]).checkpoint if path.is_dir() else None
    )
    if found is None:
        raise CheckpointError(f"There is no sound checkpoint in {path}: name the folder of one.")
    return found


def load_model(checkpoint: Checkpoint) -> Model:
    """The model of a checkpoint, ready to evaluate.

    Raises CheckpointError if it does not say what model it is.
    """
    try:
        model = build_model(read_model(checkpoint.meta["model"]), seed=0)
        model.load_state_dict(checkpoint.tensors["weights"], strict=False)
    except (KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{checkpoint.info.path} does not hold a model of this release: {error}."
        ) from None
    return model.eval()


def generate_from(
    path: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    seed: int,
    tokenizer: str | None = None,
) -> str:
    """Continue a prompt with the model of a checkpoint, by its own tokenizer.

    Raises CheckpointError, ConfigError.
    """
    checkpoint = load_checkpoint(path)
    encoder = tokenizer_of(checkpoint, tokenizer)
    model = load_model(checkpoint)
    check_vocabulary(encoder, model.settings.vocab)
    start = prompt_of(encoder, prompt)
    return encoder.decode(list(generate(model, start, tokens, temperature, TOP_K, seed)))


def tokenizer_of(checkpoint: Checkpoint, given: str | None = None) -> Tokenizer:
    """The tokenizer that a checkpoint was trained with; ``given``: its file, where the home keeps
    no copy.

    Raises ConfigError that tells which file is needed, or that the given one is another.
    """
    wanted = _Wanted.of(checkpoint)
    if given is None and wanted.is_known:
        kept = checkpoint.info.path.parent.parent / KEPT
        if not wanted.sha256:
            return open_tokenizer("bytes")
        if wanted.file == StoryTokenizer.name and StoryTokenizer().sha256 == wanted.sha256:
            return StoryTokenizer()
        if kept.is_file() and sha256_file(kept) == wanted.sha256:
            return open_tokenizer(str(kept), *wanted.marks)
    if given is None:
        raise ConfigError(f"{checkpoint.info.path} {wanted}: name it with --tokenizer.")
    found = open_tokenizer(given, *wanted.marks)
    if wanted.is_known and found.sha256 != wanted.sha256:
        raise ConfigError(
            f"{given} has the SHA-256 {found.sha256 or 'none'}, but {checkpoint.info.path} "
            f"{wanted}: name that with --tokenizer, or leave it away."
        )
    return found


@dataclass(frozen=True)
class _Wanted:
    """What the meta of a checkpoint, which may be a stranger's, says of its tokenizer."""

    file: str
    sha256: str
    is_known: bool
    """Checkpoints of 0.1 do not say."""
    marks: tuple[tuple[int, ...], int | None] = ((), None)
    """Tokens before each document, and the one after it."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        told = checkpoint.meta.get("tokenizer")
        if (
            isinstance(told, dict)
            and isinstance(told.get("sha256"), str)
            and isinstance(told.get("file"), str)
        ):
            file, digest = clean(told["file"])[:80], clean(told["sha256"])[:64]
            try:
                ends = DataSettings.model_validate(
                    {"tokenizer": "local"}
                    | {name: told[name] for name in ("begin_tokens", "end_token") if name in told}
                )
            except ValidationError:
                raise CheckpointError(
                    f"{checkpoint.info.path} names no tokens that documents begin and end with: "
                    "use another checkpoint."
                ) from None
            return cls(file, digest, is_known=True, marks=(ends.begin_tokens, ends.end_token))
        model = checkpoint.meta.get("model")
        is_bytes = isinstance(model, dict) and model.get("vocab") == BYTES
        return cls("bytes" if is_bytes else "", "", is_known=is_bytes)

    def __str__(self) -> str:
        if not self.is_known:
            return "does not say which tokenizer.json it was trained with"
        return (
            f"was trained with {self.file} (SHA-256 {self.sha256})"
            if self.sha256
            else "was trained on bytes"
        )
