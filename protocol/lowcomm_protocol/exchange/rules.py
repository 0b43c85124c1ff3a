"""The outer rules of ``spec.names.OUTER_RULES``. Each operation is rounded to float32.

nesterov: SGD with Nesterov momentum on the pseudo-gradient (DiLoCo, 2311.08105). These are the
operations of torch.optim.SGD(nesterov=True) in its order: where torch does not fuse them its result
is the same to the bit.

    delta = momentum * delta - pooled
    phi   = phi - outer_lr * (-pooled + momentum * delta)

noloco: momentum on the mean progress, with the outer rate in the contribution (NoLoCo, 2506.10911).

    step  = momentum * delta + pooled
    phi   = phi + step
    delta = memory * delta + (1 - memory) * step

Without ``memory`` the momentum is the last step, as in NoLoCo. With it the momentum is a mean of
many steps (quasi-global momentum, 2102.04761). Most of what a single step of a pair adds to what
all peers have learned is noise of two replicas, which a mean of steps with ever other partners does
not carry on.
"""

from typing import TYPE_CHECKING

from lowcomm_protocol.spec.outer import OuterRule, OuterSettings

if TYPE_CHECKING:  # checking a specification needs neither NumPy nor numba
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
        import numpy as np

        from lowcomm_protocol.exchange.outer_kernels import nesterov

        rate, momentum = np.float32(settings.outer_lr), np.float32(settings.momentum)
        nesterov(phi, delta, pooled, rate, momentum)


class Noloco(OuterRule):
    """Outer rule of NoLoCo."""

    def gain(self, settings: OuterSettings) -> float:
        return settings.outer_lr

    def dynamics(self, settings: OuterSettings) -> tuple[float, float, float, float]:
        momentum, pull, new = settings.momentum, -settings.consensus, 1.0 - settings.memory
        return momentum, pull, settings.memory + new * momentum, new * pull

    @property
    def remembers(self) -> bool:
        return True

    def step(
        self, settings: OuterSettings, phi: "Vector", delta: "Vector", pooled: "Vector"
    ) -> None:
        import numpy as np

        from lowcomm_protocol.exchange.outer_kernels import noloco, remembering

        momentum = np.float32(settings.momentum)
        if settings.memory:
            memory, new = np.float32(settings.memory), np.float32(1.0 - settings.memory)
            remembering(phi, delta, pooled, momentum, memory, new)
        else:
            noloco(phi, delta, pooled, momentum)


NESTEROV, NOLOCO = Nesterov(), Noloco()
