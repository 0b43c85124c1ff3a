"""What a plan is asked for: a run, a line, how fast a step is, and how many peers. Pure."""

import re
from dataclasses import dataclass

from lowcomm_node.errors import ConfigError
from lowcomm_node.models.base import family_of
from lowcomm_protocol.spec.models import TransformerSettings
from lowcomm_protocol.spec.run import RunSpec

LEAST_PARAMETERS, MOST_PARAMETERS = 100_000, 200_000_000_000
BYTES_BELOW = 30_000_000
"""Parameters below which a model reads bytes: a larger vocabulary would be most of it."""
BYTES, TOKENS = 256, 32_768
CONTEXT = 1024
HEAD = 64
DEEPEST, FLATTEST, USUAL = 32, 128, 64
"""Width of a model over its layers: bounds, and what is preferred between them."""
NEAR = 0.01
"""So close to the parameters wanted, the shape decides."""
TOKENS_A_PARAMETER = 20
"""Tokens to train on where only parameters are given (Hoffmann et al., 2203.15556)."""
_COUNT = re.compile(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([kMBT]?)\s*")
_TIMES = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, kw_only=True)
class Line:
    """What joins each peer to the others."""

    up: float
    """Bytes a second sent."""
    down: float
    """Bytes a second received."""
    latency: float
    """Seconds there and back between two peers."""

    @property
    def slower(self) -> float:
        """Bytes a second of the slower direction: what one sends another must receive."""
        return min(self.up, self.down)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A run on a line."""

    spec: RunSpec
    line: Line
    step_seconds: float
    """Of one inner step of a peer."""
    peers: int


def read_parameters(text: str) -> int:
    """Parse a number of parameters such as ``234k``, ``10M`` or ``1.3B``.

    Raises ValueError with what to write.
    """
    match = _COUNT.fullmatch(text)
    count = round(float(match[1]) * _TIMES[match[2]]) if match else 0
    if not LEAST_PARAMETERS <= count <= MOST_PARAMETERS:
        raise ValueError(
            f"{text.strip()!r} is not a number of parameters from 100k to 200B: write such as 10M "
            "or 1.3B"
        )
    return count


def model_of(parameters: int, vocab: int | None = None) -> TransformerSettings:
    """A transformer of about as many parameters, of a usual shape; ``vocab``: of its tokenizer, if
    that is known. Raises ConfigError."""
    vocab = vocab or (BYTES if parameters < BYTES_BELOW else TOKENS)
    shapes = (_of_width(parameters, vocab, width) for width in range(HEAD, 32 * 1024 + 1, HEAD))
    fitting = [shape for shape in shapes if shape is not None]
    if not fitting:
        raise ConfigError(f"--parameters {parameters}: no usual shape of a model has so many.")
    return min(fitting, key=lambda shape: _unlikeness(shape, parameters))


def run_of(parameters: int, peers: int, vocab: int | None = None) -> RunSpec:
    """A run of such a model that trains on 20 tokens a parameter, all peers together."""
    spec = RunSpec.model_validate(
        {
            "run": {"name": "plan"},
            "model": model_of(parameters, vocab),
            "sync": {"method": "lowcomm"},
        }
    )
    steps = round(TOKENS_A_PARAMETER * parameters / (peers * spec.tokens_per_step))
    run = spec.run.model_copy(update={"steps": max(1, steps)})
    return spec.model_copy(update={"run": run})


def _of_width(parameters: int, vocab: int, width: int) -> TransformerSettings | None:
    def of_layers(layers: int) -> TransformerSettings:
        return TransformerSettings(
            vocab=vocab,
            context=CONTEXT,
            layers=layers,
            width=width,
            heads=width // HEAD,
            feed_forward=32 * round(width / 12),  # about 8/3 of the width
        )

    one, two = (count(of_layers(layers)) for layers in (1, 2))
    layers = round((parameters - one) / (two - one)) + 1
    if not 1 <= layers <= 512 or not DEEPEST <= width / layers <= FLATTEST:
        return None
    return of_layers(layers)


def count(model: TransformerSettings) -> int:
    """Parameters of a model."""
    return family_of(model).footprint(model).parameters


def _unlikeness(model: TransformerSettings, parameters: int) -> tuple[float, float]:
    error = abs(count(model) / parameters - 1)
    ratio = model.width / model.layers
    return max(error, NEAR), max(ratio / USUAL, USUAL / ratio)
