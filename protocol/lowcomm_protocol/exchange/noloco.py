"""noloco: momentum on the mean progress, with the outer rate in the contribution (NoLoCo,
2506.10911).

delta = momentum * delta + pooled
phi   = phi + delta
"""

from typing import TYPE_CHECKING

from lowcomm_protocol.spec.outer_settings import OuterRule, OuterSettings

if TYPE_CHECKING:
    from lowcomm_protocol.spec.outer_settings import Vector


class Noloco(OuterRule):
    """See the file."""

    def gain(self, settings: OuterSettings) -> float:
        """See OuterRule."""
        return settings.outer_lr

    def dynamics(self, settings: OuterSettings) -> tuple[float, float, float, float]:
        """See OuterRule."""
        return settings.momentum, -settings.consensus, settings.momentum, -settings.consensus

    def step(
        self, settings: OuterSettings, phi: "Vector", delta: "Vector", pooled: "Vector"
    ) -> None:
        """See OuterRule."""
        import numpy as np  # checking a specification needs neither this nor numba

        from lowcomm_protocol.exchange.outer_kernels import noloco

        noloco(phi, delta, pooled, np.float32(settings.momentum))


RULE = Noloco()
