"""The memory that a run needs, reckoned before anything is allocated. Pure: settings in, bytes out.

It counts float32 values a token or a parameter; ``benchmarks/reckoning.py`` compares real trainers.
W, F, H, V are width, feed_forward, heads and vocab.

For the backward pass a layer keeps 15 W + 4 F + 3 H + 2 values a token (``test_memory.py`` counts
them): attention is torch's own, which keeps no matrix of context x context. The loss holds two
copies of the logits beside the one that is kept.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from lowcomm_node.trainer.arena import slots_each
from lowcomm_protocol.spec.run import RunSpec
from lowcomm_protocol.spec.settings import ModelSettings, TrainSettings

FLOAT = 4
MIB, GIB = 1024**2, 1024**3
DAEMON = 350 * MIB
"""The daemon."""
TRAINER = 400 * MIB
"""The trainer with its libraries and what they compile, without a model."""
CUDA_TRAINER = 2000 * MIB
"""The same where torch brings up a GPU."""
CUDA_DEVICE = 600 * MIB
"""What CUDA and its libraries take of a GPU."""
EVALUATION_TOKENS = 8_192
"""Tokens of held-out text that are looked at together (evaluation.py)."""
EXCHANGE_VECTORS = 8
"""Vectors of each fragment under way: weights, progress, what is sent, anchor, what came, mean, new
slow weights and momentum."""
PASSING_VECTORS = 3
"""Of the one fragment that is coded or merged now: weights, state of the coder, and a temporary."""
MUON_VECTORS = 5
"""Copies of all matrices of one shape while Muon moves them (muon.py)."""
BETWEEN = 1.1
"""What the C library keeps in gaps between pieces of memory."""


@dataclass(frozen=True)
class Reckoning:
    """Bytes by what takes them."""

    host: dict[str, int]
    device: dict[str, int]
    """Of a GPU; empty where training runs on the processor."""

    @property
    def host_bytes(self) -> int:
        """Of the machine's memory."""
        return sum(self.host.values())

    @property
    def device_bytes(self) -> int:
        """Of the GPU's."""
        return sum(self.device.values())


def reckon(spec: RunSpec, gpu: bool, exchanges: int = 4) -> Reckoning:
    """What training takes with at most so many ``exchanges`` under way at once."""
    model = spec.model
    numel = count_parameters(model)
    optimizer = _moments(model, spec.train)
    training = {
        "weights and gradients": 2 * FLOAT * numel,
        "optimizer": optimizer + _muon_scratch(model, spec.train, gpu),
        f"activations and logits (batch {spec.train.batch} x context {model.context})": _activations(spec, gpu),
    }
    keeping = {
        "slow weights and momentum": 2 * FLOAT * numel,
        "exchanges": _exchanges(spec, numel, exchanges),
        # Each copies weights and moments, and keeps slow weights that a merge replaces meanwhile.
        "checkpoint and state for joiners": 2 * (FLOAT * numel + optimizer) + 2 * FLOAT * numel,
    }
    if gpu:
        return Reckoning(
            host={"programs": DAEMON + CUDA_TRAINER, **_with_gaps(keeping)},
            device={"programs": CUDA_DEVICE, **_with_gaps(training)},
        )
    return Reckoning(host={"programs": DAEMON + TRAINER, **_with_gaps(training | keeping)}, device={})


def count_parameters(model: ModelSettings) -> int:
    """Parameters of a model."""
    return sum(rows * columns * count for (rows, columns), count in _matrices(model).items()) + _others(model)


def kept_values(model: ModelSettings) -> int:
    """Values a token that a step keeps for its backward pass."""
    layer = 15 * model.width + 4 * model.feed_forward + 3 * model.heads + 2
    return model.layers * layer + 3 * model.width + 3 + model.vocab


def explain(parts: Mapping[str, int]) -> str:
    """The largest parts first, in GiB."""
    largest = sorted((part for part in parts.items() if part[1] >= GIB / 20), key=lambda part: -part[1])[:4]
    return ", ".join(f"{name} {amount / GIB:.1f}" for name, amount in largest)


def _matrices(model: ModelSettings) -> Counter[tuple[int, int]]:
    """Matrices of the blocks, which Muon takes, by shape."""
    width, inner, layers = model.width, model.feed_forward, model.layers
    found: Counter[tuple[int, int]] = Counter()
    for shape, count in (((width, width), 4), ((inner, width), 2), ((width, inner), 1)):
        found[shape] += count * layers
    return found


def _others(model: ModelSettings) -> int:
    """Values of embedding, head and norms."""
    tables = (1 if model.tied else 2) * model.vocab * model.width
    return tables + model.width + model.layers * (2 * model.width + 2 * (model.width // model.heads))


def _moments(model: ModelSettings, train: TrainSettings) -> int:
    matrices = sum(rows * columns * count for (rows, columns), count in _matrices(model).items())
    return FLOAT * (2 * _others(model) + (1 if train.optimizer == "muon" else 2) * matrices)


def _muon_scratch(model: ModelSettings, train: TrainSettings, gpu: bool) -> int:
    """A processor moves all matrices of one shape together, a GPU one after the other."""
    if train.optimizer != "muon":
        return 0
    together = max(rows * columns * (1 if gpu else count) for (rows, columns), count in _matrices(model).items())
    return MUON_VECTORS * FLOAT * together


def _activations(spec: RunSpec, gpu: bool) -> int:
    """The larger of what a step and a look at held-out text take."""
    model = spec.model
    width, inner, vocab = model.width, model.feed_forward, model.vocab
    tokens = spec.train.batch * model.context
    kept, passing = kept_values(model), max(2 * vocab, 10 * width + 4 * inner)
    looked_at = max(model.context, EVALUATION_TOKENS)
    evaluated = 2 * vocab + 10 * width + 4 * inner
    # A GPU computes in bf16, but norms and the loss, and keeps a copy of the weights in bf16.
    copies = FLOAT // 2 * count_parameters(model) if gpu else 0
    return max(FLOAT * tokens * (kept + passing), FLOAT * looked_at * evaluated) + copies


def _exchanges(spec: RunSpec, numel: int, exchanges: int) -> int:
    """Captures and slots of the exchanges under way, and what coders keep of each fragment."""
    sync = spec.sync
    if sync.group == 1:
        return 0
    fragment = -(-numel // sync.fragments)
    each = fragment * (EXCHANGE_VECTORS + slots_each(sync.group))
    coders = numel if sync.error_feedback else 0
    return FLOAT * (min(exchanges, sync.fragments) * each + PASSING_VECTORS * fragment + coders)


def _with_gaps(parts: Mapping[str, int]) -> dict[str, int]:
    return {name: int(BETWEEN * amount) for name, amount in parts.items()}
