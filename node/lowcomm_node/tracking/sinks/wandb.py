"""Weights & Biases: the owner's own login and settings (``WANDB_*``) hold, ``WANDB_MODE=offline``
too.

Its own step is the number of the point. It takes none twice, so what a killed tracker has sent and
not noted down is not doubled. A run begins, or is resumed, once there is something to tell.
"""

from typing import Any

from lowcomm_node.errors import ConfigError, RetryLater
from lowcomm_node.tracking.names import SWARM_STEP
from lowcomm_node.tracking.sink import Batch, Kept, Library, Tracked

DEFAULT = "lowcomm"
DEADLINE = 60.0
"""Seconds to begin a run."""


class WeightsAndBiases:
    """See Sink."""

    takes = "points"

    def __init__(self, target: str | None) -> None:
        """``target``: ``PROJECT`` or ``ENTITY/PROJECT``."""
        self.target = target or DEFAULT
        *entity, self._project = self.target.split("/")
        if len(entity) > 1 or not self._project:
            raise ConfigError(f"--to {self.target[:120]!r}: give PROJECT or ENTITY/PROJECT.")
        self._entity = entity[0] if entity else None
        self._wandb: Any = Library("wandb", "wandb").module("wandb")
        self._tracked: Tracked | None = None
        self._run: Any = None

    def open(self, tracked: Tracked, kept: Kept) -> None:
        """See Sink."""
        self._tracked = tracked

    def write(self, batch: Batch) -> Kept:
        """See Sink. A process of its own takes it, and sends it when it can. Raises ConfigError."""
        if self._run is None:
            assert self._tracked is not None
            self._run = self._begin(self._tracked)
        for point in batch.points:
            self._run.log({**point.values, "_timestamp": point.time}, step=point.number)
        return {}

    def close(self) -> None:
        """See Sink. Waits until all is sent."""
        if self._run is not None:
            self._run.finish()

    def _begin(self, tracked: Tracked) -> Any:
        """The run has an id of its own, by which it is resumed."""
        try:
            run = self._wandb.init(
                entity=self._entity,
                project=self._project,
                id=f"{tracked.fingerprint}-{tracked.peer_id[-12:]}",
                name=tracked.node,
                group=f"{tracked.run}-{tracked.fingerprint}",
                config=dict(tracked.settings),
                resume="allow",
                settings=self._settings(),
            )
        except self._wandb.errors.UsageError as error:
            raise ConfigError(
                f"Weights & Biases does not take this: {error}. Log in with `wandb login`, or set "
                "WANDB_MODE=offline."
            ) from None
        except (self._wandb.Error, OSError) as error:
            raise RetryLater(
                f"Weights & Biases can't be reached ({error}). Nothing is lost; or set "
                "WANDB_MODE=offline."
            ) from None
        run.define_metric(SWARM_STEP)
        run.define_metric("*", step_metric=SWARM_STEP)
        return run

    def _settings(self) -> Any:
        # Nothing of this machine is told but what we tell: no console, no code, no figures of it.
        return self._wandb.Settings(
            init_timeout=DEADLINE,
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
        )
