"""What a family of models gives: all that trainer, sampling and memory estimates know of a
model.
"""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowcomm_node.models import FAMILIES
from lowcomm_protocol.plan import Role, TensorSpec
from lowcomm_protocol.spec.sections import ModelSettings


def fill_normal(parameter: Tensor, std: float, stream: str) -> None:
    """Draw from a stream of its own: independent of other tensors, of threads, and of torch's
    random state."""
    # numpy, because torch draws other bits with AVX2 than without, and peers have all kinds of
    # processors.
    seed = int.from_bytes(hashlib.sha256(stream.encode()).digest())
    values = np.random.default_rng(seed).standard_normal(tuple(parameter.shape), dtype=np.float32)
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(values)).mul_(std)


def computing(device: torch.device) -> torch.autocast:
    """A context in which products of matrices are bf16 on a GPU; a processor computes in fp32.

    Losses of training and of held-out text are computed alike.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def as_computed(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the precision of its context: bf16 within autocast, as it is elsewhere."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class Cache(Protocol):
    """What a model remembers of one text that it continues."""

    length: int
    """Tokens that it has read, at most ``context``."""


@dataclass(frozen=True)
class Place:
    """Where a parameter belongs."""

    role: Role
    layer: int | None = None
    """Number of its block."""


@dataclass(frozen=True)
class Footprint:
    """What a model takes of memory, in float32 values."""

    matrices: Counter[tuple[int, int]]
    """Matrices of the blocks, which Muon takes, by shape."""
    others: int
    """Values of all other parameters."""
    kept: int
    """Values a token that a step keeps for its backward pass, logits aside."""
    passing: int
    """Values a token that pass at the widest place of a step, logits aside."""
    vocab: int
    """Values a token of the logits."""
    blocks: int = 0
    """Blocks that can be computed again in the backward pass; 0 where none can."""
    in_block: int = 0
    """Values a token of ``kept`` that one of them keeps."""
    between: int = 0
    """Values a token that remain of it if it is computed again."""
    looking: int | None = None
    """Values a token that pass at the widest place of a forward pass alone, logits aside; None for
    as many as ``passing``."""

    @property
    def parameters(self) -> int:
        """Values of all parameters."""
        return self.in_matrices + self.others

    @property
    def in_matrices(self) -> int:
        """Values of the matrices."""
        return sum(rows * columns * count for (rows, columns), count in self.matrices.items())


@dataclass(frozen=True)
class HuggingFaceForm:
    """A model as the library ``transformers`` knows it."""

    config: dict[str, Any]
    """Its ``config.json``, but for the dtype and the tokens that begin and end a text."""
    names: Mapping[str, str]
    """Names of its tensors by ours; each is the same tensor."""
    base: str = "model"
    """Its ``base_model_prefix``, without which a folder may name tensors."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of stored tensors that it does not read."""


class Model(nn.Module, ABC):
    """A language model. Tokens are ``[batch, length]``, logits ``[batch, length, vocab]``."""

    settings: ModelSettings
    recompute: bool = False
    """Whether a backward pass computes blocks again, to the same bits, instead of keeping what they
    hold."""

    @abstractmethod
    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Logits for tokens, which continue the text of the cache, if there is one."""

    @abstractmethod
    def place_of(self, name: str) -> Place:
        """Where the parameter of this name belongs: fragments keep blocks whole, Muon moves their
        matrices."""

    def recompute_blocks(self, on: bool) -> None:
        """Set ``recompute``; a family whose footprint names no blocks takes no notice."""
        self.recompute = on

    def new_cache(self) -> Cache | None:
        """A cache of an empty text; None where the model reads the whole text for each token."""
        return None

    def compiled_parts(self) -> Iterable[nn.Module]:
        """Modules that are worth to be compiled on their own, as they are alike; none to compile
        the loss as a whole."""
        return ()

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a token."""
        return F.cross_entropy(self(tokens).float().flatten(0, 1), targets.flatten())


class Family(ABC):
    """One kind of model."""

    @abstractmethod
    def build(self, settings: ModelSettings, seed: int) -> Model:
        """A model whose weights depend on settings and seed alone: all peers of a run start with
        the same."""

    def blank(self, settings: ModelSettings) -> Model:
        """A model whose weights are arbitrary: whoever asks for it sets them, or looks at their
        shapes alone on the meta device."""
        return self.build(settings, 0)

    def check(self, settings: ModelSettings) -> None:  # noqa: B027 - most families need nothing
        """Raise ConfigError where this machine lacks what it takes to build it.

        Called before anything is allocated.
        """

    @abstractmethod
    def footprint(self, settings: ModelSettings) -> Footprint:
        """What it takes of memory, reckoned before anything is allocated."""

    def huggingface(self, settings: ModelSettings) -> HuggingFaceForm | None:
        """How ``transformers`` knows such a model; None where it does not."""
        return None


def family_of(settings: ModelSettings) -> Family:
    """The family that the settings belong to."""
    return cast("Family", FAMILIES[settings.kind])


def build_model(settings: ModelSettings, seed: int) -> Model:
    """A model of any family: see ``Family.build``."""
    return family_of(settings).build(settings, seed)


def tensor_specs(model: Model) -> list[TensorSpec]:
    """What the fragment plan must know of each parameter; the model may be on the meta device."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    specs: list[TensorSpec] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared, place = names[id(parameter)], model.place_of(name)
        specs.append(
            TensorSpec(
                name=name,
                shape=tuple(parameter.shape),
                layer=place.layer,
                role=place.role,
                storage=shared[0] if len(shared) > 1 else None,
            )
        )
    return specs
