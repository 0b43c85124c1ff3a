"""One replica: fast weights that the inner optimizer moves, slow weights that outer steps move.

Signs and symbols are those of docs/design.md: ``theta`` fast weights, ``phi`` slow weights, ``delta`` outer momentum,
``D = theta - phi`` progress, ``c`` contribution. ``phi`` and ``delta`` are float32 in host memory, one flat vector a fragment.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor, nn

from lowcomm_node.data import Dataset
from lowcomm_node.data.stream import TrainStream
from lowcomm_node.model import build_model, tensor_specs
from lowcomm_node.trainer.optimizer import InnerOptimizer
from lowcomm_protocol.clock import SwarmClock
from lowcomm_protocol.codecs import Coder, coder
from lowcomm_protocol.fragments import gather, plan_fragments, scatter
from lowcomm_protocol.outer import contribution, mean_contribution, merge, outer_step, token_weights
from lowcomm_protocol.run import RunSpec
from lowcomm_protocol.schedule import FragmentProgress, SyncSchedule


@dataclass
class Capture:
    """What is kept of a fragment between its capture and its merge. Vectors are flat float32."""

    theta: Tensor
    progress: Tensor
    sent: Tensor
    """The contribution; once it is coded, as the others decode it."""
    coder: Coder
    realign: bool
    steps: int
    """Inner steps and tokens of this replica that were done by then."""
    tokens: int
    received: dict[str, Tensor] = field(default_factory=dict)
    outcome: tuple[Tensor, Tensor] | None = None
    """New slow weights and momentum, once the outer step is computed."""


class Replica:
    """The model, its inner optimizer, and the slow weights of every fragment."""

    def __init__(self, spec: RunSpec, peer_id: str, dataset: Dataset, device: torch.device) -> None:
        self.spec, self.peer_id, self.dataset, self.device = spec, peer_id, dataset, device
        self.model = build_model(spec.model, spec.run.seed).to(device)
        self.plan = plan_fragments(tensor_specs(self.model), spec.sync.fragments, spec.sync.pattern)
        self.optimizer = InnerOptimizer(self.model, spec.train, device)
        self.stream = TrainStream(dataset.train, spec.model.context, spec.train.batch, spec.run.seed, peer_id)
        self.clock = SwarmClock()
        self.steps = 0
        self.tokens = 0
        self.schedule = SyncSchedule(spec.sync.interval, [FragmentProgress() for _ in self.plan.fragments])
        self.weights = dict(self.model.named_parameters())
        self.phi = [self.fast(p) for p in range(len(self.plan.fragments))]
        self.delta = [torch.zeros_like(phi) for phi in self.phi]
        self.captures: dict[int, Capture] = {}
        self.coders = [coder(spec.sync.codec, fragment.numel) for fragment in self.plan.fragments]
        self._outer = spec.sync.outer_settings
        self._step_loss = _compiled(self.model, device)

    # inner steps

    def inner_step(self) -> float:
        """Train on one batch of our own stream; the loss in nats a token."""
        tokens, targets = (batch.to(self.device, non_blocking=True) for batch in self.stream.next_batch())
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self._step_loss(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.train.clip)
        self.optimizer.step(self.clock.step, self.spec.run.steps)
        self.steps += 1
        self.tokens += self.spec.tokens_per_step
        self.clock.tick()
        return float(loss.detach())

    # exchanges

    def fast(self, fragment: int) -> Tensor:
        """A copy of one fragment of the fast weights: flat, float32, host memory."""
        out = torch.empty(self.plan.fragments[fragment].numel, dtype=torch.float32)
        gather(self.plan.fragments[fragment], self.weights, out)
        return out

    def capture(self, fragment: int, realign: bool = False) -> None:
        """Keep what this replica contributes to an exchange of ``fragment``, as of now.

        ``realign`` brings slow weights together again that should be equal and are not: everybody sends fast weights in
        full precision, and their mean becomes the slow weights of all.
        """
        theta, phi = self.fast(fragment), self.phi[fragment]
        sent = theta.clone() if realign else contribution(self._outer, phi, theta)
        chosen = coder("fp32", sent.numel()) if realign else self.coders[fragment]
        self.captures[fragment] = Capture(theta, theta - phi, sent, chosen, realign, self.steps, self.tokens)

    def encode(self, fragment: int, out: memoryview) -> int:
        """Code the captured contribution into ``out``; the number of bytes. Raises CodecError if it is not finite."""
        capture = self.captures[fragment]
        # A lossy codec is symmetric: our own share enters the mean exactly as the others see it.
        return capture.coder.encode(capture.sent.numpy(), out)

    def receive(self, fragment: int, peer: str, data: memoryview) -> bytes:
        """Decode a member's contribution and keep it for the merge; a bitmap of blocks that must come again, or empty.

        Raises CodecError if it can't be used.
        """
        capture = self.captures[fragment]
        vector = np.empty(capture.sent.numel(), dtype=np.float32)
        again = capture.coder.decode(data, vector)
        capture.received[peer] = torch.from_numpy(vector)
        return again

    def resend(self, fragment: int, blocks: bytes, out: memoryview) -> int:
        """Code blocks that a member could not decode again; the number of bytes. Raises CodecError for a bad bitmap."""
        capture = self.captures[fragment]
        return capture.coder.resend(blocks, capture.sent.numpy(), out)

    def patch(self, fragment: int, peer: str, data: memoryview) -> None:
        """Take in the blocks of a member that came again. Raises CodecError if they are not what was asked for."""
        capture = self.captures[fragment]
        capture.coder.patch(data, capture.received[peer].numpy())

    def drop(self, fragment: int) -> None:
        """Forget a capture that will not be merged."""
        capture = self.captures.pop(fragment, None)
        if capture is not None:
            capture.coder.forget()

    def outer(self, fragment: int, tokens: Mapping[str, int]) -> None:
        """Compute the outer step; takes effect with ``merge``.

        ``tokens``: the members whose contributions enter, in the order that all of them sum in, and what each says that
        it has trained on since its last contribution.

        Slow weights are replaced, never changed in place, so that this can run beside inner steps and snapshots.
        """
        capture = self.captures[fragment]
        shares = [capture.sent if peer == self.peer_id else capture.received[peer] for peer in tokens]
        mean = mean_contribution(shares, token_weights(list(tokens.values())))
        if capture.realign:
            capture.outcome = (mean, torch.zeros_like(mean))
            return
        phi, delta = self.phi[fragment].clone(), self.delta[fragment].clone()
        outer_step(self._outer, phi, delta, capture.progress, capture.sent, mean)
        capture.outcome = (phi, delta)

    def merge(self, fragment: int, swarm_step: int) -> None:
        """Bring the new slow weights into the fast weights, and take over a partner's swarm step."""
        capture = self.captures.pop(fragment)
        assert capture.outcome is not None
        self.phi[fragment], self.delta[fragment] = capture.outcome
        theta = self.fast(fragment)
        merge(self._outer, theta, self.phi[fragment], capture.theta)
        with torch.no_grad():
            scatter(self.plan.fragments[fragment], theta, self.weights)
        capture.coder.commit()
        self.clock.observe(swarm_step)
        self.schedule.merged(fragment, self.clock.step, capture.steps, capture.tokens)

    def slow_digest(self, fragment: int) -> str:
        """SHA-256 of one fragment's slow weights, hexadecimal: equal where the slow weights are, to the bit."""
        return sha256(self.phi[fragment].numpy().data).hexdigest()


def choose_device(name: str) -> torch.device:
    """``auto`` takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _compiled(model: nn.Module, device: torch.device):  # noqa: ANN202 - the loss function of the model
    # Compiling pays on CUDA, where a step is many small kernels; on a CPU it costs a minute of start-up for little.
    return torch.compile(model.loss) if device.type == "cuda" else model.loss
