"""Models of the library ``transformers`` that a run may choose: types, keys, bounds, sizes.

A key has the library's own name. Nothing here imports the library: a bootstrap server and a daemon
check a specification and count its parameters by this table alone. A default never changes, because
it is what a specification means that leaves the key out.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
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
    most: float = 1.0

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
    """Sizes that shapes follow from."""

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
    def keys(self) -> dict[str, Key]:
        """All keys that a run may give."""
        sizes = {
            self.width: Key(int, None, 8, 65_536),
            self.layers: Key(int, None, 1, 512),
            self.heads: Key(int, None, 1, 1024),
            self.kv_heads: Key(int, 0, 0, 1024),
            self.head: Key(int, 0, 0, 1024),
            self.inner: Key(int, 0, 0, 262_144) if self.inner_times else Key(int, None, 8, 262_144),
            "tie_word_embeddings": Key(bool, self.tied),
        }
        return {name: key for name, key in sizes.items() if name} | dict(self.more)

    def filled(self, given: Values) -> dict[str, Value]:
        """All keys; those not given have their defaults."""
        values = {name: given.get(name, key.default) for name, key in self.keys.items()}
        return {name: value for name, value in values.items() if value is not None}

    def sizes(self, given: Values) -> Sizes:
        """Its sizes, with keys that were checked."""
        values = self.filled(given)
        width, heads = int(values[self.width]), int(values[self.heads])
        return Sizes(
            layers=int(values[self.layers]),
            width=width,
            heads=heads,
            kv_heads=int(values.get(self.kv_heads, 0)) or heads,
            head=int(values.get(self.head, 0)) or width // heads,
            inner=int(values[self.inner]) or self.inner_times * width,
            tied=bool(values["tie_word_embeddings"]),
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
        counts: Counter[tuple[int, int]] = Counter()
        for rows, columns in (*into, (width, queries), (width, inner)):
            counts[(columns, rows) if self.turned else (rows, columns)] += size.layers
        return counts

    def others(self, given: Values, vocab: int, context: int) -> int:
        """Number of parameters outside the matrices of layers."""
        size, values = self.sizes(given), self.filled(given)

        def has(flag: Flag) -> bool:
            return bool(values.get(flag)) if isinstance(flag, str) else flag

        width, inner = size.width, size.inner
        normed = {"none": 0, "head": 2 * size.head, "all": size.queries + size.keys}
        layer = self.norms * width + normed[self.head_norms]
        layer += has(self.qkv_bias) * (size.queries + 2 * size.keys)
        layer += has(self.output_bias) * width
        layer += has(self.inner_bias) * (inner * (2 if self.gated else 1) + width)
        tables = vocab * width * (1 if size.tied else 2)
        positions = context * width if self.learned_positions else 0
        return tables + positions + self.last_norms * width + size.layers * layer

    def parameters(self, given: Values, vocab: int, context: int) -> int:
        """Values of all parameters."""
        matrices = self.matrices(given)
        inside = sum(rows * columns * count for (rows, columns), count in matrices.items())
        return inside + self.others(given, vocab, context)


_epsilon = partial(Key, float, least=1e-12, most=1e-2)
_base = partial(Key, float, least=1.5, most=1e9)
_window = partial(Key, int, most=1_048_576)
"""Tokens that a layer looks back; 0: all."""


def _usual(epsilon: float, base: float = 10_000.0, name: str = "rms_norm_eps") -> dict[str, Key]:
    """Keys of norms and positions, with these defaults."""
    return {name: _epsilon(epsilon), "rope_theta": _base(base)}


_FLAG = Key(bool, False)
_BIASED = {"attention_bias": _FLAG}
_BIASES = {**_BIASED, "mlp_bias": _FLAG}
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier")
_FACTOR = Key(float, 1.0, 1e-6, 1e6)
_LAYER_NORMED = partial(Architecture, gated=False, norms=4, last_norms=2)
"""Norms have biases; the feed-forward half has two matrices."""

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(head="head_dim", more=_usual(1e-6) | _BIASES),
    "mistral": Architecture(head="head_dim", more=_usual(1e-6) | {"sliding_window": _window(0)}),
    "qwen2": Architecture(more=_usual(1e-6), qkv_bias=True),
    "qwen3": Architecture(head="head_dim", more=_usual(1e-6) | _BIASED, head_norms="head"),
    "olmo2": Architecture(more=_usual(1e-5) | _BIASED, head_norms="all"),
    "olmo3": Architecture(
        more=_usual(1e-5, 500_000.0) | _BIASED | {"sliding_window": _window(4096, least=1)},
        head_norms="all",
    ),
    "smollm3": Architecture(
        more=_usual(1e-6, 2_000_000.0) | _BIASES | {"no_rope_layer_interval": Key(int, 4, 1, 1024)},
        tied=True,
    ),
    "phi3": Architecture(
        more=_usual(1e-5)
        | {"partial_rotary_factor": Key(float, 1.0, 0.01), "sliding_window": _window(0)},
        fused=True,
    ),
    "gemma3_text": Architecture(
        head="head_dim",
        more={
            **_usual(1e-6, 1_000_000.0),
            **_BIASED,
            "rope_local_base_freq": _base(10_000.0),
            "query_pre_attn_scalar": Key(int, 256, 1, 65_536),
            "sliding_window": _window(4096, least=1),
        },
        tied=True,
        norms=4,
        head_norms="head",
    ),
    "granite": Architecture(
        more=_usual(1e-6) | _BIASES | dict.fromkeys((*_MULTIPLIERS, "logits_scaling"), _FACTOR)
    ),
    "starcoder2": _LAYER_NORMED(
        more=_usual(1e-5, name="norm_epsilon")
        | {"sliding_window": _window(0), "use_bias": Key(bool, True)},
        tied=True,
        qkv_bias="use_bias",
        output_bias="use_bias",
        inner_bias="use_bias",
    ),
    "gpt_neox": _LAYER_NORMED(
        kv_heads="",
        more={
            **_usual(1e-5, name="layer_norm_eps"),
            "partial_rotary_factor": Key(float, 0.25, 0.01),
            "use_parallel_residual": Key(bool, True),
            "attention_bias": Key(bool, True),
        },
        fused=True,
        inner_bias=True,
    ),
    "gpt2": _LAYER_NORMED(
        width="n_embd",
        layers="n_layer",
        heads="n_head",
        kv_heads="",
        inner="n_inner",
        inner_times=4,
        context="n_positions",
        more={"layer_norm_epsilon": _epsilon(1e-5), "scale_attn_by_inverse_layer_idx": _FLAG},
        tied=True,
        fused=True,
        turned=True,
        qkv_bias=True,
        output_bias=True,
        inner_bias=True,
        learned_positions=True,
    ),
    "nanochat": Architecture(
        more=_usual(1e-6) | _BIASED | {"final_logit_softcapping": Key(float, 15.0, 1e-6, 1e6)},
        gated=False,
        norms=0,
        last_norms=0,
    ),
}
"""By the library's ``model_type``."""


def is_mixture(name: str) -> bool:
    """Whether this is, by its name, a type or a key of a mixture of experts."""
    return name.startswith(_MIXTURES) or "moe" in name or "expert" in name


_MIXTURES = ("mixtral", "dbrx", "deepseek_v", "gpt_oss", "llama4", "jamba", "arctic", "minimax")
