"""nesterov: SGD with Nesterov momentum on the pseudo-gradient (DiLoCo, 2311.08105).

    delta = momentum * delta - pooled
    phi   = phi - outer_lr * (-pooled + momentum * delta)

These are the operations of torch.optim.SGD(nesterov=True) in its order, each of them rounded: where
torch does not fuse them its result is the same to the bit.
"""

from typing import TYPE_CHECKING

from lowcomm_protocol.spec.outer import OuterRule, OuterSettings

if TYPE_CHECKING:
    from lowcomm_protocol.spec.outer import Vector


class Nesterov(OuterRule):
    """Outer rule of DiLoCo."""

    def gain(self, settings: OuterSettings) -> float:
        return 1.0

    def dynamics(self, settings: OuterSettings) -> tuple[float, float, float, float]:
        rate, momentum, pull = settings.outer_lr, settings.momentum, settings.consensus
        return -rate * momentum * momentum, -rate * pull * (1.0 + momentum), momentum, pull

    def step(
        self, settings: OuterSettings, phi: "Vector", delta: "Vector", pooled: "Vector"
    ) -> None:
        import numpy as np  # checking a specification needs neither this nor numba

        from lowcomm_protocol.exchange.outer_kernels import nesterov

        rate, momentum = np.float32(settings.outer_lr), np.float32(settings.momentum)
        nesterov(phi, delta, pooled, rate, momentum)


RULE = Nesterov()
