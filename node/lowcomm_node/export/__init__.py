"""Models for other programs: the choices of an owner. Nothing here loads torch."""

from dataclasses import dataclass
from enum import StrEnum


class Format(StrEnum):
    """For which programs."""

    HF = "hf"
    """transformers, vLLM, SGLang: a folder as on a model hub."""
    ADAPTER = "adapter"
    """peft, vLLM: a folder with an adapter alone, without the weights that it is of."""
    GGUF = "gguf"
    """llama.cpp, ollama, LM Studio: one file."""
    SAFETENSORS = "safetensors"
    """lowcomm's own names, as a checkpoint has them: weights.safetensors and config.json."""


class Dtype(StrEnum):
    """How precise the weights are."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    Q8_0 = "q8_0"
    """8 bits a value, with --format gguf."""


class Weights(StrEnum):
    """Which weights."""

    AVERAGE = "average"
    """The slow weights of this node and of up to three peers, averaged."""
    SLOW = "slow"
    """The slow weights, which every merge brings closer to those of peers."""
    FAST = "fast"
    """The weights that this node trains, noise of its last steps included."""


@dataclass(frozen=True)
class ExportChoices:
    """The options of ``checkpoint export``."""

    format: Format = Format.HF
    dtype: Dtype = Dtype.FLOAT32
    weights: Weights | None = None
    """None: the average where peers can be asked, else the slow ones where there are any."""
    step: int | None = None
    """Of the checkpoint; None: the newest."""
    tokenizer: str | None = None
    """File of the tokenizer, where the home keeps no copy."""
