"""Models of the library ``transformers`` that a run may choose: types, keys, bounds, sizes.

A key has the library's own name. Nothing here imports the library: a bootstrap server and a daemon
check a specification and count its parameters by this table alone. A default never changes, because
it is what a specification means that leaves the key out.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias

Value: TypeAlias = int | float | bool
Values: TypeAlias = Mapping[str, Value]


@dataclass(frozen=True)
class Key:
    """A key of ``[model.config]``."""

    kind: type[int] | type[float] | type[bool]
    default: Value | None = None
    """None: it must be given."""
    least: float = 0
    most: float = 1

    def problem(self, value: object) -> str | None:
        """What is wrong with a value; None if nothing is."""
        if self.kind is bool or isinstance(value, bool):
            return None if type(value) is self.kind else f"must be {_KINDS[self.kind]}"
        if not isinstance(value, int if self.kind is int else int | float):
            return f"must be {_KINDS[self.kind]}"
        # NaN fails both comparisons.
        if self.least <= value <= self.most:
            return None
        return f"must be from {self.least:,} to {self.most:,}"


_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}


@dataclass(frozen=True)
class Sizes:
    """What shapes follow from."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head: int
    """Channels of a head."""
    inner: int
    """Width inside of the feed-forward half."""
    tied: bool

    @property
    def queries(self) -> int:
        """Channels of all query heads."""
        return self.heads * self.head

    @property
    def keys(self) -> int:
        """Channels of all heads of keys."""
        return self.kv_heads * self.head


Flag: TypeAlias = bool | str
"""Always, never, or by the key of this name, where the type has it."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One type of model: what can be chosen of it, and which tensors it has."""

    more: Mapping[str, Key] = field(default_factory=dict[str, Key])
    """Keys beside those of its sizes."""
    width: str = "hidden_size"
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    kv_heads: str = "num_key_value_heads"
    """Empty where keys have as many heads as queries."""
    head: str = ""
    """Key of the channels of a head; empty where they follow from the width."""
    inner: str = "intermediate_size"
    inner_times: int = 0
    """The inner width in widths where its key is 0; 0: the key must be given."""
    context: str = "max_position_embeddings"
    tied: bool = False
    fused: bool = False
    """One matrix for queries, keys and values; and one for both of a gated feed-forward half."""
    turned: bool = False
    """Matrices lie as ``[inputs, outputs]``."""
    gated: bool = True
    norms: int = 2
    """Vectors of the width that a layer's norms have."""
    last_norms: int = 1
    head_norms: Literal["none", "head", "all"] = "none"
    """Norms of queries and keys: of one head's channels, or of all heads' together."""
    qkv_bias: Flag = "attention_bias"
    output_bias: Flag = "attention_bias"
    inner_bias: Flag = "mlp_bias"
    learned_positions: bool = False

    @property
    def keys(self) -> Mapping[str, Key]:
        """All keys that a run may give."""
        sizes = {
            self.width: _WIDTH,
            self.layers: _LAYERS,
            self.heads: _HEADS,
            self.kv_heads: _OPTIONAL_HEADS,
            self.head: _OPTIONAL_HEADS,
            self.inner: Key(int, 0, 0, 262_144) if self.inner_times else _INNER,
            "tie_word_embeddings": Key(bool, self.tied),
        }
        return {name: key for name, key in sizes.items() if name} | dict(self.more)

    def filled(self, given: Values) -> dict[str, Value]:
        """All keys, those that are not given by their defaults."""
        return {
            name: given.get(name, key.default)
            for name, key in self.keys.items()
            if key.default is not None or name in given
        }  # type: ignore[return-value]

    def sizes(self, given: Values) -> Sizes:
        """Its sizes, with keys that were checked."""
        told = self.filled(given)
        width, heads = int(told[self.width]), int(told[self.heads])
        return Sizes(
            layers=int(told[self.layers]),
            width=width,
            heads=heads,
            kv_heads=int(told.get(self.kv_heads, 0)) or heads,
            head=int(told.get(self.head, 0)) or width // heads,
            inner=int(told[self.inner]) or self.inner_times * width,
            tied=bool(told["tie_word_embeddings"]),
        )

    def matrices(self, given: Values) -> Counter[tuple[int, int]]:
        """The matrices of all layers, by shape."""
        size = self.sizes(given)
        queries, keys, width, inner = size.queries, size.keys, size.width, size.inner
        halves = 2 if self.gated else 1
        if self.fused:
            into = [(queries + 2 * keys, width), (halves * inner, width)]
        else:
            into = [(queries, width), (keys, width), (keys, width), *[(inner, width)] * halves]
        shapes = [*into, (width, queries), (width, inner)]
        found: Counter[tuple[int, int]] = Counter()
        for rows, columns in shapes:
            found[(columns, rows) if self.turned else (rows, columns)] += size.layers
        return found

    def others(self, given: Values, vocab: int, context: int) -> int:
        """Values of all parameters that are no matrix of a layer."""
        size = self.sizes(given)
        width, inner = size.width, size.inner
        layer = self.norms * width
        layer += {"none": 0, "head": 2 * size.head, "all": size.queries + size.keys}[
            self.head_norms
        ]
        layer += self._has(self.qkv_bias, given) * (size.queries + 2 * size.keys)
        layer += self._has(self.output_bias, given) * width
        layer += self._has(self.inner_bias, given) * (inner * (2 if self.gated else 1) + width)
        tables = vocab * width * (1 if size.tied else 2)
        positions = context * width if self.learned_positions else 0
        return tables + positions + self.last_norms * width + size.layers * layer

    def parameters(self, given: Values, vocab: int, context: int) -> int:
        """Values of all parameters."""
        matrices = self.matrices(given)
        inside = sum(rows * columns * count for (rows, columns), count in matrices.items())
        return inside + self.others(given, vocab, context)

    def _has(self, flag: Flag, given: Values) -> bool:
        return bool(self.filled(given).get(flag)) if isinstance(flag, str) else flag


_WIDTH = Key(int, None, 8, 65_536)
_LAYERS = Key(int, None, 1, 512)
_HEADS = Key(int, None, 1, 1024)
_OPTIONAL_HEADS = Key(int, 0, 0, 1024)
_INNER = Key(int, None, 8, 262_144)
_FLAG = Key(bool, False)
_WINDOW = Key(int, 0, 0, 1_048_576)
"""Tokens that a layer looks back; 0: all."""


def _epsilon(default: float) -> Key:
    return Key(float, default, 1e-12, 1e-2)


def _base(default: float) -> Key:
    return Key(float, default, 1.5, 1e9)


def _factor(default: float) -> Key:
    return Key(float, default, 1e-6, 1e6)


_LLAMA = {"rms_norm_eps": _epsilon(1e-6), "rope_theta": _base(10_000.0)}
_BIASED = {"attention_bias": _FLAG}
_OLMO = {"rms_norm_eps": _epsilon(1e-5), **_BIASED}

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(
            head="head_dim",
            more={**_LLAMA, **_BIASED, "mlp_bias": _FLAG},
        ),
        "mistral": Architecture(head="head_dim", more={**_LLAMA, "sliding_window": _WINDOW}),
        "qwen2": Architecture(more=_LLAMA, qkv_bias=True),
        "qwen3": Architecture(
            head="head_dim",
            more={**_LLAMA, **_BIASED},
            head_norms="head",
        ),
        "olmo2": Architecture(
            more={**_OLMO, "rope_theta": _base(10_000.0)},
            head_norms="all",
        ),
        "olmo3": Architecture(
            more={
                **_OLMO,
                "rope_theta": _base(500_000.0),
                "sliding_window": Key(int, 4096, 1, 1_048_576),
            },
            head_norms="all",
        ),
        "smollm3": Architecture(
            more={
                "rms_norm_eps": _epsilon(1e-6),
                "rope_theta": _base(2_000_000.0),
                "no_rope_layer_interval": Key(int, 4, 1, 1024),
                **_BIASED,
                "mlp_bias": _FLAG,
            },
            tied=True,
        ),
        "phi3": Architecture(
            more={
                "rms_norm_eps": _epsilon(1e-5),
                "rope_theta": _base(10_000.0),
                "partial_rotary_factor": Key(float, 1.0, 0.01, 1.0),
                "sliding_window": _WINDOW,
            },
            fused=True,
        ),
        "gemma3_text": Architecture(
            head="head_dim",
            more={
                "rms_norm_eps": _epsilon(1e-6),
                "rope_theta": _base(1_000_000.0),
                "rope_local_base_freq": _base(10_000.0),
                "query_pre_attn_scalar": Key(int, 256, 1, 65_536),
                "sliding_window": Key(int, 4096, 1, 1_048_576),
                **_BIASED,
            },
            tied=True,
            norms=4,
            head_norms="head",
        ),
        "granite": Architecture(
            more={
                **_LLAMA,
                **_BIASED,
                "mlp_bias": _FLAG,
                "embedding_multiplier": _factor(1.0),
                "logits_scaling": _factor(1.0),
                "residual_multiplier": _factor(1.0),
                "attention_multiplier": _factor(1.0),
            },
        ),
        "starcoder2": Architecture(
            more={
                "norm_epsilon": _epsilon(1e-5),
                "rope_theta": _base(10_000.0),
                "sliding_window": _WINDOW,
                "use_bias": Key(bool, True),
            },
            tied=True,
            gated=False,
            norms=4,
            last_norms=2,
            qkv_bias="use_bias",
            output_bias="use_bias",
            inner_bias="use_bias",
        ),
        "gpt_neox": Architecture(
            kv_heads="",
            more={
                "layer_norm_eps": _epsilon(1e-5),
                "rope_theta": _base(10_000.0),
                "partial_rotary_factor": Key(float, 0.25, 0.01, 1.0),
                "use_parallel_residual": Key(bool, True),
                "attention_bias": Key(bool, True),
            },
            fused=True,
            gated=False,
            norms=4,
            last_norms=2,
            inner_bias=True,
        ),
        "gpt2": Architecture(
            width="n_embd",
            layers="n_layer",
            heads="n_head",
            kv_heads="",
            inner="n_inner",
            inner_times=4,
            context="n_positions",
            more={
                "layer_norm_epsilon": _epsilon(1e-5),
                "scale_attn_by_inverse_layer_idx": _FLAG,
            },
            tied=True,
            fused=True,
            turned=True,
            gated=False,
            norms=4,
            last_norms=2,
            qkv_bias=True,
            output_bias=True,
            inner_bias=True,
            learned_positions=True,
        ),
        "nanochat": Architecture(
            more={**_LLAMA, **_BIASED, "final_logit_softcapping": _factor(15.0)},
            gated=False,
            norms=0,
            last_norms=0,
        ),
    }
)
"""By the library's ``model_type``."""


def is_mixture(name: str) -> bool:
    """Whether this is, by its name, a type or a key of a mixture of experts."""
    return name.startswith(_MIXTURES) or "moe" in name or "expert" in name


_MIXTURES = ("mixtral", "dbrx", "deepseek_v", "gpt_oss", "llama4", "jamba", "arctic", "minimax")
