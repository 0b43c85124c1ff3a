"""Stages: the parts of a model that several machines hold, which none of them holds whole."""

from collections.abc import Sequence

import torch

from lowcomm_node.errors import ConfigError
from lowcomm_node.models.adapters import allocated, draw_factors, footprint_of, shell
from lowcomm_node.models.base import Model, Stage, StagedModel, family_of, staged
from lowcomm_protocol.spec.run import RunSpec


def shell_of(spec: RunSpec) -> Model:
    """The whole model of a run on the meta device, where it takes no memory."""
    if spec.adapter is not None:
        return shell(spec.model, spec.adapter)
    with torch.device("meta"):
        return family_of(spec.model).blank(spec.model)


def build_stage(spec: RunSpec, stage: Stage, device: torch.device) -> StagedModel:
    """A stage with the weights of the run's seed; those of files are still to be set."""
    if spec.adapter is not None:
        adapted = staged(allocated(spec.model, spec.adapter, device, stage))
        draw_factors(adapted, spec.run.seed)
        return adapted
    model = staged(shell_of(spec))
    model.keep(stage)
    family_of(spec.model).allocate(model, device)
    model.fill(spec.run.seed)
    return model


def halves_of(spec: RunSpec) -> tuple[Stage, ...]:
    """A model in two stages, what is outside of the blocks with the first; none where it can't be
    cut."""
    blocks = footprint_of(spec).blocks
    if not family_of(spec.model).can_stage(spec.model) or blocks < 2:
        return ()
    return Stage(0, blocks // 2, outside=True), Stage(blocks // 2, blocks)


def require_stages(spec: RunSpec) -> None:
    """Raise ConfigError for a model that can't be cut into stages."""
    if not family_of(spec.model).can_stage(spec.model):
        raise ConfigError(
            f"This model of kind {spec.model.kind!r} can't be cut into stages: each machine must "
            "hold all of it."
        )


def split(blocks: int, seconds: Sequence[float], most: Sequence[int]) -> list[int] | None:
    """How many blocks each of several machines holds, so that the slowest one ends soonest.

    ``seconds``: what the same work takes each of them; ``most``: the blocks that it has memory for.
    None where all of them together have too little.
    """
    counts = [0] * len(seconds)
    for _ in range(blocks):
        open_to = [place for place, count in enumerate(counts) if count < most[place]]
        if not open_to:
            return None
        counts[min(open_to, key=lambda place: (counts[place] + 1) * seconds[place])] += 1
    return counts
