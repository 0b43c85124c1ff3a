"""What must hold when a node stops training: it tells of where it stands as it has saved it."""

from types import SimpleNamespace
from typing import Any

from lowcomm_node.training import Training

SAVED = {"swarm_step": 700, "steps": 350, "tokens": 89_600}


class OneThatRunsOn:
    """A trainer whose last steps nobody has heard of when it saves."""

    async def save(self) -> dict[str, Any]:
        return {**SAVED, "path": "/checkpoints/700"}


async def test_a_node_that_saves_tells_of_the_steps_in_its_checkpoint() -> None:
    async def train(on: bool) -> None:
        assert not on

    bulletin = SimpleNamespace(
        progress={"swarm_step": 696, "steps": 346, "tokens": 88_576, "loss": 1.5}, checkpoint=None
    )
    training = object.__new__(Training)
    training._bulletin = bulletin
    training._supervisor = SimpleNamespace(train=train, trainer=OneThatRunsOn())
    await training._save()
    assert bulletin.checkpoint == {"step": 700, "path": "/checkpoints/700"}
    assert bulletin.progress == {**SAVED, "loss": 1.5}
