"""Models of the library ``transformers`` as a family.

A model is built on the meta device, which takes no memory. Then ``init_weights`` computes the
buffers (angles of positions), and our own numbers fill all parameters, by name: those of the
library depend on its release and on torch's random state. All keys of a type are passed, never the
library's defaults, which may change. No dropout: a step must give the same bits after a restart.
"""

import hashlib
import json
import math
import re
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowcomm_node.errors import ConfigError
from lowcomm_node.models.base import (
    Cache,
    Family,
    Footprint,
    HuggingFaceForm,
    Model,
    Place,
    Stage,
    StagedModel,
    fill_normal,
)
from lowcomm_node.models.cross_entropy import cross_entropy
from lowcomm_node.models.documents import document_starts
from lowcomm_node.system import command
from lowcomm_protocol.spec.architectures import ARCHITECTURES
from lowcomm_protocol.spec.models import TransformersSettings
from lowcomm_protocol.spec.sections import ModelSettings

_ROTARY = ("rope_theta", "partial_rotary_factor", "rope_local_base_freq")
"""Keys that the library takes together, as ``rope_parameters``."""
_WITHOUT_DROPOUT = {
    "gpt2": ("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    "phi3": ("attention_dropout", "embd_pdrop", "resid_pdrop"),
    "starcoder2": ("attention_dropout", "embedding_dropout", "residual_dropout"),
    "gpt_neox": ("attention_dropout", "hidden_dropout"),
}
_FULL_EVERY = {"olmo3": 4, "gemma3_text": 6}
"""Interval of the layers that attend to the whole text."""
FULL, SLIDING = "full_attention", "sliding_attention"


def configuration(settings: TransformersSettings) -> dict[str, Any]:
    """Arguments of ``AutoConfig.for_model``, beside the type."""
    type_, values = settings.architecture, settings.values
    sizes, every = type_.sizes(settings.config), _FULL_EVERY.get(settings.type)
    keys: dict[str, Any] = {name: one for name, one in values.items() if name not in _ROTARY}
    if type_.kv_heads:
        keys[type_.kv_heads] = sizes.kv_heads
    if type_.head:
        keys[type_.head] = sizes.head
    keys[type_.inner] = values[type_.inner] or None
    if "sliding_window" in keys:
        keys["sliding_window"] = keys["sliding_window"] or None
    if every:
        layers = range(1, sizes.layers + 1)
        keys["layer_types"] = [SLIDING if layer % every else FULL for layer in layers]
    if "rope_theta" in values:
        plain = {name: values[name] for name in _ROTARY[:2] if name in values}
        plain = {"rope_type": "default", **plain}
        near = values.get("rope_local_base_freq", values["rope_theta"])
        by_layer = {FULL: plain, SLIDING: {**plain, "rope_theta": near}}
        keys["rope_parameters"] = by_layer if every else plain
    dropouts = _WITHOUT_DROPOUT.get(settings.type, ("attention_dropout",))
    return {
        **keys,
        "vocab_size": settings.vocab,
        type_.context: settings.context,
        **dict.fromkeys(dropouts, 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


INIT_STD = 0.02
_BLOCK = re.compile(r"\.(?:layers|h)\.(\d+)\.")
_INTO_RESIDUAL = re.compile(
    r"\.(?:o_proj|down_proj|dense|dense_4h_to_h|fc2|(?:attn|mlp)\.c_proj)\.weight$"
)
"""Matrices that write into the residual stream."""
_OFFSET_NORMS = ("gemma3_text",)
"""Types whose norms scale by 1 + weight."""
_STORED = {"gpt_neox": {"lm_head.weight": "embed_out.weight"}}
"""Names in files, where releases of 5 name a parameter in another way."""
LINEAR_HEADS = frozenset(ARCHITECTURES) - {"nanochat"}
"""Types whose logits are a matrix times states, perhaps divided by a number."""


UNCUT = frozenset({"gpt2"})
"""Types whose states before the first layer depend on more than tokens: places are added."""


class KeptText:
    """Keys and values of a text, as the library keeps them."""

    def __init__(self, kept: Any) -> None:
        self.kept, self.length = kept, 0


class Skipped(nn.Module):
    """In the place of a module that another machine holds."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x


class TransformersModel(StagedModel):
    """A causal language model of the library."""

    causal: Any

    def __init__(self, settings: TransformersSettings, causal: nn.Module) -> None:
        super().__init__()
        self.settings = settings
        self.causal = causal

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Raises ConfigError if the text exceeds the context."""
        text = cast("KeptText | None", cache)
        end = tokens.shape[1] + (text.length if text is not None else 0)
        self.check_length(end)
        if self.elsewhere is not None:
            x = self.elsewhere(*self.enter(tokens))
            return self.causal.get_output_embeddings()(self._to_head(x))
        if text is None:
            return self.causal(input_ids=tokens, **self._alone(tokens)).logits
        output = self.causal(input_ids=tokens, past_key_values=text.kept, use_cache=True)
        text.length = end
        return output.logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        settings = cast("TransformersSettings", self.settings)
        if settings.type not in LINEAR_HEADS:
            return super().loss(tokens, targets)
        if self.elsewhere is not None:
            return self.leave(self.elsewhere(*self.enter(tokens)), targets)
        states = self.causal.base_model(input_ids=tokens, **self._alone(tokens)).last_hidden_state
        return self._loss_of(states, targets)

    def _loss_of(self, normed: Tensor, targets: Tensor) -> Tensor:
        states = normed / self._scaling
        return cross_entropy(states, self.causal.get_output_embeddings().weight, targets)

    @property
    def _scaling(self) -> float:
        settings = cast("TransformersSettings", self.settings)
        return float(settings.values.get("logits_scaling", 1.0))

    def _to_head(self, states: Tensor) -> Tensor:
        return self._norm[1](states) / self._scaling

    def _starts(self, tokens: Tensor) -> Tensor | None:
        return None if self.separator is None else document_starts(tokens, self.separator)

    def _alone(self, tokens: Tensor) -> dict[str, Any]:
        """Arguments for windows without a cache."""
        return _without_cache(self._starts(tokens))

    # stages

    @property
    def _layers(self) -> nn.ModuleList:
        return self.causal.base_model.layers

    @property
    def _norm(self) -> tuple[str, nn.Module]:
        """Name and module of the norm after the last layer."""
        base = self.causal.base_model
        (found,) = (
            (name, one)
            for name, one in base.named_children()
            if one not in (self._layers, base.get_input_embeddings()) and list(one.parameters())
        )
        return found

    def keep(self, stage: Stage) -> None:
        base: Any = self.causal.base_model
        for number in range(len(self._layers)):
            if not stage.start <= number < stage.stop:
                self._layers[number] = Skipped()
        if not stage.outside:
            base.embedding_multiplier = 1.0  # of one type; the head multiplies
            self.causal.config.tie_word_embeddings = False
            self.causal.all_tied_weights_keys = {}
            for parent in (base, self.causal):
                for name, child in parent.named_children():
                    if child not in (base, self._layers) and list(child.parameters()):
                        setattr(parent, name, Skipped())

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        settings = cast("TransformersSettings", self.settings)
        layers = settings.architecture.sizes(settings.config).layers
        norm = 0.0 if settings.type in _OFFSET_NORMS else 1.0
        for name, parameter in self.causal.named_parameters():
            if parameter.dim() > 1:
                deep = math.sqrt(2 * layers) if _INTO_RESIDUAL.search(name) else 1.0
                fill_normal(parameter, INIT_STD / deep, f"{seed}:{name}")
            else:
                parameter.fill_(0.0 if name.endswith(".bias") else norm)

    def enter(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        base, (name, norm), starts = self.causal.base_model, self._norm, self._starts(tokens)
        setattr(base, name, Skipped())
        try:
            states = base(input_ids=tokens, **_without_cache(starts)).last_hidden_state
        finally:
            setattr(base, name, norm)
        return states, starts

    def through(self, states: Tensor, starts: Tensor | None) -> Tensor:
        base = self.causal.base_model
        return base(inputs_embeds=states, **_without_cache(starts)).last_hidden_state

    def leave(self, states: Tensor, targets: Tensor) -> Tensor:
        return self._loss_of(self._norm[1](states), targets)

    def recompute_blocks(self, on: bool) -> None:
        super().recompute_blocks(on)
        causal: Any = self.causal
        # Releases of 5 name it in two ways.
        kind = "activation" if hasattr(causal, "activation_checkpointing_enable") else "gradient"
        switch = getattr(causal, f"{kind}_checkpointing_{'enable' if on else 'disable'}")
        switch(*([{"use_reentrant": False, "preserve_rng_state": self.draws}] if on else []))

    def new_cache(self) -> KeptText:
        return KeptText(library().DynamicCache(config=self.causal.config))

    def place_of(self, name: str) -> Place:
        block = _BLOCK.search(name)
        if block:
            return Place("block", int(block[1]))
        if "norm" in name or "ln_f" in name:
            return Place("norm")
        is_table = "embed" in name or ".wte." in name or ".wpe." in name
        return Place("embedding" if is_table else "head")


def _without_cache(starts: Tensor | None) -> dict[str, Any]:
    """The library keeps attention within documents where positions begin at 0 again, in sliding
    windows, too."""
    if starts is None:
        return {"use_cache": False}
    return {"use_cache": False, "position_ids": torch.arange(starts.shape[1]).to(starts) - starts}


def library() -> Any:
    """The library. Raises ConfigError where it is missing."""
    module = command.load_optional("transformers", "The model of this run", "hf")
    module.logging.set_verbosity_error()  # its advice is for users of its own
    return module


def bare_model(settings: TransformersSettings) -> TransformersModel:
    """The model on the meta device. Raises ConfigError if the library can't build it."""
    hf = library()
    if settings.type not in hf.CONFIG_MAPPING:
        raise ConfigError(
            f"transformers {hf.__version__} knows no models of type {settings.type!r}: "
            f"{install(settings)}."
        )
    try:
        config = hf.AutoConfig.for_model(settings.type, **configuration(settings))
        with torch.device("meta"):
            causal = hf.AutoModelForCausalLM.from_config(
                config, attn_implementation="sdpa", dtype=torch.float32, trust_remote_code=False
            )
    except Exception as error:  # whatever another release thinks of its own keys
        raise ConfigError(
            f"transformers {hf.__version__} can't build a {settings.type} of this run "
            f"({str(error)[:200]}): {install(settings)}."
        ) from error
    return TransformersModel(settings, causal)


def install(settings: TransformersSettings) -> str:
    """The command that installs the release of a run."""
    release = f"=={settings.release}" if settings.release else ">=5"
    return command.install(f"transformers{release}")


def layout_of(model: TransformersModel) -> str:
    """SHA-256, hexadecimal, of type, names and shapes in order."""
    shapes = [[name, *parameter.shape] for name, parameter in model.causal.named_parameters()]
    type_ = cast("TransformersSettings", model.settings).type
    text = json.dumps(["lowcomm layout 1", type_, shapes], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def checked_model(settings: TransformersSettings) -> TransformersModel:
    """The model on the meta device, with the layout of the run. Raises ConfigError."""
    model = bare_model(settings)
    if settings.layout not in ("", layout_of(model)):
        raise ConfigError(
            f"transformers {library().__version__} builds this model with other tensors than "
            f"{settings.release or 'the release of its creator'}: {install(settings)}."
        )
    return model


class TransformersFamily(Family):
    """Builds models of the library and estimates their memory."""

    separates = True

    @torch.no_grad()
    def build(self, settings: ModelSettings, seed: int) -> TransformersModel:
        model = self.blank(settings)
        if torch.get_default_device().type != "meta":
            model.fill(seed)
        return model

    def can_stage(self, settings: ModelSettings) -> bool:
        return cast("TransformersSettings", settings).type in LINEAR_HEADS - UNCUT

    def blank(self, settings: ModelSettings) -> TransformersModel:
        model = checked_model(cast("TransformersSettings", settings))
        if torch.get_default_device().type != "meta":
            self.allocate(model, torch.get_default_device())
        return model

    def allocate(self, model: Model, device: torch.device) -> None:
        causal: Any = cast("TransformersModel", model).causal.to_empty(device=device)
        for module in causal.modules():
            # init_weights leaves it alone: only buffers, such as angles of positions, are computed.
            module._is_hf_initialized = not list(module.buffers(recurse=False))
        for parameter in causal.parameters():
            parameter._is_hf_initialized = True
        with torch.random.fork_rng(devices=[]):
            causal.init_weights()  # ties what is tied, too

    def check(self, settings: ModelSettings) -> None:
        checked_model(cast("TransformersSettings", settings))

    def footprint(self, settings: ModelSettings) -> Footprint:
        model = cast("TransformersSettings", settings)
        size, vocab = model.architecture.sizes(model.config), model.vocab
        width, inner, queries, keys = size.width, size.inner, size.queries, size.keys
        # Types without a gate have biases in their norms, which count as vectors.
        norms = model.architecture.norms if model.architecture.gated else 2
        # The library keeps more than ours: norms a copy in float32, rotations and activations
        # their parts. test_families.py counts them.
        layer = 6 * width + 3 * queries + 2 * keys + 4 * inner + 4 * size.heads
        more = max(0, norms - 2)
        in_heads = (queries + keys) * (model.architecture.head_norms != "none")
        parts = (queries + keys) * (model.architecture.fused and model.architecture.gated)
        layer += 2 * (in_heads + parts) + 3 * width * more
        normed = in_heads + (2 + more) * width * model.architecture.gated
        widest = 6 * width + 8 * queries + 5 * inner
        return Footprint(
            matrices=model.architecture.matrices(model.config),
            others=model.architecture.others(model.config, vocab, model.context),
            kept=size.layers * layer + 3 * width + 3,
            kept_for_matrices=size.layers * (2 * width + queries + inner),
            kept_for_norms=size.layers * normed + width * model.architecture.gated,
            passing_for_matrices=6 * width + 8 * queries + 3 * inner,
            # A loss that is not computed in chunks holds all logits three times.
            passing=widest + (0 if model.type in LINEAR_HEADS else 3 * vocab),
            vocab=vocab,
            blocks=size.layers,
            in_block=layer,
            between=width,
            masks=size.layers,
        )

    def huggingface(self, settings: ModelSettings) -> HuggingFaceForm | None:
        model = checked_model(cast("TransformersSettings", settings))
        causal: Any = model.causal
        config: dict[str, Any] = causal.config.to_dict()
        for name in ("_name_or_path", "transformers_version", "dtype"):
            config.pop(name, None)
        config["architectures"] = [type(causal).__name__]
        stored = _STORED.get(causal.config.model_type, {})
        parameters: list[str] = [name for name, _ in causal.named_parameters()]
        names = {f"causal.{name}": stored.get(name, name) for name in parameters}
        ignored = tuple(causal._keys_to_ignore_on_load_unexpected or ())
        return HuggingFaceForm(config, names, causal.base_model_prefix, ignored)


FAMILY = TransformersFamily()
