"""The memory that a run needs, reckoned before anything is allocated. Pure: settings in, bytes out.

It counts float32 values a token or a parameter, which the model's family gives (its ``Footprint``);
``benchmarks/reckoning.py`` compares real trainers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lowcomm_node.models.base import Footprint, family_of
from lowcomm_node.models.cross_entropy import chunk_tokens
from lowcomm_node.trainer.inner.micro_batch import Cut
from lowcomm_protocol.exchange.kinds import kind_of
from lowcomm_protocol.spec.run import RunSpec
from lowcomm_protocol.spec.settings import ModelSettings, TrainSettings

FLOAT = 4
MIB, GIB = 1024**2, 1024**3
DAEMON = 200 * MIB
"""The daemon."""
TRAINER = 350 * MIB
"""The trainer with its libraries and what they compile, without a model."""
CUDA_TRAINER = 2000 * MIB
"""The same where torch brings up a GPU."""
CUDA_DEVICE = 600 * MIB
"""What CUDA and its libraries take of a GPU."""
EVALUATION_TOKENS = 8_192
"""Tokens of held-out text that are looked at together (evaluation.py)."""
EXCHANGE_VECTORS = 7
"""Vectors of each fragment under way (scratch.py): weights, what is sent and what came, in groups
the mean, new slow weights and momentum; and what a coder keeps until they are applied."""
PASSING_VECTORS = 2
"""Of the one fragment that is coded or averaged now."""
DEVICE_VECTORS = 4
"""Of a fragment on a GPU: one that is captured, and three of a merge (device/copies.py)."""
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


def reckon(spec: RunSpec, gpu: bool, exchanges: int = 4, cut: Cut | None = None) -> Reckoning:
    """What training takes with at most so many ``exchanges`` under way at once.

    ``cut``: how a step goes through the model; None for the whole batch at once.
    """
    cut = cut or Cut(spec.train.batch)
    model = family_of(spec.model).footprint(spec.model)
    numel = model.parameters
    optimizer = _moments(model, spec.train)
    # Each copies weights and moments, and keeps slow weights that a merge replaces meanwhile.
    states = 2 * (FLOAT * numel + optimizer) + 2 * FLOAT * numel
    training = {
        "weights and gradients": 2 * FLOAT * numel,
        "optimizer": optimizer + _muon_scratch(model, spec.train, gpu),
        f"activations and logits ({cut.windows} x context {spec.model.context} at once)": (
            _activations(spec, model, gpu, states, cut)
        ),
    }
    keeping = {
        "slow weights and momentum": 2 * FLOAT * numel,
        "exchanges": _exchanges(spec, numel, exchanges),
        "checkpoint and state for joiners": states,
    }
    if gpu:
        return Reckoning(
            host={"programs": DAEMON + CUDA_TRAINER, **_with_gaps(keeping)},
            device={
                "programs": CUDA_DEVICE,
                **_with_gaps(training | {"captures and merges": _beside(spec, numel)}),
            },
        )
    return Reckoning(
        host={"programs": DAEMON + TRAINER, **_with_gaps(training | keeping)}, device={}
    )


def count_parameters(model: ModelSettings) -> int:
    """Parameters of a model."""
    return family_of(model).footprint(model).parameters


def explain(parts: Mapping[str, int]) -> str:
    """The largest parts first, in GiB."""
    largest = sorted(
        (part for part in parts.items() if part[1] >= GIB / 20), key=lambda part: -part[1]
    )[:4]
    return ", ".join(f"{name} {amount / GIB:.1f}" for name, amount in largest)


def moments_bytes(spec: RunSpec) -> int:
    """Of the inner optimizer."""
    return _moments(family_of(spec.model).footprint(spec.model), spec.train)


def _moments(model: Footprint, train: TrainSettings) -> int:
    return FLOAT * (2 * model.others + (1 if train.optimizer == "muon" else 2) * model.in_matrices)


def _muon_scratch(model: Footprint, train: TrainSettings, gpu: bool) -> int:
    """A processor moves all matrices of one shape together, a GPU one after the other."""
    if train.optimizer != "muon":
        return 0
    together = max(
        rows * columns * (1 if gpu else count) for (rows, columns), count in model.matrices.items()
    )
    return MUON_VECTORS * FLOAT * together


def step_values(model: Footprint, tokens: int, again: bool = False) -> int:
    """Values that one forward and backward pass over so many tokens takes, beside weights and
    gradients.

    ``again``: whether blocks are computed again in the backward pass.
    """
    saved = model.blocks * (model.in_block - model.between) - model.in_block if again else 0
    kept, passing = tokens * (model.kept - max(0, saved)), tokens * model.passing
    held = chunk_tokens(tokens, model.vocab)
    if held < tokens:
        return kept + max(passing, 2 * held * model.vocab)
    # One copy of the logits is kept, two more pass with the loss.
    return kept + tokens * model.vocab + max(passing, 2 * tokens * model.vocab)


def _look(model: Footprint, tokens: int) -> int:
    """Values of a forward pass without gradients."""
    held = chunk_tokens(tokens, model.vocab)
    return tokens * model.passing + 2 * held * model.vocab


def _activations(spec: RunSpec, model: Footprint, gpu: bool, states: int, cut: Cut) -> int:
    """The larger of what a step and a look at held-out text take.

    A processor's look takes the place of ``states``: they are written after an evaluation.
    """
    context = spec.model.context
    tokens = min(cut.windows, spec.train.batch) * context
    looked_at = max(context, EVALUATION_TOKENS)
    # A GPU computes in bf16, but norms and the loss, and keeps a copy of the weights in bf16.
    copies = FLOAT // 2 * model.parameters if gpu else 0
    look = FLOAT * _look(model, looked_at) - (0 if gpu else states)
    return max(FLOAT * step_values(model, tokens, cut.recompute), look) + copies


def _exchanges(spec: RunSpec, numel: int, exchanges: int) -> int:
    """Captures and slots of the exchanges under way, and what coders keep of each fragment."""
    sync, kind = spec.sync, kind_of(spec.sync)
    if kind is None:
        return 0
    fragment = -(-numel // sync.fragments)
    each = fragment * (EXCHANGE_VECTORS + kind.slots)
    coders = numel if sync.error_feedback else 0
    return FLOAT * (min(exchanges, sync.fragments) * each + PASSING_VECTORS * fragment + coders)


def _beside(spec: RunSpec, numel: int) -> int:
    """Copies of a fragment on a GPU; where they do not fit, training waits for slower ones."""
    if kind_of(spec.sync) is None:
        return 0
    return FLOAT * DEVICE_VECTORS * -(-numel // spec.sync.fragments)


def _with_gaps(parts: Mapping[str, int]) -> dict[str, int]:
    return {name: int(BETWEEN * amount) for name, amount in parts.items()}
