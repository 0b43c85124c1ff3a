"""A model from a checkpoint, and text from it, token by token."""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from lowcomm_node.data import Tokenizer, open_tokenizer
from lowcomm_node.data.tokenizer import KEPT, StoryTokenizer
from lowcomm_node.errors import CheckpointError, ConfigError, NotFinite
from lowcomm_node.models.adapters import adapted
from lowcomm_node.models.base import Cache, Model, build_model
from lowcomm_node.models.open_weights import load_weights
from lowcomm_node.storage.checkpoint import Checkpoint, CheckpointStore
from lowcomm_node.storage.files import kept_run, sha256_file
from lowcomm_node.storage.paths import START
from lowcomm_node.storage.state_file import is_finite
from lowcomm_node.system.units import clean
from lowcomm_protocol.spec.sections import BYTES, AdapterSettings, DataSettings, read_model

TOP_K = 40
"""Tokens to draw from where nobody says otherwise: the same for a running node and a checkpoint."""


def generate(
    model: Model,
    prompt: Sequence[int],
    count: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Continue a prompt by ``count`` tokens, each given as soon as it is drawn.

    Temperature 0 takes the likeliest token. When the text outgrows the context, the model goes on
    from its last half. Raises ConfigError on an empty prompt or settings out of range.
    """
    vocab = model.settings.vocab
    if not prompt or not all(0 <= token < vocab for token in prompt):
        raise ConfigError(
            f"The prompt needs at least one token, each from 0 to {vocab - 1}: pass some text of "
            "this run."
        )
    if not 0 <= temperature < math.inf or (top_k is not None and top_k < 1):
        raise ConfigError(
            f"temperature = {temperature} must be 0 or a positive number, top_k = {top_k} at least "
            "1."
        )

    def draw() -> Iterator[int]:
        text, cache, generator = list(prompt), None, torch.Generator().manual_seed(seed)
        for _ in range(count):
            logits, cache = _predict(model, text, cache)
            text.append(_draw(logits, temperature, top_k, generator))
            yield text[-1]

    return draw()


@torch.no_grad()
def _predict(model: Model, text: list[int], cache: Cache | None) -> tuple[Tensor, Cache | None]:
    """Logits ``[vocab]`` after ``text``, of which all but the last token is in the cache."""
    context = model.settings.context
    if cache is None or cache.length == context:
        # Read anew rather than slide: positions stay those that the model was trained on, and half
        # a context of tokens follows before it happens again.
        text = text if len(text) <= context else text[-(context // 2) :]
        cache = model.new_cache()
    shown = text[-1:] if cache is not None and cache.length else text
    tokens = torch.tensor([shown], device=next(model.parameters()).device)
    return model(tokens, cache)[0, -1], cache


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    logits = logits.float().cpu()
    if not is_finite(logits):
        raise NotFinite("The weights give no finite probabilities: use an older checkpoint.")
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    # From the largest down and in fp64, so that the lowest temperatures overflow to the likeliest
    # token, not to NaN.
    scaled = (logits - logits.max()).double() / temperature
    return int(torch.multinomial(torch.softmax(scaled, dim=0), 1, generator=generator))


_STEP = re.compile(r"step-(\d{10})")


def load_checkpoint(path: Path) -> Checkpoint:
    """The weights of one checkpoint folder, or of the newest sound one in a folder of checkpoints.

    Raises CheckpointError if there is none, or it is damaged.
    """
    if match := _STEP.fullmatch(path.name):
        return CheckpointStore(path.parent).load(int(match[1]), ["weights"])
    if path.is_dir():
        newest = CheckpointStore(path).load_newest_usable(["weights"]).checkpoint
        if newest is not None:
            return newest
    raise CheckpointError(f"There is no sound checkpoint in {path}: name the folder of one.")


def load_model(checkpoint: Checkpoint) -> Model:
    """The model of a checkpoint, ready to evaluate.

    Raises CheckpointError if it does not say what model it is, or the files are gone that its
    adapter is of.
    """
    meta = checkpoint.meta
    try:
        settings = read_model(meta["model"])
        if "adapter" in meta:
            adapter = AdapterSettings.model_validate(meta["adapter"])
            model = adapted(settings, adapter, int(meta["seed"]), _base_of(checkpoint))
        else:
            model = build_model(settings, seed=0)
        model.load_state_dict(checkpoint.tensors["weights"], strict=False)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{checkpoint.info.path} does not hold a model of this release: {error}."
        ) from None
    return model.eval()


def _base_of(checkpoint: Checkpoint) -> list[Path]:
    """The files of weights that the adapter of a checkpoint is of, where its home keeps them."""
    folder = checkpoint.info.path.parent.parent / START
    files = [folder / Path(str(name)).name for name in checkpoint.meta["base"]]
    if missing := [str(file) for file in files if not file.exists()]:
        raise CheckpointError(
            f"{checkpoint.info.path} is an adapter of {missing[0]}, which is gone: put that file "
            "there, or join the run again, and peers send it."
        )
    return files


def load_start(of_run: Path) -> Model:
    """The model that a run began with, from the folder of the run in a home.

    Raises CheckpointError, ConfigError.
    """
    run = kept_run(of_run / "run.json")
    if run is None:
        raise CheckpointError(
            f"{of_run} holds no run.json, which names the weights that the run began with: name a "
            "home with --home."
        )
    spec = run.spec
    files = [of_run / "start" / file.name for file in spec.start.files]
    if not files:
        raise ConfigError(
            f"Run {spec.run.name} began with random weights, which write nothing that could be "
            "compared: leave --compare away."
        )
    if missing := [file for file in files if not file.exists()]:
        raise ConfigError(
            f"{missing[0]} is missing: copy the file of that name there that the run began with."
        )
    model = build_model(spec.model, seed=0)
    load_weights(model, files)
    return model.eval()


def tokenizer_of(checkpoint: Checkpoint, given: str | None = None) -> Tokenizer:
    """The tokenizer that a checkpoint was trained with; ``given``: its file, where the home keeps
    no copy.

    Raises ConfigError that names the needed file if it is missing or another; CheckpointError.
    """
    path, meta = checkpoint.info.path, checkpoint.meta.get("tokenizer")
    meta = meta if isinstance(meta, dict) else {}
    # A stranger may have written them; checkpoints of 0.1 have none.
    texts = (meta.get(name) for name in ("file", "sha256"))
    file, digest = (clean(text)[:80] if isinstance(text, str) else "" for text in texts)
    marks = {name: meta[name] for name in ("begin_tokens", "end_token") if name in meta}
    try:
        data = DataSettings.model_validate({"tokenizer": "local", **marks})
    except ValidationError:
        raise CheckpointError(
            f"{path} names no tokens that documents begin and end with: use another checkpoint."
        ) from None
    model = checkpoint.meta.get("model")
    if not file and not (isinstance(model, dict) and model.get("vocab") == BYTES):
        if given is not None:
            return open_tokenizer(given)
        raise ConfigError(
            f"{path} does not say which tokenizer.json it was trained with: name it with "
            "--tokenizer."
        )
    trained = f"was trained with {file} (SHA-256 {digest})" if digest else "was trained on bytes"
    if given is None:
        for builtin in map(open_tokenizer, ("bytes", StoryTokenizer.name)):
            if builtin.sha256 == digest:
                return builtin
        given = str(path.parent.parent / KEPT)
        if not Path(given).is_file() or sha256_file(Path(given)) != digest:
            raise ConfigError(f"{path} {trained}: name it with --tokenizer.")
    tokenizer = open_tokenizer(given, data.begin_tokens, data.end_token)
    if tokenizer.sha256 != digest:
        raise ConfigError(
            f"{given} has the SHA-256 {tokenizer.sha256 or 'none'}, but {path} {trained}: name "
            "that with --tokenizer, or leave it away."
        )
    return tokenizer
