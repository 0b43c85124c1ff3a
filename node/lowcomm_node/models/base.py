"""Interface of a family of models: all that trainer, sampling and memory estimates know of it."""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from lowcomm_node.errors import ConfigError
from lowcomm_node.models import FAMILIES
from lowcomm_node.models.cross_entropy import mean_loss
from lowcomm_node.models.devices import computes_bf16
from lowcomm_protocol.plan import Role, TensorSpec
from lowcomm_protocol.spec.sections import ModelSettings


def fill_normal(parameter: Tensor, std: float, stream: str) -> None:
    """Draw from a stream of its own, independent of other tensors and of torch's random state."""
    # numpy, because torch draws other bits with AVX2 than without, and peers have all kinds of
    # processors.
    seed = int.from_bytes(hashlib.sha256(stream.encode()).digest())
    values = np.random.default_rng(seed).standard_normal(tuple(parameter.shape), dtype=np.float32)
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(values)).mul_(std)


def computing(device: torch.device) -> torch.autocast:
    """A context in which products of matrices are bf16 on a GPU that can; a processor computes in
    fp32."""
    able = device.type != "cpu" and computes_bf16(device)
    return torch.autocast(device.type, torch.bfloat16, enabled=able)


def as_computed(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the precision of its context: bf16 within autocast, as it is elsewhere."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class Cache(Protocol):
    """State of a model for one text that it continues."""

    length: int
    """Tokens read so far, at most ``context``."""


@dataclass(frozen=True)
class Place:
    """Where a parameter belongs: its role, and the number of its block."""

    role: Role
    layer: int | None = None


@dataclass(frozen=True)
class Stage:
    """The part of a model that one of several machines holds."""

    start: int
    stop: int
    """Its blocks: from ``start`` up to ``stop``."""
    outside: bool = False
    """Whether it holds what is outside of the blocks, too: embedding, last norm and head."""


@dataclass(frozen=True)
class Footprint:
    """Memory of a model, in float32 values; from ``kept`` on values a token, logits aside."""

    matrices: Counter[tuple[int, int]]
    """Trained matrices of the blocks, which Muon takes, by shape."""
    others: int
    """Values of all other trained parameters."""
    kept: int
    """Kept for the backward pass."""
    passing: int
    """At the widest place of a step."""
    vocab: int
    blocks: int = 0
    """Number of blocks that can be computed again in the backward pass."""
    in_block: int = 0
    """Part of ``kept`` of one of these blocks."""
    between: int = 0
    """The same of a block that is computed again."""
    masks: int = 1
    """Masks of documents that a step holds, of context x context for each window: one for all
    layers, or one for each."""
    looking: int | None = None
    """At the widest place of a forward pass alone; None for as many as ``passing``."""
    kept_for_matrices: int = 0
    """Part of ``kept`` that gradients of the blocks' matrices alone need: their inputs."""
    kept_for_norms: int = 0
    """The same of the weights of norms."""
    passing_for_matrices: int = 0
    """Part of ``passing`` where these matrices are trained."""
    packed_bytes: int = 0
    """Bytes of frozen matrices and of factors that stay, beside the parameters."""
    frozen: int = 0
    """Values of other frozen tensors: in fp32, on a GPU in bf16."""
    unpacked: int = 0
    """Values, in fp32, of a frozen matrix while it is used."""

    @property
    def parameters(self) -> int:
        """Values of all trained parameters."""
        return self.in_matrices + self.others

    @property
    def in_matrices(self) -> int:
        """Values of the matrices."""
        return sum(rows * columns * count for (rows, columns), count in self.matrices.items())


@dataclass(frozen=True)
class HuggingFaceForm:
    """A model as the library ``transformers`` knows it."""

    config: dict[str, Any]
    """``config.json`` without the dtype and the tokens that begin and end a text."""
    names: Mapping[str, str]
    """Names of tensors in the folder, by our names."""
    base: str = "model"
    """``base_model_prefix``: a folder may name tensors without it."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of stored tensors that the library does not read."""


class Model(nn.Module, ABC):
    """A language model. Tokens are ``[batch, length]``, logits ``[batch, length, vocab]``."""

    settings: ModelSettings
    separator: int | None = None
    """Token that ends a document, where attention keeps within documents; a text with a cache is
    read as one document."""
    compiled: bool = False
    """Whether the parts are compiled."""
    recompute: bool = False
    """Whether a backward pass computes blocks again, to the same bits, instead of keeping them."""

    draws: bool = False
    """Whether a step draws random numbers, for dropout."""

    @abstractmethod
    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Logits for tokens, which continue the text of the cache, if there is one."""

    @abstractmethod
    def place_of(self, name: str) -> Place:
        """Place of the parameter of this name: fragments keep blocks whole, Muon moves their
        matrices."""

    def check_length(self, tokens: int) -> None:
        """Raise ConfigError if a text exceeds the context."""
        context = self.settings.context
        if tokens > context:
            raise ConfigError(
                f"A text of {tokens} tokens exceeds context = {context}: pass fewer tokens."
            )

    def recompute_blocks(self, on: bool) -> None:
        """Set ``recompute``; a family whose footprint names no blocks takes no notice."""
        self.recompute = on

    def new_cache(self) -> Cache | None:
        """A cache of an empty text; None where the model reads the whole text for each token."""
        return None

    def compiled_parts(self) -> Iterable[nn.Module]:
        """Modules to compile on their own, as they are alike; none to compile the whole loss."""
        return ()

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a learned token; 0 where all targets are IGNORED."""
        return mean_loss(self(tokens), targets)


class StagedModel(Model):
    """A model that can be cut into stages: its loss is ``leave`` after ``enter``, and between them
    ``through`` of each machine that holds blocks."""

    elsewhere: Callable[[Tensor, Tensor | None], Tensor] | None = None
    """Computes the blocks that other machines hold, from what ``enter`` gives; None where all are
    here."""

    @abstractmethod
    def keep(self, stage: Stage) -> None:
        """Keep a stage alone of a model on the meta device, where nothing else takes memory."""

    @abstractmethod
    def fill(self, seed: int) -> None:
        """Set the weights that are here; they depend on settings and seed alone."""

    @abstractmethod
    def enter(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """States after embedding and blocks that are here, ``[batch, length, width]``, and the
        place where each token's document begins, if attention keeps within documents."""

    @abstractmethod
    def through(self, states: Tensor, starts: Tensor | None) -> Tensor:
        """States after the blocks that are here, where there is no embedding."""

    @abstractmethod
    def leave(self, states: Tensor, targets: Tensor) -> Tensor:
        """The loss of states after the last block."""


def staged(model: Model) -> StagedModel:
    """The same model, of a family that ``can_stage`` it."""
    assert isinstance(model, StagedModel), "a caller checks ``can_stage`` first"
    return model


class Family(ABC):
    """One kind of model."""

    separates: bool = False
    """Whether its models heed ``separator``."""

    @abstractmethod
    def build(self, settings: ModelSettings, seed: int) -> Model:
        """A model whose weights depend on settings and seed alone, the same at all peers."""

    def can_stage(self, settings: ModelSettings) -> bool:
        """Whether a model can be cut into stages."""
        return False

    def blank(self, settings: ModelSettings) -> Model:
        """A model of arbitrary weights, which the caller sets; on the meta device shapes alone."""
        return self.build(settings, 0)

    def allocate(self, model: Model, device: torch.device) -> None:
        """Give memory to a model of the meta device, with arbitrary parameters. A family of open
        weights sets all else."""
        model.to_empty(device=device)

    def check(self, settings: ModelSettings) -> None:  # noqa: B027 - most families need nothing
        """Raise ConfigError where this machine lacks a library; called before any allocation."""

    @abstractmethod
    def footprint(self, settings: ModelSettings) -> Footprint:
        """Memory of a model, estimated before anything is allocated."""

    def huggingface(self, settings: ModelSettings) -> HuggingFaceForm | None:
        """The same model of ``transformers``; None where it has none."""
        return None


def family_of(settings: ModelSettings) -> Family:
    """Family of a model with these settings."""
    return cast("Family", FAMILIES[settings.kind])


def build_model(settings: ModelSettings, seed: int) -> Model:
    """A model of any family, with weights that depend on settings and seed alone."""
    return family_of(settings).build(settings, seed)


def trained(model: Model) -> dict[str, nn.Parameter]:
    """The parameters that are trained, exchanged and saved, each once: all, or an adapter's."""
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


def tensor_specs(model: Model) -> list[TensorSpec]:
    """Trained parameters as the fragment plan takes them; the model may be on the meta device."""
    every = model.named_parameters(remove_duplicate=False)
    parameters = [(name, one) for name, one in every if one.requires_grad]
    names: dict[int, list[str]] = {}
    for name, parameter in parameters:
        names.setdefault(id(parameter), []).append(name)
    specs: list[TensorSpec] = []
    for name, parameter in parameters:
        shared, place = names[id(parameter)], model.place_of(name)
        storage = shared[0] if len(shared) > 1 else None
        shape = tuple(parameter.shape)
        specs.append(
            TensorSpec(name=name, shape=shape, layer=place.layer, role=place.role, storage=storage)
        )
    return specs
